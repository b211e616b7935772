//! The client side of an engine: submits requests and returns event streams.
//!
//! - `preview`: predicts whether a request would start now
//! - `score`: computes the logits or the negative log-likelihoods of given tokens
//! - `replay`: recomputes a recorded answer
//! - `prefix`: saves cached prefixes to files, and loads saved prefixes
//! - `validation`: checks requests before the engine receives them

mod prefix;
mod preview;
mod replay;
mod score;
mod validation;

use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use candle_core::Device;
use tokio::sync::mpsc::unbounded_channel;

use super::constraint::{ChatPrompt, ConstrainedRequest, ConstraintState, GrammarCompiler, prepare};
use super::engine_loop::{Counters, EngineCommand, EngineHistograms, EngineStats, stats};
use super::fault::Fault;
use super::loading::ModelInfo;
use super::rank_failure::RankFailure;
use super::requests::{
    AnswerDecoder, GenerateOptions, Prompt, Request, RequestRecord, RequestStream, ScoredPrompt, Sequence,
};
use super::sampling::{SamplingParams, uniform};
use crate::chat::{Message, RenderOptions, Rendered};
use crate::error::Error;
use crate::language::Language;
use crate::runner::{ExecutionMode, NoDecodeGraphReason, PromptSegments, Runner};
use crate::tokenizer::{ControlTokens, Tokenizer};

pub use crate::kernels::sampling::MAX_LOGPROBS;
pub use preview::RequestPreview;
pub use replay::{Divergence, ReplayedToken};

/// The time between two checks for failed devices, while a client waits for a call on the engine thread.
const FAILURE_POLL: Duration = Duration::from_millis(50);

/// A handle to an engine. Clones refer to the same engine and can be used on any thread.
#[derive(Clone)]
pub struct EngineHandle {
    commands: Sender<EngineCommand>,
    shared: Arc<SharedEngineState>,
}

/// State that clients read without asking the engine thread.
pub(super) struct SharedEngineState {
    pub language: Arc<Language>,
    pub info: ModelInfo,
    pub defaults: SamplingParams,
    pub device: Device,
    /// See `EngineParts::fingerprint`.
    pub fingerprint: String,
    pub counters: Arc<Counters>,
    pub failure: Arc<RankFailure>,
    /// The grammar compiler, or the error message if it cannot be built. Set by the first request with a constraint.
    pub grammars: OnceLock<Result<Arc<GrammarCompiler>, String>>,
}

/// A checked request, from which the sequences and the event streams of its answers are created.
struct PreparedRequest {
    /// The token ids of the prompt, which all answers share.
    prompt: Arc<Vec<u32>>,
    prompt_segments: Option<PromptSegments>,
    /// The options of the next answer. The answers differ only in the seed.
    options: GenerateOptions,
    constraint: Option<ConstraintState>,
    record: Option<Arc<RequestRecord>>,
    submitted: Instant,
}

impl EngineHandle {
    pub(super) fn new(commands: Sender<EngineCommand>, shared: SharedEngineState) -> Self {
        Self { commands, shared: Arc::new(shared) }
    }

    /// Queues a request and returns its event stream.
    ///
    /// Requests of one tenant with equal priority start in submission order.
    /// Up to [`ModelInfo::max_sequences`] answers are generated at the same time if they fit in the KV cache.
    /// Reuses cached blocks of the prompt, unless [`GenerateOptions::prompt_logprobs`] is set.
    /// [`GenerateOptions::cache_salt`] restricts which blocks are reused.
    ///
    /// Fails if
    /// - the prompt is empty, or a token id or an option is out of range ([`Error::InvalidRequest`])
    /// - the prompt is a conversation, and the model has no chat format or the format cannot render the conversation
    ///   ([`Error::InvalidRequest`])
    /// - the prompt leaves no room for an answer ([`Error::ContextFull`] or [`Error::PromptTooLong`])
    /// - the constraint is invalid, not supported or too expensive ([`Error::InvalidConstraint`])
    /// - the machine is too busy to compile the constraint in time ([`Error::CompilerBusy`])
    /// - [`GenerateOptions::deterministic`] is set, but the engine's chunk size or attention kernel does not allow it
    ///   to answer individual requests deterministically ([`Error::NotDeterministic`])
    /// - the engine has stopped or is draining
    pub fn submit(&self, request: Request) -> Result<RequestStream> {
        Ok(self.submit_n(request, 1)?.remove(0))
    }

    /// Queues a request for `n` answers to the same prompt, and returns one event stream per answer.
    ///
    /// The answers share the prefill.
    /// Answer i, counted from 0, is sampled with the request's seed plus i.
    /// Fails like [`submit`](Self::submit), and also if `n` is not between 1 and 128.
    pub fn submit_n(&self, request: Request, n: usize) -> Result<Vec<RequestStream>> {
        let submitted = Instant::now();
        let language = &self.shared.language;
        Self::check_answer_count(n)?;
        let options = request.options.unwrap_or_else(|| GenerateOptions::new(self.shared.defaults.clone()));
        let mut chat = None;
        let (ids, decoders): (Vec<u32>, Vec<AnswerDecoder>) = match request.prompt {
            Prompt::Chat { messages, render } => {
                let rendered = self.render(&messages, &render)?;
                let format = language.chat_format()?;
                // Given tools, some parsers read plain text as a tool call. Text that matches a grammar must stay text.
                let has_grammar = options.constraint.as_ref().is_some_and(|constraint| constraint.answer.is_some());
                let tools = if has_grammar { &[] } else { &render.tools[..] };
                let parser = || format.parser(&rendered).with_tools(&language.tokenizer, tools);
                let decoder = |_| AnswerDecoder::chat(language.clone(), parser(), &options);
                let decoders = (0..n).map(decoder).collect();
                let has_generation_prompt = render.add_generation_prompt;
                chat = Some(ChatPrompt { text: rendered.text, has_generation_prompt });
                (rendered.ids, decoders)
            }
            Prompt::Text(text) => {
                self.check_prompt_bytes(text.len())?;
                let ids = language.tokenizer.encode(&text, ControlTokens::Default)?;
                let decoders = (0..n).map(|_| AnswerDecoder::raw(language.clone(), &ids, &options)).collect();
                (ids, decoders)
            }
            Prompt::Ids(ids) => {
                let decoders = (0..n).map(|_| AnswerDecoder::raw(language.clone(), &ids, &options)).collect();
                (ids, decoders)
            }
        };
        self.submit_ids(ids, chat, decoders, options, submitted)
    }

    /// Queues a request whose prompt is already encoded. Creates one sequence and one stream for each of `decoders`.
    pub(super) fn submit_ids(
        &self,
        ids: Vec<u32>,
        chat: Option<ChatPrompt>,
        decoders: Vec<AnswerDecoder>,
        mut options: GenerateOptions,
        submitted: Instant,
    ) -> Result<Vec<RequestStream>> {
        self.check_request(&ids, &options)?;
        let counters = &self.shared.counters;
        if counters.is_draining.load(Ordering::Relaxed) {
            return Err(Error::Draining.into());
        }
        let prompt_segments = self.request_segments(&options)?;
        let record = options.keeps_record.then(|| Arc::new(RequestRecord::new(&ids, chat.as_ref(), &options)));
        let constraint = self.prepare_constraint(&mut options, chat)?;
        let mut request =
            PreparedRequest { prompt: Arc::new(ids), prompt_segments, options, constraint, record, submitted };
        let mut answers = Vec::with_capacity(decoders.len());
        for decoder in decoders {
            answers.push(self.create_answer(&request, decoder));
            request.options.sampling.seed = request.options.sampling.seed.wrapping_add(1);
        }
        let (sequences, streams): (Vec<_>, Vec<_>) = answers.into_iter().unzip();
        // The sequences are then the only owners of the prompt, so the engine thread need not copy it.
        drop(request);
        let count = streams.len() as u64;
        stats::add(&counters.waiting, count);
        self.send(EngineCommand::Submit(sequences)).inspect_err(|_| stats::subtract(&counters.waiting, count))?;
        Ok(streams)
    }

    /// Creates the sequence and the event stream of one answer. If the model runs on several ranks, registers the
    /// sequence, so that its client learns if a rank fails.
    fn create_answer(&self, request: &PreparedRequest, decoder: AnswerDecoder) -> (Sequence, RequestStream) {
        let PreparedRequest { prompt, prompt_segments, options, constraint, record, submitted } = request;
        let (sender, events) = unbounded_channel();
        if self.info().ranks > 1 {
            self.shared.failure.add(&sender);
        }
        let mut sequence = Sequence::new(prompt.clone(), options, self.language().stop_ids(), sender);
        sequence.prompt_segments = *prompt_segments;
        if let Some(constraint) = constraint {
            sequence.constrain(constraint.clone());
        }
        let client_end = sequence.client_end().clone();
        let scored_prompt = |top| ScoredPrompt { tokens: prompt.to_vec(), top, logprobs: Vec::new() };
        let stream = RequestStream::new(events, decoder, options, prompt.len(), self.info(), *submitted, client_end)
            .with_record(record.clone())
            .with_scored_prompt(options.prompt_logprobs.map(scored_prompt));
        (sequence, stream)
    }

    /// Compiles the constraint of a request, if any.
    /// The first call with a constraint also builds the grammar compiler.
    fn prepare_constraint(
        &self,
        options: &mut GenerateOptions,
        chat: Option<ChatPrompt>,
    ) -> Result<Option<ConstraintState>> {
        let Some(constraint) = options.constraint.take() else { return Ok(None) };
        let invalid = |name: &str, reason: String| Error::InvalidConstraint { name: name.to_string(), reason };
        if options.ignore_eos {
            return Err(invalid(
                "ignore_eos",
                "not allowed with a constraint, because a constrained answer must be able to end".to_string(),
            )
            .into());
        }
        let (language, vocab_size) = (&self.shared.language, self.info().vocab_size);
        let compiler = self.shared.grammars.get_or_init(|| {
            let compiler = GrammarCompiler::new(language.tokenizer.table(), vocab_size, language.stop_ids());
            compiler.map(Arc::new).map_err(|problem| format!("{problem:#}"))
        });
        let compiler = compiler.clone().map_err(|reason| invalid("model", reason))?;
        let stop_token_ids = options.stop_token_ids.clone();
        prepare(ConstrainedRequest { compiler, language: language.clone(), constraint, chat, stop_token_ids }).map(Some)
    }

    /// Returns the token ids of a prompt. Renders the prompt first if it is a conversation.
    pub(super) fn encode(&self, prompt: Prompt) -> Result<Vec<u32>> {
        match prompt {
            Prompt::Chat { messages, render } => Ok(self.render(&messages, &render)?.ids),
            Prompt::Text(text) => {
                self.check_prompt_bytes(text.len())?;
                self.tokenizer().encode(&text, ControlTokens::Default)
            }
            Prompt::Ids(ids) => Ok(ids),
        }
    }

    /// Renders a conversation to text and token ids.
    ///
    /// Fails if the model has no chat format, or if the format cannot render the conversation.
    /// Fails with [`Error::PromptTooLong`], before rendering, if the conversation is far longer than the context.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<Rendered> {
        self.check_prompt_bytes(messages.iter().map(Message::text_bytes).sum())?;
        self.shared.language.render(messages, options)
    }

    /// Submits a conversation and streams the answer. See [`submit`](Self::submit) and [`Prompt::Chat`].
    pub fn chat(
        &self,
        messages: &[Message],
        render: &RenderOptions,
        options: GenerateOptions,
    ) -> Result<RequestStream> {
        self.submit(Request::chat(messages).render(render.clone()).options(options))
    }

    /// Submits a text and streams its continuation. See [`submit`](Self::submit) and [`Prompt::Text`].
    pub fn complete(&self, text: &str, options: GenerateOptions) -> Result<RequestStream> {
        self.submit(Request::text(text).options(options))
    }

    /// Submits token ids and streams their continuation. See [`submit`](Self::submit) and [`Prompt::Ids`].
    pub fn complete_ids(&self, ids: &[u32], options: GenerateOptions) -> Result<RequestStream> {
        self.submit(Request::ids(ids).options(options))
    }

    /// Returns the properties of the loaded model, and the settings with which the engine runs it.
    pub fn info(&self) -> &ModelInfo {
        &self.shared.info
    }

    /// Returns the model's tokenizer and chat format.
    pub fn language(&self) -> &Language {
        &self.shared.language
    }

    pub(super) fn shared_language(&self) -> Arc<Language> {
        self.shared.language.clone()
    }

    /// Returns the model's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.shared.language.tokenizer
    }

    /// Returns the sampling defaults of the model.
    /// The temperature is 0 (greedy sampling) unless the model's generation config enables sampling.
    pub fn defaults(&self) -> &SamplingParams {
        &self.shared.defaults
    }

    /// Returns the context length: the maximum number of tokens in a sequence, prompt and answer together.
    pub fn context(&self) -> usize {
        self.shared.info.context
    }

    /// Returns [`EngineStats::cached_tokens`].
    pub fn cached_tokens(&self) -> usize {
        self.stats().cached_tokens as usize
    }

    /// Returns the device of the first rank.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Returns how decode steps usually run while one request is active: as a CUDA graph, or operation by operation.
    pub fn execution_mode(&self) -> ExecutionMode {
        self.shared.info.execution_mode
    }

    /// Returns why the engine has no decode graph, or `None` if it has one.
    pub fn no_decode_graph(&self) -> Option<&NoDecodeGraphReason> {
        self.shared.info.no_decode_graph.as_ref()
    }

    /// Returns a snapshot of the engine's counters.
    pub fn stats(&self) -> EngineStats {
        self.shared.counters.snapshot()
    }

    pub(crate) fn histograms(&self) -> EngineHistograms {
        self.shared.counters.histograms()
    }

    /// Returns how long each canceled request took to end, in seconds, and empties the list of these times.
    /// Covers only requests whose client ended the stream, and at most 10,000 of them.
    pub(crate) fn take_cancel_times(&self) -> Vec<f64> {
        self.shared.counters.take_cancel_times()
    }

    /// Returns whether the engine thread is alive, its current step, if any, has taken at most `limit`, and no device
    /// has failed.
    pub fn is_responsive(&self, limit: Duration) -> bool {
        self.failure().is_none() && self.shared.counters.heartbeat.is_regular(limit)
    }

    /// Returns whether the engine can no longer answer requests, because its thread has ended or a device has failed.
    pub fn has_stopped(&self) -> bool {
        self.failure().is_some() || self.shared.counters.heartbeat.has_stopped()
    }

    /// Returns the error of the failed device, or `None` if no device has failed or there is only one rank.
    /// The engine stops after a failure.
    pub fn failure(&self) -> Option<Error> {
        self.shared.failure.error()
    }

    /// Injects a fault, for tests.
    #[doc(hidden)]
    pub fn inject_fault(&self, fault: Fault) -> Result<()> {
        self.send(EngineCommand::InjectFault(fault))
    }

    /// Rejects new requests, and waits until all accepted requests have ended.
    pub fn drain(&self) -> Result<()> {
        self.shared.counters.is_draining.store(true, Ordering::Relaxed);
        // A thread that read `is_draining` before the flag was set can still submit a request.
        // The engine thread rejects requests that arrive after `EngineCommand::Drain`.
        self.send(EngineCommand::Drain)?;
        self.with_runner(|_| ())
    }

    /// Waits for the result of a call on the engine thread. Fails if the engine stops or a device fails.
    pub(super) fn wait_for<T>(&self, result: &mpsc::Receiver<T>) -> Result<T> {
        loop {
            match result.recv_timeout(FAILURE_POLL) {
                Ok(value) => return Ok(value),
                Err(RecvTimeoutError::Timeout) if self.failure().is_none() => {}
                Err(_) => {
                    let stopped = || anyhow!("cannot finish the call: the engine stopped");
                    return Err(self.failure().map_or_else(stopped, anyhow::Error::from));
                }
            }
        }
    }

    /// Calls a function with the runner on the engine thread, and waits for the result.
    ///
    /// The call runs when all earlier requests have ended, and delays later requests.
    /// The function may overwrite the KV cache, so the engine first forgets all cached prefixes.
    /// Fails if the engine stops, for example because the function panics, or if a device fails.
    pub fn with_runner<T: Send + 'static>(&self, call: impl FnOnce(&mut Runner) -> T + Send + 'static) -> Result<T> {
        let (sender, result) = mpsc::sync_channel(1);
        self.send(EngineCommand::CallRunner(Box::new(move |runner| {
            // The send fails only if the caller no longer waits for the result of the call.
            let _ = sender.send(call(runner));
        })))?;
        self.wait_for(&result)
    }

    /// Returns `count` random token ids, which depend only on the seed and the vocabulary size.
    pub fn random_tokens(&self, seed: u64, count: usize) -> Vec<u32> {
        let vocab_size = self.info().vocab_size as f64;
        (0..count as u64).map(|index| (uniform(seed, index) * vocab_size) as u32).collect()
    }

    pub(super) fn send(&self, command: EngineCommand) -> Result<()> {
        let stopped = |_| {
            self.failure()
                .map_or_else(|| anyhow!("cannot reach the engine: the engine has stopped"), anyhow::Error::from)
        };
        self.commands.send(command).map_err(stopped)
    }
}
