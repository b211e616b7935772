//! The state of one sequence on the engine thread: token ids, sampler and limits, but no text.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;

use super::request::{FinishReason, GenerateOptions};
use super::sampler::Sampler;

/// A message from the engine thread to the client of a sequence.
#[derive(Debug)]
pub enum SequenceEvent {
    /// The prefill has started. It skips the `cached_tokens` that are already in the KV cache.
    Started {
        cached_tokens: usize,
    },
    /// A generated token and the time at which it was generated.
    Token {
        id: u32,
        at: Instant,
    },
    Finished(FinishReason),
    Failed(anyhow::Error),
}

/// A request that is queued or running on the engine thread.
pub struct Sequence {
    prompt: Vec<u32>,
    /// The number of prompt tokens in the KV cache. `None` until the sequence starts.
    prefilled: Option<usize>,
    /// The token sampled by the last step.
    pub last: Option<u32>,
    generated: usize,
    pub sampler: Sampler,
    max_tokens: Option<usize>,
    ignore_eos: bool,
    /// The caller's cancel flag. Closing the event channel also cancels the sequence.
    cancel: Option<Arc<AtomicBool>>,
    events: UnboundedSender<SequenceEvent>,
}

impl Sequence {
    pub fn new(prompt: Vec<u32>, options: &GenerateOptions, events: UnboundedSender<SequenceEvent>) -> Self {
        Self {
            sampler: Sampler::new(options.sampling.clone(), &prompt),
            prompt,
            prefilled: None,
            last: None,
            generated: 0,
            max_tokens: options.max_tokens,
            ignore_eos: options.ignore_eos,
            cancel: options.cancel.clone(),
            events,
        }
    }

    pub fn prompt(&self) -> &[u32] {
        &self.prompt
    }

    /// Returns whether the client canceled the request, dropped its stream or found a stop string.
    pub fn is_canceled(&self) -> bool {
        self.events.is_closed() || self.cancel.as_ref().is_some_and(|cancel| cancel.load(Ordering::Relaxed))
    }

    /// Returns whether the sequence has not started yet.
    pub fn is_new(&self) -> bool {
        self.prefilled.is_none()
    }

    /// Starts the prefill after the first `cached_tokens` tokens of the prompt, which are already in the KV cache.
    pub fn start(&mut self, cached_tokens: usize) {
        self.prefilled = Some(cached_tokens);
        self.send(SequenceEvent::Started { cached_tokens });
    }

    /// Returns the range of the next chunk, at most `limit` tokens. Returns `None` once the prefill is complete.
    pub fn next_chunk(&self, limit: usize) -> Option<Range<usize>> {
        let start = self.prefilled.unwrap_or(0);
        (start < self.prompt.len()).then(|| start..self.prompt.len().min(start + limit))
    }

    /// Marks prompt tokens up to `end` as prefilled. Returns whether the prefill is complete.
    pub fn advance_prefill(&mut self, end: usize) -> bool {
        self.prefilled = Some(end);
        end == self.prompt.len()
    }

    /// Returns whether the request generates no tokens.
    pub fn is_prefill_only(&self) -> bool {
        self.max_tokens == Some(0)
    }

    /// Returns how many more tokens the sequence may generate.
    pub fn remaining(&self) -> usize {
        self.max_tokens.map_or(usize::MAX, |max| max.saturating_sub(self.generated))
    }

    /// Adds a generated token and sends it to the client. Returns the finish reason if the token ends the sequence.
    pub fn push(&mut self, token: u32, is_stop: bool, context: usize) -> Option<FinishReason> {
        self.last = Some(token);
        self.generated += 1;
        self.send(SequenceEvent::Token { id: token, at: Instant::now() });
        if is_stop && !self.ignore_eos {
            Some(FinishReason::Stop)
        } else if self.remaining() == 0 || self.prompt.len() + self.generated >= context {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    /// Sends the finish reason to the client.
    pub fn finish(&self, reason: FinishReason) {
        self.send(SequenceEvent::Finished(reason));
    }

    /// Ends the client's stream with an error.
    pub fn fail(&self, error: anyhow::Error) {
        self.send(SequenceEvent::Failed(error));
    }

    /// Sends an event, unless the client has dropped its stream.
    fn send(&self, event: SequenceEvent) {
        let _ = self.events.send(event);
    }
}
