//! One file a verb: its flags, its help, its `run`. Here, the flags that several verbs share. `defaults`, `logging`,
//! `progress`, `prompt`, `answer`, `sampling` and `bench_report` are no verbs, but what those are made of.

mod answer;
pub mod bench;
mod bench_report;
pub mod completions;
pub mod defaults;
pub mod doctor;
pub mod download;
pub mod list;
pub mod logging;
pub mod perplexity;
pub mod play;
mod progress;
mod prompt;
pub mod prune;
pub mod remove;
mod sampling;
pub mod show;
pub mod tokenize;
pub mod verify;

use std::io::IsTerminal;

use anyhow::Result;
use candle_core::DType;
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::device::{DeviceChoice, DeviceInfo};
use crate::engine::{Engine, LoadOptions};
use crate::error::Error;
use crate::hub::{Hub, Snapshot, demo};
use crate::kernels::attention::AttentionBackend;
use crate::language::Language;
use crate::text::printable;
use crate::weights::quantized::QuantizationTarget;

/// Where and how a model is loaded.
#[derive(Clone, clap::Args)]
pub struct LoadArgs {
    /// Branch, tag or commit of the model
    #[arg(long, value_name = "REV")]
    revision: Option<String>,
    /// cuda, cuda:N, or cpu (for development and the demo model)
    #[arg(long, default_value = "cuda", value_name = "DEVICE")]
    device: DeviceChoice,
    /// What to compute in [default: bf16 on a GPU, f32 on a CPU]
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<Dtype>,
    /// Tokens to make room for, prompt and answers together [default: what fits, up to 32768]
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Most tokens of a prompt to read at once [default: up to 8192, as memory allows]
    #[arg(long, value_name = "TOKENS", hide_short_help = true)]
    chunk: Option<usize>,
    /// QuantizationTarget matrices of floats while loading: q8_0, q6_k, q5_k, q4_k, .. as in GGUF files, fp8 or int8
    #[arg(long, value_name = "FORMAT")]
    quantize: Option<QuantizationTarget>,
    /// Decode operation by operation, without a CUDA graph: slow, to compare with
    #[arg(long, hide_short_help = true)]
    eager: bool,
    /// Whose attention kernel reads prompts: auto, own, flash (builds with that feature) or eager
    #[arg(long, default_value = "auto", value_name = "WHOSE", hide_short_help = true)]
    attention: Attention,
}

#[derive(Clone, Copy, ValueEnum)]
enum Attention {
    Auto,
    Own,
    Flash,
    Eager,
}

#[derive(Clone, Copy, ValueEnum)]
enum Dtype {
    F32,
    F16,
    Bf16,
}

impl LoadArgs {
    pub fn revision(&self) -> Option<&str> {
        self.revision.as_deref()
    }

    /// The same without --quantize.
    fn as_it_is(&self) -> Self {
        Self { quantize: None, ..self.clone() }
    }

    /// Makes room for `tokens`. Fails if `--context` was given and has less.
    fn make_room(&mut self, tokens: usize) -> Result<()> {
        match self.context {
            Some(context) if context < tokens => {
                let problem = format!("this needs --context {tokens}, and {context} was given");
                Err(Error::Usage(problem).into())
            }
            given => {
                self.context = Some(given.unwrap_or(tokens));
                Ok(())
            }
        }
    }

    /// Loads a snapshot, with a progress bar and a line about the device on stderr.
    pub fn load(&self, snapshot: &Snapshot) -> Result<Engine> {
        self.load_speaking(snapshot, &|_| Ok(()))
    }

    /// The same for a model whose language is as `check` wants it.
    pub fn load_speaking(
        &self,
        snapshot: &Snapshot,
        check_language: &(dyn Fn(&Language) -> Result<()> + Sync),
    ) -> Result<Engine> {
        let bar = ProgressBar::with_draw_target(Some(0), stderr_target());
        bar.set_style(style("loading {wide_bar} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec}"));
        let engine = Engine::load(
            &snapshot.path,
            &LoadOptions {
                device: self.device,
                dtype: self.dtype.map(|dtype| match dtype {
                    Dtype::F32 => DType::F32,
                    Dtype::F16 => DType::F16,
                    Dtype::Bf16 => DType::BF16,
                }),
                context: self.context,
                chunk: self.chunk,
                quantize: self.quantize,
                eager: self.eager,
                attention: match self.attention {
                    Attention::Auto => AttentionBackend::Auto,
                    Attention::Own => AttentionBackend::Own,
                    Attention::Flash => AttentionBackend::CandleFlashAttn,
                    Attention::Eager => AttentionBackend::Eager,
                },
                progress: &|bytes, total| {
                    bar.set_length(total);
                    bar.set_position(bytes);
                },
                on_device: &|info: &DeviceInfo| bar.suspend(|| note(&info.to_string())),
                check_language,
            },
        );
        bar.finish_and_clear();
        let engine = engine?;
        if let Some(reason) = engine.eager_reason().filter(|reason| reason.is_unexpected()) {
            eprintln!("warning: {}\n  answers are slower; please report this", printable(&reason.to_string()));
        }
        Ok(engine)
    }
}

/// Every model that can be played: those in the caches, and last the built-in demo, unless the cache cannot be written.
fn playable(hub: &Hub) -> Result<Vec<Snapshot>> {
    let mut snapshots = hub.list()?;
    snapshots.extend(hub.find(demo::NAME, None));
    Ok(snapshots)
}

/// Today as YYYY-MM-DD, in the local time zone.
fn today() -> String {
    jiff::Zoned::now().strftime("%Y-%m-%d").to_string()
}

/// A remark for the person at the terminal: dim, on stderr, and only if that is a terminal.
fn note(text: &str) {
    if std::io::stderr().is_terminal() {
        crate::terminal::remark(text);
    }
}

/// Progress bars are drawn on a terminal only.
fn stderr_target() -> ProgressDrawTarget {
    if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
