//! Measures CPU time, and limits how much of it a request may spend on token masks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The CPU time per token mask that does not count toward the limit. Masks of common schemas take less time.
const FREE_TIME: Duration = Duration::from_millis(1);

/// The maximum total CPU time of a request's masks beyond [`FREE_TIME`] per mask.
/// The engine thread computes the masks, so a slow mask delays all requests.
const MAX_EXCESS: Duration = Duration::from_millis(250);

/// The CPU time that the masks of a request took beyond [`FREE_TIME`] per mask, in nanoseconds.
#[derive(Default)]
pub struct MaskBudget(AtomicU64);

impl MaskBudget {
    /// Adds the CPU time of a mask. Returns whether the request may continue.
    pub fn spend(&self, time: Duration) -> bool {
        let excess = time.saturating_sub(FREE_TIME).as_nanos() as u64;
        let before = self.0.fetch_add(excess, Ordering::Relaxed);
        before.saturating_add(excess) <= MAX_EXCESS.as_nanos() as u64
    }
}

/// Returns the CPU time of the calling thread so far.
#[cfg(unix)]
pub fn thread_time() -> Duration {
    use nix::time::{ClockId, clock_gettime};
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// A clock for the CPU time of one thread, readable from any thread. Always zero on systems other than Linux.
pub struct ThreadClock {
    #[cfg(target_os = "linux")]
    clock: nix::time::ClockId,
}

impl ThreadClock {
    /// Creates a clock for the calling thread.
    pub fn new() -> Self {
        Self {
            // The Linux kernel's id for a thread's CPU clock, computed as in pthread_getcpuclockid.
            #[cfg(target_os = "linux")]
            clock: nix::time::ClockId::from_raw(!nix::unistd::gettid().as_raw() << 3 | 6),
        }
    }

    /// Returns the CPU time of the thread so far, or zero if the thread has ended.
    pub fn elapsed(&self) -> Duration {
        #[cfg(target_os = "linux")]
        return nix::time::clock_gettime(self.clock).map_or(Duration::ZERO, Duration::from);
        #[cfg(not(target_os = "linux"))]
        Duration::ZERO
    }
}

/// Returns zero. On systems other than Unix, the CPU time of a thread is not measured.
#[cfg(not(unix))]
pub fn thread_time() -> Duration {
    Duration::ZERO
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn other_threads_can_read_the_time_of_a_thread() {
        let clock = ThreadClock::new();
        let read = || std::thread::scope(|scope| scope.spawn(|| clock.elapsed()).join().unwrap());
        let (before, own) = (read(), thread_time());
        while thread_time() < own + Duration::from_millis(20) {}
        let spent = read() - before;
        assert!(spent >= Duration::from_millis(20) && spent <= thread_time(), "{spent:?}");
    }

    #[test]
    fn only_slow_masks_count() {
        let budget = MaskBudget::default();
        assert!((0..100_000).all(|_| budget.spend(FREE_TIME)));
        assert!((0..25).all(|_| budget.spend(Duration::from_millis(11))));
        assert!(!budget.spend(Duration::from_millis(11)));
    }
}
