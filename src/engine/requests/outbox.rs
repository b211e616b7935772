//! Events that the engine sends to clients while the device runs the next step.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;

use super::request::FinishReason;
use crate::runner::{ChosenToken, TokenLogprobs};

/// A message from the engine thread to the client of a sequence.
#[derive(Debug)]
pub enum SequenceEvent {
    /// The prefill has started. It skips the first `cached_tokens` tokens, which are already in the KV cache.
    Started {
        cached_tokens: usize,
        at: Instant,
    },
    /// The log probabilities of the next prompt tokens. They come before the first generated token.
    PromptLogprobs(Arc<Vec<TokenLogprobs>>),
    /// A generated token and the time at which it was generated.
    Token {
        token: ChosenToken,
        at: Instant,
    },
    Finished(FinishReason),
    Failed(anyhow::Error),
}

/// Events to send, in order. Sending is delayed because waking a client's thread takes microseconds.
#[derive(Default)]
pub struct Outbox(Vec<(UnboundedSender<SequenceEvent>, SequenceEvent)>);

impl Outbox {
    /// Adds an event, which the next [`flush`](Self::flush) sends.
    pub fn add(&mut self, client: &UnboundedSender<SequenceEvent>, event: SequenceEvent) {
        self.0.push((client.clone(), event));
    }

    /// Sends all events. Ignores clients that have dropped their streams.
    pub fn flush(&mut self) {
        for (client, event) in self.0.drain(..) {
            let _ = client.send(event);
        }
    }
}
