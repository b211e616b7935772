//! Tests of the engine.
//!
//! - answers: `generation`, `options`, `sampling`, `deterministic`, `prompt_logprobs`, `constraint`
//! - parts of the engine, with a virtual clock or random operations: `scheduler`, `fairness`, `blocks`
//! - memory: `memory`, `prefix_file`

mod blocks;
mod constraint;
mod deterministic;
mod fairness;
mod generation;
mod memory;
mod options;
mod prefix_file;
pub mod prompt_logprobs;
mod sampling;
mod scheduler;

use crate::harness::{Need, TestCase};

/// The largest difference between log probabilities that the CPU computes in f32, in steps of different sizes.
/// This is twice the rounding error of logits: at most 2.4e-6 (`float64_relative_error` in
/// `tests/golden/provenance.json`) of the largest |logit|, which is 22 in the tiny models (`logits_abs_max`).
const F32_LOGPROB_TOLERANCE: f64 = 1e-4;

/// The largest difference between log probabilities that a GPU computes in f16, in a decode graph and in a prefill.
/// A rounding to f16 changes a value by up to 2^-11 of its size. This is about ten such errors of the largest logit.
const F16_LOGPROB_TOLERANCE: f64 = 0.1;

/// Returns a test case for each tiny model in `names`.
fn models(names: &[&'static str], need: Option<Need>) -> Vec<TestCase<&'static str>> {
    names.iter().map(|&value| TestCase { name: value.to_string(), need, value }).collect()
}

/// Adds a value to a digest, such as the next token to the digest of a sequence.
fn digest(before: u64, token: u64) -> u64 {
    (before ^ token).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
}
