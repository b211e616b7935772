//! [`Sequence`]: one answer to a request, on the engine thread. It has token ids but no text.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::sync::mpsc::UnboundedSender;

use super::client_end::ClientEnd;
use super::outbox::{Outbox, SequenceEvent};
use super::prompt_scorer::PromptScorer;
use super::request::{FinishReason, GenerateOptions};
use crate::engine::constraint::ConstraintState;
use crate::engine::sampling::{LogitRules, Sampler};
use crate::engine::scheduler::TenantId;
use crate::runner::{ChosenToken, PromptSegments, TokenLogprobs};

/// The prompt, sampler, limits and event channel of one answer to a request.
pub struct Sequence {
    /// The prompt, which all sequences of a request share.
    prompt: Arc<Vec<u32>>,
    prompt_tokens: usize,
    /// Whether [`SequenceEvent::Started`] was added to the outbox.
    has_started: bool,
    generated: usize,
    pub sampler: Sampler,
    /// The progress of scoring the prompt, if the request asked for prompt log probabilities.
    pub prompt_scorer: Option<PromptScorer>,
    max_tokens: Option<usize>,
    /// The tokens that end the sequence: those in `stop_token_ids` and, without `ignore_eos`, the model's stop tokens.
    stop_ids: Vec<u32>,
    /// See [`GenerateOptions::cache_salt`]. The engine loop moves it from a request's first sequence to the scheduler.
    pub cache_salt: Option<String>,
    /// How the prompt is divided into segments. `Some` only if the request must be deterministic, but the engine is
    /// not.
    pub prompt_segments: Option<PromptSegments>,
    pub tenant: TenantId,
    pub priority: i32,
    pub max_wait: Option<Duration>,
    /// See [`GenerateOptions::cancel`].
    cancel: Option<Arc<AtomicBool>>,
    client_end: Arc<ClientEnd>,
    events: UnboundedSender<SequenceEvent>,
    /// Whether a step has returned a token since [`is_canceled`](Self::is_canceled) became true.
    is_noted_as_canceled: bool,
}

impl Sequence {
    /// Creates a sequence. `model_stop_ids` are the stop tokens of the model.
    pub fn new(
        prompt: Arc<Vec<u32>>,
        options: &GenerateOptions,
        model_stop_ids: &[u32],
        events: UnboundedSender<SequenceEvent>,
    ) -> Self {
        let model_stop_ids = if options.ignore_eos { &[] } else { model_stop_ids };
        let stop_ids: Vec<u32> = model_stop_ids.iter().chain(&options.stop_token_ids).copied().collect();
        let rules = LogitRules {
            bias: options.logit_bias.clone(),
            stop_tokens: stop_ids.clone(),
            min_tokens: options.min_tokens,
            logprobs: options.logprobs,
        };
        Self {
            sampler: Sampler::new(options.sampling.clone(), &prompt).with_rules(rules),
            prompt_scorer: options.prompt_logprobs.map(|top| PromptScorer::new(top, prompt.len())),
            stop_ids,
            prompt_tokens: prompt.len(),
            prompt,
            has_started: false,
            generated: 0,
            max_tokens: options.max_tokens,
            cache_salt: options.cache_salt.clone(),
            prompt_segments: None,
            tenant: options.tenant,
            priority: options.priority,
            max_wait: options.max_wait,
            cancel: options.cancel.clone(),
            client_end: Arc::default(),
            events,
            is_noted_as_canceled: false,
        }
    }

    /// Sets the constraint of the answer.
    pub fn constrain(&mut self, constraint: ConstraintState) {
        self.sampler.set_constraint(constraint);
    }

    /// Passes the chosen token to the constraint, which can replace the token. See [`Sampler::advance`].
    pub fn accept(&mut self, token: ChosenToken) -> Result<ChosenToken> {
        Ok(ChosenToken { id: self.sampler.advance(token.id)?, ..token })
    }

    /// Moves the prompt out of the sequences of a request, which share it. Later calls return an empty list.
    pub fn take_prompt(sequences: &mut [Sequence]) -> Vec<u32> {
        let mut prompts = sequences.iter_mut().map(|sequence| std::mem::take(&mut sequence.prompt));
        let prompt = prompts.next().unwrap_or_default();
        // Drop all other references first. The list is then moved, not copied.
        prompts.for_each(drop);
        Arc::unwrap_or_clone(prompt)
    }

    /// Returns whether the client needs no more tokens, because it has canceled the request, dropped its stream,
    /// or received the complete answer.
    pub fn is_canceled(&self) -> bool {
        self.events.is_closed() || self.cancel.as_ref().is_some_and(|cancel| cancel.load(Ordering::Relaxed))
    }

    /// Returns how and when the client ended the sequence.
    /// The engine reads this value only after [`is_canceled`](Self::is_canceled) has returned true.
    pub fn client_end(&self) -> &Arc<ClientEnd> {
        &self.client_end
    }

    /// Records a token that a step returned after the cancellation. Returns true from the second such token on.
    pub fn note_canceled(&mut self) -> bool {
        std::mem::replace(&mut self.is_noted_as_canceled, true)
    }

    /// Adds the event [`SequenceEvent::Started`], unless the sequence has already started.
    pub fn start(&mut self, cached_tokens: usize, outbox: &mut Outbox) {
        if !self.has_started {
            self.has_started = true;
            outbox.add(&self.events, SequenceEvent::Started { cached_tokens, at: Instant::now() });
        }
    }

    /// Adds an event with log probabilities of prompt tokens, and counts these log probabilities as sent.
    /// Does nothing if the request did not ask for prompt log probabilities.
    pub fn add_prompt_logprobs(&mut self, logprobs: &Arc<Vec<TokenLogprobs>>, outbox: &mut Outbox) {
        if let Some(scorer) = &mut self.prompt_scorer {
            scorer.count(logprobs.len());
            outbox.add(&self.events, SequenceEvent::PromptLogprobs(logprobs.clone()));
        }
    }

    pub fn has_generated(&self) -> bool {
        self.generated > 0
    }

    pub fn has_started(&self) -> bool {
        self.has_started
    }

    /// Returns whether the request generates no tokens, because `max_tokens` is 0.
    pub fn is_prefill_only(&self) -> bool {
        self.max_tokens == Some(0)
    }

    /// Returns how many more tokens `max_tokens` allows, or [`usize::MAX`] if it is `None`. Ignores the context length.
    pub fn remaining(&self) -> usize {
        self.max_tokens.map_or(usize::MAX, |max| max.saturating_sub(self.generated))
    }

    /// Counts a generated token and adds its event. Returns a finish reason if the token ends the sequence.
    pub fn push(&mut self, token: ChosenToken, context: usize, outbox: &mut Outbox) -> Option<FinishReason> {
        let is_stop = self.stop_ids.contains(&token.id);
        self.generated += 1;
        outbox.add(&self.events, SequenceEvent::Token { token, at: Instant::now() });
        if is_stop {
            Some(FinishReason::Stop)
        } else if self.remaining() == 0 || self.prompt_tokens + self.generated >= context {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    /// Adds the last event of the sequence: a finish reason.
    pub fn finish(&self, reason: FinishReason, outbox: &mut Outbox) {
        outbox.add(&self.events, SequenceEvent::Finished(reason));
    }

    /// Adds the last event of the sequence: an error.
    pub fn fail(&self, error: anyhow::Error, outbox: &mut Outbox) {
        outbox.add(&self.events, SequenceEvent::Failed(error));
    }
}
