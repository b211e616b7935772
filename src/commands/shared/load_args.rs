//! The flags for loading a model, and a loader that shows a progress bar.

use anyhow::Result;
use candle_core::DType;
use clap::ValueEnum;
use indicatif::ProgressBar;

use super::{note, progress_style, stderr_target};
use crate::device::{DeviceChoice, DeviceInfo, Devices, MAX_RANKS, Split};
use crate::engine::{Engine, LoadOptions, MemoryLimit};
use crate::error::Error;
use crate::hub::Snapshot;
use crate::kernels::attention::AttentionBackend;
use crate::language::Language;
use crate::terminal;
use crate::weights::quantized::QuantizationTarget;

/// The minimum number of full-context sequences that a server's KV cache can hold on a CPU.
const CPU_SEQUENCES: usize = 4;

/// The flags for loading a model, shared by `play`, `serve`, `bench`, `perplexity` and `replay`.
#[derive(Clone, clap::Args)]
pub struct LoadArgs {
    /// Branch, tag or commit of the model
    #[arg(long, value_name = "REV")]
    revision: Option<String>,
    /// Device to run on: cuda, cuda:N, several GPUs as cuda:N,M, or cpu (for development and the demo model)
    #[arg(long, default_value = "cuda", value_name = "DEVICE")]
    device: Devices,
    /// Number of GPUs that run the model together; uses the first N GPUs
    #[arg(long, value_name = "N", value_parser = parse_gpus, conflicts_with = "device")]
    gpus: Option<Devices>,
    /// How several GPUs divide the model: tensor (each GPU holds a part of every layer; faster) or layers (each GPU
    /// holds complete layers; for slow connections and for GPUs with unequal memory)
    #[arg(long, value_name = "HOW", default_value = "tensor", hide_possible_values = true)]
    split: SplitBy,
    /// Compute dtype [default: bf16 on a GPU, f32 on a CPU]
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<Dtype>,
    /// Context length in tokens, for prompt and answers together [default: as much as fits, up to 32768]
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Memory to use on each GPU, such as 20GB or 90%. The KV cache uses what remains after weights and workspace
    /// [default: as much as the context needs; 90% for serve]
    #[arg(long, value_name = "SIZE")]
    gpu_memory: Option<MemoryLimit>,
    /// Largest prompt chunk in one forward pass, in tokens [default: up to 8192, as memory allows]
    #[arg(long, value_name = "TOKENS", hide_short_help = true)]
    chunk: Option<usize>,
    /// Quantize float weights while loading: fp8, int8, or a GGUF type such as q8_0, q6_k, q5_k or q4_k
    #[arg(long, value_name = "FORMAT")]
    quantize: Option<QuantizationTarget>,
    /// Decode without a CUDA graph, operation by operation; slow, for comparison
    #[arg(long, hide_short_help = true)]
    eager: bool,
    /// Attention kernel of all steps except those of the decode graph: own (inferno's, for tensor cores), flash
    /// (FlashAttention, needs the flash-attn feature), portable (inferno's, without tensor cores) or auto
    #[arg(long, default_value = "auto", value_name = "KERNEL", hide_short_help = true)]
    attention: AttentionChoice,
    /// The minimum number of full-context sequences that the KV cache can hold.
    #[arg(skip = 1usize)]
    sequences: usize,
    /// Whether answers must be independent of other requests.
    #[arg(skip)]
    deterministic: bool,
    /// The maximum number of sequences that run at once. `None` selects the engine's limit.
    #[arg(skip)]
    max_sequences: Option<usize>,
    /// Whether to load the kernels of dense matrix products before the first request.
    #[arg(skip)]
    warm_up: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum AttentionChoice {
    Auto,
    Own,
    Flash,
    // The earlier name, which is still accepted. It is unrelated to `--eager`.
    #[value(alias = "eager")]
    Portable,
}

/// The values of `--split`. See [`Split`].
#[derive(Clone, Copy, ValueEnum)]
pub enum SplitBy {
    Tensor,
    Layers,
}

impl From<SplitBy> for Split {
    fn from(split: SplitBy) -> Self {
        match split {
            SplitBy::Tensor => Split::Tensor,
            SplitBy::Layers => Split::Layers,
        }
    }
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

    /// Returns a copy of these flags without `--quantize`.
    pub fn unquantized(&self) -> Self {
        Self { quantize: None, ..self.clone() }
    }

    /// Sets the context to `tokens` if `--context` was not given. Fails if `--context` is smaller than `tokens`.
    pub fn require_context(&mut self, tokens: usize) -> Result<()> {
        match self.context {
            Some(context) if context < tokens => {
                let message =
                    format!("cannot run the benchmark with --context {context}: use --context {tokens} or more");
                Err(Error::Usage(message).into())
            }
            context => {
                self.context = Some(context.unwrap_or(tokens));
                Ok(())
            }
        }
    }

    /// Makes the KV cache large enough for this number of full-context sequences.
    pub fn set_sequences(&mut self, sequences: usize) {
        self.sequences = sequences;
    }

    /// Sets the values of --context and --chunk, in tokens, unless these flags were given.
    pub fn set_default_sizes(&mut self, context: usize, chunk: usize) {
        self.context.get_or_insert(context);
        self.chunk.get_or_insert(chunk);
    }

    /// Sets whether answers must be independent of other requests.
    pub fn set_deterministic(&mut self, deterministic: bool) {
        self.deterministic = deterministic;
    }

    /// Makes [`load`](Self::load) also load the kernels of dense matrix products, so that the first requests do not
    /// wait for these kernels.
    pub fn warm_up(&mut self) {
        self.warm_up = true;
    }

    /// Sets the maximum number of sequences that run at once, and requests a KV cache for many sequences.
    ///
    /// On GPUs, the engine may use 90% of the memory of each GPU, or the limit in --gpu-memory if it is set.
    /// On a CPU, the KV cache can hold at least `CPU_SEQUENCES` full-context sequences.
    pub fn plan_for_many(&mut self, max_sequences: Option<usize>) {
        self.max_sequences = max_sequences;
        match self.devices().first() {
            DeviceChoice::Cpu => self.sequences = CPU_SEQUENCES,
            _ => self.gpu_memory = self.gpu_memory.or(Some(MemoryLimit::Fraction(0.9))),
        }
    }

    fn devices(&self) -> &Devices {
        self.gpus.as_ref().unwrap_or(&self.device)
    }

    /// Loads the model of a snapshot, and prints warnings about the loaded model.
    ///
    /// If stderr is a terminal, shows a progress bar and a line about the device with the least free memory.
    pub fn load(&self, snapshot: &Snapshot) -> Result<Engine> {
        self.load_with_language_check(snapshot, &|_| Ok(()))
    }

    /// Like [`load`](Self::load), but fails if `check_language` rejects the tokenizer or the chat format.
    pub fn load_with_language_check(
        &self,
        snapshot: &Snapshot,
        check_language: &(dyn Fn(&Language) -> Result<()> + Sync),
    ) -> Result<Engine> {
        let bar = ProgressBar::with_draw_target(Some(0), stderr_target());
        bar.set_style(progress_style(
            "loading {wide_bar} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec}",
        ));
        let engine = Engine::load(
            &snapshot.path,
            &LoadOptions {
                devices: self.devices().clone(),
                split: self.split.into(),
                dtype: self.dtype.map(|dtype| match dtype {
                    Dtype::F32 => DType::F32,
                    Dtype::F16 => DType::F16,
                    Dtype::Bf16 => DType::BF16,
                }),
                context: self.context,
                chunk: self.chunk,
                sequences: self.sequences,
                max_sequences: self.max_sequences,
                memory: self.gpu_memory,
                quantize: self.quantize,
                eager: self.eager,
                deterministic: self.deterministic,
                queue_steps: None,
                warm_up: self.warm_up,
                attention: match self.attention {
                    AttentionChoice::Auto => AttentionBackend::Auto,
                    AttentionChoice::Own => AttentionBackend::Own,
                    AttentionChoice::Flash => AttentionBackend::CandleFlashAttn,
                    AttentionChoice::Portable => AttentionBackend::Portable,
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
        if let Some(reason) = engine.no_decode_graph().filter(|reason| reason.is_unexpected()) {
            terminal::print(&format!("warning: {reason}\n  answers are slower; please report this"));
        }
        for reason in &engine.info().ignored_defaults {
            terminal::print(&format!("warning: ignored a sampling default: {reason}"));
        }
        Ok(engine)
    }
}

fn parse_gpus(text: &str) -> Result<Devices, String> {
    parse_gpu_count(text).map(Devices::gpus)
}

/// Parses a number of GPUs from 1 to [`MAX_RANKS`].
pub fn parse_gpu_count(text: &str) -> Result<usize, String> {
    let count = text.parse().map_err(|_| format!("'{text}' is not a number of GPUs"))?;
    if (1..=MAX_RANKS).contains(&count) { Ok(count) } else { Err(format!("choose 1 to {MAX_RANKS}")) }
}
