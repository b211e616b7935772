//! `inferno perplexity`

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::LoadArgs;
use crate::engine::EngineHandle;
use crate::error::Error;
use crate::hub::{Hub, Snapshot};
use crate::text::size;
use crate::tokenizer::ControlTokens;

/// Tokens whose predictions are compared by `--kl`: their logits are held in memory, 0.8 MB each for a vocabulary of 200,000.
const KL_TOKENS: usize = 512;

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
    /// With --quantize: also measure how far predictions are from those of the weights as they are, which are loaded first
    #[arg(long, requires = "quantize")]
    kl: bool,
    #[command(flatten)]
    load: LoadArgs,
}

/// What quantization did to a model.
struct Change {
    /// Mean KL divergence of the quantized model's predictions from the other's, in nats a token.
    kl: f64,
    tokens: usize,
    /// Of all weights as they are.
    bytes: u64,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let text = std::fs::read(&args.file).with_context(|| format!("cannot read {}", args.file.display()))?;
    let text = String::from_utf8(text).with_context(|| format!("{} is not UTF-8", args.file.display()))?;
    let hub = Hub::from_env()?;
    let snapshot = hub.find(&args.model, args.load.revision())?;
    hub.record_use(&snapshot);
    let before = args.kl.then(|| unquantized(&args.load, &snapshot, &text)).transpose()?;
    let engine = args.load.load(&snapshot)?;
    let ids = engine.tokenizer().encode(&text, ControlTokens::Default)?;
    let nll = engine.negative_log_likelihood(&ids)?;
    let change = before.map(|(logits, bytes)| -> Result<Change> {
        let tokens = logits.dim(0)?;
        Ok(Change { kl: mean_kl(&logits, &logits_of(&engine, &ids[..tokens])?)?, tokens, bytes })
    });
    let change = change.transpose()?;
    let weight_bytes = engine.info().weight_bytes;
    let mean_nll = nll.iter().map(|&nll| nll as f64).sum::<f64>() / nll.len() as f64;
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut result = serde_json::json!({
            "tokens": ids.len(),
            "mean_nll": mean_nll,
            "perplexity": mean_nll.exp(),
            "weight_bytes": weight_bytes,
            "nll": nll,
        });
        if let Some(Change { kl, tokens, bytes }) = change {
            result["kl"] = kl.into();
            result["kl_tokens"] = tokens.into();
            result["unquantized_weight_bytes"] = bytes.into();
        }
        writeln!(out, "{result}")?;
    } else {
        writeln!(out, "perplexity {:.4} (mean NLL {mean_nll:.4} over {} tokens)", mean_nll.exp(), nll.len())?;
        if let Some(Change { kl, tokens, bytes }) = change {
            writeln!(
                out,
                "KL divergence {kl:.5} from the weights as they are (mean over {tokens} tokens); {} instead of {}",
                size(weight_bytes),
                size(bytes)
            )?;
        }
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// Logits f32 \[T, V\] of the text's first tokens by the model as it is, on the host, and the bytes of its weights.
fn unquantized(load: &LoadArgs, snapshot: &Snapshot, text: &str) -> Result<(Tensor, u64)> {
    let engine = load.as_it_is().load(snapshot)?;
    let ids = engine.tokenizer().encode(text, ControlTokens::Default)?;
    let tokens = KL_TOKENS.min(engine.context()).min(ids.len());
    if tokens == 0 {
        return Err(Error::Usage("--kl needs a text of one token at least".into()).into());
    }
    Ok((logits_of(&engine, &ids[..tokens])?, engine.info().weight_bytes))
}

fn logits_of(engine: &EngineHandle, ids: &[u32]) -> Result<Tensor> {
    Ok(engine.logits(ids)?.to_device(&Device::Cpu)?)
}

/// Σ p ln(p / q) over the vocabulary, p and q the predictions by rows of `ours` and `theirs` f32 \[T, V\]; the mean of all rows.
fn mean_kl(ours: &Tensor, theirs: &Tensor) -> Result<f64> {
    let (p, q) = (ours.to_vec2::<f32>()?, theirs.to_vec2::<f32>()?);
    let of_row = |(p, q): (&Vec<f32>, &Vec<f32>)| {
        let (p_sum, q_sum) = (log_sum_exp(p), log_sum_exp(q));
        let terms = p.iter().zip(q).map(|(&p, &q)| {
            let (p, q) = (p as f64 - p_sum, q as f64 - q_sum);
            p.exp() * (p - q)
        });
        terms.sum::<f64>()
    };
    let total: f64 = p.par_iter().zip(&q).map(of_row).sum();
    Ok(total / p.len() as f64)
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    top + logits.iter().map(|&logit| (logit as f64 - top).exp()).sum::<f64>().ln()
}
