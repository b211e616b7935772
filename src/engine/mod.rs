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
    AnswerProgress, BlockingEvents, EngineRecord, Event, FinishReason, GenerateOptions, GenerationRecord, Prompt,
    RecordedAnswer, RecordedRequest, Request, RequestRecord, RequestStream, ScoredPrompt, StopFilter, Summary,
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
    /// Returns a builder for an engine with the model at `path`, which is a snapshot directory or a GGUF file.
    pub fn builder<'o>(path: impl AsRef<Path>) -> EngineBuilder<'o> {
        EngineBuilder { path: path.as_ref().to_path_buf(), options: LoadOptions::default() }
    }

    /// Loads the model at `path`, which is a snapshot directory or a GGUF file, and starts the engine thread.
    ///
    /// If the architecture is not supported, or if the memory plan exceeds the free memory or the memory limit, fails
    /// before any memory is allocated for the model.
    pub fn load(path: &Path, options: &LoadOptions) -> Result<Self> {
        let model = loading::load(path, options)?;
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

/// A builder for an [`Engine`], created by [`Engine::builder`]. Each method sets a field of [`LoadOptions`].
pub struct EngineBuilder<'o> {
    path: PathBuf,
    options: LoadOptions<'o>,
}

impl<'o> EngineBuilder<'o> {
    /// Sets the device that runs the model ([`LoadOptions::devices`]).
    pub fn device(self, device: DeviceChoice) -> Self {
        self.devices(device.into())
    }

    /// Sets the devices that run the model together ([`LoadOptions::devices`]). Replaces an earlier choice.
    pub fn devices(mut self, devices: Devices) -> Self {
        self.options.devices = devices;
        self
    }

    /// Sets how several devices divide the model ([`LoadOptions::split`]).
    pub fn split(mut self, split: Split) -> Self {
        self.options.split = split;
        self
    }

    /// Sets the dtype of activations and of the KV cache ([`LoadOptions::dtype`]).
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.options.dtype = Some(dtype);
        self
    }

    /// Sets the context length in tokens ([`LoadOptions::context`]).
    pub fn context(mut self, context: usize) -> Self {
        self.options.context = Some(context);
        self
    }

    /// Sets how many sequences of full context length the KV cache can hold ([`LoadOptions::sequences`]).
    pub fn sequences(mut self, sequences: usize) -> Self {
        self.options.sequences = sequences;
        self
    }

    /// Sets the maximum number of sequences that run at once ([`LoadOptions::max_sequences`]).
    pub fn max_sequences(mut self, max_sequences: usize) -> Self {
        self.options.max_sequences = Some(max_sequences);
        self
    }

    /// Sets how much memory of each device the engine uses ([`LoadOptions::memory`]).
    pub fn memory(mut self, limit: MemoryLimit) -> Self {
        self.options.memory = Some(limit);
        self
    }

    /// Sets the prefill chunk size in tokens ([`LoadOptions::chunk`]).
    pub fn chunk(mut self, chunk: usize) -> Self {
        self.options.chunk = Some(chunk);
        self
    }

    /// Quantizes floating-point weights during loading ([`LoadOptions::quantize`]).
    pub fn quantize(mut self, quantize: QuantizationTarget) -> Self {
        self.options.quantize = Some(quantize);
        self
    }

    /// Sets whether steps run without CUDA graphs ([`LoadOptions::eager`]).
    pub fn eager(mut self, eager: bool) -> Self {
        self.options.eager = eager;
        self
    }

    /// Sets whether answers must not depend on other requests ([`LoadOptions::deterministic`]).
    pub fn deterministic(mut self, deterministic: bool) -> Self {
        self.options.deterministic = deterministic;
        self
    }

    /// Sets whether a step can be queued before the previous step has ended ([`LoadOptions::queue_steps`]).
    pub fn queue_steps(mut self, queue_steps: bool) -> Self {
        self.options.queue_steps = Some(queue_steps);
        self
    }

    /// Sets whether loading also loads the kernels of dense matrix products ([`LoadOptions::warm_up`]).
    pub fn warm_up(mut self, warm_up: bool) -> Self {
        self.options.warm_up = warm_up;
        self
    }

    /// Sets the attention kernel ([`LoadOptions::attention`]).
    pub fn attention(mut self, attention: AttentionBackend) -> Self {
        self.options.attention = attention;
        self
    }

    /// Sets a function that is called while weights load ([`LoadOptions::progress`]).
    pub fn progress(mut self, progress: &'o dyn Fn(u64, u64)) -> Self {
        self.options.progress = progress;
        self
    }

    /// Sets a function that is called when all devices are open ([`LoadOptions::on_device`]).
    pub fn on_device(mut self, on_device: &'o dyn Fn(&DeviceInfo)) -> Self {
        self.options.on_device = on_device;
        self
    }

    /// Sets a function that can reject the tokenizer and the chat format ([`LoadOptions::check_language`]).
    pub fn check_language(mut self, check: &'o (dyn Fn(&Language) -> Result<()> + Sync)) -> Self {
        self.options.check_language = check;
        self
    }

    /// Loads the model and starts the engine thread. See [`Engine::load`] for errors.
    pub fn load(self) -> Result<Engine> {
        Engine::load(&self.path, &self.options)
    }
}
