//! `inferno completions`: prints a completion script for a shell.

use std::process::ExitCode;

use anyhow::Result;
use clap_complete::Shell;

/// Print a completion script for a shell
#[derive(clap::Args)]
pub struct Args {
    /// The shell; for bash, add `source <(inferno completions bash)` to ~/.bashrc
    shell: Shell,
}

/// Prints the completion script. `command` is clap's definition of `inferno` with all its subcommands.
pub fn run(args: Args, mut command: clap::Command) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "inferno", &mut script);
    std::io::Write::write_all(&mut std::io::stdout().lock(), &script)?;
    Ok(ExitCode::SUCCESS)
}
