//! Shows other threads whether the engine thread is making progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The start time of the engine thread's current step, and whether the thread has ended.
pub struct Heartbeat {
    created: Instant,
    /// Milliseconds from `created` to the start of the current step, plus 1, because 0 means that the engine is idle.
    step_started_ms: AtomicU64,
    has_stopped: AtomicBool,
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self { created: Instant::now(), step_started_ms: AtomicU64::new(0), has_stopped: AtomicBool::new(false) }
    }
}

impl Heartbeat {
    /// Records the current time as the start of a step.
    pub fn begin_step(&self) {
        let milliseconds = self.created.elapsed().as_millis() as u64;
        self.step_started_ms.store(milliseconds + 1, Ordering::Relaxed);
    }

    /// Records that the engine is idle and waits for commands.
    pub fn rest(&self) {
        self.step_started_ms.store(0, Ordering::Relaxed);
    }

    /// Returns whether the engine thread is alive and its current step, if any, has taken at most `limit`.
    pub fn is_regular(&self, limit: Duration) -> bool {
        let step_time = match self.step_started_ms.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            started => self.created.elapsed().saturating_sub(Duration::from_millis(started - 1)),
        };
        !self.has_stopped() && step_time <= limit
    }

    /// Returns whether the engine thread has ended.
    pub fn has_stopped(&self) -> bool {
        self.has_stopped.load(Ordering::Relaxed)
    }
}

/// Records the end of the engine thread when dropped, even if the thread panics.
pub struct StopGuard(Arc<Heartbeat>);

impl StopGuard {
    pub fn new(heartbeat: Arc<Heartbeat>) -> Self {
        Self(heartbeat)
    }
}

impl Drop for StopGuard {
    fn drop(&mut self) {
        self.0.has_stopped.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_step_and_a_stopped_thread_are_irregular() {
        let heartbeat = Arc::new(Heartbeat::default());
        assert!(heartbeat.is_regular(Duration::ZERO), "an idle engine must count as regular");
        heartbeat.begin_step();
        assert!(heartbeat.is_regular(Duration::from_secs(3600)));
        std::thread::sleep(Duration::from_millis(3));
        assert!(!heartbeat.is_regular(Duration::from_millis(1)));
        heartbeat.rest();
        assert!(heartbeat.is_regular(Duration::ZERO));
        drop(StopGuard::new(heartbeat.clone()));
        assert!(!heartbeat.is_regular(Duration::from_secs(3600)));
    }
}
