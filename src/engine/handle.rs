//! The client's end of an engine: requests go in, streams of events come out.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::time::Instant;

use anyhow::{Result, anyhow, bail};
use candle_core::Device;
use tokio::sync::mpsc::unbounded_channel;

use super::engine_loop::Command;
use super::info::ModelInfo;
use super::output::Output;
use super::request::{GenerateOptions, Prompt, Request};
use super::sampler::uniform;
use super::sampling::SamplingParams;
use super::sequence::Sequence;
use super::stats::{self, Counters, EngineStats};
use super::stream::RequestStream;
use crate::chat::{Message, RenderOptions};
use crate::error::Error;
use crate::language::Language;
use crate::runner::{EagerReason, Runner};
use crate::tokenizer::{ControlTokens, Tokenizer};

/// A client of an engine. Clones are clients of the same engine, on any thread.
#[derive(Clone)]
pub struct EngineHandle {
    commands: Sender<Command>,
    shared: Arc<Shared>,
}

/// What clients may read without asking the engine's thread.
pub(super) struct Shared {
    pub language: Arc<Language>,
    pub info: ModelInfo,
    pub defaults: SamplingParams,
    pub device: Device,
    pub counters: Arc<Counters>,
}

impl EngineHandle {
    pub(super) fn new(commands: Sender<Command>, shared: Shared) -> Self {
        Self { commands, shared: Arc::new(shared) }
    }

    /// Queues a request. Returns the stream of its events.
    ///
    /// Requests are answered in the order in which they come. Tokens of the prompt that the KV cache already has, from the
    /// start, are not read again. Fails for an empty prompt, with [`Error::ContextFull`] for one that leaves no position for
    /// an answer, and for a conversation that the model's chat format cannot render.
    pub fn submit(&self, request: Request) -> Result<RequestStream> {
        let language = &self.shared.language;
        let options = request.options.unwrap_or_else(|| GenerateOptions::new(self.shared.defaults.clone()));
        let (ids, output) = match request.prompt {
            Prompt::Chat { messages, render } => {
                let rendered = language.render(&messages, &render)?;
                let parser = language.chat_format()?.parser(&rendered);
                (rendered.ids, Output::chat(language.clone(), parser, &options))
            }
            Prompt::Text(text) => {
                let ids = language.tokenizer.encode(&text, ControlTokens::Default)?;
                let output = Output::raw(language.clone(), &ids, &options);
                (ids, output)
            }
            Prompt::Ids(ids) => {
                let output = Output::raw(language.clone(), &ids, &options);
                (ids, output)
            }
        };
        self.submit_ids(ids, output, &options)
    }

    fn submit_ids(&self, ids: Vec<u32>, output: Output, options: &GenerateOptions) -> Result<RequestStream> {
        let submitted = Instant::now();
        options.sampling.validate().map_err(anyhow::Error::msg)?;
        if ids.is_empty() {
            bail!("the prompt is empty");
        }
        let (prompt_tokens, context) = (ids.len(), self.context());
        if prompt_tokens >= context {
            let limit_tokens = self.info().max_context;
            return Err(Error::ContextFull { prompt_tokens, context_tokens: context, limit_tokens }.into());
        }
        let counters = &self.shared.counters;
        if counters.is_draining.load(Ordering::Relaxed) {
            bail!("cannot take a new request: the engine is draining");
        }
        let (sender, events) = unbounded_channel();
        let sequence = Sequence::new(ids, options, sender);
        stats::add(&counters.waiting, 1);
        self.send(Command::Submit(Box::new(sequence)))?;
        Ok(RequestStream::new(events, output, options, prompt_tokens, (context, self.executor()), submitted))
    }

    /// Answers a conversation: [`submit`](Self::submit) with [`Prompt::Chat`].
    pub fn chat(
        &self,
        messages: &[Message],
        render: &RenderOptions,
        options: GenerateOptions,
    ) -> Result<RequestStream> {
        self.submit(Request::chat(messages).render(render.clone()).options(options))
    }

    /// Continues a text: [`submit`](Self::submit) with [`Prompt::Text`].
    pub fn complete(&self, text: &str, options: GenerateOptions) -> Result<RequestStream> {
        self.submit(Request::text(text).options(options))
    }

    /// Continues token ids: [`submit`](Self::submit) with [`Prompt::Ids`].
    pub fn complete_ids(&self, ids: &[u32], options: GenerateOptions) -> Result<RequestStream> {
        self.submit(Request::ids(ids).options(options))
    }

    /// What was loaded, and how.
    pub fn info(&self) -> &ModelInfo {
        &self.shared.info
    }

    /// The model's tokenizer and chat format.
    pub fn language(&self) -> &Language {
        &self.shared.language
    }

    /// The tokenizer of [`language`](Self::language).
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.shared.language.tokenizer
    }

    /// The model's own sampling from generation_config.json; greedy if the file does not say.
    pub fn defaults(&self) -> &SamplingParams {
        &self.shared.defaults
    }

    /// The most positions of a sequence.
    pub fn context(&self) -> usize {
        self.shared.info.context
    }

    /// The number of tokens in the KV cache.
    pub fn cached_tokens(&self) -> usize {
        self.stats().cached_tokens as usize
    }

    /// Where weights and cache are.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// What runs decode steps: [`ModelInfo::executor`].
    pub fn executor(&self) -> &'static str {
        self.shared.info.executor
    }

    /// Why decode steps do not run as a graph; `None` if they do.
    pub fn eager_reason(&self) -> Option<&EagerReason> {
        self.shared.info.eager_reason.as_ref()
    }

    /// Returns what the engine did so far, and what it has to do.
    pub fn stats(&self) -> EngineStats {
        self.shared.counters.snapshot()
    }

    /// Refuses new requests from now on, and waits until all that were submitted have ended.
    pub fn drain(&self) -> Result<()> {
        self.shared.counters.is_draining.store(true, Ordering::Relaxed);
        self.with_runner(|_| ())
    }

    /// Calls a function on the engine's thread with the bare runner, and waits for its result.
    ///
    /// The call waits for all requests before it, and requests after it wait for the call: it has the KV cache to itself.
    /// Fails if the engine has stopped, or stops because the function panics.
    pub fn with_runner<T: Send + 'static>(&self, call: impl FnOnce(&mut Runner) -> T + Send + 'static) -> Result<T> {
        let (sender, result) = mpsc::sync_channel(1);
        self.send(Command::Run(Box::new(move |runner| {
            // A caller that is gone needs no result.
            let _ = sender.send(call(runner));
        })))?;
        result.recv().map_err(|_| anyhow!("the engine stopped"))
    }

    /// Returns `count` token ids that depend on `seed` alone.
    pub fn random_tokens(&self, seed: u64, count: usize) -> Vec<u32> {
        let vocab_size = self.info().vocab_size as f64;
        (0..count as u64).map(|index| (uniform(seed, index) * vocab_size) as u32).collect()
    }

    pub(super) fn send(&self, command: Command) -> Result<()> {
        self.commands.send(command).map_err(|_| anyhow!("the engine has stopped"))
    }
}
