//! Chooses the next token from logits.
//!
//! - `params`: the sampling parameters, and the table of their flags, bounds and fields
//! - `sampler`: applies the parameters of one sequence on a CPU, and passes them to the sampling kernel on a GPU
//! - `token_counts`: how often each token of a sequence was generated, for the penalties

mod params;
mod sampler;
mod token_counts;

pub use params::{GenerationConfigUse, SAMPLING_FIELDS, SamplingField, SamplingParams};
pub use sampler::{Candidate, LogitRules, Sampler, argmax, candidates, uniform};
