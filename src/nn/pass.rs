//! One forward pass: its tokens and the data that all layers share.

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
    /// The number of new tokens in each sequence. The positions of new tokens follow the cached positions.
    pub lengths: &'b [usize],
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

/// The data of a forward pass that all layers share: token positions, row ranges and the attention backend.
pub struct Pass {
    /// u32 `[tokens]`
    positions: Tensor,
    spans: Vec<Range<usize>>,
    backend: AttentionBackend,
}

impl Pass {
    /// Computes the position of every token. Fails if a cache has no room for the tokens of its sequence.
    pub(super) fn new(
        batch: &StepBatch,
        caches: &[&mut KvCache],
        device: &Device,
        backend: AttentionBackend,
    ) -> Result<Self> {
        let StepBatch { ids, lengths, .. } = *batch;
        if lengths.len() != caches.len() || lengths.iter().sum::<usize>() != ids.len() {
            bail!("the batch has {} token ids, lengths {lengths:?}, and {} caches", ids.len(), caches.len());
        }
        let mut spans = Vec::new();
        let mut positions = Vec::with_capacity(ids.len());
        for (&tokens, cache) in lengths.iter().zip(caches) {
            cache.check_capacity(tokens)?;
            spans.push(positions.len()..positions.len() + tokens);
            positions.extend((cache.len()..cache.len() + tokens).map(|position| position as u32));
        }
        let count = positions.len();
        Ok(Self { positions: Tensor::from_vec(positions, count, device)?, spans, backend })
    }

    /// Returns the position of every token, u32 `[tokens]`.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }

    /// Returns the range of batch rows that hold the tokens of each sequence.
    pub fn spans(&self) -> impl Iterator<Item = Range<usize>> {
        self.spans.iter().cloned()
    }

    /// Returns the attention backend to use.
    pub fn backend(&self) -> AttentionBackend {
        self.backend
    }
}
