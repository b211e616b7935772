//! `inferno download`

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;

use super::progress::{Listener, Show};
use crate::hub::{FileFilter, Hub};

/// Fetch a model from the Hugging Face hub; the same command goes on where an earlier one stopped
#[derive(clap::Args)]
pub struct Args {
    /// Repository, such as openai/gpt-oss-20b
    repo: String,
    /// Branch, tag or commit
    #[arg(long, value_name = "REV")]
    revision: Option<String>,
    /// Weight files to fetch, such as '*Q4_K_M*', instead of all of the model's safetensors; may be given again
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// Files to leave out; may be given again
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    /// Say nothing unless it fails
    #[arg(long, short)]
    quiet: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let hub = Hub::from_env()?;
    let show = Show::new(Listener::new(args.quiet), "fetched");
    let filter = FileFilter { include: args.include, exclude: args.exclude };
    let result = hub.download(&args.repo, args.revision.as_deref(), &filter, &show);
    show.finish();
    let snapshot = result?;
    if args.quiet {
        return Ok(ExitCode::SUCCESS);
    }
    let mut err = std::io::stderr();
    writeln!(err, "{} is in {}", snapshot.name, snapshot.path.display())?;
    // Only a part may have been asked for.
    for model in snapshot.models().iter().filter(|model| hub.find(&model.name, None).is_ok()) {
        writeln!(err, "chat with it: inferno play {}", model.name)?;
    }
    Ok(ExitCode::SUCCESS)
}
