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
    /// Whether the client has all it needs of the answer.
    is_stopped: AtomicBool,
    at: OnceLock<Instant>,
}

impl ClientEnd {
    /// Records that the client has all it needs of the answer.
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
    }

    /// Records the current time as the end of the sequence. Later calls do nothing.
    pub fn end(&self) {
        self.at.get_or_init(Instant::now);
    }

    /// Returns `Stop` after a call of [`stop`](Self::stop), or else `Canceled`.
    pub fn reason(&self) -> FinishReason {
        if self.is_stopped.load(Ordering::Acquire) { FinishReason::Stop } else { FinishReason::Canceled }
    }

    /// Returns the time since the client ended the sequence.
    /// Returns `None` if the client has not called [`end`](Self::end), for example because it only set its cancel flag.
    pub fn elapsed(&self) -> Option<Duration> {
        self.at.get().map(Instant::elapsed)
    }
}
