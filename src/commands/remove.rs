//! `inferno remove`

use std::io::{IsTerminal, Write, stderr, stdin};
use std::process::ExitCode;

use anyhow::Result;

use super::progress::{Listener, Show};
use crate::error::Error;
use crate::hub::Hub;
use crate::text::{short, size};

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
    let hub = Hub::from_env()?.with_force(args.force);
    if let Some(name) = hub.complete_partial_name(&args.model)
        && !is_meant(&args.model, &name)?
    {
        return Ok(ExitCode::SUCCESS);
    }
    let show = Show::new(Listener::new(false), "read");
    let removed = hub.remove(&args.model, args.revision.as_deref(), &show)?;
    let mut out = std::io::stdout().lock();
    let revisions: Vec<String> = removed.revisions.iter().map(|revision| short(revision)).collect();
    let at = if revisions.is_empty() { String::new() } else { format!(" ({})", revisions.join(", ")) };
    let kept = match removed.kept_bytes {
        0 => String::new(),
        bytes => format!("; {} stay, which other revisions share", size(bytes)),
    };
    writeln!(out, "removed {}{at}: {} freed{kept}", removed.name, size(removed.freed_bytes))?;
    Ok(ExitCode::SUCCESS)
}

/// Whether a person means the model `name` by `part`. A script must say all of it: run again, it would mean another model.
fn is_meant(part: &str, name: &str) -> Result<bool> {
    if !stdin().is_terminal() || !stderr().is_terminal() {
        let problem = format!("'{part}' is only a part of a name; to delete that model: inferno remove {name}");
        return Err(Error::Usage(problem).into());
    }
    eprint!("remove {name}? [y/N] ");
    let mut line = String::new();
    stdin().read_line(&mut line)?;
    Ok(matches!(line.trim().to_lowercase().as_str(), "y" | "yes"))
}
