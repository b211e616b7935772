//! Runs a model on a thread of its own and serves requests.
//!
//! [`Engine`] loads a model and owns the engine thread. Clients submit a [`Request`] through an [`EngineHandle`].
//! They receive the answer as events from a [`RequestStream`].
//! The engine thread receives and sends token ids. The client's thread encodes and decodes text.
//! The modules, roughly in the order in which a request passes through them:
//!
//! - `loading/`: loads a model and plans its memory; runs once, before the engine thread starts
//! - `handle/`: the client's side of the engine: submits and replays requests, predicts when a request would start,
//!   scores text, and saves and loads cached prefixes
//! - `requests/`: a request, its sequences on the engine thread, and the events and text of its answers
//! - `engine_loop/`: the engine thread: plans and runs steps, delivers their tokens, and updates counters
//! - `scheduler/`: decides which tokens of which sequences each step computes
//! - `blocks/`: assigns blocks of the KV cache to sequences, finds cached prefixes, and reads and writes prefix files
//! - `sampling/`: chooses the next token; `constraint/`: restricts the choice to a grammar
//! - `rank_failure`: tells clients that one of several devices has failed; `fault`: failures that tests inject
//! - `scripted`: an engine without a model, for tests

pub mod blocks;
mod constraint;
mod engine_loop;
mod fault;
mod handle;
mod loading;
mod rank_failure;
mod requests;
pub mod sampling;
pub mod scheduler;
#[doc(hidden)]
pub mod scripted;

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use candle_core::DType;

use crate::device::{DeviceChoice, DeviceInfo, Devices, Split};
use crate::kernels::attention::AttentionBackend;
use crate::language::Language;
use crate::weights::quantized::QuantizationTarget;
use engine_loop::{Counters, EngineCommand, EngineLoop, StopGuard};
use handle::SharedEngineState;
use rank_failure::RankFailure;

pub use crate::nn::kv_cache::BLOCK_TOKENS;
#[doc(hidden)]
pub use crate::runner::RankFault;
pub use crate::runner::TokenLogprobs;
pub use constraint::{Constraint, Grammar, GrammarKind, ToolGrammar};
pub use engine_loop::EngineStats;
pub(crate) use engine_loop::{EngineHistograms, HistogramStats};
#[doc(hidden)]
pub use fault::{Fault, FaultTime, PlannedFault};
pub use handle::{Divergence, EngineHandle, MAX_LOGPROBS, ReplayedToken, RequestPreview};
pub use loading::{LoadOptions, LoadTimes, MemoryLimit, ModelInfo, memory};
pub use requests::{
    AnswerProgress, EngineRecord, Event, Events, FinishReason, GenerateOptions, GenerationRecord, Prompt,
    RecordedAnswer, RecordedRequest, Request, RequestRecord, RequestStream, ScoredPrompt, StopStrings, Summary,
};
pub use sampling::SamplingParams;

/// The maximum time that dropping an engine waits for the engine thread after one of several devices has failed.
/// The engine thread itself then waits up to 1 s for the threads of the other ranks before it ends.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// A loaded model and the thread that runs it.
///
/// Dereferences to an [`EngineHandle`]. Clone the handle to submit requests from other threads.
/// Dropping the engine stops the thread and frees the model's memory. Unfinished requests fail.
/// However, if one of several devices has failed, a thread that hangs keeps the memory until the process ends.
///
/// Example with a blocking iterator:
///
/// ```
#[doc = include_str!("../../examples/blocking.rs")]
/// ```
///
/// Example with an async stream, on any runtime:
///
/// ```
#[doc = include_str!("../../examples/async_stream.rs")]
/// ```
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Returns a builder for an engine with the model at the path `dir`: a snapshot directory or a GGUF file.
    pub fn builder<'o>(dir: impl AsRef<Path>) -> EngineBuilder<'o> {
        EngineBuilder { dir: dir.as_ref().to_path_buf(), options: LoadOptions::default() }
    }

    /// Loads the model at the path `dir`, a snapshot directory or a GGUF file, and starts the engine thread.
    ///
    /// If the architecture is not supported, or if the memory plan exceeds the free memory or the memory limit, fails
    /// before any memory is allocated for the model.
    pub fn load(dir: &Path, options: &LoadOptions) -> Result<Self> {
        let model = loading::load(dir, options)?;
        let (commands, receiver) = mpsc::channel();
        let counters = Arc::new(Counters::default());
        let failure = Arc::new(RankFailure::default());
        let reported = failure.clone();
        model.runner.world().on_failure(move |reason| reported.report(reason));
        let shared = SharedEngineState {
            language: Arc::new(model.language),
            info: model.info,
            defaults: model.defaults,
            device: model.runner.device().clone(),
            fingerprint: model.fingerprint,
            counters: counters.clone(),
            failure,
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

    /// Returns a handle to this engine. The handle does not keep the engine alive.
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
        // Sending fails only if the engine thread has already ended.
        let _ = self.handle.send(EngineCommand::Shutdown);
        let Some(thread) = self.thread.take() else { return };
        let started = Instant::now();
        while self.handle.failure().is_some() && !thread.is_finished() && started.elapsed() < END_TIMEOUT {
            thread::sleep(Duration::from_millis(10));
        }
        // Do not join an engine thread that hangs in a device call. The thread ends with the process.
        if self.handle.failure().is_none() || thread.is_finished() {
            let _ = thread.join();
        }
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

    /// Sets the devices that run the model together. Replaces the device that [`device`](Self::device) set.
    pub fn devices(mut self, devices: Devices) -> Self {
        self.options.devices = devices;
        self
    }

    /// Sets how several devices divide the model.
    /// By default, each device holds a part of every large matrix except the embeddings, which it holds whole.
    pub fn split(mut self, split: Split) -> Self {
        self.options.split = split;
        self
    }

    /// Sets the dtype of activations and of the KV cache. The default is bf16 on a GPU and f32 on a CPU.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.options.dtype = Some(dtype);
        self
    }

    /// Sets the context length in tokens. The default is 32,768 or the model's default, whichever is less.
    /// If the model does not fit in memory even with the smallest chunk, the default is halved until the model fits,
    /// but not below 2,048.
    pub fn context(mut self, context: usize) -> Self {
        self.options.context = Some(context);
        self
    }

    /// Sets the minimum number of full-context sequences that the KV cache can hold. The default is 1.
    ///
    /// More sequences can run at once if they are shorter than the context.
    /// A sequence waits to start while the KV cache has too few free blocks.
    pub fn sequences(mut self, sequences: usize) -> Self {
        self.options.sequences = sequences;
        self
    }

    /// Sets the maximum number of sequences that run at once.
    /// The default is the upper limit: 256 or the chunk size, whichever is less.
    pub fn max_sequences(mut self, max_sequences: usize) -> Self {
        self.options.max_sequences = Some(max_sequences);
        self
    }

    /// Sets the memory to use on each device. The KV cache gets what remains after weights and workspace.
    ///
    /// By default, the KV cache is only as large as [`sequences`](Self::sequences) requires.
    pub fn memory(mut self, limit: MemoryLimit) -> Self {
        self.options.memory = Some(limit);
        self
    }

    /// Sets the prefill chunk size in tokens.
    /// The default is up to 8,192 on a GPU and up to 256 on a CPU, depending on the free memory and the context.
    pub fn chunk(mut self, chunk: usize) -> Self {
        self.options.chunk = Some(chunk);
        self
    }

    /// Sets the format to which floating-point weight matrices are quantized during loading.
    /// By default, these matrices are not quantized.
    pub fn quantize(mut self, quantize: QuantizationTarget) -> Self {
        self.options.quantize = Some(quantize);
        self
    }

    /// Sets whether all steps run one operation at a time, even if a CUDA graph could run them. The default is `false`.
    pub fn eager(mut self, eager: bool) -> Self {
        self.options.eager = eager;
        self
    }

    /// Sets whether answers are deterministic: their tokens and logits do not depend on other requests, prefix caching
    /// or preemption. The default is `false`.
    pub fn deterministic(mut self, deterministic: bool) -> Self {
        self.options.deterministic = deterministic;
        self
    }

    /// Sets whether steps can be queued before the tokens of the previous step are known.
    ///
    /// The default is `true` on a GPU and `false` on a CPU. [`LoadOptions::queue_steps`] lists exceptions.
    /// Change the default only in tests: without queued steps, a GPU idles while it waits for the host.
    /// On a CPU, queuing gains nothing, because a step runs as soon as it is queued.
    pub fn queue_steps(mut self, queue_steps: bool) -> Self {
        self.options.queue_steps = Some(queue_steps);
        self
    }

    /// Sets whether to load the kernels of dense matrix products before the first request. The default is `false`.
    ///
    /// If true, loading takes longer: for gpt-oss-20b on an H200, 0.3 s (see docs/benchmark-history.md).
    /// If false, the first steps with a new number of tokens can wait until cuBLASLt has loaded a kernel.
    pub fn warm_up(mut self, warm_up: bool) -> Self {
        self.options.warm_up = warm_up;
        self
    }

    /// Sets the attention kernel. Loading fails if the device or the model does not support the kernel.
    /// The decode graph ignores this option, because it has its own attention kernel.
    pub fn attention(mut self, attention: AttentionBackend) -> Self {
        self.options.attention = attention;
        self
    }

    /// Sets a progress callback. Its first argument is the size of the tensors that the first device has loaded so far.
    /// Its second argument is the size of all tensors for the first device, including tensors that are never loaded,
    /// such as a vision tower. Both sizes are in bytes.
    /// A tensor counts with its whole size in the model's files, even if the device loads only a part of the tensor.
    pub fn progress(mut self, progress: &'o dyn Fn(u64, u64)) -> Self {
        self.options.progress = progress;
        self
    }

    /// Sets a callback that runs when all devices are open. Its argument is the device with the least free memory.
    pub fn on_device(mut self, on_device: &'o dyn Fn(&DeviceInfo)) -> Self {
        self.options.on_device = on_device;
        self
    }

    /// Sets a function that checks the tokenizer and chat format while the weights load.
    /// If the function fails, loading fails.
    pub fn check_language(mut self, check: &'o (dyn Fn(&Language) -> Result<()> + Sync)) -> Self {
        self.options.check_language = check;
        self
    }

    /// Loads the model and starts the engine thread. See [`Engine::load`] for errors.
    pub fn load(self) -> Result<Engine> {
        Engine::load(&self.dir, &self.options)
    }
}
