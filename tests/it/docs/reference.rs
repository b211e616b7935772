//! Tests that docs/cli.md contains the output of `--help`, and that docs/reference.md is complete.

use std::collections::BTreeSet;
use std::fs;

use inferno::error::Error;

use super::{help, page, repository};
use crate::support::add_files;
use crate::support::program::text;

#[test]
fn cli_page_matches_the_help_of_every_command() {
    let page = page("docs/cli.md");
    let overview = help(&[]);
    let commands = overview.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let commands: Vec<&str> = commands.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.len() > 8, "{commands:?}");
    let stale = "docs/cli.md is out of date: run scripts/cli-reference.sh";
    assert!(page.contains(&overview), "{stale}");
    for command in commands.into_iter().filter(|command| *command != "help") {
        assert!(
            page.contains(&format!("## inferno {command}\n\n```text\n{}\n```", help(&[command]))),
            "{stale} ({command})"
        );
    }
}

#[test]
fn reference_page_lists_every_environment_variable() {
    let page = page("docs/reference.md");
    let mut files = Vec::new();
    add_files(&repository().join("src"), &["rs"], &mut files);
    let mut variables = BTreeSet::new();
    for file in files {
        let code = fs::read_to_string(&file).unwrap();
        // Splitting at quotation marks yields string literals and code. Keep only names of environment variables.
        let literals = code.split('"').filter(|literal| {
            let prefixes = ["INFERNO_", "HF_", "XDG_", "CUDA_", "NVCC", "NO_COLOR", "RUST_LOG", "VISUAL", "EDITOR"];
            let is_name = literal.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
            is_name && prefixes.iter().any(|prefix| literal.starts_with(prefix) && !literal.ends_with('_'))
        });
        variables.extend(literals.map(str::to_string));
    }
    // Leave out variables that the build script sets for the compiler, and names of driver errors (`CUDA_ERROR_*`).
    let internal = ["COMMIT", "COMPUTE_CAP", "CUDA_MAJOR", "DEMO_REVISION", "NATIVE_CAPS"];
    let internal = internal.map(|name| format!("INFERNO_{name}"));
    let missing: Vec<&String> = variables
        .iter()
        .filter(|name| !internal.contains(name) && !name.starts_with("CUDA_ERROR_"))
        .filter(|name| !page.contains(&format!("`{name}`")))
        .collect();
    assert!(variables.len() > 15, "{variables:?}");
    assert!(missing.is_empty(), "docs/reference.md does not list {missing:?}");
}

/// docs/reference.md, `--help` and `Error::exit_code` must list the same exit codes.
#[test]
fn reference_page_lists_exactly_the_exit_codes() {
    let reference = page("docs/reference.md");
    let section = reference.split_once("## Exit codes\n").unwrap().1.split("\n## ").next().unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" |"));
    let documented: BTreeSet<u8> = rows.filter_map(|(code, _)| code.parse().ok()).collect();

    // In `Error::exit_code`, each match arm ends with an exit code: a number or the name of a constant.
    let source = page("src/error.rs");
    let function = source.split_once("pub fn exit_code").unwrap().1.split("\n    }\n").next().unwrap();
    let arms = function.lines().filter_map(|line| line.trim_end_matches(',').rsplit_once("=> "));
    let constant = |name: &str| source.split_once(&format!("const {name}: u8 = "))?.1.split(';').next()?.parse().ok();
    let number = |code: &str| code.parse::<u8>().ok().or_else(|| constant(code));
    let errors = arms.map(|(_, code)| number(code).unwrap_or_else(|| panic!("'{code}' is not an exit code")));
    // Add the codes of other outcomes: 0 for success, 1 for errors of other types, and 130 for Ctrl-C.
    let codes: BTreeSet<u8> = errors.chain([0, 1, 130]).collect();
    assert_eq!(documented, codes, "the exit codes in docs/reference.md and src/error.rs differ");

    let help = help(&[]);
    let numbers = help.split_once("Exit codes:").unwrap().1.split(|c: char| !c.is_ascii_digit());
    let in_help: BTreeSet<u8> = numbers.filter_map(|number| number.parse().ok()).collect();
    assert_eq!(documented, in_help, "the exit codes in docs/reference.md and `inferno --help` differ");
    assert_eq!(Error::Usage(String::new()).exit_code(), 2);
}

#[test]
fn reference_page_lists_every_configuration_key() {
    let home = tempfile::TempDir::new().unwrap();
    let config = home.path().join("config.toml");
    fs::write(&config, "no-such-key = 1\n").unwrap();
    let output =
        crate::support::program::inferno(&home).env("INFERNO_CONFIG", &config).args(["play", "demo"]).output().unwrap();
    let message = text(&output.stderr);
    let known = message.split_once("known keys: ").unwrap_or_else(|| panic!("{message}")).1.lines().next().unwrap();
    let page = page("docs/reference.md");
    for key in known.split(", ") {
        assert!(page.contains(&format!("`{key}`")), "docs/reference.md does not list the key {key}");
    }
}
