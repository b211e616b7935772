//! [`RowSampling`]: how a queued step on a GPU chooses the token of a sequence.

use crate::kernels::sampling::{RowEdits, SamplingKernelParams};
use crate::runner::step::StepSequence;

/// How the GPU chooses the next token of a sequence in a queued step.
#[derive(Clone)]
pub struct RowSampling {
    pub id: u64,
    /// The index of the sequence in the step.
    pub index: usize,
    /// Whether the previous step chooses a token for the sequence that the sampler has not recorded yet.
    pub awaits_input: bool,
    pub params: SamplingKernelParams,
    pub edits: RowEdits,
    /// How many of the most likely tokens to report with log probabilities, besides the chosen token.
    /// `None` if the step reports no log probabilities for the sequence.
    pub logprobs: Option<usize>,
}

impl RowSampling {
    /// Returns an entry for each sequence that has a sampler, in the order of `sequences`.
    pub fn of_sequences(sequences: &[StepSequence], vocab_size: usize) -> Vec<Self> {
        let sampling = |(index, sequence): (usize, &StepSequence)| {
            let &StepSequence { id, awaits_input, ref sampler, .. } = sequence;
            let (sampler, in_flight) = (sampler.as_deref()?, u32::from(awaits_input));
            let sampling = sampler.on_device();
            let mut params = sampling.map_or_else(SamplingKernelParams::greedy, |sampling| sampling.params);
            params.sampled_before += in_flight;
            let logprobs = sampler.top_logprobs().map(|count| count.min(vocab_size));
            Some(Self { id, index, awaits_input, params, edits: sampler.queued_edits(in_flight), logprobs })
        };
        sequences.iter().enumerate().filter_map(sampling).collect()
    }

    /// Returns whether the step chooses the token with the largest unedited logit, and needs no other logits.
    pub fn needs_only_best(&self) -> bool {
        self.params.temperature == 0.0 && self.edits.is_empty() && self.logprobs.is_none()
    }
}
