//! [`QueuedStep`]: a step whose tokens the engine has not taken yet.
//! [`RowSampling`]: how a queued step on a GPU chooses the token of a sequence.

use std::time::Instant;

use super::sequence::StepSequence;
use super::times::StepKind;
use crate::kernels::sampling::{RowEdits, SamplingKernelParams};
use crate::runner::sampling::SamplerResult;

/// A queued step. [`Runner::take`](crate::runner::Runner::take) returns its tokens.
pub struct QueuedStep {
    pub(in crate::runner) kind: StepKind,
    pub(in crate::runner) queued_at: Instant,
    pub(in crate::runner) tokens: QueuedTokens,
}

/// The tokens of a queued step, or where the host receives them.
pub(in crate::runner) enum QueuedTokens {
    /// The tokens of a step that has already run on a CPU.
    Known(Vec<SamplerResult>),
    /// The device will send a token for each sequence that needs one. `index` is the result of `StepLauncher::queue`.
    /// `expected` has an entry for each sequence, which is `None` if the sequence needs no token.
    Sent { index: usize, expected: Vec<Option<ExpectedToken>> },
}

/// A token that the device will send to the host.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedToken {
    /// How many of the most likely tokens the device will send with log probabilities, besides the chosen token.
    /// `None` if the device sends no log probabilities.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only builds with CUDA read it"))]
    pub logprobs: Option<usize>,
}

/// How the GPU chooses the next token of a sequence in a queued step.
#[derive(Clone)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only builds with CUDA read all fields"))]
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
            let sampler = sampler.as_deref()?;
            let in_flight = u32::from(awaits_input);
            let sampling = sampler.on_device();
            let mut params = sampling.map_or_else(SamplingKernelParams::greedy, |sampling| sampling.params);
            params.sampled_before += in_flight;
            let logprobs = sampler.top_logprobs().map(|count| count.min(vocab_size));
            Some(Self { id, index, awaits_input, params, edits: sampler.queued_edits(in_flight), logprobs })
        };
        sequences.iter().enumerate().filter_map(sampling).collect()
    }
}
