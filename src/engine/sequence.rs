//! One sequence on the engine's thread: its token ids, sampling state and limits. There is no text in it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;

use super::request::{FinishReason, GenerateOptions};
use super::sampler::Sampler;

/// A message from the engine's thread to the client of a sequence.
#[derive(Debug)]
pub enum SequenceEvent {
    /// The prompt is being read, after the tokens that the KV cache already had.
    Started {
        cached_tokens: usize,
    },
    /// A token was generated at this time.
    Token {
        id: u32,
        at: Instant,
    },
    Finished(FinishReason),
    Failed(anyhow::Error),
}

/// A request as the engine's thread sees it.
pub struct Sequence {
    prompt: Vec<u32>,
    /// How many tokens of the prompt are in the KV cache; `None` until the sequence is admitted.
    prefilled: Option<usize>,
    /// The token that the last step chose.
    pub last: Option<u32>,
    generated: usize,
    pub sampler: Sampler,
    max_tokens: Option<usize>,
    ignore_eos: bool,
    /// The caller's own flag, besides closing the channel.
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

    /// Returns whether the client dropped its stream, found a stop string, or set its cancel flag.
    pub fn is_canceled(&self) -> bool {
        self.events.is_closed() || self.cancel.as_ref().is_some_and(|cancel| cancel.load(Ordering::Relaxed))
    }

    /// Returns whether the sequence still has to look for its prefix in the KV cache.
    pub fn is_new(&self) -> bool {
        self.prefilled.is_none()
    }

    /// Starts the prefill after `cached_tokens` of the prompt.
    pub fn start(&mut self, cached_tokens: usize) {
        self.prefilled = Some(cached_tokens);
        self.send(SequenceEvent::Started { cached_tokens });
    }

    /// Returns the part of the prompt that comes next, at most `limit` tokens; `None` once all of it was read.
    pub fn next_chunk(&self, limit: usize) -> Option<Range<usize>> {
        let start = self.prefilled.unwrap_or(0);
        (start < self.prompt.len()).then(|| start..self.prompt.len().min(start + limit))
    }

    /// Counts prompt tokens up to `end` as read. Returns whether that was the last chunk.
    pub fn advance_prefill(&mut self, end: usize) -> bool {
        self.prefilled = Some(end);
        end == self.prompt.len()
    }

    /// Returns whether no token is wanted at all: the prompt is only to be read.
    pub fn wants_no_tokens(&self) -> bool {
        self.max_tokens == Some(0)
    }

    /// The most tokens that this sequence may still take.
    pub fn remaining(&self) -> usize {
        self.max_tokens.map_or(usize::MAX, |max| max.saturating_sub(self.generated))
    }

    /// Takes a generated token and sends it to the client. Returns why the sequence ends with it, if it does.
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

    /// Sends the reason of the end to the client.
    pub fn finish(self, reason: FinishReason) {
        self.send(SequenceEvent::Finished(reason));
    }

    /// Ends the client's stream with an error.
    pub fn fail(self, error: anyhow::Error) {
        self.send(SequenceEvent::Failed(error));
    }

    /// A client that is gone needs no message.
    fn send(&self, event: SequenceEvent) {
        let _ = self.events.send(event);
    }
}
