//! Allocates blocks of the KV cache to sequences, and reuses cached blocks if prompts start with the same tokens.
//!
//! [Internal](crate#stable-api): can change in any release.
//!
//! All layers of a layer group have the same attention window. A sequence has one block table per layer group.
//! Full-attention groups keep every block of a sequence, while sliding-window groups release the blocks that no later
//! token attends to. All layer groups share one pool of blocks, as in vLLM's hybrid KV cache manager.
//!
//! The key of a full block consists of its layer group and a hash of all tokens up to the end of the block.
//! A prompt that starts with the same tokens can reuse the block, whether or not another sequence still uses it.
//! The hash includes the cache salt and the [`PromptSegments`], so only prompts with the same salt and segments share
//! blocks.
//!
//! - this file: [`BlockManager`] and the blocks of one sequence, with the search for cached prefixes
//! - `growth`: how many blocks a sequence needs, and their allocation
//! - `hashes`: the hashes of blocks; `pool`: reference counts and contents of blocks
//! - `prefix_file`: prefixes in files

mod growth;
mod hashes;
mod pool;
pub(super) mod prefix_file;

use std::ops::Range;

use crate::nn::kv_cache::{BLOCK_TOKENS, BlockTables, peak_blocks};
use crate::runner::PromptSegments;
use hashes::BlockHasher;

pub use hashes::BlockHashes;
pub use pool::{BlockContent, BlockId, BlockKey, BlockPool, Retention, SCRATCH_BLOCK};

/// Sliding-window groups retain prefixes whose length is a multiple of this number of tokens longer than others.
/// A prefix is reusable only while the blocks in the window at its end are cached, so these blocks get
/// [`Retention::Keep`].
const RETAINED_PREFIX_TOKENS: usize = 1024;

/// The block tables of one sequence, and what its blocks contain.
#[derive(Debug, Default)]
pub struct SequenceBlocks {
    /// One table per layer group. Entry i is the scratch block if no later token attends to the positions of block i.
    tables: BlockTables,
    hashes: BlockHashes,
    /// For each table, the number of entries at its start that are the scratch block.
    first_held: Vec<usize>,
    /// See [`computed`](Self::computed).
    /// Sliding-window groups keep only the keys and values that later tokens attend to.
    computed: usize,
    prompt_tokens: usize,
    /// The maximum number of blocks of each table that other sequences may reuse.
    /// `usize::MAX` if the prompt is not divided into segments.
    reusable: usize,
    /// The number of tokens that [`BlockManager::start`] looked up in the prefix cache.
    queried_tokens: usize,
}

impl SequenceBlocks {
    pub fn tables(&self) -> &BlockTables {
        &self.tables
    }

    /// Returns the number of tokens whose keys and values are computed, including the tokens of a queued step.
    pub fn computed(&self) -> usize {
        self.computed
    }
}

/// The longest cached prefix of a prompt, found without starting a sequence.
/// The prefix holds no references to its blocks, so it is valid only until the block manager changes.
pub struct CachedPrefix(SequenceBlocks);

impl CachedPrefix {
    /// Returns the block tables that a new sequence would have if it reused the prefix.
    pub fn tables(&self) -> &BlockTables {
        &self.0.tables
    }

    /// Returns the number of tokens in the prefix.
    pub fn tokens(&self) -> usize {
        self.0.computed
    }
}

/// A copy of a block that the caller must make before the next step. The step writes to the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    pub from: BlockId,
    pub to: BlockId,
}

/// Counts of blocks, and counters of the prefix cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockStats {
    /// Blocks that sequences can use: all blocks except the scratch block.
    pub total: usize,
    /// Blocks that at least one sequence uses.
    pub used: usize,
    /// Blocks with reusable contents, whether or not a sequence uses them.
    pub cached: usize,
    /// Evictions of reusable block contents so far.
    pub evicted: u64,
    /// Tokens looked up in the prefix cache so far.
    pub queried_tokens: u64,
    /// Tokens found in the prefix cache so far.
    pub hit_tokens: u64,
}

/// Allocates blocks to sequences and finds cached prefixes.
pub struct BlockManager {
    /// The attention window of each layer group, or `None` for full attention.
    windows: Vec<Option<usize>>,
    /// The default prompt segments. If `Some`, sequences without segments of their own reuse prefixes only in whole
    /// segments.
    prompt_segments: Option<PromptSegments>,
    pool: BlockPool,
    hasher: BlockHasher,
    queried_tokens: u64,
    hit_tokens: u64,
}

impl BlockManager {
    /// Creates a manager of `blocks` blocks, one of which is the scratch block.
    pub fn new(windows: Vec<Option<usize>>, blocks: usize) -> Self {
        let (pool, hasher) = (BlockPool::new(blocks), BlockHasher::new());
        Self { windows, prompt_segments: None, pool, hasher, queried_tokens: 0, hit_tokens: 0 }
    }

    /// Sets the prompt segments of sequences that have none of their own.
    /// A sequence with prompt segments reuses a cached prefix only in whole segments: see [`hashes`](Self::hashes).
    pub fn with_prompt_segments(self, prompt_segments: Option<PromptSegments>) -> Self {
        Self { prompt_segments, ..self }
    }

    pub fn stats(&self) -> BlockStats {
        BlockStats {
            total: self.pool.total(),
            used: self.pool.total() - self.pool.free(),
            cached: self.pool.cached(),
            evicted: self.pool.evicted(),
            queried_tokens: self.queried_tokens,
            hit_tokens: self.hit_tokens,
        }
    }

    /// Returns the number of blocks that no sequence uses, including blocks with cached contents.
    pub fn free_blocks(&self) -> usize {
        self.pool.free()
    }

    /// Returns the number of blocks that would be free if a sequence had started with the blocks of `prefix`.
    pub fn free_blocks_after(&self, prefix: &CachedPrefix) -> usize {
        let blocks = prefix.0.tables.iter().flatten().filter(|&&block| block != SCRATCH_BLOCK);
        self.free_blocks() - blocks.filter(|&&block| self.pool.references(block) == 0).count()
    }

    /// Returns the number of blocks that a sequence uses, in all layer groups together.
    pub fn held_blocks(&self, sequence: &SequenceBlocks) -> usize {
        sequence.tables.iter().zip(&sequence.first_held).map(|(table, first_held)| table.len() - first_held).sum()
    }

    /// Returns the maximum number of blocks that a sequence of `tokens` tokens uses at once,
    /// if each step computes at most `chunk` of these tokens.
    pub fn peak_blocks(&self, tokens: usize, chunk: usize) -> usize {
        self.windows.iter().map(|&window| peak_blocks(window, tokens, chunk)).sum()
    }

    /// Creates the block tables of a sequence and adds the blocks of the longest cached prefix of `tokens`.
    /// The prefix never includes the last token, because a step must compute the last token's logits.
    ///
    /// The first `prompt_tokens` tokens are the prompt. All later tokens were generated before a preemption.
    /// For a new sequence, `hashes` comes from [`hashes`](Self::hashes).
    /// For a sequence that starts again, it comes from [`release`](Self::release) or [`abandon`](Self::abandon).
    pub fn start(&mut self, tokens: &[u32], prompt_tokens: usize, hashes: BlockHashes) -> SequenceBlocks {
        let mut sequence = self.start_with(tokens, prompt_tokens, hashes, usize::MAX);
        sequence.queried_tokens = tokens.len();
        self.queried_tokens += sequence.queried_tokens as u64;
        self.hit_tokens += sequence.computed as u64;
        sequence
    }

    /// Creates the block tables of a sequence like [`start`](Self::start), but adds no cached blocks.
    pub fn start_uncached(&mut self, tokens: &[u32], prompt_tokens: usize, hashes: BlockHashes) -> SequenceBlocks {
        self.start_with(tokens, prompt_tokens, hashes, 0)
    }

    /// Creates the block tables of a sequence and adds the longest cached prefix of at most `max_blocks` blocks.
    fn start_with(
        &mut self,
        tokens: &[u32],
        prompt_tokens: usize,
        hashes: BlockHashes,
        max_blocks: usize,
    ) -> SequenceBlocks {
        let CachedPrefix(sequence) = self.find_prefix(tokens, prompt_tokens, hashes, max_blocks);
        sequence.tables.iter().flatten().for_each(|&block| self.pool.retain(block));
        sequence
    }

    /// Finds the longest cached prefix of at most `max_blocks` blocks.
    /// For the other arguments, see [`start`](Self::start).
    pub fn find_prefix(
        &self,
        tokens: &[u32],
        prompt_tokens: usize,
        hashes: BlockHashes,
        max_blocks: usize,
    ) -> CachedPrefix {
        let (last, prompt_segments) =
            (prompt_tokens.saturating_sub(1), hashes.prompt_segments.or(self.prompt_segments));
        let mut sequence = SequenceBlocks {
            tables: BlockTables::new(self.windows.len()),
            hashes,
            first_held: vec![0; self.windows.len()],
            computed: 0,
            prompt_tokens,
            reusable: prompt_segments.map_or(usize::MAX, |segments| segments.floor(last) / BLOCK_TOKENS),
            queried_tokens: 0,
        };
        let limit = sequence.reusable.min(tokens.len().saturating_sub(1) / BLOCK_TOKENS).min(max_blocks);
        self.hasher.extend(&mut sequence.hashes, &tokens[..limit * BLOCK_TOKENS]);
        let hit = self.longest_hit(tokens, &sequence.hashes, limit);
        for group in 0..self.windows.len() {
            let first = self.first_visible_block(group, hit * BLOCK_TOKENS);
            sequence.first_held[group] = first;
            for index in 0..hit {
                let block = if index < first { None } else { self.find(group, tokens, &sequence.hashes, index) };
                sequence.tables.push(group, block.unwrap_or(SCRATCH_BLOCK));
            }
        }
        sequence.computed = hit * BLOCK_TOKENS;
        CachedPrefix(sequence)
    }

    /// Returns the length, in blocks, of the longest reusable prefix of at most `limit` blocks.
    /// If the prompt is divided into segments, the prefix consists of whole segments.
    fn longest_hit(&self, tokens: &[u32], hashes: &BlockHashes, limit: usize) -> usize {
        let groups = 0..self.windows.len();
        let has = |group, index| self.find(group, tokens, hashes, index).is_some();
        let mut hit = limit;
        for group in groups.clone().filter(|&group| self.windows[group].is_none()) {
            hit = (0..hit).take_while(|&index| has(group, index)).count();
        }
        // A sliding-window group needs only the blocks that the token after the prefix attends to.
        // If block i is one of these blocks and is missing, shorten the prefix to i blocks,
        // because every prefix of i + 1 to `hit` blocks needs block i too.
        let last_missing = |hit: usize| {
            groups.clone().filter(|&group| self.windows[group].is_some()).find_map(|group| {
                (self.first_visible_block(group, hit * BLOCK_TOKENS)..hit).rev().find(|&index| !has(group, index))
            })
        };
        let prompt_segments = hashes.prompt_segments.or(self.prompt_segments);
        let floor =
            |hit: usize| prompt_segments.map_or(hit, |segments| segments.floor(hit * BLOCK_TOKENS) / BLOCK_TOKENS);
        hit = floor(hit);
        while let Some(missing) = last_missing(hit) {
            hit = floor(missing);
        }
        hit
    }

    fn find(&self, group: usize, tokens: &[u32], hashes: &BlockHashes, index: usize) -> Option<BlockId> {
        let key = BlockKey { group, hash: hashes.blocks[index] };
        self.pool.find(key, hashes.before(index), tokens_of_block(tokens, index))
    }

    /// Returns the index of the first block that a token at `position` attends to.
    fn first_visible_block(&self, group: usize, position: usize) -> usize {
        self.windows[group].map_or(0, |window| (position + 1).saturating_sub(window) / BLOCK_TOKENS)
    }

    /// Returns the [`BlockHashes`] of a new sequence, in which no block is hashed yet.
    /// The sequence reuses only blocks of sequences with the same salt and segments.
    ///
    /// If the prompt is divided into segments, the sequence reuses only whole segments.
    /// If the sequence reused half a segment, a smaller pass would compute the other half, and the keys and values of
    /// that half could differ in their last bits.
    pub fn hashes(&self, salt: Option<&str>, prompt_segments: Option<PromptSegments>) -> BlockHashes {
        self.hasher.start(salt, prompt_segments)
    }

    /// Records that the keys and values of all `tokens` are computed, or that a queued step will compute them.
    /// Makes the full blocks among the first `sequence.reusable` blocks of each table reusable.
    /// Releases the blocks that no later token attends to.
    pub fn commit(&mut self, sequence: &mut SequenceBlocks, tokens: &[u32]) {
        let (first, full) = (sequence.computed / BLOCK_TOKENS, tokens.len() / BLOCK_TOKENS);
        sequence.computed = tokens.len();
        self.hasher.extend(&mut sequence.hashes, &tokens[..full * BLOCK_TOKENS]);
        let hashes = &sequence.hashes;
        for group in 0..self.windows.len() {
            for index in first.max(sequence.first_held[group])..full.min(sequence.reusable) {
                let content = BlockContent {
                    key: BlockKey { group, hash: hashes.blocks[index] },
                    parent: hashes.before(index),
                    tokens: *tokens_of_block(tokens, index),
                };
                self.pool.publish(sequence.tables.get(group, index), content);
            }
            let visible = self.first_visible_block(group, tokens.len());
            for index in sequence.first_held[group]..visible {
                let retention = self.retention_behind_window(group, index, sequence.prompt_tokens);
                self.pool.release(sequence.tables.get(group, index), retention);
                sequence.tables.set(group, index, SCRATCH_BLOCK);
            }
            sequence.first_held[group] = visible.max(sequence.first_held[group]);
        }
    }

    /// Returns how soon to evict a block that left the window of a sequence.
    ///
    /// A prompt can reuse a prefix only if all blocks in the window at the end of the prefix are cached.
    /// Blocks in the window at the end of the prompt are therefore evicted last.
    /// So are blocks in the window at the end of a prefix whose length is a multiple of [`RETAINED_PREFIX_TOKENS`].
    fn retention_behind_window(&self, group: usize, index: usize, prompt_tokens: usize) -> Retention {
        let prefix_end = (index * BLOCK_TOKENS / RETAINED_PREFIX_TOKENS + 1) * RETAINED_PREFIX_TOKENS;
        let is_visible_from = |position| index >= self.first_visible_block(group, position);
        // A later prompt that starts with this prompt needs the blocks in the window at the end of this prompt.
        // If this prompt is repeated, its last token is computed again, and needs the blocks in the window before it.
        let prompt_start = prompt_tokens.saturating_sub(1) / BLOCK_TOKENS * BLOCK_TOKENS;
        let is_before_prompt_end = index < prompt_tokens / BLOCK_TOKENS && is_visible_from(prompt_start);
        if is_visible_from(prefix_end) || is_before_prompt_end { Retention::Keep } else { Retention::EvictFirst }
    }

    /// Returns the table indices of the full blocks of a layer group that the token at position `tokens` attends to.
    pub fn visible_blocks(&self, group: usize, tokens: usize) -> Range<usize> {
        self.first_visible_block(group, tokens)..tokens / BLOCK_TOKENS
    }

    /// Allocates the blocks of a prefix whose keys and values come from elsewhere, such as a file.
    /// In sliding-window groups, allocates only the blocks that the token after the prefix attends to.
    /// The last block of the prefix must be full. The caller fills the blocks and then calls [`commit`](Self::commit).
    /// Returns `None` if too few blocks are free.
    pub fn adopt(&mut self, tokens: &[u32]) -> Option<SequenceBlocks> {
        let groups = 0..self.windows.len();
        let needed: usize = groups.clone().map(|group| self.visible_blocks(group, tokens.len()).len()).sum();
        if needed > self.pool.free() {
            return None;
        }
        let mut sequence = SequenceBlocks {
            tables: BlockTables::new(self.windows.len()),
            first_held: vec![0; self.windows.len()],
            prompt_tokens: tokens.len(),
            reusable: usize::MAX,
            ..SequenceBlocks::default()
        };
        for group in groups {
            let visible = self.visible_blocks(group, tokens.len());
            sequence.first_held[group] = visible.start;
            for index in 0..visible.end {
                let block = if index < visible.start { SCRATCH_BLOCK } else { self.pool.allocate()? };
                sequence.tables.push(group, block);
            }
        }
        Some(sequence)
    }

    /// Creates a sequence that shares all blocks of `sequence`.
    pub fn fork(&mut self, sequence: &SequenceBlocks) -> SequenceBlocks {
        sequence.tables.iter().flatten().for_each(|&block| self.pool.retain(block));
        SequenceBlocks {
            tables: sequence.tables.clone(),
            hashes: sequence.hashes.clone(),
            first_held: sequence.first_held.clone(),
            computed: sequence.computed,
            prompt_tokens: sequence.prompt_tokens,
            reusable: sequence.reusable,
            queried_tokens: 0,
        }
    }

    /// Releases all blocks of a sequence. Reusable blocks stay cached and are evicted from last to first.
    /// Returns the block hashes, which [`start`](Self::start) needs if the sequence continues later.
    pub fn release(&mut self, sequence: SequenceBlocks) -> BlockHashes {
        let groups = 0..self.windows.len();
        let longest = groups.clone().map(|group| sequence.tables.len(group)).max().unwrap_or(0);
        // Blocks are evicted in release order.
        // Release the last blocks first, because the start of a sequence stays reusable without its end.
        // Release block i of all layer groups together, because a prefix must be cached in every layer group.
        for index in (0..longest).rev() {
            for group in groups.clone().filter(|&group| index < sequence.tables.len(group)) {
                self.pool.release(sequence.tables.get(group, index), Retention::Keep);
            }
        }
        sequence.hashes
    }

    /// Undoes [`start`](Self::start) or [`start_uncached`](Self::start_uncached) for a sequence that has not run.
    /// Also subtracts what `start` added to the counters of the prefix cache. Returns the block hashes.
    pub fn abandon(&mut self, sequence: SequenceBlocks) -> BlockHashes {
        self.queried_tokens -= sequence.queried_tokens as u64;
        self.hit_tokens -= sequence.computed as u64;
        self.release(sequence)
    }

    /// Forgets all cached prefixes, so that later sequences compute the keys and values of these prefixes again.
    pub fn forget_prefixes(&mut self) {
        self.pool.forget();
    }
}

/// Returns the tokens of a full block of a sequence.
fn tokens_of_block(tokens: &[u32], index: usize) -> &[u32; BLOCK_TOKENS] {
    &tokens.as_chunks().0[index]
}
