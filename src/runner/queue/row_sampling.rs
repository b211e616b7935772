//! [`RowSampling`]: the sampling parameters of a sequence in a queued step.

use crate::kernels::decode::sample::SamplingKernelParams;
use crate::runner::step_sequence::StepSequence;

/// How the device chooses the next token of a sequence in a queued step.
#[derive(Clone, Copy)]
pub struct RowSampling {
    /// The id of the sequence.
    pub id: u64,
    /// The index of the sequence in the step.
    pub index: usize,
    pub params: SamplingKernelParams,
}

impl RowSampling {
    /// Returns an entry for each sequence that has a sampler.
    pub fn of_sequences(sequences: &[StepSequence]) -> Vec<Self> {
        let sampling = |(index, sequence): (usize, &StepSequence)| {
            let sampling = sequence.sampler.as_deref()?.on_device();
            let mut params = sampling.map_or_else(SamplingKernelParams::greedy, |sampling| sampling.params);
            // The sampler has not yet recorded the token that the previous step chooses.
            params.sampled_before += u32::from(sequence.awaits_input);
            Some(Self { id: sequence.id, index, params })
        };
        sequences.iter().enumerate().filter_map(sampling).collect()
    }
}
