//! The sampling parameters, and the kernels that edit logits, choose tokens, and compute log probabilities.
//!
//! - `sample_rows`: samples a token from each row of logits
//! - `best_logits`: finds candidates for the largest logit of each row, and chooses tokens greedily from them
//! - `logits`: edits and masks logits, and computes log probabilities
//! - `row_edits`: adds values to the logits of queued steps, then applies penalties; also applies penalties alone
//! - `token_mask`: a set of allowed tokens
//!
//! The decode graph has its own sampling kernel (`decode/sample.cu`), which takes the same parameters.

#[cfg(feature = "cuda")]
mod best_logits;
#[cfg(feature = "cuda")]
mod logits;
mod row_edits;
#[cfg(feature = "cuda")]
mod sample_rows;
mod token_mask;

#[cfg(feature = "cuda")]
pub use best_logits::{BEST_LOGITS_COLUMNS, TOKEN_LIMIT, best_logits, queue_best};
#[cfg(feature = "cuda")]
pub use logits::{
    LogitEdit, LogprobsRow, RowLogprobs, edit_logits, mask_logits, send_logprobs, take_logprobs, top_logprobs,
};
#[cfg(feature = "cuda")]
pub use row_edits::{EditedRow, edit_rows};
pub use row_edits::{Penalties, RowEdits};
#[cfg(feature = "cuda")]
pub use sample_rows::{queue_rows, sample_rows};
pub use token_mask::TokenMask;

#[cfg(feature = "cuda")]
pub use crate::kernels::constants::{LOGPROBS_ROW_WORDS, LOGPROBS_SLOTS, MAILBOX_NO_TOKEN, SAMPLE_PARAM_WORDS};

pub use crate::kernels::constants::MAX_LOGPROBS;

/// The parameters of the sampling kernels, which receive them as the struct of the same name in `sampling.cuh`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingKernelParams {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    pub seed: u64,
    /// The number of earlier random draws of the sequence. A random number depends only on this count and the seed.
    /// The decode graph receives the parameters only when it starts to decode a sequence.
    /// Its sampling kernel therefore adds the number of steps that the graph has finished since then.
    pub sampled_before: u32,
}

impl SamplingKernelParams {
    /// Returns parameters for greedy sampling without penalties.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
            sampled_before: 0,
        }
    }

    /// Returns whether any penalty is set. Without penalties, the kernels do not need [`DeviceSampling::seen`].
    #[cfg(feature = "cuda")]
    pub(in crate::kernels) fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }

    /// Returns the parameters as u32 words, in the order of `SamplingKernelParams` in `sampling.cuh`.
    #[cfg(feature = "cuda")]
    pub(in crate::kernels) fn words(&self) -> [u32; SAMPLE_PARAM_WORDS] {
        // The pattern has no `..`, so that a new parameter causes a compile error until it is added here.
        let &Self {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            seed,
            sampled_before,
        } = self;
        [
            temperature.to_bits(),
            top_p.to_bits(),
            min_p.to_bits(),
            repetition_penalty.to_bits(),
            frequency_penalty.to_bits(),
            presence_penalty.to_bits(),
            top_k,
            sampled_before,
            seed as u32,
            (seed >> 32) as u32,
        ]
    }
}

/// The parameters and token counts that the host sampler passes to a sampling kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSampling {
    pub params: SamplingKernelParams,
    /// (token, count) pairs, at most one per token, for the tokens that get penalties.
    /// The count is the number of times that the token was generated, or 0 if only the prompt contains the token.
    /// Empty if no penalty is set.
    pub seen: Vec<(u32, u32)>,
}

impl DeviceSampling {
    /// Returns the parameters of greedy sampling without penalties.
    pub fn greedy() -> Self {
        Self { params: SamplingKernelParams::greedy(), seen: Vec::new() }
    }
}
