//! One generation: prefill what the cache does not hold, then a token at a time, told apart into channels of text.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use super::Engine;
use super::sampler::Sampler;
use super::sampling::SamplingParams;
use super::stop::StopStrings;
use crate::chat::{Channel, Delta, Parser, ToolCall};
use crate::error::Error;
use crate::nn::pass::LogitRows;
use crate::tokenizer::TextStream;

/// What a caller may ask of a generation. `Engine::defaults` gives the model's own sampling.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    pub sampling: SamplingParams,
    /// At most this many tokens; `None` until the context is full.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Go on after the model's own end of text: for measuring.
    pub ignore_eos: bool,
    /// Set from another thread (Ctrl-C) to end the generation at the next token, or prefill at the next chunk.
    pub cancel: Option<Arc<AtomicBool>>,
}

impl GenerateOptions {
    pub fn new(sampling: SamplingParams) -> Self {
        Self { sampling, max_tokens: None, stop: Vec::new(), ignore_eos: false, cancel: None }
    }
}

/// What one step brought.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// The generated token; none in the last chunk, which only brings text that was held back.
    pub token: Option<u32>,
    /// Text that became certain, possibly none.
    pub deltas: Vec<Delta>,
}

impl Chunk {
    /// The part of the text that belongs to the answer.
    pub fn answer(&self) -> String {
        self.text(Channel::Answer)
    }

    /// The part of the text on one channel.
    pub fn text(&self, channel: Channel) -> String {
        self.deltas.iter().filter(|delta| delta.channel == channel).map(|delta| delta.text.as_str()).collect()
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its text, or a stop string came.
    Stop,
    /// `max_tokens`, or the context is full.
    Length,
    /// The model asks for tools to be run.
    ToolCalls,
    /// `cancel` was set.
    Interrupted,
}

/// Counts and times of a generation.
#[derive(Clone, Debug)]
pub struct Summary {
    pub finish_reason: FinishReason,
    pub prompt_tokens: usize,
    /// Of them, those that the cache held already.
    pub cached_tokens: usize,
    pub completion_tokens: usize,
    /// Seconds from the call to the first token.
    pub ttft_s: f64,
    /// Tokens per second after the first one; 0 with fewer than two.
    pub tok_per_s: f64,
    /// Positions in use, and how many there are.
    pub context_used: usize,
    pub context: usize,
    /// What ran the decode steps: `Engine::executor`.
    pub executor: &'static str,
    pub tool_calls: Vec<ToolCall>,
    /// How often the model broke its chat format.
    pub malformed: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnDevice {
    No,
    /// `last` is none before the first token.
    Yes {
        last: Option<u32>,
    },
}

/// Which parser a generation's tokens go through.
pub(super) enum Reader {
    Chat(Box<Parser>),
    /// Continued text: everything is answer.
    Raw(TextStream),
}

/// The tokens of one generation, as an iterator of chunks. Dropping it early is fine: the engine keeps what it read.
pub struct Generation<'e> {
    engine: &'e mut Engine,
    options: GenerateOptions,
    reader: Reader,
    sampler: Sampler,
    stop: StopStrings,
    /// Logits of the last position, until the token is sampled.
    logits: Vec<f32>,
    /// Whether the engine's graph chooses the tokens, and the last one that it chose.
    on_device: OnDevice,
    prompt_tokens: usize,
    cached_tokens: usize,
    generated: usize,
    started: Instant,
    first_token: Option<Instant>,
    last_token: Instant,
    finish: Option<FinishReason>,
    flushed: bool,
}

impl<'e> Generation<'e> {
    pub(super) fn start(
        engine: &'e mut Engine,
        prompt: &[u32],
        reader: Reader,
        options: GenerateOptions,
    ) -> Result<Self> {
        let started = Instant::now();
        options.sampling.validate().map_err(anyhow::Error::msg)?;
        if prompt.is_empty() {
            anyhow::bail!("the prompt is empty");
        }
        if prompt.len() >= engine.context() {
            return Err(Error::ContextFull {
                prompt_tokens: prompt.len(),
                context_tokens: engine.context(),
                limit_tokens: engine.info().max_context,
            }
            .into());
        }
        let canceled = || options.cancel.as_ref().is_some_and(|cancel| cancel.load(Ordering::Relaxed));
        let read = match engine.prefill(prompt, &canceled) {
            Ok(read) => read,
            Err(error) => {
                // What the cache holds past an error is unknown.
                engine.forget();
                return Err(error);
            }
        };
        tracing::debug!(prompt_tokens = prompt.len(), cached_tokens = read.cached_tokens, "prompt read");
        let finish = read.logits.is_none().then_some(FinishReason::Interrupted);
        let mut generation = Self {
            sampler: Sampler::new(options.sampling.clone(), prompt),
            stop: StopStrings::new(&options.stop),
            logits: Vec::new(),
            on_device: OnDevice::No,
            engine,
            options,
            reader,
            prompt_tokens: prompt.len(),
            cached_tokens: read.cached_tokens,
            generated: 0,
            started,
            first_token: None,
            last_token: started,
            finish,
            flushed: false,
        };
        if let Some(logits) = read.logits
            && generation.options.max_tokens != Some(0)
        {
            match generation.engine.start_from(&logits, &generation.sampler)? {
                true => generation.on_device = OnDevice::Yes { last: None },
                false => generation.logits = logits.flatten_all()?.to_vec1()?,
            }
        }
        Ok(generation)
    }

    /// Counts and times so far; final once the iterator has ended.
    pub fn summary(&self) -> Summary {
        let tool_calls = match &self.reader {
            Reader::Chat(parser) => parser.tool_calls().to_vec(),
            Reader::Raw(_) => Vec::new(),
        };
        let finish_reason = match self.finish.unwrap_or(FinishReason::Interrupted) {
            FinishReason::Stop if !tool_calls.is_empty() => FinishReason::ToolCalls,
            other => other,
        };
        let first = self.first_token.unwrap_or(self.last_token);
        let decode_s = (self.last_token - first).as_secs_f64();
        Summary {
            finish_reason,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            completion_tokens: self.generated,
            ttft_s: (first - self.started).as_secs_f64(),
            tok_per_s: if decode_s > 0.0 { (self.generated - 1) as f64 / decode_s } else { 0.0 },
            context_used: self.prompt_tokens + self.generated,
            context: self.engine.context(),
            executor: self.engine.executor(),
            malformed: match &self.reader {
                Reader::Chat(parser) => parser.malformed(),
                Reader::Raw(_) => 0,
            },
            tool_calls,
        }
    }

    /// Samples a token, reads it, and runs the model on it unless it is the last.
    fn step(&mut self) -> Result<Chunk> {
        let token = match self.on_device {
            OnDevice::Yes { last } => {
                let most = self.options.max_tokens.map_or(usize::MAX, |max| max - self.generated);
                let token = self.engine.next_step(last, most)?;
                self.on_device = OnDevice::Yes { last: Some(token) };
                token
            }
            OnDevice::No if self.logits.iter().all(|logit| logit.is_nan()) => {
                anyhow::bail!(
                    "the model's logits are not numbers: its weights are broken, or too large for this --dtype"
                )
            }
            OnDevice::No => self.sampler.sample(&mut self.logits),
        };
        self.generated += 1;
        self.last_token = Instant::now();
        self.first_token.get_or_insert(self.last_token);

        let at_end = self.engine.is_stop(token) && !self.options.ignore_eos;
        let read = match &mut self.reader {
            Reader::Chat(parser) => parser.push(self.engine.tokenizer(), token)?,
            Reader::Raw(_) if at_end => Vec::new(),
            Reader::Raw(stream) => answer(stream.push(self.engine.tokenizer(), token)?),
        };
        let deltas = self.until_stop(read);
        self.finish = if at_end || self.stop.hit() {
            Some(FinishReason::Stop)
        } else if self.options.max_tokens.is_some_and(|max| self.generated >= max)
            || self.prompt_tokens + self.generated >= self.engine.context()
        {
            Some(FinishReason::Length)
        } else {
            None
        };
        // The graph runs on by itself: the text of this token is made while it does.
        if self.finish.is_none() && self.on_device == OnDevice::No {
            self.logits = self.engine.forward(&[token], LogitRows::Last)?;
        }
        Ok(Chunk { token: Some(token), deltas })
    }

    /// Passes the answer through the stop strings; the other channels pass as they are.
    fn until_stop(&mut self, deltas: Vec<Delta>) -> Vec<Delta> {
        let mut passed = Vec::new();
        for delta in deltas {
            if delta.channel == Channel::Answer {
                passed.extend(answer(self.stop.push(&delta.text)));
            } else {
                // What was held back came before this.
                passed.extend(answer(self.stop.finish()));
                passed.push(delta);
            }
        }
        passed
    }

    /// What parser and stop strings still hold.
    fn flush(&mut self) -> Result<Chunk> {
        let held = match &mut self.reader {
            Reader::Chat(parser) => parser.finish(self.engine.tokenizer())?,
            Reader::Raw(stream) => answer(stream.finish(self.engine.tokenizer())?),
        };
        let mut deltas = self.until_stop(held);
        deltas.extend(answer(self.stop.finish()));
        Ok(Chunk { token: None, deltas })
    }
}

fn answer(text: String) -> Vec<Delta> {
    if text.is_empty() { Vec::new() } else { vec![Delta { channel: Channel::Answer, text }] }
}

impl Iterator for Generation<'_> {
    type Item = Result<Chunk>;

    fn next(&mut self) -> Option<Self::Item> {
        let canceled = self.options.cancel.as_ref().is_some_and(|cancel| cancel.load(Ordering::Relaxed));
        if self.finish.is_none() && canceled {
            self.finish = Some(FinishReason::Interrupted);
        }
        if self.finish.is_none() && self.options.max_tokens == Some(0) {
            self.finish = Some(FinishReason::Length);
        }
        if self.finish.is_none() {
            let chunk = self.step();
            if chunk.is_err() {
                // An error ends the iterator; what the cache holds past it is unknown.
                self.engine.forget();
                (self.finish, self.flushed) = (Some(FinishReason::Interrupted), true);
            }
            return Some(chunk);
        }
        if std::mem::replace(&mut self.flushed, true) {
            return None;
        }
        match self.flush() {
            Ok(chunk) if chunk.deltas.is_empty() => None,
            other => Some(other),
        }
    }
}
