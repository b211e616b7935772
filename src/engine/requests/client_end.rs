//! [`ClientEnd`]: how and when a client ended its sequence.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::request::FinishReason;

/// How and when a client ended its sequence. The client's stream and the engine's sequence share this value.
///
/// The client sets the value before it closes the event channel.
/// The engine reads the value after the channel has closed or the client has set its cancel flag.
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

    /// Records the current time as the end of the sequence. Later calls do nothing.
    pub fn end(&self) {
        self.at.get_or_init(Instant::now);
    }

    /// Returns `Stop` if the client has the complete answer, or else `Canceled`.
    pub fn reason(&self) -> FinishReason {
        if self.is_complete.load(Ordering::Acquire) { FinishReason::Stop } else { FinishReason::Canceled }
    }

    /// Returns the time since the client ended the sequence.
    /// Returns `None` if the client has not called [`end`](Self::end), for example because it only set its cancel flag.
    pub fn elapsed(&self) -> Option<Duration> {
        self.at.get().map(Instant::elapsed)
    }
}
