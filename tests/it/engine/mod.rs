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
