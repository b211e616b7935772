//! Estimates when sequences will end, from the times at which earlier sequences ended.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The maximum number of recorded ends. Sequences that end in the same step count as one end.
/// More ends make the estimate steadier, but slower to follow a change of load.
const ENDS: usize = 64;

/// The number of most recent intervals between ends that are compared with the older ones to detect a change of load.
const RECENT: usize = 8;

/// The maximum ratio of the mean of the older intervals to the mean of the [`RECENT`] most recent intervals.
/// If the ratio is larger, the older intervals come from an earlier load and are dropped.
/// Under a constant load, the ratio rarely exceeds this maximum.
const MAX_RATIO: f64 = 4.0;

/// A sequence that ends within this time after the previous end counts as part of that end:
/// the sequences probably ended in the same step.
const SAME_STEP: Duration = Duration::from_millis(1);

/// The most recent times at which sequences ended.
pub struct EndTimes {
    last: Instant,
    /// For each end, the time since the previous end or restart, and the number of sequences that ended.
    ends: VecDeque<(Duration, usize)>,
}

impl EndTimes {
    pub fn new(now: Instant) -> Self {
        Self { last: now, ends: VecDeque::new() }
    }

    /// Starts measuring the time to the next end at `now`, so that a time without sequences does not count.
    pub fn restart(&mut self, now: Instant) {
        self.last = now;
    }

    /// Returns the time since the last end or restart.
    pub fn elapsed(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.last)
    }

    /// Records that `count` sequences ended at `now`.
    pub fn add(&mut self, now: Instant, count: usize) {
        let interval = self.elapsed(now);
        match self.ends.back_mut() {
            Some((_, sequences)) if interval < SAME_STEP => *sequences += count,
            _ => {
                self.ends.push_back((interval, count));
                self.last = now;
            }
        }
        if self.ends.len() > ENDS {
            self.ends.pop_front();
        }
        self.forget_earlier_load();
    }

    /// Removes the older intervals if they are much longer than the recent ones.
    /// If they stayed, a few long intervals would dominate [`expected_wait`](Self::expected_wait).
    fn forget_earlier_load(&mut self) {
        let Some(older) = self.ends.len().checked_sub(RECENT).filter(|older| *older > 0) else { return };
        let sum_s =
            |ends: &mut dyn Iterator<Item = &(Duration, usize)>| ends.map(|end| end.0.as_secs_f64()).sum::<f64>();
        let older_mean_s = sum_s(&mut self.ends.iter().take(older)) / older as f64;
        let recent_mean_s = sum_s(&mut self.ends.iter().skip(older)) / RECENT as f64;
        if older_mean_s > MAX_RATIO * recent_mean_s {
            self.ends.drain(..older);
        }
    }

    /// Returns the expected time until `count` more sequences have ended.
    /// Returns `None` if no sequence has ended yet, or if the time overflows a [`Duration`].
    ///
    /// The expected time until the next end is the mean interval between ends minus the time since the last end.
    /// This mean includes only the intervals that are at least as long as the time since the last end.
    /// If all intervals are shorter, the expected time until the next end is the time since the last end.
    /// Each of the `count` sequences that ends after the next end adds the mean time per ended sequence.
    pub fn expected_wait(&self, now: Instant, count: usize) -> Option<Duration> {
        let elapsed = self.elapsed(now);
        let rests = self.ends.iter().filter_map(|(interval, _)| interval.checked_sub(elapsed));
        let (sum, longer) = rests.fold((Duration::ZERO, 0), |(sum, longer), rest| (sum + rest, longer + 1));
        let next = sum.checked_div(longer).unwrap_or(elapsed);
        let total: Duration = self.ends.iter().map(|(interval, _)| interval).sum();
        let sequences: usize = self.ends.iter().map(|(_, sequences)| sequences).sum();
        // Assume that the mean number of sequences per recorded end also applies to the next end.
        let per_end = sequences.checked_div(self.ends.len())?;
        let others = count.saturating_sub(per_end.max(1)) as f64 * total.as_secs_f64() / sequences.max(1) as f64;
        Duration::try_from_secs_f64(next.as_secs_f64() + others).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pseudorandom number generator with values between 0 and 1.
    struct Uniform(u64);

    impl Uniform {
        fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((self.0 >> 33) as f64 + 0.5) / (1u64 << 31) as f64
        }
    }

    /// Simulates a server on which `per_end` sequences end at once. `interval_s` draws the time between two such ends.
    /// At evenly spaced times, samples the wait until `count` more sequences have ended.
    /// Returns the mean suggested wait and the mean true wait.
    fn waits(per_end: usize, count: usize, mut interval_s: impl FnMut(&mut Uniform) -> f64) -> (f64, f64) {
        let start = Instant::now();
        let mut random = Uniform(1);
        let mut ends = vec![0.0];
        while ends.len() < 2000 {
            ends.push(ends[ends.len() - 1] + interval_s(&mut random));
        }
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let mut times = EndTimes::new(start);
        let mut known = 0;
        let mut suggested = 0.0;
        let mut real = 0.0;
        let samples = 5000;
        for sample in 0..samples {
            // Start at end 100, when `times` has a full history, and stop at end 1900, so that each true wait is known.
            let now = ends[100] + (ends[1900] - ends[100]) * f64::from(sample) / f64::from(samples);
            while ends[known + 1] <= now {
                known += 1;
                // The simulated sequences of a step end 1 µs apart, which is less than `SAME_STEP`.
                (0..per_end).for_each(|index| times.add(at(ends[known] + index as f64 * 1e-6), 1));
            }
            suggested += times.expected_wait(at(now), count).unwrap().as_secs_f64();
            real += ends[known + count.div_ceil(per_end)] - now;
        }
        (suggested / f64::from(samples), real / f64::from(samples))
    }

    #[test]
    fn suggested_waits_are_close_to_the_truth() {
        for scale_s in [0.006, 0.3, 20.0] {
            let regular = |random: &mut Uniform| scale_s * (0.9 + 0.2 * random.next());
            let random = |random: &mut Uniform| 0.002 + scale_s * -random.next().ln();
            let rare = |random: &mut Uniform| if random.next() < 0.1 { 5.0 * scale_s } else { 0.3 * scale_s };
            for (per_end, count) in [(1, 1), (1, 5), (16, 1), (16, 40)] {
                for (name, (suggested, real)) in [
                    ("regular", waits(per_end, count, regular)),
                    ("random", waits(per_end, count, random)),
                    ("rare", waits(per_end, count, rare)),
                ] {
                    let ratio = suggested / real;
                    assert!(
                        (0.7..1.5).contains(&ratio),
                        "{name} ends, scale {scale_s} s, {per_end} sequences per end, wait for {count}: \
                         suggested wait {suggested} s, true wait {real} s"
                    );
                }
            }
        }
    }

    /// Twelve long answers end in three steps. Then, short answers end one by one.
    #[test]
    fn long_intervals_of_an_earlier_load_do_not_count() {
        let start = Instant::now();
        let mut random = Uniform(1);
        for scale_s in [0.03, 0.3, 3.0] {
            let mut times = EndTimes::new(start);
            let mut now_s = 0.0;
            let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
            for _ in 0..3 {
                now_s += 12.0 * scale_s;
                (0..4).for_each(|index| times.add(at(now_s + index as f64 * 1e-6), 1));
            }
            let (mut suggested_s, mut real_s) = (0.0, 0.0);
            for end in 0..20 {
                let interval_s = scale_s * (0.1 + 1.8 * random.next());
                for part in 0..100 {
                    let elapsed_s = interval_s * f64::from(part) / 100.0;
                    // Start sampling once the load of short answers has lasted for `RECENT` intervals.
                    if end >= RECENT {
                        suggested_s +=
                            times.expected_wait(at(now_s + elapsed_s), 1).unwrap().as_secs_f64() * interval_s;
                        real_s += (interval_s - elapsed_s) * interval_s;
                    }
                }
                now_s += interval_s;
                times.add(at(now_s), 1);
            }
            let ratio = suggested_s / real_s;
            assert!((0.5..1.5).contains(&ratio), "scale {scale_s} s: suggested waits are {ratio} times the true waits");
        }
    }

    #[test]
    fn a_wait_longer_than_all_others_is_expected_to_double() {
        let start = Instant::now();
        let mut times = EndTimes::new(start);
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        assert_eq!(times.expected_wait(at(70), 1), None);
        times.restart(at(100));
        times.add(at(110), 1);
        times.add(at(120), 3);
        assert_eq!(times.expected_wait(at(123), 1), Some(Duration::from_millis(7)));
        assert_eq!(times.expected_wait(at(150), 1), Some(Duration::from_millis(30)));
        times.restart(at(200));
        assert_eq!(times.expected_wait(at(200), 2), Some(Duration::from_millis(10)));
    }
}
