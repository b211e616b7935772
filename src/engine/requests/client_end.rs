//! How and when the client of a sequence ended it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::request::FinishReason;

/// What the client tells the engine when the client ends a sequence. The stream and the sequence share this value.
///
/// The client sets it before it closes the event channel. The engine reads it after it has found the channel closed.
#[derive(Default)]
pub struct ClientEnd {
    is_complete: AtomicBool,
    at: OnceLock<Instant>,
}

impl ClientEnd {
    /// Records that the client has the complete answer.
    pub fn complete(&self) {
        self.is_complete.store(true, Ordering::Release);
    }

    /// Records that the client ends the sequence now. Later calls have no effect.
    pub fn end(&self) {
        self.at.get_or_init(Instant::now);
    }

    /// Returns `Stop` if the client has the complete answer, or else `Canceled`.
    pub fn reason(&self) -> FinishReason {
        if self.is_complete.load(Ordering::Acquire) { FinishReason::Stop } else { FinishReason::Canceled }
    }

    /// Returns the time since the client ended the sequence. Returns `None` if the client only set its cancel flag, or
    /// has not ended the sequence.
    pub fn elapsed(&self) -> Option<Duration> {
        self.at.get().map(Instant::elapsed)
    }
}
