//! Runs a model on a dedicated thread and serves requests.
//!
//! [`Engine`] loads a model and owns the engine thread. Clients submit a [`Request`] through an [`EngineHandle`].
//! They receive the answer as events from a [`RequestStream`].
//! The engine thread handles only token ids. Text is encoded and decoded on the client's thread.
//! The modules are:
//!
//! - `load`, `load_ranks`: load a model; `memory`, `rank_memory`, `memory_limit`: plan its memory; `info`: its properties
//! - `handle`, `request`, `preview`, `score`: the client's side: submit, predict and score requests
//! - `stream`, `output`, `stop`: turn the tokens of an answer into text and events, on the client's thread
//! - `engine_loop/`, `sequence`, `prompt_scores`, `outbox`: the engine thread, the state of its sequences, and the events
//!   that it sends
//! - `scheduler/`, `blocks/`, `prefix_file`: choose the tokens of each step, and assign and reuse blocks of the KV cache
//! - `sampling`, `sampler`, `constraint/`: choose tokens
//! - `record`, `replay`: records of answers, and their recomputation
//! - `stats`, `histogram`, `heartbeat`: show other threads what the engine thread does
//! - `scripted`: an engine without a model, for tests

pub mod blocks;
mod client_end;
mod constraint;
mod engine_loop;
mod fault;
mod handle;
mod heartbeat;
mod histogram;
mod info;
mod load;
mod load_ranks;
pub mod memory;
mod memory_limit;
mod outbox;
mod output;
mod prefix_file;
mod preview;
mod prompt_scores;
mod rank_memory;
mod record;
mod replay;
mod request;
pub mod sampler;
pub mod sampling;
pub mod scheduler;
mod score;
#[doc(hidden)]
pub mod scripted;
mod sequence;
mod stats;
mod stop;
mod stream;

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};
use candle_core::DType;

use crate::device::{DeviceChoice, DeviceInfo, Devices, Split};
use crate::kernels::attention::AttentionBackend;
use crate::language::Language;
use crate::weights::quantized::QuantizationTarget;
use engine_loop::{Command, EngineLoop};
use handle::Shared;
use heartbeat::StopGuard;
use stats::Counters;

pub use constraint::{Constraint, Grammar, GrammarKind, ToolGrammar};
#[doc(hidden)]
pub use fault::Fault;
pub use handle::EngineHandle;
pub(crate) use histogram::HistogramStats;
pub use info::{LoadTimes, ModelInfo};
pub use load::LoadOptions;
pub use memory_limit::MemoryLimit;
pub use preview::RequestPreview;
pub use record::{EngineRecord, Record, RecordedAnswer, RecordedRequest, RequestRecord};
pub use replay::{Divergence, ReplayedToken};
pub use request::{FinishReason, GenerateOptions, Prompt, Request};
pub use sampling::SamplingParams;
pub(crate) use stats::EngineHistograms;
pub use stats::EngineStats;
pub use stop::StopStrings;
pub use stream::{Event, Events, RequestStream, ScoredPrompt, Summary, TokenCounts};

/// A loaded model and the thread that runs it.
///
/// Dereferences to an [`EngineHandle`]. Clone the handle to submit requests from other threads.
/// Dropping the engine stops the thread and frees the model's memory.
///
/// Example with a blocking iterator:
///
/// ```
#[doc = include_str!("../../docs/examples/blocking.rs")]
/// ```
///
/// Example with an async stream, on any runtime:
///
/// ```
#[doc = include_str!("../../docs/examples/async_stream.rs")]
/// ```
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Returns a builder that loads the snapshot in `dir`. `dir` may also be the path of a GGUF file.
    pub fn builder<'o>(dir: impl AsRef<Path>) -> EngineBuilder<'o> {
        EngineBuilder { dir: dir.as_ref().to_path_buf(), options: LoadOptions::default() }
    }

    /// Loads the snapshot in `dir` and starts the engine thread. `dir` may also be the path of a GGUF file.
    ///
    /// Fails before allocating device memory if the model is not supported or does not fit.
    pub fn load(dir: &Path, options: &LoadOptions) -> Result<Self> {
        let model = load::load(dir, options)?;
        let (commands, receiver) = mpsc::channel();
        let counters = Arc::new(Counters::default());
        let shared = Shared {
            language: Arc::new(model.language),
            info: model.info,
            defaults: model.defaults,
            device: model.runner.device().clone(),
            fingerprint: model.fingerprint,
            counters: counters.clone(),
            grammars: OnceLock::new(),
        };
        let guard = StopGuard::new(counters.heartbeat.clone());
        let max_sequences = shared.info.max_sequences;
        let engine_loop = EngineLoop::new(model.runner, max_sequences, receiver, counters);
        let thread = thread::Builder::new().name("inferno-engine".into()).spawn(move || {
            let _guard = guard;
            engine_loop.run();
        });
        let thread = Some(thread.context("cannot start the engine thread")?);
        Ok(Self { handle: EngineHandle::new(commands, shared), thread })
    }

    /// Returns a handle to this engine. Submitting requests fails once the engine is dropped.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }
}

impl Deref for Engine {
    type Target = EngineHandle;

    fn deref(&self) -> &EngineHandle {
        &self.handle
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // An error here means that the thread has already ended.
        let _ = self.handle.send(Command::Shutdown);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A builder for an [`Engine`], created by [`Engine::builder`].
pub struct EngineBuilder<'o> {
    dir: PathBuf,
    options: LoadOptions<'o>,
}

impl<'o> EngineBuilder<'o> {
    /// Sets the device. The default is the first GPU.
    pub fn device(self, device: DeviceChoice) -> Self {
        self.devices(device.into())
    }

    /// Sets the devices that run the model together.
    pub fn devices(mut self, devices: Devices) -> Self {
        self.options.devices = devices;
        self
    }

    /// Sets how several devices divide the model. By default, each device holds a part of every large matrix.
    pub fn split(mut self, split: Split) -> Self {
        self.options.split = split;
        self
    }

    /// Sets the dtype of activations. The default is bf16 on a GPU and f32 on a CPU.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.options.dtype = Some(dtype);
        self
    }

    /// Sets the context length in tokens. The default is 32,768 or the model's limit, whichever is less, halved until
    /// the model fits in memory. Models with RoPE scaling can have a shorter default.
    pub fn context(mut self, context: usize) -> Self {
        self.options.context = Some(context);
        self
    }

    /// Sets the number of full-context sequences that the KV cache can hold. The default is 1.
    ///
    /// Requests run concurrently while there are enough blocks for them. All other requests wait.
    pub fn sequences(mut self, sequences: usize) -> Self {
        self.options.sequences = sequences;
        self
    }

    /// Sets the maximum number of sequences that run at once. The default is 256, which is also the upper limit.
    pub fn max_sequences(mut self, max_sequences: usize) -> Self {
        self.options.max_sequences = Some(max_sequences);
        self
    }

    /// Sets the amount of device memory to use. The KV cache uses what remains after weights and workspace.
    ///
    /// By default, the cache is only as large as the number of [`sequences`](Self::sequences) requires.
    pub fn memory(mut self, limit: MemoryLimit) -> Self {
        self.options.memory = Some(limit);
        self
    }

    /// Sets the prefill chunk size in tokens. The default is the fastest size that fits in memory.
    pub fn chunk(mut self, chunk: usize) -> Self {
        self.options.chunk = Some(chunk);
        self
    }

    /// Quantizes floating-point weight matrices to this format during loading.
    pub fn quantize(mut self, quantize: QuantizationTarget) -> Self {
        self.options.quantize = Some(quantize);
        self
    }

    /// Sets whether decode steps run one operation at a time, even if a CUDA graph could run them.
    pub fn eager(mut self, eager: bool) -> Self {
        self.options.eager = eager;
        self
    }

    /// Sets whether the tokens and logits of answers must be independent of other requests. The default is `false`.
    pub fn deterministic(mut self, deterministic: bool) -> Self {
        self.options.deterministic = deterministic;
        self
    }

    /// Sets whether each step is planned before the tokens of the previous step are known, even on a CPU.
    ///
    /// Engines on a GPU always plan ahead. On a CPU, this is useful only in tests: a CPU runs a step as soon as it is
    /// planned, so steps do not become faster. The default is `false`.
    pub fn queue_on_cpu(mut self, queue_on_cpu: bool) -> Self {
        self.options.queue_on_cpu = queue_on_cpu;
        self
    }

    /// Sets the attention kernel on a GPU, for all steps outside the decode graph.
    pub fn attention(mut self, attention: AttentionBackend) -> Self {
        self.options.attention = attention;
        self
    }

    /// Sets a progress callback. Its arguments are the number of bytes loaded so far and the total number of bytes.
    pub fn progress(mut self, progress: &'o dyn Fn(u64, u64)) -> Self {
        self.options.progress = progress;
        self
    }

    /// Sets a callback that runs once the device is open.
    pub fn on_device(mut self, on_device: &'o dyn Fn(&DeviceInfo)) -> Self {
        self.options.on_device = on_device;
        self
    }

    /// Sets a function that checks the tokenizer and chat format while the weights load. If it fails, loading fails.
    pub fn check_language(mut self, check: &'o (dyn Fn(&Language) -> Result<()> + Sync)) -> Self {
        self.options.check_language = check;
        self
    }

    /// Loads the model and starts the engine thread.
    pub fn load(self) -> Result<Engine> {
        Engine::load(&self.dir, &self.options)
    }
}
