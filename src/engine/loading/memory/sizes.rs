//! The sizes of the KV cache and of the workspace for a given context length and chunk size.

use super::plan::{Capacity, MemoryPlan};
use crate::device::DeviceInfo;
use crate::kernels::exchange::MAILBOX_BYTES;
use crate::kernels::scratch::MAX_ARENAS_BYTES;
use crate::nn::kv_cache::{BLOCK_TOKENS, LayerSpec, peak_blocks};
use crate::runner::MAX_SEQUENCES;

/// An upper bound on the memory for library buffers, decode buffers, the decode graph and the logits of one token,
/// in bytes. The workspace of cuBLASLt takes up to 32 MiB of this memory.
pub(super) const WORKSPACE_BYTES: u64 = 192 << 20;
/// The memory that is planned for all arenas of batch graphs together, in bytes.
pub(super) const ARENA_BYTES: u64 = MAX_ARENAS_BYTES as u64;

/// How the size of the keys and values of one sequence depends on its context.
pub struct CacheGrowth {
    /// The bytes in all full-attention layers per 1,000 tokens of context.
    pub bytes_per_1000_tokens: u64,
    /// The maximum bytes in all sliding-window layers, for the longest context that the model supports.
    pub sliding_bytes: u64,
}

impl MemoryPlan {
    /// Returns the number of blocks in the KV cache: the blocks for `sequences` full-context sequences and
    /// the scratch block, or more if a memory limit leaves room for more.
    pub fn cache_blocks(&self, capacity: Capacity) -> usize {
        let Capacity { context, chunk } = capacity;
        // Only one sequence at a time can have a full chunk, because all sequences share the `chunk` tokens of a step.
        let others = self.sequence_blocks(context).saturating_mul(self.sequences - 1);
        let needed = self.layout.peak_blocks(context, chunk).saturating_add(others).saturating_add(1);
        let Some(limit) = self.limit_bytes else { return needed };
        let other_bytes = self.weight_bytes.saturating_add(self.workspace_bytes(capacity));
        let room = limit.saturating_sub(other_bytes) / self.layout.block_bytes(self.dtype).max(1);
        usize::try_from(room).unwrap_or(usize::MAX).min(self.max_blocks()).max(needed)
    }

    /// Returns the number of blocks that one decoding sequence uses when it fills the context.
    pub fn sequence_blocks(&self, context: usize) -> usize {
        self.layout.peak_blocks(context, 1)
    }

    /// Returns how many full-context sequences fit if the KV cache gets all free memory of the device that remains after
    /// the weights and the workspace. The workspace includes the memory for steps with several sequences.
    pub fn sequences_that_fit(&self, capacity: Capacity, device: &DeviceInfo) -> usize {
        let workspace_bytes = self.clone().with_limit(device.free_bytes).workspace_bytes(capacity);
        let other_bytes = self.weight_bytes.saturating_add(workspace_bytes);
        let blocks = device.free_bytes.saturating_sub(other_bytes) / self.layout.block_bytes(self.dtype).max(1);
        (blocks as usize).min(self.max_blocks()) / self.sequence_blocks(capacity.context).max(1)
    }

    /// Returns the maximum number of blocks, which is limited because kernels count the elements of a cache tensor as
    /// an i32.
    fn max_blocks(&self) -> usize {
        let elements = self.layers.iter().map(|layer| layer.kv_heads * layer.head_dim * BLOCK_TOKENS).max();
        i32::MAX as usize / elements.unwrap_or(1).max(1)
    }

    /// Returns the size of the planned KV cache, in bytes.
    pub fn cache_bytes(&self, capacity: Capacity) -> u64 {
        self.block_bytes(self.cache_blocks(capacity))
    }

    /// Returns the size of a KV cache with `blocks` blocks, in bytes.
    pub fn block_bytes(&self, blocks: usize) -> u64 {
        (blocks as u64).saturating_mul(self.layout.block_bytes(self.dtype))
    }

    /// Returns the memory that forward passes need besides the weights and the KV cache, in bytes:
    /// activations, dequantized experts, logits, graphs, exchange buffers and library buffers.
    pub fn workspace_bytes(&self, capacity: Capacity) -> u64 {
        let chunk_bytes = self.workspace_bytes_per_token.saturating_mul(capacity.chunk as u64);
        let is_batch = self.sequences > 1 || self.limit_bytes.is_some();
        let batch_bytes = if is_batch { self.logit_bytes(capacity.chunk).saturating_add(ARENA_BYTES) } else { 0 };
        let exchange_bytes = if self.ranks > 1 { MAILBOX_BYTES as u64 } else { 0 };
        (WORKSPACE_BYTES + exchange_bytes)
            .saturating_add(chunk_bytes)
            .saturating_add(self.unpacked_bytes)
            .saturating_add(batch_bytes)
    }

    /// Returns the memory for the logits of steps with several sequences, in bytes.
    ///
    /// The sum has four terms: a buffer that all batch graphs share, the logits of a step,
    /// a copy of the rows to sample from, and another copy for log probabilities.
    fn logit_bytes(&self, chunk: usize) -> u64 {
        ((MAX_SEQUENCES + 3 * MAX_SEQUENCES.min(chunk)) as u64).saturating_mul(self.logits_row_bytes)
    }

    /// Returns how the size of one sequence's keys and values depends on its context.
    pub fn cache_growth(&self, chunk: usize) -> CacheGrowth {
        let (sliding, full): (Vec<LayerSpec>, Vec<LayerSpec>) =
            self.layers.iter().partition(|layer| layer.window.is_some());
        let elements = |layers: &[LayerSpec]| -> u64 {
            layers.iter().map(|layer| 2 * layer.kv_heads as u64 * layer.head_dim as u64).fold(0, u64::saturating_add)
        };
        let bytes = self.dtype.size_in_bytes() as u64;
        let sliding_blocks = |layer: &LayerSpec| peak_blocks(layer.window, self.max_context, chunk) * BLOCK_TOKENS;
        let rows = sliding.iter().map(|layer| elements(&[*layer]).saturating_mul(sliding_blocks(layer) as u64));
        let sliding_bytes = rows.fold(0, u64::saturating_add).saturating_mul(bytes);
        CacheGrowth { bytes_per_1000_tokens: elements(&full).saturating_mul(1000 * bytes), sliding_bytes }
    }

    /// Returns the larger of the memory for loading and the memory for running the model, in bytes.
    pub fn bytes(&self, capacity: Capacity) -> u64 {
        let running = self.cache_bytes(capacity).saturating_add(self.workspace_bytes(capacity) - WORKSPACE_BYTES);
        self.weight_bytes.saturating_add(WORKSPACE_BYTES).saturating_add(running.max(self.loading_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_plan::{device, plan};
    use super::*;

    #[test]
    fn loading_can_need_more_memory_than_running() {
        let capacity = Capacity { context: 100, chunk: 100 };
        let running = plan().bytes(capacity);
        let plan = MemoryPlan { loading_bytes: 5 << 30, ..plan() };
        assert_eq!(plan.bytes(capacity), (10 << 30) + WORKSPACE_BYTES + (5 << 30));
        assert!(running < plan.bytes(capacity));
    }

    #[test]
    fn the_workspace_for_several_sequences_counts_once() {
        let capacity = Capacity { context: 6400, chunk: 512 };
        let free_bytes = 14 << 30;
        let plan = MemoryPlan { logits_row_bytes: 4 << 17, ..plan() };
        let limited = plan.clone().with_limit(free_bytes);
        let sequences = limited.cache_blocks(capacity) / limited.sequence_blocks(capacity.context);
        for plan in [plan.clone(), plan.with_sequences(3).unwrap(), limited] {
            assert_eq!(plan.sequences_that_fit(capacity, &device(free_bytes)), sequences);
        }
    }

    #[test]
    fn only_full_layers_grow_with_the_context() {
        let plan = plan();
        let growth = plan.cache_growth(512);
        assert_eq!(growth.bytes_per_1000_tokens, 1000 * 2 * 8 * 64 * 2);
        // The window and the chunk fill 10 blocks, or extend over 11 if they start in the middle of a block.
        assert_eq!(growth.sliding_bytes, 11 * 64 * 2 * 8 * 64 * 2);
        let block_bytes = 64 * 2 * 8 * 64 * 2;
        let capacity = Capacity { context: 6400, chunk: 512 };
        assert_eq!(plan.cache_bytes(capacity), (1 + 100 + 11) * block_bytes);
        assert_eq!(plan.with_sequences(3).unwrap().cache_bytes(capacity), (1 + 100 + 11 + 2 * (100 + 4)) * block_bytes);
    }
}
