//! The methods of [`BlockManager`] that let a sequence grow: they count and allocate the blocks that it needs.

use super::pool::Retention;
use super::{BlockCopy, BlockManager, CachedPrefix, SequenceBlocks};
use crate::nn::kv_cache::{BLOCK_TOKENS, peak_blocks};

impl BlockManager {
    /// Returns the number of free blocks that [`grow`](Self::grow) needs to make room for all positions below `end`.
    pub fn missing(&self, sequence: &SequenceBlocks, end: usize) -> usize {
        (0..self.windows.len()).map(|group| self.missing_in_group(group, sequence, end)).sum()
    }

    fn missing_in_group(&self, group: usize, sequence: &SequenceBlocks, end: usize) -> usize {
        let added = end.div_ceil(BLOCK_TOKENS).saturating_sub(sequence.tables.len(group));
        self.blocks_to_copy(group, sequence, end).count() + added
    }

    /// Returns how many free blocks the sequence needs to grow to `tokens` tokens in steps of up to `chunk` tokens.
    /// A block that leaves the window as the sequence grows counts only once, because the sequence can use it again.
    pub fn demand(&self, sequence: &SequenceBlocks, tokens: usize, chunk: usize) -> usize {
        self.demand_of(sequence, tokens, chunk, 1)
    }

    /// Returns the [`demand`](Self::demand) of a sequence that would start with the blocks of `prefix`.
    pub fn demand_after(&self, prefix: &CachedPrefix, tokens: usize, chunk: usize) -> usize {
        self.demand_of(&prefix.0, tokens, chunk, 0)
    }

    /// Returns the [`demand`](Self::demand) of a sequence that holds `own` references to each of its blocks:
    /// 1 if the sequence has started, and 0 for the blocks of a [`CachedPrefix`].
    fn demand_of(&self, sequence: &SequenceBlocks, tokens: usize, chunk: usize, own: u32) -> usize {
        let demand = |group: usize| {
            let missing = self.missing_in_group(group, sequence, tokens);
            let Some(window) = self.windows[group] else { return missing };
            // A shared block does not become free when it leaves the window of one sequence.
            let unshared = (sequence.first_held[group]..sequence.tables.len(group))
                .filter(|&index| self.pool.references(sequence.tables.get(group, index)) == own);
            missing.min(peak_blocks(Some(window), tokens, chunk).saturating_sub(unshared.count()))
        };
        (0..self.windows.len()).map(demand).sum()
    }

    /// Allocates blocks to the sequence for all positions below `end`.
    /// Returns `None` and changes nothing if too few blocks are free.
    ///
    /// If a step would write to a shared or cached block, the sequence gets a copy of the block.
    /// Before the next step, the caller must make all copies in the order in which `grow` returns them.
    /// The order matters because a later copy, even of the same call, may write to the source block of an earlier copy.
    pub fn grow(&mut self, sequence: &mut SequenceBlocks, end: usize) -> Option<Vec<BlockCopy>> {
        if self.missing(sequence, end) > self.pool.free() {
            return None;
        }
        // From here on, `allocate` does not fail: `missing` counts every block that these loops allocate.
        let mut copies = Vec::new();
        for group in 0..self.windows.len() {
            let copied: Vec<_> = self.blocks_to_copy(group, sequence, end).collect();
            for index in copied {
                let from = sequence.tables.get(group, index);
                let to = self.pool.allocate()?;
                sequence.tables.set(group, index, to);
                copies.push(BlockCopy { from, to });
                self.pool.release(from, Retention::Keep);
            }
            while sequence.tables.len(group) < end.div_ceil(BLOCK_TOKENS) {
                let block = self.pool.allocate()?;
                sequence.tables.push(group, block);
            }
        }
        Some(copies)
    }

    /// Returns the table indices of the shared or cached blocks that a step would write to
    /// if it computed all remaining positions below `end`.
    fn blocks_to_copy(&self, group: usize, sequence: &SequenceBlocks, end: usize) -> impl Iterator<Item = usize> {
        // Skip full blocks, because no step writes to a full block again.
        let written = sequence.computed / BLOCK_TOKENS..end.div_ceil(BLOCK_TOKENS).min(sequence.tables.len(group));
        let is_written = end > sequence.computed;
        written.filter(move |&index| is_written && !self.pool.is_writable(sequence.tables.get(group, index)))
    }
}
