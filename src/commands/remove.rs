//! `inferno remove`: deletes a model from inferno's cache.

use std::io::{IsTerminal, Write, stderr, stdin};
use std::process::ExitCode;

use anyhow::Result;

use super::shared::progress::{Operation, ProgressStyle, ProgressView};
use crate::error::Error;
use crate::hub::Hub;
use crate::terminal;
use crate::text::{short_commit, size};

/// Delete a model from inferno's cache
#[derive(clap::Args)]
pub struct Args {
    /// Name of a model, or part of a name; NAME:Q4_K_M for one of several GGUF files
    model: String,
    /// Delete only this branch, tag or commit; keep files that other revisions use
    #[arg(long, value_name = "REV")]
    revision: Option<String>,
    /// Delete even if the filesystem does not support file locking; make sure that no other inferno process is running
    #[arg(long)]
    force: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let hub = Hub::from_env()?.with_force(args.force);
    if let Some(name) = hub.resolve_partial_name(&args.model)
        && !is_confirmed(&args.model, &name)?
    {
        return Ok(ExitCode::SUCCESS);
    }
    let progress = ProgressView::new(ProgressStyle::detect(), Operation::Verification);
    let removed = hub.remove(&args.model, args.revision.as_deref(), &progress)?;
    let mut out = std::io::stdout().lock();
    let revisions: Vec<String> = removed.changed_commits.iter().map(|revision| short_commit(revision)).collect();
    let at = if revisions.is_empty() { String::new() } else { format!(" ({})", revisions.join(", ")) };
    let kept = match removed.shared_bytes {
        0 => String::new(),
        bytes => format!("; {} kept for other revisions", size(bytes)),
    };
    writeln!(out, "removed {}{at}: {} freed{kept}", removed.name, size(removed.freed_bytes))?;
    Ok(ExitCode::SUCCESS)
}

/// Asks for confirmation to delete the model `name`, because the user typed only `part` of the name.
///
/// Fails without a terminal: a script must pass the full name, because `part` could match a different model later.
fn is_confirmed(part: &str, name: &str) -> Result<bool> {
    if !stdin().is_terminal() || !stderr().is_terminal() {
        let message = format!(
            "cannot ask for confirmation without a terminal: '{part}' is only part of a name; \
             type the full name: inferno remove {name}"
        );
        return Err(Error::Usage(message).into());
    }
    terminal::write_stderr(&format!("remove {name}? [y/N] "));
    let mut line = String::new();
    stdin().read_line(&mut line)?;
    Ok(matches!(line.trim().to_lowercase().as_str(), "y" | "yes"))
}
