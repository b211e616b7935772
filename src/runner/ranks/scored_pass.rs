//! A forward pass that also computes the logits of prompt tokens, for their log probabilities.

use std::ops::Range;

use anyhow::Result;
use candle_core::Tensor;

use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;
use crate::nn::pass::{PassBatch, RowSelection};

/// Runs a batch without a graph, one operation at a time. `ranges` are ranges of the batch's tokens.
/// Calls `on_logits` with the index of each range and the range's logits, f32 `[tokens of the range, vocab]`.
/// Returns the logits of each sequence's last token, f32 `[sequences, vocab]`.
///
/// All ranks must call this function with the same batch and the same ranges.
/// Short ranges save memory, because the logits of only one range are in memory at a time.
pub fn forward_scored(
    decoder: &Decoder,
    batch: &PassBatch,
    cache: &KvCache,
    ranges: &[Range<usize>],
    mut on_logits: impl FnMut(usize, &Tensor) -> Result<()>,
) -> Result<Tensor> {
    let batch = &PassBatch { rows: RowSelection::All, ..*batch };
    let pass = decoder.prepare(batch, cache)?;
    let hidden = decoder.hidden_states(&Tensor::new(batch.ids, cache.device())?, &pass, cache, None)?;
    for (index, range) in ranges.iter().enumerate() {
        let logits = decoder.logits(&hidden.narrow(0, range.start, range.len())?, batch.sum_order)?;
        on_logits(index, &logits)?;
    }
    let ends = batch.sequences.iter().scan(0, |end, span| {
        *end += span.tokens as u32;
        Some(*end - 1)
    });
    let last_rows = Tensor::new(ends.collect::<Vec<_>>(), hidden.device())?;
    decoder.logits(&hidden.index_select(&last_rows, 0)?, batch.sum_order)
}
