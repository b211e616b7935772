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

#[test]
fn reference_page_lists_every_exit_code() {
    let page = page("docs/reference.md");
    let help = help(&[]);
    let codes = help.split_once("Exit codes:").unwrap().1;
    let numbers = codes.split(|c: char| !c.is_ascii_digit()).filter(|number| !number.is_empty());
    for number in numbers {
        assert!(page.contains(&format!("\n| {number} | ")), "docs/reference.md does not list exit code {number}");
    }
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
