//! `inferno show`

mod report;
mod sizes;
mod source;
mod table;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;

use crate::error::Error;
use crate::hub::{self, Hub, demo};
use crate::text::printable;
use report::{Gpu, Report};
use source::Source;

/// Show what a model is and what it needs, without loading it
#[derive(clap::Args)]
pub struct Args {
    /// Name or directory of a model
    model: String,
    /// Branch, tag or commit of the model
    #[arg(long, value_name = "REV")]
    revision: Option<String>,
    /// Ask the hub about a model that need not be on this machine; fetches no weights
    #[arg(long)]
    remote: bool,
    /// Tokens to make room for [default: what inferno play would choose]
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let hub = Hub::from_env()?;
    let source = match args.remote {
        true => Source::remote(&hub, look_up(&hub, &args)?)?,
        false => Source::here(&hub.find(&args.model, args.revision.as_deref()).map_err(with_remote)?),
    };
    let report = Report::new(source, args.context, Gpu::first())?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        // Names and words come from files that anyone may have written.
        write!(out, "{}", printable(&table::table(&report)))?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn look_up(hub: &Hub, args: &Args) -> Result<hub::RemoteModel> {
    if args.model == demo::NAME {
        return Err(Error::Usage("the demo is inside inferno, on no hub: inferno show demo".into()).into());
    }
    super::note(&format!("asking {}", hub.config().endpoint_for_display()));
    hub.inspect(&args.model, args.revision.as_deref())
}

/// A model that is not here may still be looked at where it is.
fn with_remote(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<Error>() {
        Some(Error::ModelNotFound { model, hint }) if hub::is_repo_name(model) && model.contains('/') => {
            let hint = format!("{hint}\n  to see what it is and needs first: inferno show {model} --remote");
            Error::ModelNotFound { model: model.clone(), hint }.into()
        }
        _ => error,
    }
}
