//! Events from the engine thread to clients. If possible, the engine sends them while the device runs the next step.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;

use super::request::FinishReason;
use crate::runner::{ChosenToken, TokenLogprobs};

/// An event of a sequence, for its client. The engine thread sends all events, with one exception:
/// after one of several devices has failed, any thread can send `Failed` (see `rank_failure.rs`).
#[derive(Debug)]
pub enum SequenceEvent {
    /// The prefill starts after the first `cached_tokens` tokens of the prompt, which are in the KV cache.
    Started {
        cached_tokens: usize,
        at: Instant,
    },
    /// The log probabilities of the next prompt tokens. All of these events come before the first generated token.
    PromptLogprobs(Arc<Vec<TokenLogprobs>>),
    /// A generated token, and the time at which the engine thread received it.
    Token {
        token: ChosenToken,
        at: Instant,
    },
    Finished(FinishReason),
    Failed(anyhow::Error),
}

/// Events to send, in order.
///
/// Each send can wake a client's thread, which takes time. The engine thread therefore collects events, and sends them
/// while the device is busy.
#[derive(Default)]
pub struct Outbox(Vec<(UnboundedSender<SequenceEvent>, SequenceEvent)>);

impl Outbox {
    /// Adds an event, which the next [`flush`](Self::flush) sends.
    pub fn add(&mut self, client: &UnboundedSender<SequenceEvent>, event: SequenceEvent) {
        self.0.push((client.clone(), event));
    }

    /// Sends and removes all events. Skips clients that have dropped their streams.
    pub fn flush(&mut self) {
        for (client, event) in self.0.drain(..) {
            let _ = client.send(event);
        }
    }
}
