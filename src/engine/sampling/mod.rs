//! Sampling: chooses the next token of a sequence from logits.
//!
//! [Internal](crate#stable-api): can change in any release.
//!
//! - `params`: the sampling parameters, and the table that defines them
//! - `sampler`: chooses the tokens of one sequence on a CPU, or prepares the input of the sampling kernels on a GPU
//! - `token_counts`: the tokens of a sequence, and how often each was generated, for the penalties

mod params;
mod sampler;
mod token_counts;

pub use params::{GenerationConfigUse, SAMPLING_FIELDS, SamplingField, SamplingParams};
pub use sampler::{LogitRules, Sampler, TokenCandidate, argmax, candidates, uniform};
