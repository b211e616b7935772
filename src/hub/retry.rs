//! When to ask again.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

use ureq::http::{HeaderMap, StatusCode, header};

use super::Limits;

/// Doubling no further than this, unless a server asks for more.
const LONGEST: Duration = Duration::from_secs(15);

/// Counts the failures in a row of one thing that is fetched.
pub(super) struct Retry<'a> {
    limits: &'a Limits,
    tries: u32,
    failures: u32,
}

impl<'a> Retry<'a> {
    pub fn new(limits: &'a Limits, tries: u32) -> Self {
        Self { limits, tries, failures: 0 }
    }

    /// Something was gained.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// How long to wait after one more failure, `asked_for` by the server or as we think; none to give up.
    pub fn after_failure(&mut self, asked_for: Option<Duration>) -> Option<Duration> {
        self.failures += 1;
        if self.failures > self.tries {
            return None;
        }
        let own = self.limits.retry.saturating_mul(1 << (self.failures - 1).min(16)).min(LONGEST);
        let wait = jittered(own).max(asked_for.unwrap_or_default());
        (wait <= self.limits.longest_retry).then_some(wait)
    }
}

/// Between half of it and all of it: many clients that were cut off at once must not come back at once.
fn jittered(wait: Duration) -> Duration {
    // The hasher's keys are random; no other randomness is needed here.
    let random = RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64;
    wait.mul_f64(0.5 + random / 2.0)
}

/// Whether the same request may fare better later.
pub(super) fn is_passing(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
}

/// What the server asks to wait, in seconds or as a date.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = jiff::fmt::rfc2822::parse(value).ok()?.timestamp();
    // A date that has passed means now.
    Some(Duration::from_secs(u64::try_from(date.duration_since(jiff::Timestamp::now()).as_secs()).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_longer_each_time_and_gives_up() {
        let limits = Limits { retry: Duration::from_millis(100), ..Limits::default() };
        let mut retry = Retry::new(&limits, 3);
        for most in [100, 200, 400] {
            let wait = retry.after_failure(None).unwrap();
            assert!((most / 2..=most).contains(&(wait.as_millis() as u64)), "{wait:?}");
        }
        assert_eq!(retry.after_failure(None), None);
        retry.reset();
        let wait = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(retry.after_failure(wait(7)), wait(7));
        assert_eq!(retry.after_failure(wait(301)), None, "nobody wants to wait for so long");
        let waits: std::collections::BTreeSet<_> = (0..20).map(|_| jittered(Duration::from_secs(1))).collect();
        assert!(waits.len() > 1);
    }

    #[test]
    fn servers_say_how_long() {
        let after = |value: &str| retry_after(&HeaderMap::from_iter([(header::RETRY_AFTER, value.parse().unwrap())]));
        assert_eq!(after("12"), Some(Duration::from_secs(12)));
        assert_eq!(after("Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        assert!(after("Sat, 21 Oct 2215 07:28:00 GMT").is_some_and(|wait| wait > Duration::from_secs(1 << 30)));
        assert_eq!(after("soon"), None);
    }
}
