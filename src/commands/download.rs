//! `inferno download`: fetches a model from the hub.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;

use super::shared::progress::{Operation, ProgressStyle, ProgressView};
use super::shared::warn_about_token;
use crate::error::Error;
use crate::hub::{DownloadName, FileFilter, Hub, shell_word};
use crate::text::printable;

/// Fetch a model from the Hugging Face hub; run the same command again to resume an interrupted download
#[derive(clap::Args)]
pub struct Args {
    /// Repository, such as openai/gpt-oss-20b, or one GGUF model of a repository, such as org/name:Q4_K_M
    repo: String,
    /// Branch, tag or commit
    #[arg(long, value_name = "REV")]
    revision: Option<String>,
    /// Weight files to fetch, such as '*Q4_K_M*' [default: the weights that inferno loads]; can be repeated
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// Files to skip; can be repeated
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    /// Print nothing unless the download fails
    #[arg(long, short)]
    quiet: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let hub = Hub::from_env()?;
    if !args.quiet {
        warn_about_token(&hub);
    }
    let progress = ProgressView::new(ProgressStyle::new(args.quiet), Operation::Download);
    let DownloadName { repo, revision, tag } = DownloadName::parse(&args.repo, args.revision.as_deref())?;
    if tag.is_some() && !args.include.is_empty() {
        return Err(Error::usage(
            "cannot combine --include with a tag: the tag selects the weights; omit one of them".to_string(),
        ));
    }
    let filter = FileFilter { include: args.include, exclude: args.exclude, tag };
    let result = hub.download(&repo, revision.as_deref(), &filter, &progress);
    progress.finish();
    let snapshot = result?;
    if args.quiet {
        return Ok(ExitCode::SUCCESS);
    }
    let mut err = std::io::stderr();
    writeln!(err, "{} is in {}", snapshot.name, snapshot.path.display())?;
    // Skip models that are incomplete because --include or --exclude left out some of their files.
    for model in snapshot.models().iter().filter(|model| hub.find(&model.name, revision.as_deref()).is_ok()) {
        let at =
            revision.as_deref().map_or_else(String::new, |revision| format!(" --revision {}", shell_word(revision)));
        writeln!(err, "to run it: inferno play {}{}", printable(&shell_word(&model.name)), printable(&at))?;
    }
    Ok(ExitCode::SUCCESS)
}
