//! The engine: a model on its own thread that answers requests.
//!
//! [`Engine`] loads a model and owns its thread. Clients hold an [`EngineHandle`]: they submit a [`Request`] and read the
//! events of the answer from a [`RequestStream`]. The thread knows token ids only; text is made on the client's side.

mod engine_loop;
mod handle;
mod info;
mod load;
pub mod memory;
mod output;
mod request;
pub mod sampler;
pub mod sampling;
mod score;
mod sequence;
mod stats;
mod stop;
mod stream;

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};
use candle_core::DType;

use crate::device::{DeviceChoice, DeviceInfo};
use crate::kernels::attention::AttentionBackend;
use crate::language::Language;
use crate::weights::quantized::QuantizationTarget;
use engine_loop::{Command, EngineLoop};
use handle::Shared;
use stats::Counters;

pub use handle::EngineHandle;
pub use info::{LoadTimes, ModelInfo};
pub use load::LoadOptions;
pub use request::{FinishReason, GenerateOptions, Prompt, Request};
pub use sampling::SamplingParams;
pub use stats::EngineStats;
pub use stop::StopStrings;
pub use stream::{Event, Events, RequestStream, Summary};

/// A loaded model and the thread that runs it.
///
/// It derefs to its [`EngineHandle`]; clone the handle to submit requests from other threads. When the engine is dropped,
/// its thread ends and the memory of the model is free again.
///
/// With a blocking iterator:
///
/// ```
#[doc = include_str!("../../docs/examples/blocking.rs")]
/// ```
///
/// With an async stream, in any runtime:
///
/// ```
#[doc = include_str!("../../docs/examples/async_stream.rs")]
/// ```
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts to describe how the snapshot in `dir` is loaded; `dir` may be a GGUF file itself.
    pub fn builder<'o>(dir: impl AsRef<Path>) -> EngineBuilder<'o> {
        EngineBuilder { dir: dir.as_ref().to_path_buf(), options: LoadOptions::default() }
    }

    /// Loads the snapshot in `dir`, which may be a GGUF file itself, and starts its thread.
    ///
    /// Fails before anything is allocated if the model is not supported or does not fit.
    pub fn load(dir: &Path, options: &LoadOptions) -> Result<Self> {
        let model = load::load(dir, options)?;
        let (commands, receiver) = mpsc::channel();
        let (language, counters) = (Arc::new(model.language), Arc::new(Counters::default()));
        let shared = Shared {
            language: language.clone(),
            info: model.info,
            defaults: model.defaults,
            device: model.runner.device().clone(),
            counters: counters.clone(),
        };
        let engine_loop = EngineLoop::new(model.runner, language, receiver, counters);
        let thread = thread::Builder::new().name("inferno-engine".into()).spawn(move || engine_loop.run());
        let thread = Some(thread.context("cannot start the engine's thread")?);
        Ok(Self { handle: EngineHandle::new(commands, shared), thread })
    }

    /// Returns a handle of this engine. It fails to submit once the engine was dropped.
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
        // Neither fails but for a thread that has already ended.
        let _ = self.handle.send(Command::Shutdown);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// How to load a model: [`LoadOptions`], one call for each option. From [`Engine::builder`].
pub struct EngineBuilder<'o> {
    dir: PathBuf,
    options: LoadOptions<'o>,
}

impl<'o> EngineBuilder<'o> {
    /// Loads onto this device instead of the first GPU.
    pub fn device(mut self, device: DeviceChoice) -> Self {
        self.options.device = device;
        self
    }

    /// Sets the dtype of activations. The default is bf16 on a GPU and f32 on a CPU.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.options.dtype = Some(dtype);
        self
    }

    /// Sets the most positions of a sequence. The default is as many as the model and the memory allow, up to 32,768.
    pub fn context(mut self, context: usize) -> Self {
        self.options.context = Some(context);
        self
    }

    /// Sets the most tokens of a prompt in one pass. The default is the fastest size that fits in memory.
    pub fn chunk(mut self, chunk: usize) -> Self {
        self.options.chunk = Some(chunk);
        self
    }

    /// Quantizes matrices of floats to this format while they are loaded.
    pub fn quantize(mut self, quantize: QuantizationTarget) -> Self {
        self.options.quantize = Some(quantize);
        self
    }

    /// Runs decode steps operation by operation, even if a graph could run them.
    pub fn eager(mut self, eager: bool) -> Self {
        self.options.eager = eager;
        self
    }

    /// Sets the attention kernel of prefill on a GPU, and of decode steps without a graph.
    pub fn attention(mut self, attention: AttentionBackend) -> Self {
        self.options.attention = attention;
        self
    }

    /// Calls this with the bytes loaded so far and the bytes in all.
    pub fn progress(mut self, progress: &'o dyn Fn(u64, u64)) -> Self {
        self.options.progress = progress;
        self
    }

    /// Calls this once the device is open.
    pub fn on_device(mut self, on_device: &'o dyn Fn(&DeviceInfo)) -> Self {
        self.options.on_device = on_device;
        self
    }

    /// Refuses a model for its language while its weights are still being read.
    pub fn check_language(mut self, check: &'o (dyn Fn(&Language) -> Result<()> + Sync)) -> Self {
        self.options.check_language = check;
        self
    }

    /// Loads the model and starts its thread.
    pub fn load(self) -> Result<Engine> {
        Engine::load(&self.dir, &self.options)
    }
}
