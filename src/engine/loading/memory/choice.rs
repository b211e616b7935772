//! Chooses the context length and the chunk size.

use anyhow::Result;

use super::plan::{Capacity, MemoryPlan};
use crate::device::DeviceInfo;
use crate::error::Error;
use crate::text::counted;

/// The upper limit on the default context length, in tokens.
const DEFAULT_CONTEXT: usize = 32_768;
/// If the model does not fit in memory, the default context length is halved, but not below this number of tokens.
const SMALLEST_CONTEXT: usize = 2048;

impl MemoryPlan {
    /// Returns the default context length in tokens, for a device with enough memory.
    pub fn default_context(&self) -> usize {
        self.max_context.min(self.default_context).min(DEFAULT_CONTEXT)
    }

    /// Chooses the capacity for the requested context, or else for the default context.
    ///
    /// If memory is short, prefers a smaller chunk to a shorter default context. Never reduces a requested context.
    /// Fails if the requested context is invalid, or if nothing fits.
    pub fn choose(&self, requested: Option<usize>, device: &DeviceInfo) -> Result<Capacity> {
        let Some(context) = self.check_context(requested)? else {
            let default = self.default_context();
            return self.halvings(default).find_map(|context| self.fit(context, device)).ok_or_else(|| {
                let smallest = self.halvings(default).last().unwrap_or(default);
                self.out_of_memory(smallest, device).into()
            });
        };
        self.fit(context, device).ok_or_else(|| self.out_of_memory(context, device).into())
    }

    /// Returns `requested` unchanged. Fails if the requested context is 0 or longer than the model supports.
    pub fn check_context(&self, requested: Option<usize>) -> Result<Option<usize>> {
        let error = match requested {
            Some(0) => "cannot load a model with --context 0: use --context 1 or more".into(),
            Some(context) if context > self.max_context => {
                let limit = counted(self.max_context, "token");
                format!(
                    "cannot load the model with --context {context}: the model supports at most {limit}; lower --context"
                )
            }
            _ => return Ok(requested),
        };
        Err(Error::Usage(error).into())
    }

    /// Yields `longest`, then half of it, and so on.
    /// The last value is [`SMALLEST_CONTEXT`], or `longest` if that is less.
    fn halvings(&self, longest: usize) -> impl Iterator<Item = usize> {
        let shortest = SMALLEST_CONTEXT.min(longest);
        let next = move |&context: &usize| (context > shortest).then(|| (context / 2).max(shortest));
        std::iter::successors(Some(longest), next)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::super::sizes::ARENA_BYTES;
    use super::super::test_plan::{device, plan};
    use super::*;
    use crate::nn::kv_cache::BLOCK_TOKENS;

    #[test]
    fn chunk_shrinks_before_the_context_does() {
        let plan = plan();
        let all = Capacity { context: DEFAULT_CONTEXT, chunk: 2048 };
        assert_eq!(plan.choose(None, &device(80 << 30)).unwrap(), all);
        assert_eq!(plan.choose(None, &device(plan.bytes(all))).unwrap(), all);
        let small = Capacity { chunk: 512, ..all };
        assert_eq!(plan.choose(None, &device(plan.bytes(all) - 1)).unwrap(), small);
        assert_eq!(plan.choose(None, &device(plan.bytes(small))).unwrap(), small);
        let half = plan.choose(None, &device(plan.bytes(small) - 1)).unwrap();
        assert_eq!(half, Capacity { context: DEFAULT_CONTEXT / 2, chunk: 512 });
        assert_eq!(plan.choose(Some(100), &device(80 << 30)).unwrap(), Capacity { context: 100, chunk: 100 });
    }

    #[test]
    fn the_cache_takes_what_the_limit_leaves() {
        let limit = 14u64 << 30;
        let plan = plan().with_limit(limit);
        let capacity = plan.choose(None, &device(limit)).unwrap();
        assert_eq!(capacity, Capacity { context: DEFAULT_CONTEXT, chunk: 2048 });
        let bytes = plan.bytes(capacity);
        assert!(bytes <= limit && bytes + plan.layout.block_bytes(DType::BF16) > limit, "{bytes}");
        let sequences = plan.cache_blocks(capacity) / plan.sequence_blocks(DEFAULT_CONTEXT);
        assert_eq!(plan.sequences_that_fit(capacity, &device(limit)), sequences);
        // If one sequence of the default context does not fit in the limit, the default context shrinks.
        // If the user requests a context of the default length, `choose` fails instead.
        let smallest = Capacity { context: SMALLEST_CONTEXT, chunk: 512 };
        let plan = self::plan().with_limit(self::plan().bytes(smallest) + ARENA_BYTES + (10 << 20));
        assert!(plan.choose(None, &device(80 << 30)).unwrap().context < DEFAULT_CONTEXT);
        assert!(plan.choose(Some(DEFAULT_CONTEXT), &device(80 << 30)).is_err());
        // The number of cache blocks is limited, because kernels count the elements of a cache tensor as an i32.
        let plan = self::plan().with_limit(1 << 45);
        assert_eq!(plan.cache_blocks(capacity), i32::MAX as usize / (8 * 64 * BLOCK_TOKENS));
    }
}
