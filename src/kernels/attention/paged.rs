//! The inputs of attention over a paged KV cache: the cached layer, the queries of all sequences, and the block tables.

use std::cell::RefCell;
use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::kernels::constants::FLASH_DECODE_ROWS;

pub use crate::kernels::constants::BLOCK_TOKENS;

/// The largest number of rows per KV head with which a sequence has few rows: two 16-row tiles.
/// A row is one query head of one token.
pub(super) const MAX_FEW_ROWS: usize = 2 * FLASH_DECODE_ROWS;

/// The cached keys and values of one layer, for all sequences.
#[derive(Clone, Copy)]
pub struct CachedLayer<'t> {
    /// The keys: `[rows, kv_heads, head_dim]`. Block b starts at row `b * BLOCK_TOKENS`.
    pub k: &'t Tensor,
    /// The values: `[rows, kv_heads, head_dim]`, in the same order as the keys.
    pub v: &'t Tensor,
}

/// The new tokens of one sequence in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuerySpan {
    /// The index of the sequence's first new token among the new tokens of all sequences in the pass.
    pub first: usize,
    pub tokens: usize,
    /// The position of the first new token in the sequence.
    pub position: usize,
}

impl QuerySpan {
    /// Returns whether the span has at most [`MAX_FEW_ROWS`] rows per KV head.
    /// `heads_per_kv` is the number of query heads per KV head.
    pub(super) fn has_few_rows(&self, heads_per_kv: usize) -> bool {
        self.tokens * heads_per_kv <= MAX_FEW_ROWS
    }
}

/// The queries of one pass: tokens of one or more sequences, one sequence after the other.
pub struct QueryLayout {
    spans: Vec<QuerySpan>,
    /// u32 `[tokens]`: the position of each token.
    positions: Tensor,
    /// u32 `[tokens]`: the index of each token's sequence.
    sequences: Tensor,
    /// Cached results of `row_tiles`, by (`heads_per_kv`, `rows_per_tile`, `has_few_rows`).
    /// Layers with equal shapes share a result.
    tiles: RefCell<HashMap<(usize, usize, bool), Tensor>>,
    /// Counters of finished partitions, u32, shared by all layers. All are zero between launches, because the last
    /// partition of a row tile to finish resets the counter of the row tile (`flash_attention.cu`).
    counters: RefCell<Option<Tensor>>,
}

/// The block tables of all sequences in a pass, and the slot of each new token, for one layer group (`nn::kv_cache`).
/// All layers of a layer group have the same block tables.
pub struct PassBlocks {
    /// The block tables: u32 `[sequences, blocks]`. Entries after the block of a sequence's last new token are unused.
    pub tables: Tensor,
    /// u32 `[tokens]`: the row of k and v for the key and the value of each new token.
    pub slots: Tensor,
}

impl QueryLayout {
    /// Creates the queries of a pass.
    /// For each sequence, `sequences` lists the number of new tokens and the position of the first new token.
    pub fn new(sequences: &[(usize, usize)], device: &Device) -> Result<Self> {
        let mut spans = Vec::with_capacity(sequences.len());
        let (mut positions, mut indices) = (Vec::new(), Vec::new());
        for (index, &(tokens, position)) in sequences.iter().enumerate() {
            spans.push(QuerySpan { first: positions.len(), tokens, position });
            positions.extend((position..position + tokens).map(|position| position as u32));
            indices.resize(positions.len(), index as u32);
        }
        let tokens = positions.len();
        Ok(Self {
            spans,
            positions: Tensor::from_vec(positions, tokens, device)?,
            sequences: Tensor::from_vec(indices, tokens, device)?,
            tiles: RefCell::default(),
            counters: RefCell::default(),
        })
    }

    /// Creates the queries of sequences with one token each. `positions` is u32 `[sequences]`.
    ///
    /// The host does not know the positions, so `position` is 0 in all spans.
    #[cfg(feature = "cuda")]
    pub fn one_token_each(positions: Tensor) -> Result<Self> {
        let count = positions.dims1()?;
        let spans = (0..count).map(|first| QuerySpan { first, tokens: 1, position: 0 }).collect();
        let sequences = Tensor::arange(0, count as u32, positions.device())?;
        Ok(Self { spans, positions, sequences, tiles: RefCell::default(), counters: RefCell::default() })
    }

    /// Returns the span of each sequence.
    pub fn spans(&self) -> &[QuerySpan] {
        &self.spans
    }

    /// Returns the total number of tokens.
    pub fn tokens(&self) -> usize {
        self.spans.iter().map(|span| span.tokens).sum()
    }

    /// Returns the position of each token, u32 `[tokens]`.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }

    /// Returns the index of each token's sequence, u32 `[tokens]`.
    pub fn sequences(&self) -> &Tensor {
        &self.sequences
    }

    /// Returns the number of tokens per sequence if all sequences have the same number.
    /// Returns `None` if the numbers differ or there are no sequences.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only builds with CUDA call it"))]
    pub(super) fn uniform_tokens(&self) -> Option<usize> {
        let tokens = self.spans.first()?.tokens;
        self.spans.iter().all(|span| span.tokens == tokens).then_some(tokens)
    }

    /// Returns the row tiles of the sequences for which [`QuerySpan::has_few_rows`] equals `has_few_rows`.
    ///
    /// The result is u32 `[tiles, 4]`, with four values for each tile:
    /// - the index of the sequence, and the index of the tile in the sequence
    /// - the index in q of the sequence's first new token, and the number of the sequence's new tokens
    ///
    /// A tile has up to `rows_per_tile` rows. A row is one query head of one token.
    /// `heads_per_kv` is the number of query heads per KV head.
    /// Tiles with the most keys come first, because they usually take longest. The order ignores the sliding window.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only builds with CUDA call it"))]
    pub(super) fn row_tiles(&self, heads_per_kv: usize, rows_per_tile: usize, has_few_rows: bool) -> Result<Tensor> {
        if let Some(tiles) = self.tiles.borrow().get(&(heads_per_kv, rows_per_tile, has_few_rows)) {
            return Ok(tiles.clone());
        }
        let mut tiles = Vec::new();
        for (sequence, span) in
            self.spans.iter().enumerate().filter(|(_, span)| span.has_few_rows(heads_per_kv) == has_few_rows)
        {
            for tile in 0..(span.tokens * heads_per_kv).div_ceil(rows_per_tile) {
                let last_token = span.tokens.min(((tile + 1) * rows_per_tile).div_ceil(heads_per_kv));
                let tile = [sequence as u32, tile as u32, span.first as u32, span.tokens as u32];
                tiles.push((span.position + last_token, tile));
            }
        }
        tiles.sort_by_key(|&(keys, _)| std::cmp::Reverse(keys));
        let count = tiles.len();
        let values: Vec<u32> = tiles.into_iter().flat_map(|(_, tile)| tile).collect();
        let tiles = Tensor::from_vec(values, (count, 4), self.positions.device())?;
        self.tiles.borrow_mut().insert((heads_per_kv, rows_per_tile, has_few_rows), tiles.clone());
        Ok(tiles)
    }

    /// Returns at least `count` u32 counters, all zero. A kernel that changes a counter must reset the counter to zero.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only builds with CUDA call it"))]
    pub(super) fn counters(&self, count: usize) -> Result<Tensor> {
        let mut counters = self.counters.borrow_mut();
        match &*counters {
            Some(counters) if counters.elem_count() >= count => Ok(counters.clone()),
            _ => Ok(counters.insert(Tensor::zeros(count, DType::U32, self.positions.device())?).clone()),
        }
    }

    /// Fails unless `blocks` has one slot per token, one table per sequence, and enough columns for all spans.
    /// Tables and slots must be u32.
    pub(super) fn check(&self, blocks: &PassBlocks) -> Result<()> {
        let (sequences, columns) = blocks.tables.dims2()?;
        let end = self.spans.iter().map(|span| span.position + span.tokens).max().unwrap_or(0);
        let are_u32 = blocks.tables.dtype() == DType::U32 && blocks.slots.dtype() == DType::U32;
        if !are_u32
            || sequences != self.spans.len()
            || columns * BLOCK_TOKENS < end
            || blocks.slots.dims() != [self.tokens()]
        {
            let (tables, slots) = (blocks.tables.dims(), blocks.slots.dims());
            bail!(
                "cannot compute attention: block tables {tables:?} and slots {slots:?} must be U32 and match {:?}",
                self.spans
            );
        }
        Ok(())
    }
}

impl PassBlocks {
    /// Copies the used part of each sequence's block table to the device, and computes the slot of each new token.
    ///
    /// `tables` has one block table per sequence, and `blocks` is the number of blocks in the cache.
    /// Fails if the number of tables is wrong, a table is too short, or a used block is not in the cache.
    pub fn new(queries: &QueryLayout, tables: &[&[u32]], blocks: usize, device: &Device) -> Result<Self> {
        let ends = queries.spans.iter().map(|span| span.position + span.tokens);
        let used: Vec<usize> = ends.map(|end| end.div_ceil(BLOCK_TOKENS)).collect();
        let are_long_enough = tables.len() == used.len() && tables.iter().zip(&used).all(|(t, &used)| t.len() >= used);
        if !are_long_enough {
            bail!("cannot compute attention: the block tables do not cover the sequences {:?}", queries.spans);
        }
        let columns = used.iter().copied().max().unwrap_or(0).max(1);
        let mut rows = Vec::with_capacity(columns * tables.len());
        let mut slots = Vec::with_capacity(queries.tokens());
        for ((table, &used), span) in tables.iter().zip(&used).zip(&queries.spans) {
            if let Some(block) = table[..used].iter().find(|&&block| block as usize >= blocks) {
                bail!("cannot compute attention: block {block} is not one of the {blocks} blocks of the KV cache");
            }
            rows.extend_from_slice(&table[..used]);
            rows.resize(rows.len() + columns - used, 0);
            slots.extend((span.position..span.position + span.tokens).map(|position| slot(table, position)));
        }
        let (sequences, tokens) = (tables.len(), slots.len());
        Ok(Self {
            tables: Tensor::from_vec(rows, (sequences, columns), device)?,
            slots: Tensor::from_vec(slots, tokens, device)?,
        })
    }
}

/// Returns the row of k and v that holds `position` of the sequence with this block table.
pub fn slot(table: &[u32], position: usize) -> u32 {
    table[position / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (position % BLOCK_TOKENS) as u32
}
