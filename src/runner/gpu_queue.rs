//! Queues steps on a GPU, as CUDA graphs where possible.

use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Tensor};

use super::gpu_step::sampled_rows;
use super::queued_step::{QueuedStep, QueuedTokens};
use super::step_queue::MAX_ROWS;
use super::step_sequence::StepSequence;
use super::step_times::StepKind;
use super::{Decode, Runner};
use crate::kernels::step_inputs::StepInputs;
use crate::nn::pass::{LogitRows, SequenceSpan, StepBatch};

impl Runner {
    /// Implements [`queue`](Self::queue) for a GPU.
    pub(super) fn queue_on_gpu(&mut self, sequences: &mut [StepSequence]) -> Result<Option<QueuedStep>> {
        // The tokens of a queued step stay on the first GPU, but the next step needs them on all GPUs.
        if !self.followers.is_empty() {
            return Ok(None);
        }
        let is_decode = sequences.iter().all(|sequence| sequence.ids.len() == 1);
        let runs_alone = sequences.len() == 1 && matches!(self.decode, Decode::Graph(_));
        if sequences.len() > MAX_ROWS || runs_alone || self.options.grid.is_some() && !is_decode {
            return Ok(None);
        }
        self.check_tokens(sequences)?;
        self.forget_sequences();
        let (Some(queue), Some(batches)) = (&mut self.queue, &mut self.batches) else { return Ok(None) };
        let (kind, queued_at) = (StepKind::of(sequences), Instant::now());
        let logits = match batches.try_run(&self.decoder, &self.cache, sequences, queue)? {
            Some(logits) => logits,
            None => {
                let ids: Vec<u32> = sequences.iter().flat_map(|sequence| sequence.ids).copied().collect();
                let mut sources = Vec::with_capacity(ids.len());
                for sequence in &*sequences {
                    sources.push(queue.source(sequence)?);
                    sources.resize(sources.len() + sequence.ids.len() - 1, None);
                }
                let on_device = Tensor::zeros(ids.len(), DType::U32, &self.device)?;
                let inputs = StepInputs { ids: ids.clone(), sources, ..StepInputs::default() };
                queue.write_inputs(&inputs, &on_device)?;
                let spans: Vec<SequenceSpan> = sequences.iter().map(StepSequence::span).collect();
                let sum_order = self.options.sum_order();
                let batch = StepBatch { ids: &ids, sequences: &spans, logits: LogitRows::Last, sum_order };
                self.decoder.forward_on_device(&on_device, &batch, &self.cache)?
            }
        };
        let index = queue.choose(sequences, &sampled_rows(sequences, &logits)?)?;
        let needs_token = sequences.iter().map(|sequence| sequence.sampler.is_some()).collect();
        Ok(Some(QueuedStep { kind, queued_at, tokens: QueuedTokens::Sent { index, needs_token } }))
    }
}
