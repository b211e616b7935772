//! Counters of the engine: written by its thread, read by any client.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What the engine did so far, and what it has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct EngineStats {
    /// Requests that wait for their turn.
    pub waiting: u64,
    /// Requests that are being answered.
    pub running: u64,
    /// Requests that ended, for whatever reason.
    pub ended: u64,
    /// Requests that ended because their client canceled them.
    pub canceled: u64,
    /// Requests that ended with an error.
    pub failed: u64,
    /// Prompt tokens that were read. Tokens that the KV cache already had are not counted.
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    /// Tokens in the KV cache. A prompt that starts with them does not read them again.
    pub cached_tokens: u64,
}

/// The atomics behind [`EngineStats`].
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
    /// Whether new requests are refused.
    pub is_draining: AtomicBool,
}

impl Counters {
    /// Returns the counters at this moment.
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

/// Adds to a counter.
pub fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

/// Subtracts one from a counter.
pub fn subtract_one(counter: &AtomicU64) {
    counter.fetch_sub(1, Ordering::Relaxed);
}
