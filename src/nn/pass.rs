//! One forward pass: the tokens it runs, and what every layer needs to know about them.

use std::ops::Range;

use anyhow::{Result, bail};
use candle_core::{Device, Tensor};

use super::kv_cache::KvCache;
use crate::kernels::attention::AttentionBackend;

/// The input of one forward pass: tokens of one or more sequences.
#[derive(Clone, Debug)]
pub struct StepBatch<'b> {
    /// The token ids of all sequences, one sequence after the other.
    pub ids: &'b [u32],
    /// The number of tokens of each sequence. Their positions continue where the sequence's cache ends.
    pub tokens: &'b [usize],
    pub logits: LogitRows,
}

/// The tokens for which a pass returns logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// The last token of each sequence.
    Last,
    /// Every token.
    All,
}

/// The part of a forward pass that is the same for all layers.
pub struct Pass {
    /// u32 `[T]`
    positions: Tensor,
    spans: Vec<Range<usize>>,
    backend: AttentionBackend,
}

impl Pass {
    /// Computes the position of every token. Fails if a cache has no capacity for its sequence's tokens.
    pub(super) fn new(
        batch: &StepBatch,
        caches: &[&mut KvCache],
        device: &Device,
        backend: AttentionBackend,
    ) -> Result<Self> {
        let StepBatch { ids, tokens: counts, .. } = *batch;
        if counts.len() != caches.len() || counts.iter().sum::<usize>() != ids.len() {
            bail!("the batch has {} token ids and counts {counts:?} for {} caches", ids.len(), caches.len());
        }
        let mut spans = Vec::new();
        let mut positions = Vec::with_capacity(ids.len());
        for (&tokens, cache) in counts.iter().zip(caches) {
            cache.check_capacity(tokens)?;
            spans.push(positions.len()..positions.len() + tokens);
            positions.extend((cache.len()..cache.len() + tokens).map(|position| position as u32));
        }
        let count = positions.len();
        Ok(Self { positions: Tensor::from_vec(positions, count, device)?, spans, backend })
    }

    /// Returns the position of every token, u32 \[T\].
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }

    /// Returns the range of rows that each sequence has among the T tokens.
    pub fn spans(&self) -> impl Iterator<Item = Range<usize>> {
        self.spans.iter().cloned()
    }

    /// Returns the attention kernel to use.
    pub fn backend(&self) -> AttentionBackend {
        self.backend
    }
}
