//! Admits sequences up to a limit, and estimates when rejected sequences could be admitted.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::end_times::EndTimes;

/// The longest wait that the server suggests to a client before a retry.
const MAX_RETRY: Duration = Duration::from_secs(60);

/// The shortest wait that the server suggests: the smallest one above 0 that the header `retry-after-ms` can express.
const MIN_RETRY: Duration = Duration::from_millis(1);

/// The maximum ratio of one tenant's sequences to the capacity that remains free, if there are several tenants.
/// At this ratio, a tenant that is alone on the server leaves a fifth of the capacity free.
/// If a tenant has no waiting or running sequences, its next request may exceed the ratio.
const MAX_SHARE_OF_ROOM: usize = 4;

/// Counts the sequences that are waiting or running, and rejects sequences above the limit or a tenant's share.
pub struct Admission {
    limit: usize,
    state: Mutex<AdmissionState>,
    /// Notified when no sequence is waiting or running.
    idle: Notify,
}

/// The numbers of sequences that are waiting or running, and the times at which sequences ended.
struct AdmissionState {
    /// For each tenant, the number of its sequences that are waiting or running.
    admitted: Vec<usize>,
    ends: EndTimes,
}

impl AdmissionState {
    fn total(&self) -> usize {
        self.admitted.iter().sum()
    }
}

impl Admission {
    /// Creates an [`Admission`] for `tenants` tenants, whose sequences together must not exceed `limit` at any time.
    pub fn new(limit: usize, tenants: usize) -> Self {
        let admitted = vec![0; tenants.max(1)];
        let state = Mutex::new(AdmissionState { admitted, ends: EndTimes::new(Instant::now()) });
        Self { limit, state, idle: Notify::new() }
    }

    /// Admits `count` sequences of a tenant, or returns the wait to suggest before a retry.
    pub fn admit(self: &Arc<Self>, tenant: usize, count: usize) -> Result<Permit, Duration> {
        let mut state = self.lock();
        let total = state.total();
        if !self.has_room(&state, tenant, count) {
            return Err(self.expected_wait(&state, count));
        }
        if total == 0 {
            // The time without admitted sequences must not count as an interval between two ends.
            state.ends.restart(Instant::now());
        }
        state.admitted[tenant] += count;
        Ok(Permit { admission: self.clone(), tenant, count })
    }

    /// Returns the wait to suggest before sending `count` sequences of a tenant, or `None` if there is room for them.
    pub fn wait(&self, tenant: usize, count: usize) -> Option<Duration> {
        let state = self.lock();
        (!self.has_room(&state, tenant, count)).then(|| self.expected_wait(&state, count))
    }

    /// Returns the expected time until a waiting sequence can start if `ahead` sequences wait before it.
    /// Assumes that the sequence can start once `ahead + 1` sequences have ended.
    /// Returns `None` without an estimate, for example if no sequence has ended yet.
    pub fn expected_start(&self, ahead: usize) -> Option<Duration> {
        self.lock().ends.expected_wait(Instant::now(), ahead + 1)
    }

    /// Returns the wait to suggest to a client whose request did not start within the time limit.
    /// `ahead` is the number of other sequences that are waiting.
    pub fn wait_to_start(&self, ahead: usize) -> Duration {
        suggested_wait(&self.lock().ends, ahead + 1)
    }

    /// Returns the wait to suggest: the expected time until the limit allows `count` more sequences,
    /// or until the next sequence ends, whichever is later.
    fn expected_wait(&self, state: &AdmissionState, count: usize) -> Duration {
        suggested_wait(&state.ends, (state.total() + count).saturating_sub(self.limit).max(1))
    }

    fn has_room(&self, state: &AdmissionState, tenant: usize, count: usize) -> bool {
        let Some(room) = self.limit.checked_sub(state.total() + count) else { return false };
        let own = state.admitted[tenant];
        // A tenant without sequences can use the whole remaining capacity,
        // so that an idle server admits any request up to the limit.
        state.admitted.len() == 1 || own == 0 || own + count <= room.saturating_mul(MAX_SHARE_OF_ROOM)
    }

    /// Returns the maximum number of sequences that can be waiting or running at once.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the number of sequences that are waiting or running.
    pub fn admitted(&self) -> usize {
        self.lock().total()
    }

    /// Waits until no sequence is waiting or running.
    pub async fn wait_until_idle(&self) {
        loop {
            let idle = self.idle.notified();
            if self.admitted() == 0 {
                return;
            }
            idle.await;
        }
    }

    fn release(&self, tenant: usize, count: usize) {
        let mut state = self.lock();
        state.ends.add(Instant::now(), count);
        state.admitted[tenant] -= count;
        if state.total() == 0 {
            self.idle.notify_waiters();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, AdmissionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the expected time until `count` sequences have ended, clamped to the waits that the server may suggest.
fn suggested_wait(ends: &EndTimes, count: usize) -> Duration {
    let now = Instant::now();
    // If no sequence has ended yet, assume that the first sequence is half done: suggest the time since its admission.
    let wait = ends.expected_wait(now, count).unwrap_or_else(|| ends.elapsed(now));
    wait.clamp(MIN_RETRY, MAX_RETRY)
}

/// The permission to run sequences. Dropping the permit lets the server admit other sequences.
pub struct Permit {
    admission: Arc<Admission>,
    tenant: usize,
    count: usize,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.admission.release(self.tenant, self.count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_the_excess_is_rejected() {
        let admission = Arc::new(Admission::new(5, 1));
        let first = admission.admit(0, 3).unwrap();
        let second = admission.admit(0, 2).unwrap();
        assert!(admission.admit(0, 1).is_err());
        drop(first);
        assert!(admission.admit(0, 4).is_err() && admission.admit(0, 3).is_ok());
        assert_eq!(admission.admitted(), 2);
        drop(second);
        assert_eq!(admission.admitted(), 0);
        let wait = admission.expected_wait(&admission.lock(), 5);
        assert!(wait >= MIN_RETRY && wait <= MAX_RETRY, "{wait:?}");
    }

    #[test]
    fn a_client_leaves_room_to_others() {
        let admission = Arc::new(Admission::new(100, 3));
        let mut permits: Vec<Permit> = (0..1000).filter_map(|_| admission.admit(0, 1).ok()).collect();
        assert_eq!(permits.len(), 80);
        assert!(admission.wait(0, 1).is_some() && admission.wait(1, 20).is_none() && admission.wait(1, 21).is_some());
        permits.extend((0..1000).filter_map(|_| admission.admit(1, 1).ok()));
        assert_eq!(permits.len(), 96);
        permits.push(admission.admit(2, 4).ok().unwrap());
        assert!(admission.admit(2, 1).is_err());
        permits.clear();
        assert!(admission.admit(1, 100).is_ok(), "an idle server rejected the largest request");
    }
}
