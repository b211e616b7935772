//! [`BlockHashes`]: the hashes under which the pool finds cached blocks.
//!
//! As in vLLM, the hash of a block covers the hash of the block before it, so that it identifies the whole prefix.

use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};

use crate::nn::kv_cache::BLOCK_TOKENS;
use crate::runner::PromptSegments;

/// The hashes of the full blocks of a sequence.
///
/// A block's hash covers the cache salt, the prompt segments and all tokens up to the end of the block.
/// The default value has neither a salt nor prompt segments.
#[derive(Clone, Debug, Default)]
pub struct BlockHashes {
    /// The hash of the sequence's own cache salt and prompt segments, or 0 if it has neither.
    /// The default prompt segments of the [`BlockManager`](super::BlockManager) are not included.
    /// Every block hash includes this hash, so only sequences with equal salts and segments share cached blocks.
    root: u128,
    /// The sequence's own prompt segments. If `None`, the default of the block manager applies.
    pub(super) prompt_segments: Option<PromptSegments>,
    pub(super) blocks: Vec<u128>,
}

impl BlockHashes {
    /// Returns the hash of the cache salt, the prompt segments and all tokens before the block at `index`.
    pub(super) fn before(&self, index: usize) -> u128 {
        index.checked_sub(1).map_or(self.root, |before| self.blocks[before])
    }
}

/// Computes the hashes of blocks.
///
/// A hash has 128 bits and random keys, so that nobody can construct two prompts with equal hashes.
/// The pool compares the tokens of a block too.
pub struct BlockHasher([RandomState; 2]);

impl BlockHasher {
    pub fn new() -> Self {
        Self([RandomState::new(), RandomState::new()])
    }

    /// Returns the [`BlockHashes`] of a new sequence, in which no block is hashed yet.
    pub fn start(&self, salt: Option<&str>, prompt_segments: Option<PromptSegments>) -> BlockHashes {
        let root = (salt.is_some() || prompt_segments.is_some()).then(|| {
            self.hash(|mut hasher| {
                (salt, prompt_segments.map(PromptSegments::tokens)).hash(&mut hasher);
                hasher.finish()
            })
        });
        BlockHashes { root: root.unwrap_or(0), prompt_segments, blocks: Vec::new() }
    }

    /// Appends the hashes of the full blocks of `tokens` that are not hashed yet.
    pub fn extend(&self, hashes: &mut BlockHashes, tokens: &[u32]) {
        for block in tokens.chunks_exact(BLOCK_TOKENS).skip(hashes.blocks.len()) {
            let parent = hashes.before(hashes.blocks.len());
            hashes.blocks.push(self.hash(|mut hasher| {
                hasher.write_u128(parent);
                u32::hash_slice(block, &mut hasher);
                hasher.finish()
            }));
        }
    }

    /// Returns a 128-bit hash. `finish` writes the data to a hasher and returns one half of the hash.
    fn hash(&self, finish: impl Fn(DefaultHasher) -> u64) -> u128 {
        let half = |state: &RandomState| u128::from(finish(state.build_hasher()));
        half(&self.0[0]) << 64 | half(&self.0[1])
    }
}
