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

/// Returns a test case for each tiny model in `names`.
fn models(names: &[&'static str], need: Option<Need>) -> Vec<TestCase<&'static str>> {
    names.iter().map(|&value| TestCase { name: value.to_string(), need, value }).collect()
}

/// Adds a value to a digest, such as the next token to the digest of a sequence.
fn digest(before: u64, token: u64) -> u64 {
    (before ^ token).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
}
