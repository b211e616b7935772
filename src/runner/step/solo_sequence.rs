//! The state of one sequence that has the KV cache to itself.

use crate::nn::kv_cache::{BlockTables, CacheLayout};
use crate::runner::limits::RunnerLimits;

/// The cached tokens of the solo sequence and their block tables.
pub struct SoloSequence {
    /// The tokens whose keys and values are in the cache.
    pub cached: Vec<u32>,
    pub tables: BlockTables,
    /// The largest position that steps since the last [`clear`](Self::clear) write, plus one. Includes queued steps.
    /// From this, `Runner::rewind` finds out whether keys and values of a sliding window may have been overwritten.
    pub written: usize,
}

impl SoloSequence {
    pub fn new(layout: &CacheLayout, limits: RunnerLimits) -> Self {
        let tables = BlockTables::for_one_sequence(layout, limits.context, limits.chunk);
        Self { cached: Vec::new(), tables, written: 0 }
    }

    /// Forgets the cached tokens.
    pub fn clear(&mut self) {
        self.cached.clear();
        self.written = 0;
    }
}
