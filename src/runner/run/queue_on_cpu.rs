//! Queues steps on a CPU. Tests use such steps to check queueing without a GPU.

use std::collections::HashMap;
use std::time::Instant;

use anyhow::{Result, anyhow};

use crate::kernels::sampling::{DeviceSampling, RowEdits};
use crate::runner::Runner;
use crate::runner::sampling::TokenSampler;
use crate::runner::step::{QueuedStep, QueuedTokens, StepKind, StepSequence};

impl Runner {
    /// Implements [`queue`](Self::queue) for a CPU: runs the step immediately.
    /// Keeps the tokens of the step as the input of the next step.
    /// As on a GPU, the samplers do not know the tokens before [`take`](Self::take) records them.
    pub(super) fn queue_on_cpu(&mut self, sequences: &mut [StepSequence]) -> Result<QueuedStep> {
        let (kind, queued_at) = (StepKind::of(sequences), Instant::now());
        let inputs =
            sequences.iter().map(|sequence| match (sequence.awaits_input, self.queued_tokens.get(&sequence.id)) {
                (false, _) => Ok(None),
                (true, Some(&token)) => Ok(Some([token])),
                (true, None) => Err(anyhow!("internal error: no queued step chooses the input of a sequence")),
            });
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let mut samplers: Vec<Option<QueuedSampler>> = Vec::with_capacity(sequences.len());
        for (sequence, input) in sequences.iter_mut().zip(&inputs) {
            let sampler = sequence.sampler.take();
            samplers.push(sampler.map(|sampler| QueuedSampler::new(sampler, input.map(|[token]| token))));
        }
        let mut known: Vec<StepSequence> = Vec::with_capacity(sequences.len());
        for ((sequence, input), sampler) in sequences.iter().zip(&inputs).zip(&mut samplers) {
            let ids = input.as_ref().map_or(sequence.ids, |input| input.as_slice());
            let sampler = sampler.as_mut().map(|sampler| sampler as &mut dyn TokenSampler);
            known.push(StepSequence { sampler, ..sequence.with_input(ids, sequence.position) });
        }
        let chosen = self.run_passes(known, &mut || ())?;
        let tokens = sequences.iter().zip(&chosen).filter_map(|(sequence, chosen)| {
            // If no token could be chosen, the sequence ends with an error, so its next input does not matter.
            Some((sequence.id, chosen.as_ref()?.as_ref().map_or(0, |chosen| chosen.id)))
        });
        self.queued_tokens = tokens.collect::<HashMap<_, _>>();
        Ok(QueuedStep { kind, queued_at, tokens: QueuedTokens::Known(chosen) })
    }
}

/// A sampler that chooses tokens on the CPU as a queued step does on a GPU, and records no tokens.
/// `in_flight` is the token of the previous step, which `sampler` does not know when it chooses.
struct QueuedSampler<'s> {
    sampler: &'s dyn TokenSampler,
    edits: RowEdits,
    in_flight: Option<u32>,
}

impl<'s> QueuedSampler<'s> {
    fn new(sampler: &'s dyn TokenSampler, in_flight: Option<u32>) -> Self {
        Self { sampler, edits: sampler.queued_edits(u32::from(in_flight.is_some())), in_flight }
    }
}

impl TokenSampler for QueuedSampler<'_> {
    fn choose(&mut self, logits: &mut [f32]) -> u32 {
        self.edits.penalize(logits, self.in_flight);
        self.choose_queued(logits, u32::from(self.in_flight.is_some()))
    }

    fn logit_edits(&self) -> Vec<(u32, f32)> {
        self.edits.values.clone()
    }

    fn top_logprobs(&self) -> Option<usize> {
        self.sampler.top_logprobs()
    }

    fn choose_queued(&self, logits: &[f32], in_flight: u32) -> u32 {
        self.sampler.choose_queued(logits, in_flight)
    }

    /// Does nothing, because the `record` callback of [`Runner::take`] records the token.
    fn record(&mut self, _: u32) {}

    fn on_device(&self) -> Option<DeviceSampling> {
        self.sampler.on_device()
    }
}
