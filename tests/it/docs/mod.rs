//! Checks the documentation:
//! - `names`: the source files, type members, modules, tests and link targets named in pages or comments exist.
//!   `members` finds the members in the code. scripts/README.md and tests/README.md list all files of their folders.
//! - `reference`: `docs/` lists all flags, environment variables, exit codes and configuration keys.
//! - `server_pages`: flags and metrics on the pages about the server exist.
//!   Defaults in docs/tuning.md agree with `inferno serve --help`.
//! - `benchmarks`: the main speeds and memory sizes agree with benches/results, which has exactly the files that the
//!   pages name, and figures in docs/tuning.md agree with other pages.
//! - `constants`: numbers that the name of a constant follows are its value.
//! - `unsafe_code`: docs/unsafe.md lists all unsafe code.

mod benchmarks;
mod constants;
mod members;
mod names;
mod reference;
mod server_pages;
mod unsafe_code;

use std::fs;
use std::path::Path;

use crate::support::program::{run, text};

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
fn readme_is_short() {
    assert!(page("README.md").lines().count() <= 250);
}
