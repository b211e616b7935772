//! One forward pass: its tokens and the data that all layers share.

use std::cell::OnceCell;

use anyhow::{Result, bail};
use candle_core::{Device, Tensor};

use super::kv_cache::{BlockTables, KvCache};
use crate::kernels::SumOrder;
use crate::kernels::attention::{AttentionBackend, PassBlocks, QueryLayout};

/// The input of one forward pass: tokens of one or more sequences.
#[derive(Clone, Copy, Debug)]
pub struct PassBatch<'b> {
    /// The token ids of all sequences, one sequence after the other.
    pub ids: &'b [u32],
    pub sequences: &'b [SequenceSpan<'b>],
    pub rows: RowSelection,
    /// The order of additions in matrix products and attention. `Fixed` requires one token per sequence.
    pub sum_order: SumOrder,
}

/// The tokens of one sequence in a pass.
#[derive(Clone, Copy, Debug)]
pub struct SequenceSpan<'b> {
    /// The number of new tokens.
    pub tokens: usize,
    /// The position of the first new token.
    /// The keys and values of all earlier positions that the new tokens attend to must be in the cache.
    pub position: usize,
    /// The block tables of the sequence, which must cover all positions up to the last new token.
    pub tables: &'b BlockTables,
}

/// A selection of the tokens of a pass, such as the tokens for which the pass returns logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowSelection {
    /// The last token of each sequence.
    Last,
    /// Every token.
    All,
}

/// The data of a forward pass that all layers share.
pub struct Pass {
    queries: QueryLayout,
    /// For each layer group, the block tables and the slots of the new tokens.
    blocks: Vec<PassBlocks>,
    backend: AttentionBackend,
    sum_order: SumOrder,
    rows: RowSelection,
    /// The index in the pass of each sequence's last token, u32 `[sequences]`. Set on first use.
    last_tokens: OnceCell<Tensor>,
}

impl Pass {
    /// Computes the position of each token and its slot in each layer group, and copies the block tables to the device.
    /// Fails if the batch has the wrong number of ids or block tables, if a sequence has no tokens or more tokens than
    /// the summation order allows, or if a block is missing or not in the cache.
    pub(super) fn new(batch: &PassBatch, cache: &KvCache, device: &Device, backend: AttentionBackend) -> Result<Self> {
        let PassBatch { ids, sequences, rows, sum_order } = *batch;
        let tokens: usize = sequences.iter().map(|span| span.tokens).sum();
        if tokens != ids.len() || sequences.iter().any(|span| span.tokens == 0) {
            let lengths: Vec<usize> = sequences.iter().map(|span| span.tokens).collect();
            bail!(
                "the batch has {} token ids for sequences of {lengths:?} tokens; \
                 the lengths must be at least 1 and add up to the number of ids",
                ids.len()
            );
        }
        if sum_order == SumOrder::Fixed && sequences.len() != tokens {
            let count = sequences.len();
            bail!("a fixed summation order requires one token per sequence, not {tokens} tokens for {count} sequences");
        }
        let groups = cache.layout().groups();
        if let Some(span) = sequences.iter().find(|span| span.tables.iter().len() != groups) {
            bail!("a sequence has {} block tables, but the cache has {groups} layer groups", span.tables.iter().len());
        }
        let spans: Vec<(usize, usize)> = sequences.iter().map(|span| (span.tokens, span.position)).collect();
        let queries = QueryLayout::new(&spans, device)?;
        let blocks = (0..groups).map(|group| {
            let tables: Vec<&[u32]> = sequences.iter().map(|span| span.tables.table(group)).collect();
            PassBlocks::new(&queries, &tables, cache.blocks(), device)
        });
        let blocks = blocks.collect::<candle_core::Result<_>>()?;
        Ok(Self { queries, blocks, backend, sum_order, rows, last_tokens: OnceCell::new() })
    }

    /// Creates a pass from positions and block tables that are already on the device.
    /// The pass selects the last token of each sequence.
    #[cfg(feature = "cuda")]
    pub(crate) fn from_parts(
        queries: QueryLayout,
        blocks: Vec<PassBlocks>,
        backend: AttentionBackend,
        sum_order: SumOrder,
    ) -> Self {
        Self { queries, blocks, backend, sum_order, rows: RowSelection::Last, last_tokens: OnceCell::new() }
    }

    /// Returns the position and the sequence of each token.
    pub fn queries(&self) -> &QueryLayout {
        &self.queries
    }

    /// Returns the block tables of a layer group, and the slots of the new tokens.
    pub fn blocks(&self, group: usize) -> &PassBlocks {
        &self.blocks[group]
    }

    /// Returns the selection of tokens whose logits the pass returns.
    pub(super) fn rows(&self) -> RowSelection {
        self.rows
    }

    /// Returns the number of rows that [`select`](Self::select) returns.
    pub(super) fn row_count(&self, rows: RowSelection) -> usize {
        let spans = self.queries.spans();
        match rows {
            RowSelection::Last => spans.len(),
            RowSelection::All => spans.iter().map(|span| span.tokens).sum(),
        }
    }

    /// Returns the rows of x that `rows` selects. x has one row per token.
    pub(super) fn select(&self, rows: RowSelection, x: &Tensor) -> Result<Tensor> {
        let spans = self.queries.spans();
        if self.row_count(rows) == x.dim(0)? {
            return Ok(x.clone());
        }
        if let [span] = spans {
            return Ok(x.narrow(0, span.tokens - 1, 1)?.contiguous()?);
        }
        let last_tokens = match self.last_tokens.get() {
            Some(last_tokens) => last_tokens,
            None => {
                let last: Vec<u32> = spans.iter().map(|span| (span.first + span.tokens - 1) as u32).collect();
                let last = Tensor::new(last, x.device())?;
                self.last_tokens.get_or_init(|| last)
            }
        };
        Ok(x.index_select(last_tokens, 0)?)
    }

    /// Returns the order of additions in matrix products and attention.
    pub fn sum_order(&self) -> SumOrder {
        self.sum_order
    }

    pub fn backend(&self) -> AttentionBackend {
        self.backend
    }
}
