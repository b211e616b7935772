//! `inferno prune`: deletes partial downloads and unused files from inferno's cache.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;

use crate::hub::Hub;
use crate::text::{counted, size};

/// Delete partial downloads and unused files from inferno's cache
#[derive(clap::Args)]
pub struct Args {
    /// Delete even if the filesystem does not support file locking; make sure that no other inferno process is running
    #[arg(long)]
    force: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    let mut freed_bytes = 0;
    for pruned in Hub::from_env()?.with_force(args.force).prune()? {
        if pruned.is_busy {
            writeln!(out, "{}: skipped because another inferno process is changing it", pruned.name)?;
            continue;
        }
        writeln!(out, "{}: {}, {}", pruned.name, counted(pruned.files, "file"), size(pruned.freed_bytes))?;
        freed_bytes += pruned.freed_bytes;
    }
    writeln!(out, "{} freed", size(freed_bytes))?;
    Ok(ExitCode::SUCCESS)
}
