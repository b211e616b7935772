//! Runs one sequence that has the KV cache to itself, for `bench`, `perplexity` and `EngineHandle::logits`.
//!
//! `bench.rs` contains more methods for this sequence.

use anyhow::{Result, bail};
use candle_core::Tensor;

use crate::kernels::SumOrder;
use crate::nn::pass::{PassBatch, RowSelection, SequenceSpan};
use crate::runner::Runner;
use crate::runner::limits::RunnerLimits;

/// Methods for the solo sequence, which overwrites the blocks of other sequences and of cached prefixes.
/// Run it only after all other sequences have ended and all cached prefixes are forgotten.
impl Runner {
    /// Returns how many tokens of the solo sequence are cached.
    pub fn cached_tokens(&self) -> usize {
        self.solo.cached.len()
    }

    /// Stops the decode graph, and forgets the cached tokens, so that the next token is at position 0.
    /// Steps of other sequences, except steps of the decode graph, call this function first, because they may overwrite
    /// the blocks of the solo sequence and of the decode graph's sequence.
    pub fn reset(&mut self) {
        self.stop_graph();
        self.solo.clear();
    }

    /// Runs `ids`, at most `limits.chunk` tokens, after the cached tokens.
    /// Returns f32 logits `[rows, vocab]`, with the rows that `rows` selects.
    pub(super) fn forward_solo(&mut self, ids: &[u32], rows: RowSelection) -> Result<Tensor> {
        let (position, RunnerLimits { context, chunk }) = (self.solo.cached.len(), self.limits);
        if ids.len() > chunk || position + ids.len() > context {
            bail!(
                "cannot cache {} tokens: {position} of {context} positions are used, and a pass takes at most {chunk} \
                 tokens",
                ids.len()
            );
        }
        self.stop_graph();
        let span = SequenceSpan { tokens: ids.len(), position, tables: &self.solo.tables };
        let batch = PassBatch { ids, sequences: &[span], rows, sum_order: SumOrder::Fastest };
        let logits = self.ranks.forward(&self.decoder, &batch, &self.cache)?;
        self.solo.cached.extend(ids);
        self.solo.written = self.solo.written.max(self.solo.cached.len());
        Ok(logits)
    }

    /// Runs `chunk`, at most `limits.chunk` tokens, after the cached tokens.
    /// Returns the logits of every token, f32 `[tokens, vocab]`.
    pub fn chunk_logits(&mut self, chunk: &[u32]) -> Result<Tensor> {
        self.forward_solo(chunk, RowSelection::All)
    }

    /// Forgets the cached tokens, then runs `ids`. Returns the logits of every token, f32 `[tokens, vocab]`.
    ///
    /// Fails if `ids` is empty or does not fit in the context. Needs device memory for up to two copies of the logits.
    pub fn logits(&mut self, ids: &[u32]) -> Result<Tensor> {
        self.reset();
        let rows: Vec<Tensor> =
            ids.chunks(self.limits.chunk).map(|chunk| self.chunk_logits(chunk)).collect::<Result<_>>()?;
        Ok(Tensor::cat(&rows, 0)?)
    }
}
