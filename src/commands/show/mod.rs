//! `inferno show`: describes a model and the memory that it needs.

mod report;
mod shown_model;
mod sizes;
mod table;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;

use super::shared::{SplitBy, parse_gpu_count};
use crate::error::Error;
use crate::hub::{self, Hub, demo};
use crate::text::{escaped_json, printable};
use report::{Gpu, Requested, ShowReport};
use shown_model::ShownModel;

/// Describe a model and the memory it needs, without loading it
#[derive(clap::Args)]
pub struct Args {
    /// Name, directory or GGUF file of a model
    model: String,
    /// Branch, tag or commit of the model
    #[arg(long, value_name = "REV")]
    revision: Option<String>,
    /// Describe a model on the hub, without downloading its weights
    #[arg(long)]
    remote: bool,
    /// Context length in tokens [default: what inferno play would choose]
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Number of GPUs that run the model together; shows the memory that each GPU needs
    #[arg(long, value_name = "N", default_value_t = 1, hide_default_value = true, value_parser = parse_gpu_count)]
    gpus: usize,
    /// How several GPUs divide the model: tensor or layers
    #[arg(long, value_name = "HOW", default_value = "tensor", hide_possible_values = true)]
    split: SplitBy,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let hub = Hub::from_env()?;
    let shown = if args.remote {
        ShownModel::remote(&hub, peek(&hub, &args)?)?
    } else {
        ShownModel::local(
            &hub.find(&args.model, args.revision.as_deref())
                .map_err(|error| suggest_remote(error, args.revision.as_deref()))?,
        )
    };
    let plan = Requested { context: args.context, gpus: args.gpus, split: args.split.into() };
    let report = ShowReport::new(shown, plan, Gpu::first())?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", escaped_json(&serde_json::to_string_pretty(&report)?))?;
    } else {
        // The license, the dtypes and the file names come from untrusted models and may contain control characters.
        write!(out, "{}", printable(&table::table(&report)))?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn peek(hub: &Hub, args: &Args) -> Result<hub::HubModel> {
    if args.model == demo::NAME && args.revision.is_none() {
        return Err(Error::Usage(
            "the demo is built into inferno and is not on the hub; to show it: inferno show demo".into(),
        )
        .into());
    }
    super::shared::note(&format!("asking {}", hub.config().endpoint_for_display()));
    super::shared::warn_about_token(hub);
    hub.inspect(&args.model, args.revision.as_deref())
}

/// Adds a hint about `--remote` to the error for a missing model, if the model's name has the form `org/name`.
fn suggest_remote(error: anyhow::Error, revision: Option<&str>) -> anyhow::Error {
    match error.downcast_ref::<Error>() {
        Some(Error::ModelNotFound { model, hint }) if hub::is_repo_name(model) && model.contains('/') => {
            let revision = revision.map(|revision| format!(" --revision {revision}")).unwrap_or_default();
            let command = format!("inferno show {model}{revision} --remote");
            let hint = format!("{hint}\n  to see the model's needs before a download: {command}");
            Error::ModelNotFound { model: model.clone(), hint }.into()
        }
        _ => error,
    }
}
