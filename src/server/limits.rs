//! Admits requests up to a limit, and estimates when the next one will be admitted.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// The weight of the newest interval in the mean interval between the ends of sequences.
const NEWEST_WEIGHT: f64 = 0.2;

/// The longest wait that the server suggests to a client.
const MAX_RETRY: Duration = Duration::from_secs(60);

/// Counts the sequences that wait or run, and rejects those above the limit.
pub struct Admission {
    limit: usize,
    admitted: AtomicUsize,
    ends: Mutex<Ends>,
    /// Notified when no sequence is left.
    idle: Notify,
}

/// The times at which sequences ended.
struct Ends {
    last: Instant,
    /// The mean time between two ends while the server was busy, in seconds.
    mean_interval_s: Option<f64>,
}

impl Admission {
    /// Creates an admission for at most `limit` sequences at once.
    pub fn new(limit: usize) -> Self {
        let ends = Mutex::new(Ends { last: Instant::now(), mean_interval_s: None });
        Self { limit, admitted: AtomicUsize::new(0), ends, idle: Notify::new() }
    }

    /// Admits `count` sequences, or returns the expected time until there is room for them.
    pub fn admit(self: &Arc<Self>, count: usize) -> Result<Permit, Duration> {
        let admit = |admitted: usize| Some(admitted + count).filter(|&sum| sum <= self.limit);
        match self.admitted.fetch_update(Ordering::AcqRel, Ordering::Acquire, admit) {
            Ok(before) => {
                if before == 0 {
                    // The time without any sequence is not an interval between two ends.
                    self.lock().last = Instant::now();
                }
                Ok(Permit { admission: self.clone(), count })
            }
            Err(_) => Err(self.expected_wait()),
        }
    }

    /// Returns the expected time until the next sequence ends.
    fn expected_wait(&self) -> Duration {
        let ends = self.lock();
        let elapsed = ends.last.elapsed().as_secs_f64();
        // Before the first end, only a lower bound is known: no sequence has ended in `elapsed` seconds.
        let left = ends.mean_interval_s.map_or(elapsed, |mean| mean - elapsed);
        Duration::from_secs_f64(left.clamp(0.05, MAX_RETRY.as_secs_f64()))
    }

    /// Returns the most sequences that can wait or run at once.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the number of sequences that wait or run.
    pub fn admitted(&self) -> usize {
        self.admitted.load(Ordering::Acquire)
    }

    /// Waits until no sequence waits or runs.
    pub async fn wait_until_idle(&self) {
        loop {
            let idle = self.idle.notified();
            if self.admitted() == 0 {
                return;
            }
            idle.await;
        }
    }

    fn release(&self, count: usize) {
        let mut ends = self.lock();
        let interval_s = ends.last.elapsed().as_secs_f64() / count.max(1) as f64;
        let mean = ends.mean_interval_s.map_or(interval_s, |mean| mean + NEWEST_WEIGHT * (interval_s - mean));
        *ends = Ends { last: Instant::now(), mean_interval_s: Some(mean) };
        drop(ends);
        if self.admitted.fetch_sub(count, Ordering::AcqRel) == count {
            self.idle.notify_waiters();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to run sequences. Dropping it makes room for others.
pub struct Permit {
    admission: Arc<Admission>,
    count: usize,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.admission.release(self.count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_the_excess_is_rejected() {
        let admission = Arc::new(Admission::new(5));
        let first = admission.admit(3).unwrap();
        let second = admission.admit(2).unwrap();
        assert!(admission.admit(1).is_err());
        drop(first);
        assert!(admission.admit(4).is_err() && admission.admit(3).is_ok());
        assert_eq!(admission.admitted(), 2);
        drop(second);
        assert_eq!(admission.admitted(), 0);
        let wait = admission.expected_wait();
        assert!(wait >= Duration::from_millis(50) && wait <= MAX_RETRY, "{wait:?}");
    }
}
