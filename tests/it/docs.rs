//! Checks that the pages in `docs/` list all flags, environment variables, exit codes and configuration keys.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use inferno::error::Error;

use crate::cli::{run, text};

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn page(name: &str) -> String {
    fs::read_to_string(repository().join(name)).unwrap()
}

/// Returns the output of `inferno ARGS --help`, with trailing spaces removed from each line.
fn help(args: &[&str]) -> String {
    let output = run(&[args, &["--help"]].concat());
    assert!(output.status.success());
    text(&output.stdout).lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

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
    collect(&repository().join("src"), &mut files);
    let mut variables = BTreeSet::new();
    for file in files {
        let code = fs::read_to_string(&file).unwrap();
        // Splitting at quotation marks yields string literals and the code between them. The filter keeps only names.
        let literals = code.split('"').filter(|literal| {
            let prefixes = ["INFERNO_", "HF_", "XDG_", "CUDA_", "NVCC", "NO_COLOR", "RUST_LOG", "VISUAL", "EDITOR"];
            let is_name = literal.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
            is_name && prefixes.iter().any(|prefix| literal.starts_with(prefix) && !literal.ends_with('_'))
        });
        variables.extend(literals.map(str::to_string));
    }
    // The build script sets these variables for the compiler. `CUDA_ERROR_*` are names of driver errors.
    let internal =
        ["INFERNO_COMMIT", "INFERNO_COMPUTE_CAP", "INFERNO_CUDA_MAJOR", "INFERNO_DEMO_REVISION"].map(str::to_string);
    let missing: Vec<&String> = variables
        .iter()
        .filter(|name| !internal.contains(name) && !name.starts_with("CUDA_ERROR_"))
        .filter(|name| !page.contains(&format!("`{name}`")))
        .collect();
    assert!(variables.len() > 15, "{variables:?}");
    assert!(missing.is_empty(), "docs/reference.md does not list {missing:?}");
}

/// The table, `--help` and the program must have the same exit codes.
#[test]
fn reference_page_lists_exactly_the_exit_codes() {
    let reference = page("docs/reference.md");
    let section = reference.split_once("## Exit codes\n").unwrap().1.split("\n## ").next().unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" |"));
    let documented: BTreeSet<u8> = rows.filter_map(|(code, _)| code.parse().ok()).collect();

    // The code of each error is the number after the last arrow in a line of `Error::exit_code`.
    let source = page("src/error.rs");
    let function = source.split_once("pub fn exit_code").unwrap().1;
    let arms = function.lines().filter_map(|line| line.trim_end_matches(',').rsplit_once("=> "));
    let errors = arms.map(|(_, code)| code.parse::<u8>().unwrap_or_else(|_| panic!("'{code}' is not an exit code")));
    // Success, all other errors, and Ctrl-C.
    let codes: BTreeSet<u8> = errors.chain([0, 1, 130]).collect();
    assert_eq!(documented, codes, "docs/reference.md and src/error.rs differ");

    let help = help(&[]);
    let numbers = help.split_once("Exit codes:").unwrap().1.split(|c: char| !c.is_ascii_digit());
    let in_help: BTreeSet<u8> = numbers.filter_map(|number| number.parse().ok()).collect();
    assert_eq!(documented, in_help, "docs/reference.md and `inferno --help` differ");
    assert_eq!(Error::Usage(String::new()).exit_code(), 2);
}

#[test]
fn reference_page_lists_every_configuration_key() {
    let home = tempfile::TempDir::new().unwrap();
    let config = home.path().join("config.toml");
    fs::write(&config, "no-such-key = 1\n").unwrap();
    let output = crate::cli::inferno(&home).env("INFERNO_CONFIG", &config).args(["play", "demo"]).output().unwrap();
    let message = text(&output.stderr);
    let known = message.split_once("known keys: ").unwrap_or_else(|| panic!("{message}")).1.lines().next().unwrap();
    let page = page("docs/reference.md");
    for key in known.split(", ") {
        assert!(page.contains(&format!("`{key}`")), "docs/reference.md does not list the key {key}");
    }
}

#[test]
fn readme_is_short() {
    assert!(page("README.md").lines().count() <= 250);
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}
