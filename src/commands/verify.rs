//! `inferno verify`: checks downloaded files against their hashes.

use std::io::Write;
use std::mem;
use std::process::ExitCode;

use anyhow::Result;

use super::shared::progress::{Operation, ProgressStyle, ProgressView};
use super::shared::warn_about_token;
use crate::error::Error;
use crate::hub::{FileState, Hub, SnapshotSource, VerifiedSnapshot};
use crate::text::{counted, printable, short_commit};

/// Check the files of downloaded models against their hashes
#[derive(clap::Args)]
pub struct Args {
    /// Name of a model, or part of a name [default: all models]
    model: Option<String>,
    /// Branch, tag or commit [default: all downloaded revisions]
    #[arg(long, value_name = "REV")]
    revision: Option<String>,
    /// Fetch the files that are bad or missing, but only in inferno's own cache
    #[arg(long)]
    repair: bool,
    /// Print only the models with bad, missing or unverifiable files
    #[arg(long, short)]
    quiet: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let hub = Hub::from_env()?;
    let progress = ProgressView::new(ProgressStyle::new(args.quiet), Operation::Verification);
    let result = hub.verify(args.model.as_deref(), args.revision.as_deref(), &progress);
    progress.finish();
    let mut out = std::io::stdout().lock();
    let mut models = 0;
    let mut files = 0;
    let mut failure = None;
    let mut has_warned = false;
    for checked in result? {
        let bad_files = bad_files(&checked);
        if !bad_files.is_empty() || !args.quiet {
            // Ignore write errors, for example because stdout is closed (`| head`) or the disk is full.
            // The exit code still reports whether the files are valid.
            let _ = write!(
                out,
                "{}",
                printable(&format!("{} {}\n{bad_files}", summary(&checked), short_revision(&checked)))
            );
            let _ = out.flush();
        }
        let faults = checked.damaged_files().count();
        if faults > 0 && args.repair {
            if checked.source == SnapshotSource::Inferno && !mem::replace(&mut has_warned, true) {
                warn_about_token(&hub);
            }
            let progress = ProgressView::new(ProgressStyle::new(args.quiet), Operation::Download);
            let result = hub.repair(&checked, &progress);
            progress.finish();
            match result {
                Ok(()) => drop(writeln!(out, "  {} fetched again", counted(faults, "file"))),
                // Repair the other models before reporting the error.
                Err(error) => {
                    let _ = writeln!(out, "  not repaired");
                    failure.get_or_insert(error);
                }
            }
        } else if faults > 0 {
            (models, files) = (models + 1, files + faults);
        }
    }
    let _ = out.flush();
    if let Some(error) = failure {
        return Err(error);
    }
    if files == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let what = format!("found {} in {}", counted(files, "bad or missing file"), counted(models, "model"));
    let model = args.model.map(|model| format!(" {model}")).unwrap_or_default();
    let revision = args.revision.map(|revision| format!(" --revision {revision}")).unwrap_or_default();
    Err(Error::Verification { what, hint: format!("inferno verify{model}{revision} --repair") }.into())
}

fn summary(checked: &VerifiedSnapshot) -> String {
    let good = checked.files.iter().filter(|(_, state)| *state == FileState::Good).count();
    format!("{}: {good} of {} good", checked.name, counted(checked.files.len(), "file"))
}

fn short_revision(checked: &VerifiedSnapshot) -> String {
    format!("({})", short_commit(&checked.revision))
}

/// Lists the bad, missing and unverifiable files, one per line.
fn bad_files(checked: &VerifiedSnapshot) -> String {
    let line = |(name, state): &(String, FileState)| {
        let state = match state {
            FileState::Good => return None,
            FileState::Corrupt => "bad    ",
            FileState::Missing => "missing",
            FileState::Unknown => "unknown",
        };
        Some(format!("  {state}  {name}\n"))
    };
    checked.files.iter().filter_map(line).collect()
}
