//! Chooses the next token from logits.
//!
//! - `params`: the sampling parameters, and the table of their flags, bounds and fields
//! - `sampler`: applies the parameters of one sequence on a CPU, and passes them to the sampling kernel on a GPU

mod params;
mod sampler;

pub use params::{GenerationConfigUse, SAMPLING_FIELDS, SamplingField, SamplingParams};
pub use sampler::{Candidate, LogitRules, Sampler, argmax, candidates, uniform};
