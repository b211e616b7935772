//! `inferno perplexity`

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};

use super::LoadArgs;
use crate::hub::Hub;
use crate::tokenizer::Controls;

/// Measure how well a model predicts a text
#[derive(clap::Args)]
pub struct Args {
    /// Name or directory of a model
    model: String,
    /// The text, UTF-8; read in overlapping windows if it is longer than the context
    #[arg(long, value_name = "PATH")]
    file: PathBuf,
    /// Print JSON, with the negative log-likelihood of every token from the second on
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    load: LoadArgs,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let text = std::fs::read(&args.file).with_context(|| format!("cannot read {}", args.file.display()))?;
    let text = String::from_utf8(text).with_context(|| format!("{} is not UTF-8", args.file.display()))?;
    let hub = Hub::from_env()?;
    let snapshot = hub.find(&args.model, args.load.revision())?;
    hub.note_use(&snapshot);
    let mut engine = args.load.load(&snapshot)?;
    let ids = engine.tokenizer().encode(&text, Controls::Default)?;
    let nll = engine.negative_log_likelihood(&ids)?;
    let mean_nll = nll.iter().map(|&nll| nll as f64).sum::<f64>() / nll.len() as f64;
    let mut out = std::io::stdout().lock();
    if args.json {
        let result = serde_json::json!({
            "tokens": ids.len(),
            "mean_nll": mean_nll,
            "perplexity": mean_nll.exp(),
            "nll": nll,
        });
        writeln!(out, "{result}")?;
    } else {
        writeln!(out, "perplexity {:.4} (mean NLL {mean_nll:.4} over {} tokens)", mean_nll.exp(), nll.len())?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}
