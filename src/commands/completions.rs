//! `inferno completions`: what a shell needs to complete commands and flags.

use std::process::ExitCode;

use anyhow::Result;
use clap_complete::Shell;

/// Print completions for bash, zsh or fish
#[derive(clap::Args)]
pub struct Args {
    /// Whose: `source <(inferno completions bash)` in ~/.bashrc, for example
    shell: Shell,
}

/// `command` is all of the command line.
pub fn run(args: Args, mut command: clap::Command) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "inferno", &mut script);
    std::io::Write::write_all(&mut std::io::stdout().lock(), &script)?;
    Ok(ExitCode::SUCCESS)
}
