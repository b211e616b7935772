//! The blocks of the KV cache: reference counts, and the contents that later sequences can reuse.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::nn::kv_cache::BLOCK_TOKENS;

/// The index of a block in the KV cache.
pub type BlockId = u32;

/// A block that no sequence owns. Unused block table entries refer to it, and no result depends on its contents.
pub const SCRATCH_BLOCK: BlockId = 0;

/// What the keys and values in a full block were computed from. [`BlockPool::find`] compares all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockContent {
    pub key: BlockKey,
    /// The hash of the cache salt, the prompt segments and all tokens before the block.
    pub parent: u128,
    pub tokens: [u32; BLOCK_TOKENS],
}

/// The key under which the pool finds a block with cached content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockKey {
    /// The index of the layer group.
    pub group: usize,
    /// The hash of the cache salt, the prompt segments and all tokens up to the end of the block.
    pub hash: u128,
}

/// How soon a released block with cached content is evicted. Blocks of equal retention are evicted in release order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// Evict the block after all `EvictFirst` blocks.
    Keep,
    /// Evict the block before all `Keep` blocks.
    EvictFirst,
}

/// Reference counts and contents of all blocks.
///
/// Blocks without references form a list in eviction order: first the blocks that were never used or were released
/// without content, then the [`Retention::EvictFirst`] blocks, then the [`Retention::Keep`] blocks.
/// A block with content stays reusable in this list until it is evicted.
pub struct BlockPool {
    /// The scratch block, then the blocks for sequences, then the marker. See [`BlockState`].
    blocks: Vec<BlockState>,
    cached: HashMap<BlockKey, BlockId>,
    /// The number of blocks without references.
    free: usize,
    evicted: u64,
}

/// The state of one block.
///
/// `previous` and `next` link the blocks without references in a ring, in eviction order.
/// The ring starts and ends at the scratch block, and also contains a marker, which is the last entry of
/// [`BlockPool::blocks`]. `EvictFirst` blocks come before the marker, and `Keep` blocks after it.
/// The scratch block and the marker are never evicted, and the marker is not a block of the KV cache.
#[derive(Clone, Debug, Default)]
struct BlockState {
    references: u32,
    content: Option<BlockContent>,
    previous: BlockId,
    next: BlockId,
}

impl BlockPool {
    /// Creates a pool of `count` blocks, one of which is the scratch block.
    pub fn new(count: usize) -> Self {
        let count = count.max(1);
        // Allocate the map at its final size, so that no step is delayed while the map grows.
        let mut pool = Self {
            blocks: vec![BlockState::default(); count + 1],
            cached: HashMap::with_capacity(count),
            free: 0,
            evicted: 0,
        };
        pool.link_after(SCRATCH_BLOCK, pool.marker());
        for id in (1..count as BlockId).rev() {
            pool.link_after(SCRATCH_BLOCK, id);
        }
        pool.free = pool.total();
        pool
    }

    /// Returns the number of blocks that sequences can use.
    pub fn total(&self) -> usize {
        self.blocks.len() - 2
    }

    /// Returns the number of blocks without references, including those with cached contents.
    pub fn free(&self) -> usize {
        self.free
    }

    /// Returns the number of blocks with cached contents, with or without references.
    pub fn cached(&self) -> usize {
        self.cached.len()
    }

    /// Returns how many times the cached content of a block has been evicted so far.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    pub fn references(&self, id: BlockId) -> u32 {
        self.blocks[id as usize].references
    }

    /// Returns whether a block is writable: only one sequence uses the block, and its content is not cached.
    pub fn is_writable(&self, id: BlockId) -> bool {
        let block = &self.blocks[id as usize];
        block.references == 1 && block.content.is_none()
    }

    /// Takes a block without references, evicts its content, if any, and adds a reference.
    /// Returns `None` if all blocks are in use.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let mut id = self.blocks[SCRATCH_BLOCK as usize].next;
        if id == self.marker() {
            id = self.blocks[id as usize].next;
        }
        if id == SCRATCH_BLOCK {
            return None;
        }
        self.unlink(id);
        self.free -= 1;
        if let Some(content) = self.blocks[id as usize].content.take() {
            self.cached.remove(&content.key);
            self.evicted += 1;
        }
        self.blocks[id as usize].references = 1;
        Some(id)
    }

    /// Returns the block cached under `key` if its tokens and its parent hash match. Adds no reference.
    pub fn find(&self, key: BlockKey, parent: u128, tokens: &[u32; BLOCK_TOKENS]) -> Option<BlockId> {
        let id = *self.cached.get(&key)?;
        let content = self.blocks[id as usize].content.as_ref()?;
        (content.parent == parent && content.tokens == *tokens).then_some(id)
    }

    /// Adds a reference to a block, so that the block is not free. Ignores the scratch block.
    pub fn retain(&mut self, id: BlockId) {
        if id == SCRATCH_BLOCK {
            return;
        }
        if self.blocks[id as usize].references == 0 {
            self.unlink(id);
            self.free -= 1;
        }
        self.blocks[id as usize].references += 1;
    }

    /// Removes a reference. Ignores the scratch block.
    /// If no reference is left, the block becomes free, and `retention` determines how soon its content is evicted.
    pub fn release(&mut self, id: BlockId, retention: Retention) {
        if id == SCRATCH_BLOCK {
            return;
        }
        let block = &mut self.blocks[id as usize];
        assert!(block.references > 0, "cannot release block {id}: it has no references");
        block.references -= 1;
        if block.references == 0 {
            let next = match (&block.content, retention) {
                (None, _) => self.blocks[SCRATCH_BLOCK as usize].next,
                (Some(_), Retention::EvictFirst) => self.marker(),
                (Some(_), Retention::Keep) => SCRATCH_BLOCK,
            };
            self.link_after(self.blocks[next as usize].previous, id);
            self.free += 1;
        }
    }

    /// Makes the content of a full block reusable.
    /// Does nothing for the scratch block, or if this block or another block with the same key is already cached.
    pub fn publish(&mut self, id: BlockId, content: BlockContent) {
        if id == SCRATCH_BLOCK || self.blocks[id as usize].content.is_some() {
            return;
        }
        if let Entry::Vacant(entry) = self.cached.entry(content.key) {
            entry.insert(id);
            self.blocks[id as usize].content = Some(content);
        }
    }

    /// Makes all cached contents unavailable for reuse. Sequences keep their blocks.
    pub fn forget(&mut self) {
        self.cached.clear();
        self.blocks.iter_mut().for_each(|block| block.content = None);
    }

    fn marker(&self) -> BlockId {
        (self.blocks.len() - 1) as BlockId
    }

    fn link_after(&mut self, previous: BlockId, id: BlockId) {
        let next = self.blocks[previous as usize].next;
        self.blocks[previous as usize].next = id;
        self.blocks[next as usize].previous = id;
        let block = &mut self.blocks[id as usize];
        (block.previous, block.next) = (previous, next);
    }

    fn unlink(&mut self, id: BlockId) {
        let BlockState { previous, next, .. } = self.blocks[id as usize];
        self.blocks[previous as usize].next = next;
        self.blocks[next as usize].previous = previous;
    }
}
