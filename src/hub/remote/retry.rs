//! [`Retry`]: decides whether and when to retry a failed request.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

use ureq::http::{HeaderMap, StatusCode, header};

use crate::hub::limits::Limits;

/// The maximum wait between two attempts, unless the server asks for a longer wait.
const MAX_BACKOFF: Duration = Duration::from_secs(15);

/// A request is retried at most `MAX_RESETS * max_failures` times in total.
/// Without this limit, a request that makes progress before every failure would be retried forever.
const MAX_RESETS: u32 = 100;

/// Counts the failures of one request.
pub(in crate::hub) struct Retry<'a> {
    limits: &'a Limits,
    max_failures: u32,
    /// The number of failures since the last [`reset`](Self::reset).
    failures: u32,
    total_failures: u32,
}

impl<'a> Retry<'a> {
    pub fn new(limits: &'a Limits, max_failures: u32) -> Self {
        Self { limits, max_failures, failures: 0, total_failures: 0 }
    }

    /// Restarts the count of consecutive failures. Callers call `reset` when the request has made progress.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// Counts a failure. Returns how long to wait before the next attempt, or `None` if the caller must give up:
    /// after too many failures, or if the wait would exceed [`Limits::max_wait`].
    ///
    /// `retry_after` is the minimum wait that the server asked for.
    pub fn wait_after_failure(&mut self, retry_after: Option<Duration>) -> Option<Duration> {
        self.failures += 1;
        self.total_failures += 1;
        if self.failures > self.max_failures || self.total_failures > self.max_failures.saturating_mul(MAX_RESETS) {
            return None;
        }
        let backoff = self.limits.first_wait.saturating_mul(1 << (self.failures - 1).min(16)).min(MAX_BACKOFF);
        let wait = with_jitter(backoff).max(retry_after.unwrap_or_default());
        (wait <= self.limits.max_wait).then_some(wait)
    }
}

/// Returns a random time between half of `wait` and `wait`, so that many clients do not retry at the same moment.
fn with_jitter(wait: Duration) -> Duration {
    // The standard hasher has random keys, so its hash of no data serves as a random number without another crate.
    let random = RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64;
    wait.mul_f64(0.5 + random / 2.0)
}

/// Returns whether a retry may succeed after a response with `status`.
pub(in crate::hub) fn is_temporary(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
}

/// Returns the wait from the Retry-After header. The header contains a number of seconds or a date.
/// Returns `None` if the header is missing or invalid.
pub(in crate::hub) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = jiff::fmt::rfc2822::parse(value).ok()?.timestamp();
    // A date in the past means no wait.
    Some(Duration::from_secs(u64::try_from(date.duration_since(jiff::Timestamp::now()).as_secs()).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_until_the_retries_run_out() {
        let limits = Limits { first_wait: Duration::from_millis(100), ..Limits::default() };
        let mut retry = Retry::new(&limits, 3);
        for limit in [100, 200, 400] {
            let wait = retry.wait_after_failure(None).unwrap();
            assert!((limit / 2..=limit).contains(&(wait.as_millis() as u64)), "{wait:?}");
        }
        assert_eq!(retry.wait_after_failure(None), None);
        retry.reset();
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(retry.wait_after_failure(seconds(7)), seconds(7));
        assert_eq!(retry.wait_after_failure(seconds(301)), None, "a wait of more than `max_wait` must end the retries");
        let mut retry = Retry::new(&limits, 3);
        let total = (0..1000).take_while(|_| {
            retry.reset();
            retry.wait_after_failure(None).is_some()
        });
        assert_eq!(total.count(), 300);
        let waits: std::collections::BTreeSet<_> = (0..20).map(|_| with_jitter(Duration::from_secs(1))).collect();
        assert!(waits.len() > 1);
    }

    #[test]
    fn retry_after_is_a_number_or_a_date() {
        let after = |value: &str| retry_after(&HeaderMap::from_iter([(header::RETRY_AFTER, value.parse().unwrap())]));
        assert_eq!(after("12"), Some(Duration::from_secs(12)));
        assert_eq!(after("Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        assert!(after("Sat, 21 Oct 2215 07:28:00 GMT").is_some_and(|wait| wait > Duration::from_secs(1 << 30)));
        assert_eq!(after("soon"), None);
    }
}
