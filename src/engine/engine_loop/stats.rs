//! Engine counters that any thread can read.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::heartbeat::Heartbeat;
use super::histogram::{Histogram, HistogramStats};
use crate::engine::requests::ClientEnd;
use crate::engine::scheduler::Scheduler;

/// The maximum number of entries in [`Counters::cancel_times`]. If the list is full, new entries are dropped.
const MAX_CANCEL_TIMES: usize = 10_000;

/// The upper bounds of the buckets for tokens per step, as in vLLM.
const STEP_TOKENS: &[u64] = &[1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];

/// The upper bounds of the buckets for preemptions per sequence.
const PREEMPTIONS: &[u64] = &[0, 1, 2, 3, 4, 5, 10, 20];

/// A snapshot of the engine's counters. A request for n answers counts as n requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct EngineStats {
    /// Requests that have neither started nor ended.
    pub waiting: u64,
    /// Requests that have started and not ended.
    pub running: u64,
    /// Requests that have ended, except those that were unfinished when the engine stopped.
    pub ended: u64,
    /// Ended requests that the client canceled or dropped before their answers were complete.
    pub canceled: u64,
    /// Ended requests that failed.
    pub failed: u64,
    /// Tokens generated for a request after its client had canceled it or had the complete answer.
    /// Excludes the first of these tokens, because its step may have begun before the cancellation.
    /// A value other than 0 shows a bug in the engine.
    pub tokens_after_cancel: u64,
    /// Tokens computed by prefill, including tokens recomputed after a preemption.
    /// Excludes tokens reused from the prefix cache, and tokens that are recomputed one at a time.
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    /// Tokens in the KV cache that belong to the last sequence of the latest step. 0 after a failed step.
    /// After [`with_runner`](crate::engine::EngineHandle::with_runner), the tokens that the runner has cached.
    pub cached_tokens: u64,
    /// Steps that the engine planned, including failed steps. A step can compute tokens of several requests.
    pub steps: u64,
    /// Steps that were queued before the tokens of the previous step were known.
    pub steps_queued_ahead: u64,
    /// How often a running request gave up its blocks because the KV cache was full.
    pub preemptions: u64,
    /// Blocks of the KV cache that requests can use. 0 until the first step or request has ended.
    pub blocks: u64,
    /// Blocks that running requests use.
    pub used_blocks: u64,
    /// Tokens that were looked up in the prefix cache. After a preemption, they include generated tokens.
    pub queried_tokens: u64,
    /// The looked-up tokens that were found in the prefix cache.
    pub hit_tokens: u64,
}

/// Histograms of steps and sequences.
pub struct Histograms {
    /// The number of tokens in each successful step, over all sequences of the step.
    pub step_tokens: Histogram,
    /// How often each sequence in the scheduler was preempted before it ended.
    pub preemptions: Histogram,
}

impl Default for Histograms {
    fn default() -> Self {
        Self { step_tokens: Histogram::new(STEP_TOKENS), preemptions: Histogram::new(PREEMPTIONS) }
    }
}

/// A snapshot of [`Histograms`].
pub struct EngineHistograms {
    pub step_tokens: HistogramStats,
    pub preemptions: HistogramStats,
}

/// The state of the engine that any thread can read: the counters of [`EngineStats`], the histograms,
/// how long canceled requests took to end, the heartbeat, and whether the engine is draining.
#[derive(Default)]
pub struct Counters {
    pub waiting: AtomicU64,
    pub running: AtomicU64,
    pub ended: AtomicU64,
    pub canceled: AtomicU64,
    pub failed: AtomicU64,
    pub tokens_after_cancel: AtomicU64,
    pub prompt_tokens: AtomicU64,
    pub generated_tokens: AtomicU64,
    pub cached_tokens: AtomicU64,
    pub steps: AtomicU64,
    pub steps_queued_ahead: AtomicU64,
    pub preemptions: AtomicU64,
    pub blocks: AtomicU64,
    pub used_blocks: AtomicU64,
    pub queried_tokens: AtomicU64,
    pub hit_tokens: AtomicU64,
    pub histograms: Histograms,
    /// The seconds from the cancellation of a request to its end, for requests whose client ended the stream.
    /// Holds at most [`MAX_CANCEL_TIMES`] entries. [`take_cancel_times`](Self::take_cancel_times) empties the list.
    cancel_times: Mutex<Vec<f64>>,
    /// Shows when the engine thread began its current step, and whether the thread has stopped.
    pub heartbeat: Arc<Heartbeat>,
    /// Whether the engine rejects new requests while it finishes the requests that it has accepted.
    pub is_draining: AtomicBool,
}

impl Counters {
    /// Updates the counters of preemptions, blocks and the prefix cache.
    pub fn publish(&self, scheduler: &Scheduler) {
        let write = |counter: &AtomicU64, value: u64| counter.store(value, Ordering::Relaxed);
        let blocks = scheduler.blocks().stats();
        write(&self.preemptions, scheduler.stats().preemptions);
        write(&self.blocks, blocks.total as u64);
        write(&self.used_blocks, blocks.used as u64);
        write(&self.queried_tokens, blocks.queried_tokens);
        write(&self.hit_tokens, blocks.hit_tokens);
    }

    /// Counts a canceled request, and records the time since its cancellation if the client ended the stream.
    pub fn count_canceled(&self, client_end: &ClientEnd) {
        add(&self.canceled, 1);
        let mut times = self.cancel_times.lock().unwrap_or_else(PoisonError::into_inner);
        // Limit the length of the list, because there may be no reader that empties it.
        if times.len() < MAX_CANCEL_TIMES {
            times.extend(client_end.elapsed().map(|time| time.as_secs_f64()));
        }
    }

    /// Returns the seconds from each cancellation to the end of its request, and empties the list of these times.
    pub fn take_cancel_times(&self) -> Vec<f64> {
        std::mem::take(&mut *self.cancel_times.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn histograms(&self) -> EngineHistograms {
        let Histograms { step_tokens, preemptions } = &self.histograms;
        EngineHistograms { step_tokens: step_tokens.stats(), preemptions: preemptions.stats() }
    }

    pub fn snapshot(&self) -> EngineStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        EngineStats {
            waiting: read(&self.waiting),
            running: read(&self.running),
            ended: read(&self.ended),
            canceled: read(&self.canceled),
            failed: read(&self.failed),
            tokens_after_cancel: read(&self.tokens_after_cancel),
            prompt_tokens: read(&self.prompt_tokens),
            generated_tokens: read(&self.generated_tokens),
            cached_tokens: read(&self.cached_tokens),
            steps: read(&self.steps),
            steps_queued_ahead: read(&self.steps_queued_ahead),
            preemptions: read(&self.preemptions),
            blocks: read(&self.blocks),
            used_blocks: read(&self.used_blocks),
            queried_tokens: read(&self.queried_tokens),
            hit_tokens: read(&self.hit_tokens),
        }
    }
}

pub fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

pub fn subtract(counter: &AtomicU64, count: u64) {
    counter.fetch_sub(count, Ordering::Relaxed);
}
