//! Engine counters that any thread can read.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A snapshot of the engine's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct EngineStats {
    /// Requests in the queue.
    pub waiting: u64,
    /// Requests in progress.
    pub running: u64,
    /// Requests that have ended for any reason, except those that were cut off when the engine stopped.
    pub ended: u64,
    /// Requests that the client ended: canceled, dropped, or stopped at a stop string.
    pub canceled: u64,
    /// Requests that ended with an error.
    pub failed: u64,
    /// Prefilled prompt tokens, excluding tokens reused from the KV cache.
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    /// Tokens in the KV cache. A prompt that starts with the same tokens reuses them.
    pub cached_tokens: u64,
}

/// The atomic counters behind [`EngineStats`].
#[derive(Default)]
pub struct Counters {
    pub waiting: AtomicU64,
    pub running: AtomicU64,
    pub ended: AtomicU64,
    pub canceled: AtomicU64,
    pub failed: AtomicU64,
    pub prompt_tokens: AtomicU64,
    pub generated_tokens: AtomicU64,
    pub cached_tokens: AtomicU64,
    /// Whether the engine rejects new requests.
    pub is_draining: AtomicBool,
}

impl Counters {
    /// Returns the current counter values.
    pub fn snapshot(&self) -> EngineStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        EngineStats {
            waiting: read(&self.waiting),
            running: read(&self.running),
            ended: read(&self.ended),
            canceled: read(&self.canceled),
            failed: read(&self.failed),
            prompt_tokens: read(&self.prompt_tokens),
            generated_tokens: read(&self.generated_tokens),
            cached_tokens: read(&self.cached_tokens),
        }
    }
}

pub fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

pub fn subtract_one(counter: &AtomicU64) {
    counter.fetch_sub(1, Ordering::Relaxed);
}
