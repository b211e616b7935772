//! `inferno verify`

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;

use super::progress::{Listener, Show};
use crate::error::Error;
use crate::hub::{FileState, Hub, VerifiedSnapshot};
use crate::text::{printable, short};

/// Read models again and compare them with their hashes
#[derive(clap::Args)]
pub struct Args {
    /// Name of a model, or a part of it [default: all that are here]
    model: Option<String>,
    /// Branch, tag or commit [default: all that are here]
    #[arg(long, value_name = "REV")]
    revision: Option<String>,
    /// Fetch the files that are bad or missing
    #[arg(long)]
    repair: bool,
    /// Name only what is wrong
    #[arg(long, short)]
    quiet: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let hub = Hub::from_env()?;
    let show = Show::new(Listener::new(args.quiet), "read");
    let result = hub.verify(args.model.as_deref(), args.revision.as_deref(), &show);
    show.finish();
    let mut out = std::io::stdout().lock();
    let (mut models, mut files, mut failure) = (0, 0, None);
    for checked in result? {
        let report = report(&checked);
        if !report.is_empty() || !args.quiet {
            // Whoever reads this may have had enough; what was found is told by the exit code all the same.
            let _ = write!(out, "{}", printable(&format!("{} {}\n{report}", summary(&checked), at(&checked))));
            let _ = out.flush();
        }
        let faults = checked.damaged_files().count();
        if faults > 0 && args.repair {
            let show = Show::new(Listener::new(args.quiet), "fetched");
            let result = hub.repair(&checked, &show);
            show.finish();
            match result {
                Ok(()) => drop(writeln!(out, "  {} fetched anew", count(faults, "file"))),
                // The others can be helped all the same.
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
    let what = format!("{} of {} bad or missing", count(files, "file"), count(models, "model"));
    let model = args.model.map(|model| format!(" {model}")).unwrap_or_default();
    Err(Error::Verification { what, hint: format!("inferno verify{model} --repair") }.into())
}

fn summary(checked: &VerifiedSnapshot) -> String {
    let good = checked.files.iter().filter(|(_, state)| *state == FileState::Good).count();
    format!("{}: {good} of {} good", checked.name, count(checked.files.len(), "file"))
}

fn at(checked: &VerifiedSnapshot) -> String {
    format!("({})", short(&checked.revision))
}

/// The files that are not good, one a line.
fn report(checked: &VerifiedSnapshot) -> String {
    let line = |(name, state): &(String, FileState)| {
        let state = match state {
            FileState::Good => return None,
            FileState::Bad => "bad    ",
            FileState::Missing => "missing",
            FileState::Unknown => "unknown",
        };
        Some(format!("  {state}  {name}\n"))
    };
    checked.files.iter().filter_map(line).collect()
}

fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}
