//! `inferno perplexity`: measures how well a model predicts a text.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use candle_core::{DType, Tensor};
use candle_nn::ops::log_softmax;
use rayon::prelude::*;

use super::shared::LoadArgs;
use crate::engine::EngineHandle;
use crate::error::Error;
use crate::files;
use crate::hub::{Hub, Snapshot};
use crate::text::{counted, size};
use crate::tokenizer::ControlTokens;

/// The maximum number of tokens for which `--kl` compares the logits of both models.
///
/// Limits the memory for logits. Each model's logits take 0.8 MB per token with a vocabulary of 200,000 tokens.
const KL_TOKENS: usize = 512;

/// Measure how well a model predicts a text
#[derive(clap::Args)]
pub struct Args {
    /// Name, directory or GGUF file of a model
    model: String,
    /// UTF-8 text file; text longer than the context is split into overlapping windows
    #[arg(long, value_name = "PATH")]
    file: PathBuf,
    /// Print JSON with the negative log-likelihood of every token except the first
    #[arg(long)]
    json: bool,
    /// With --quantize: also load the unquantized model, and measure the KL divergence from it over at most the first
    /// 512 tokens
    #[arg(long, requires = "quantize")]
    kl: bool,
    #[command(flatten)]
    load: LoadArgs,
}

/// The effect of `--quantize` on a model, measured with `--kl`.
struct QuantizationEffect {
    /// The mean KL divergence of the quantized model from the unquantized model, in nats per token.
    kl: f64,
    /// The number of tokens over which `kl` is averaged.
    tokens: usize,
    /// The size of the unquantized weights, in bytes.
    bytes: u64,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let text = files::read_input_text(&args.file, files::MAX_TEXT_BYTES)?;
    let hub = Hub::from_env()?;
    let snapshot = hub.find(&args.model, args.load.revision())?;
    hub.record_use(&snapshot);
    let before = args.kl.then(|| unquantized(&args.load, &snapshot, &text)).transpose()?;
    let engine = args.load.load(&snapshot)?;
    let ids = engine.tokenizer().encode(&text, ControlTokens::Default)?;
    let nll = engine.negative_log_likelihood(&ids)?;
    check_losses(&nll)?;
    let change = before.map(|(logits, bytes)| -> Result<QuantizationEffect> {
        let tokens = logits.dim(0)?;
        Ok(QuantizationEffect { kl: mean_kl(&logits, &logits_on_cpu(&engine, &ids[..tokens])?)?, tokens, bytes })
    });
    let change = change.transpose()?;
    if let Some(QuantizationEffect { kl, .. }) = change.as_ref().filter(|change| !change.kl.is_finite()) {
        bail!("cannot compute the KL divergence: the result is {kl}, because some logits are not finite");
    }
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
        if let Some(QuantizationEffect { kl, tokens, bytes }) = change {
            result["kl"] = kl.into();
            result["kl_tokens"] = tokens.into();
            result["unquantized_weight_bytes"] = bytes.into();
        }
        writeln!(out, "{}", result)?;
    } else {
        writeln!(
            out,
            "perplexity {} (mean NLL {mean_nll:.4} over {})",
            perplexity(mean_nll),
            counted(nll.len(), "token")
        )?;
        if let Some(QuantizationEffect { kl, tokens, bytes }) = change {
            writeln!(
                out,
                "KL divergence {kl:.5} from the unquantized model (mean over {}); \
                 weights take {} instead of {}",
                counted(tokens, "token"),
                size(weight_bytes),
                size(bytes)
            )?;
        }
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// Loads the unquantized model.
/// Returns its logits for the first tokens of `text`, and the size of its weights in bytes.
///
/// The logits are f32 `[tokens, vocab]` on the CPU. `tokens` is at most [`KL_TOKENS`] and at most the context length.
/// Fails if the text has no tokens.
fn unquantized(load: &LoadArgs, snapshot: &Snapshot, text: &str) -> Result<(Tensor, u64)> {
    let engine = load.unquantized().load(snapshot)?;
    let ids = engine.tokenizer().encode(text, ControlTokens::Default)?;
    let tokens = KL_TOKENS.min(engine.context()).min(ids.len());
    if tokens == 0 {
        return Err(
            Error::Usage("cannot measure the KL divergence: the text has no tokens; use a longer text".into()).into()
        );
    }
    Ok((logits_on_cpu(&engine, &ids[..tokens])?, engine.info().weight_bytes))
}

fn logits_on_cpu(engine: &EngineHandle, ids: &[u32]) -> Result<Tensor> {
    engine.logits(ids)
}

/// Returns the mean of KL(p ‖ q) over all tokens, in nats. Both logit tensors are f32 `[tokens, vocab]` on the CPU.
fn mean_kl(p_logits: &Tensor, q_logits: &Tensor) -> Result<f64> {
    let (tokens, _) = p_logits.dims2()?;
    // Convert each row to f64 separately, because f64 copies of all rows at once would take gigabytes.
    let kl_of_row = |row: usize| -> Result<f64> {
        let log_probabilities = |logits: &Tensor| log_softmax(&logits.get(row)?.to_dtype(DType::F64)?, 0);
        let (p, q) = (log_probabilities(p_logits)?, log_probabilities(q_logits)?);
        Ok((p.exp()? * (p - q)?)?.sum_all()?.to_scalar::<f64>()?)
    };
    let rows = (0..tokens).into_par_iter().map(kl_of_row).collect::<Result<Vec<_>>>()?;
    Ok(rows.iter().sum::<f64>() / tokens as f64)
}

/// Fails if a loss is NaN or infinite.
fn check_losses(nll: &[f32]) -> Result<()> {
    match nll.iter().position(|loss| !loss.is_finite()) {
        // `nll[0]` is the loss of the second token. The error message counts tokens from 1.
        Some(index) => bail!(
            "cannot compute the perplexity: the loss of token {} is {}; \
             check the model's files, or use another --dtype",
            index + 2,
            nll[index]
        ),
        None => Ok(()),
    }
}

/// Formats the perplexity for a mean negative log-likelihood. Uses scientific notation for values of 1e6 or more.
fn perplexity(mean_nll: f64) -> String {
    match mean_nll.exp() {
        perplexity if perplexity < 1e6 => format!("{perplexity:.4}"),
        perplexity => format!("{perplexity:.4e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_that_are_not_numbers_are_errors() {
        assert!(check_losses(&[1.0, 1e30]).is_ok());
        let error = check_losses(&[1.0, f32::NAN]).unwrap_err().to_string();
        assert!(error.starts_with("cannot compute the perplexity: the loss of token 3 is NaN;"), "{error}");
        assert!(check_losses(&[f32::INFINITY]).unwrap_err().to_string().contains("token 2 is inf"));
    }

    #[test]
    fn large_perplexities_are_printed_with_an_exponent() {
        assert_eq!(perplexity(0.0), "1.0000");
        assert_eq!(perplexity(12.5), "268337.2865");
        assert_eq!(perplexity(684.0), "1.1414e297");
        assert_eq!(perplexity(1000.0), "inf");
    }

    #[test]
    fn kl_divergence_is_the_mean_over_rows() {
        let logits = |rows: [[f32; 2]; 2]| Tensor::new(&rows, &candle_core::Device::Cpu).unwrap();
        let (even, skewed) = ([0.0, 0.0], [3f32.ln(), 0.0]);
        // The KL divergence is 0.5 ln(0.5 / 0.75) + 0.5 ln(0.5 / 0.25) for the first row, and 0 for the second.
        let kl = mean_kl(&logits([even, even]), &logits([skewed, even])).unwrap();
        assert!((kl - 0.5 * (4f64 / 3.0).ln() / 2.0).abs() < 1e-7, "{kl}");
    }
}
