//! Queues steps on a GPU, as CUDA graphs where possible.

use std::time::Instant;

use anyhow::Result;

use super::run_on_gpu::needs_logits;
use crate::runner::Runner;
use crate::runner::decode::Decode;
use crate::runner::queue::{MAX_ROWS, QueuedStep, QueuedTokens, RowSampling};
use crate::runner::ranks::RankQueue;
use crate::runner::step_sequence::StepSequence;
use crate::runner::step_times::StepKind;

impl Runner {
    /// Implements [`queue`](Self::queue) for a GPU.
    pub(super) fn queue_on_gpu(&mut self, sequences: &mut [StepSequence]) -> Result<Option<QueuedStep>> {
        let is_decode = sequences.iter().all(|sequence| sequence.ids.len() == 1);
        // The decode graph queues its own steps, but cannot edit logits.
        let runs_alone =
            matches!((&*sequences, &self.decode), ([sequence], Decode::Graph(_)) if !needs_logits(sequence));
        if sequences.len() > MAX_ROWS || runs_alone || self.options.prompt_parts.is_some() && !is_decode {
            return Ok(None);
        }
        if !self.followers.can_queue() {
            return Ok(None);
        }
        self.check_tokens(sequences)?;
        self.forget_sequences();
        let (Some(buffers), Some(batches)) = (&mut self.buffers, &mut self.batches) else { return Ok(None) };
        let (kind, queued_at) = (StepKind::of(sequences), Instant::now());
        let (samplings, sum_order) = (RowSampling::of_sequences(sequences), self.options.sum_order());
        let index = self.followers.queue(sequences, &samplings, || {
            RankQueue { decoder: &self.decoder, cache: &self.cache, batches, buffers, sum_order }
                .queue(sequences, &samplings)
        })?;
        let needs_token = sequences.iter().map(|sequence| sequence.sampler.is_some()).collect();
        Ok(Some(QueuedStep { kind, queued_at, tokens: QueuedTokens::Sent { index, needs_token } }))
    }
}
