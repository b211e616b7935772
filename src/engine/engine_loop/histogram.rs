//! Histograms that the engine thread updates and any thread can read.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts values in buckets between bounds, and sums the values. Adding and reading take no lock.
pub struct Histogram {
    bounds: &'static [u64],
    /// Entry i is the number of values v with `bounds[i - 1] < v <= bounds[i]`. Entry 0 has no lower bound.
    /// The last entry is the number of values above all bounds.
    counts: Vec<AtomicU64>,
    sum: AtomicU64,
}

/// The counts and the sum of a histogram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistogramStats {
    pub bounds: &'static [u64],
    /// For each bound, the number of values that are less than or equal to the bound.
    pub cumulative: Vec<u64>,
    /// The number of values, including those above all bounds.
    pub count: u64,
    pub sum: u64,
}

impl Histogram {
    /// Creates an empty histogram. `bounds` must be in ascending order.
    pub fn new(bounds: &'static [u64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum: AtomicU64::new(0) }
    }

    /// Adds a value to the counts and to the sum.
    pub fn observe(&self, value: u64) {
        let index = self.bounds.partition_point(|bound| *bound < value);
        self.counts[index].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// Returns the current counts and sum.
    /// A value that is added during the call can be missing from the counts or from the sum.
    pub fn stats(&self) -> HistogramStats {
        let mut count = 0;
        let mut cumulative: Vec<u64> = Vec::with_capacity(self.counts.len());
        for bucket in &self.counts {
            count += bucket.load(Ordering::Relaxed);
            cumulative.push(count);
        }
        cumulative.pop();
        HistogramStats { bounds: self.bounds, cumulative, count, sum: self.sum.load(Ordering::Relaxed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_belongs_to_the_first_bound_that_is_not_smaller() {
        let histogram = Histogram::new(&[0, 1, 8]);
        [0, 1, 1, 2, 8, 9].into_iter().for_each(|value| histogram.observe(value));
        let expected = HistogramStats { bounds: &[0, 1, 8], cumulative: vec![1, 3, 5], count: 6, sum: 21 };
        assert_eq!(histogram.stats(), expected);
    }
}
