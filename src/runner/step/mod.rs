//! A step of one or more sequences: its input, how it runs, and its cost. `run/` runs the steps.
//!
//! - `sequence`: the input of one sequence in a step
//! - `route`: decides what runs a step, and whether the step is queued
//! - `execution_mode`: whether decode steps run as CUDA graphs
//! - `times`: the mean durations of steps
//! - `cost`: the bytes, launches and kernel times of a decode step

mod cost;
mod execution_mode;
mod route;
mod sequence;
mod times;

pub use cost::{KernelTime, LaunchCounts, StepBytes};
pub use execution_mode::ExecutionMode;
pub(super) use route::{RunnerFacts, StepExecutor, StepFacts, route};
pub(super) use sequence::samplers;
pub use sequence::{StepSequence, TokensToScore};
pub use times::StepTime;
pub(super) use times::{StepKind, StepTimes};
