//! `inferno remove`

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;

use super::list::size;
use super::progress::{Listener, Show};
use crate::hub::Hub;

/// Delete a model from inferno's cache
#[derive(clap::Args)]
pub struct Args {
    /// Name of a model, or a part of it; NAME:Q4_K_M for one of several GGUF files
    model: String,
    /// Only this branch, tag or commit; files that others share stay
    #[arg(long, value_name = "REV")]
    revision: Option<String>,
    /// Delete even where locks do not work, as on some network disks, and no other inferno would be noticed
    #[arg(long)]
    force: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let show = Show::new(Listener::new(false), "read");
    let removed = Hub::from_env()?.forced(args.force).remove(&args.model, args.revision.as_deref(), &show)?;
    let mut out = std::io::stdout().lock();
    let short = |revision: &String| revision.chars().take(7).collect::<String>();
    let revisions: Vec<String> = removed.revisions.iter().map(short).collect();
    let at = if revisions.is_empty() { String::new() } else { format!(" ({})", revisions.join(", ")) };
    let kept = match removed.kept_bytes {
        0 => String::new(),
        bytes => format!("; {} stay, which other revisions share", size(bytes)),
    };
    writeln!(out, "removed {}{at}: {} freed{kept}", removed.name, size(removed.freed_bytes))?;
    Ok(ExitCode::SUCCESS)
}
