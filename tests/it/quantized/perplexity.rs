//! Measures how quantization changes the perplexity and the output distribution of models.
//! docs/benchmarks.md quotes the numbers that the tests print.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor, safetensors};
use inferno::device::DeviceChoice;
use inferno::kernels::matrix::Matrix;
use inferno::models;
use inferno::tokenizer::{ControlTokens, Tokenizer};
use inferno::weights::quantized::QuantizationTarget;
use inferno::weights::{Checkpoint, Inventory, LoadProgress, Weights, WeightsBuilder};
use inferno::{Engine, LoadOptions};

use super::targets;
use crate::support::{demo_dir, golden, logits_of, relative_error, token_ids, values};

/// A model and a text to evaluate it on.
struct Subject {
    dir: PathBuf,
    checkpoint: Checkpoint,
    ids: Vec<u32>,
}

/// The results of a [`Subject`]'s model on its text, and the size of the model's weights.
struct Run {
    /// The log probabilities, `[tokens, vocab_size]`.
    rows: Vec<f32>,
    logits: Vec<f32>,
    vocab_size: usize,
    /// The size in bytes that the loaded weights would have with the compute dtype bf16.
    bytes: u64,
}

impl Subject {
    fn new(dir: PathBuf, text: &str, max_tokens: usize) -> Self {
        let mut ids = Tokenizer::from_dir(&dir).unwrap().encode(text, ControlTokens::Default).unwrap();
        ids.truncate(max_tokens);
        Self { checkpoint: Checkpoint::open(&dir).unwrap(), dir, ids }
    }

    fn weights<'c>(&'c self, quantize: Option<QuantizationTarget>, progress: &'c LoadProgress<'c>) -> Weights<'c> {
        WeightsBuilder::new(&self.checkpoint, &Device::Cpu, DType::F32, progress).quantize(quantize).build().unwrap()
    }

    fn run(&self, quantize: Option<QuantizationTarget>) -> Run {
        let tokens = self.ids.len();
        let progress = LoadProgress::silent();
        let weights = self.weights(quantize, &progress);
        let config = models::read_config(&self.dir).unwrap();
        let decoder = config.build(&weights, tokens).unwrap();
        let logits = values(&logits_of(&decoder, &self.ids, DType::F32, &Device::Cpu).unwrap());
        let mut rows = logits.clone();
        for row in rows.chunks_exact_mut(decoder.vocab_size()) {
            let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
            row.iter_mut().for_each(|logit| *logit = (f64::from(*logit) - sum.ln()) as f32);
        }
        let inventory = Inventory::from_checkpoint(&self.checkpoint, config.family.tensors, quantize);
        Run { rows, logits, vocab_size: decoder.vocab_size(), bytes: inventory.loaded_bytes(DType::BF16) }
    }

    /// Returns the negative log-likelihood (the loss) of each token after the first.
    fn nll(&self, run: &Run) -> Vec<f32> {
        let rows = run.rows.chunks_exact(run.vocab_size).zip(&self.ids[1..]);
        rows.map(|(row, &next)| -row[next as usize]).collect()
    }

    fn perplexity(&self, run: &Run) -> f64 {
        mean(&self.nll(run)).exp()
    }
}

impl Run {
    /// Returns the KL divergence KL(self ‖ other) for each token.
    fn kl(&self, other: &Self) -> Vec<f32> {
        let rows = self.rows.chunks_exact(self.vocab_size).zip(other.rows.chunks_exact(self.vocab_size));
        let of_row =
            |(p, q): (&[f32], &[f32])| p.iter().zip(q).map(|(p, q)| f64::from(p.exp()) * f64::from(p - q)).sum();
        rows.map(of_row).map(|kl: f64| kl as f32).collect()
    }
}

fn mean(numbers: &[f32]) -> f64 {
    numbers.iter().map(|&number| f64::from(number)).sum::<f64>() / numbers.len() as f64
}

/// K-quants are left out, because the row lengths of the demo model are not multiples of 256.
#[test]
fn quantized_demo_model_stays_close_to_the_original() {
    let data = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/demo/data/using.toml")).unwrap();
    let answers: Vec<&str> =
        data.lines().filter_map(|line| line.strip_prefix("answer = \"")?.strip_suffix('"')).collect();
    let demo = Subject::new(demo_dir(), &answers.join("\n"), 1000);
    let plain = demo.run(None);
    println!("demo, unquantized: {:.1} MB, perplexity {:.3}", plain.bytes as f64 / 1e6, demo.perplexity(&plain));
    for (name, limit) in
        [("q8_0", 0.003), ("int8", 0.005), ("fp8", 0.05), ("q5_1", 0.05), ("q5_0", 0.05), ("q4_1", 0.2), ("q4_0", 0.2)]
    {
        let run = demo.run(Some(name.parse().unwrap()));
        let (kl, bytes) = (mean(&plain.kl(&run)), run.bytes);
        println!("demo, {name}: {:.1} MB, perplexity {:.3}, KL {kl:.4}", bytes as f64 / 1e6, demo.perplexity(&run));
        assert!(kl > 0.0 && kl < limit, "{name}: KL {kl}");
        assert!(bytes < plain.bytes, "{name}: {bytes} bytes quantized, but {} bytes unquantized", plain.bytes);
    }
}

/// A model that `tests/golden/make_trained.py` trained on a text, with results of transformers on the text.
/// The rows of its weights have 256 values, the block length of K-quants.
struct Trained {
    subject: Subject,
    golden: HashMap<String, Tensor>,
    /// The results of the unquantized model.
    plain: Run,
}

impl Trained {
    fn load() -> Self {
        let dir = golden("trained");
        let text = std::fs::read_to_string(dir.join("text.txt")).unwrap();
        let golden = safetensors::load(dir.join("golden.safetensors"), &Device::Cpu).unwrap();
        let subject = Subject::new(dir, &text, usize::MAX);
        let plain = subject.run(None);
        Self { subject, golden, plain }
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        values(&self.golden[name])
    }

    fn integers(&self, name: &str) -> Vec<i64> {
        self.golden[name].to_vec1().unwrap()
    }
}

/// Compares the token ids, the logits and the losses of the unquantized model.
#[test]
fn trained_model_agrees_with_transformers() {
    let trained = Trained::load();
    let Trained { subject, golden, plain } = &trained;
    assert_eq!(subject.ids, token_ids(&golden["ids"]));
    let rows = trained.integers("positions").into_iter().map(|at| &plain.logits[at as usize * plain.vocab_size..]);
    let logits: Vec<f32> = rows.flat_map(|row| &row[..plain.vocab_size]).copied().collect();
    let error = relative_error(&logits, &trained.floats("logits"));
    assert!(error < 1e-5, "relative error of the logits: {error:e}");
    println!("trained, unquantized: {:.2} MB, perplexity {:.3}", plain.bytes as f64 / 1e6, subject.perplexity(plain));
    assert_near("unquantized", &subject.nll(plain), &trained.floats("nll"));
}

/// Compares the quantized weights with weights that ggml quantized (for int8 and fp8, torch), and the losses and
/// KL divergences with those that transformers computes with these weights.
#[test(each = targets)]
fn quantized_model_agrees_with_ggml_and_transformers(target: &'static str) {
    let trained = Trained::load();
    let Trained { subject, plain, .. } = &trained;
    let quantize: QuantizationTarget = target.parse().unwrap();
    assert_eq!(
        digest(subject, quantize),
        trained.integers(&format!("{target}.values"))[0],
        "the quantized values differ from the reference"
    );
    let run = subject.run(Some(quantize));
    let kl = plain.kl(&run);
    let megabytes = run.bytes as f64 / 1e6;
    println!("trained, {target}: {megabytes:.2} MB, perplexity {:.3}, KL {:.4}", subject.perplexity(&run), mean(&kl));
    assert_near(target, &subject.nll(&run), &trained.floats(&format!("{target}.nll")));
    assert_near(target, &kl, &trained.floats(&format!("{target}.kl")));
}

/// Asserts that the losses or KL divergences of all tokens agree with transformers, up to rounding.
fn assert_near(name: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{name}");
    let worst = got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
    assert!(worst < 2e-4, "{name}: the largest difference for one token is {worst:e}");
    let (got, want) = (mean(got), mean(want));
    assert!((got - want).abs() < 2e-6, "{name}: the mean is {got}, but {want} in transformers");
}

/// Quantizes all matrices, and returns a hash of the dequantized values.
fn digest(subject: &Subject, quantize: QuantizationTarget) -> i64 {
    let progress = LoadProgress::silent();
    let weights = subject.weights(Some(quantize), &progress);
    let mut digest = 0u64;
    for (name, info) in subject.checkpoint.tensors() {
        let (Some(module), [rows, columns]) = (name.strip_suffix(".weight"), info.shape.as_slice()) else { continue };
        let matrix = Weights::matrix(&[(weights.at(module), *rows)], "weight", *columns).unwrap();
        let Matrix::Quantized(parts) = matrix else { panic!("{quantize}: {name} is not quantized") };
        for value in values(&parts[0].dequantize(DType::F32).unwrap()) {
            digest = digest.wrapping_mul(0x100_0000_01b3).wrapping_add(u64::from(value.to_bits()));
        }
    }
    digest as i64
}

/// Compares `EngineHandle::negative_log_likelihood`, which `inferno perplexity` calls, with transformers.
#[test]
fn engine_agrees_with_transformers_on_the_loss_of_a_text() {
    let dir = golden("trained");
    let golden = safetensors::load(dir.join("golden.safetensors"), &Device::Cpu).unwrap();
    let text = std::fs::read_to_string(dir.join("text.txt")).unwrap();
    for (quantize, name) in [(None, "nll"), (Some("q4_k"), "q4_k.nll")] {
        let quantize = quantize.map(|name| name.parse().unwrap());
        let options = LoadOptions { devices: DeviceChoice::Cpu.into(), quantize, ..Default::default() };
        let engine = Engine::load(Path::new(&dir), &options).unwrap();
        let ids = engine.tokenizer().encode(&text, ControlTokens::Default).unwrap();
        assert_near(name, &engine.negative_log_likelihood(&ids).unwrap(), &values(&golden[name]));
    }
}
