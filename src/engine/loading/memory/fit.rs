//! Determines which contexts and chunk sizes fit in the memory of a device.

use super::plan::{Capacity, MemoryPlan};
use crate::device::DeviceInfo;

impl MemoryPlan {
    /// Limits `chunk` to the tokens of `sequences` full contexts, for which the KV cache is sized.
    /// With a memory limit, returns `chunk`, because the KV cache can be larger.
    fn useful_chunk(&self, chunk: usize, context: usize) -> usize {
        match self.limit_bytes {
            Some(_) => chunk,
            None => chunk.min(context.saturating_mul(self.sequences)),
        }
    }

    /// Returns the capacity for `context` with the smallest chunk size.
    pub fn smallest(&self, context: usize) -> Capacity {
        Capacity { context, chunk: self.useful_chunk(self.chunks.last().copied().unwrap_or(context), context) }
    }

    /// Returns the longest context in tokens that fits with the smallest chunk, or `None` if no context fits.
    pub fn largest_context(&self, device: &DeviceInfo) -> Option<usize> {
        let fits = |context| self.fits(self.smallest(context), device);
        if self.max_context == 0 || !fits(1) {
            return None;
        }
        // Invariant of the binary search: `fitting` fits, and `too_long` does not fit or exceeds `max_context`.
        let mut fitting = 1;
        let mut too_long = self.max_context + 1;
        while too_long - fitting > 1 {
            let middle = fitting + (too_long - fitting) / 2;
            if fits(middle) { fitting = middle } else { too_long = middle }
        }
        Some(fitting)
    }

    /// Returns whether the model fits in the memory limit, if any, and in the free memory of the device.
    /// If the device's total memory is unknown, checks only the memory limit.
    fn fits(&self, capacity: Capacity, device: &DeviceInfo) -> bool {
        let bytes = self.bytes(capacity);
        self.limit_bytes.is_none_or(|limit| bytes <= limit) && (device.total_bytes == 0 || bytes <= device.free_bytes)
    }

    /// Returns the capacity for `context` with the best chunk size that fits, or `None` if no chunk size fits.
    pub(super) fn fit(&self, context: usize, device: &DeviceInfo) -> Option<Capacity> {
        let chunk = |&chunk: &usize| Capacity { context, chunk: self.useful_chunk(chunk, context) };
        let mut capacities = self.chunks.iter().map(chunk);
        capacities.find(|capacity| self.fits(*capacity, device))
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_plan::{device, plan};

    #[test]
    fn largest_context_is_the_last_one_that_fits() {
        let plan = plan();
        assert_eq!(plan.largest_context(&device(80 << 30)), Some(131_072));
        assert_eq!(plan.largest_context(&device(1 << 30)), None);
        // Contexts shorter than the smallest chunk (512 tokens) also limit the chunk, so every token needs memory.
        // Longer contexts need memory only for each block of 64 tokens, so the longest that fits is a multiple of 64.
        for context in [1, 511, 5056, 131_072] {
            let bytes = plan.bytes(plan.smallest(context));
            assert_eq!(plan.largest_context(&device(bytes)), Some(context));
        }
    }
}
