//! What a step consists of: its input, the decision how it runs, and its results. No code here runs a step.
//!
//! - `route`: decides what runs a step, and whether the step is queued
//! - `sequence`: the input of one sequence in a step
//! - `solo_sequence`: the cached tokens of a sequence that has the KV cache to itself
//! - `queued_step`: a step whose tokens the engine has not taken yet
//! - `execution_mode`: whether decode steps run as CUDA graphs
//! - `times`: the mean durations of steps
//! - `cost`: the bytes, launches and kernel times of a decode step

mod cost;
mod execution_mode;
mod queued_step;
mod route;
mod sequence;
mod solo_sequence;
mod times;

pub use cost::{KernelTime, LaunchCounts, StepBytes};
pub use execution_mode::ExecutionMode;
pub use queued_step::QueuedStep;
pub(super) use queued_step::{ExpectedToken, QueuedTokens};
pub(super) use route::{RunnerFacts, StepExecutor, StepFacts, route};
pub(super) use sequence::samplers;
pub use sequence::{StepSequence, TokensToScore};
pub(super) use solo_sequence::SoloSequence;
pub use times::StepTime;
pub(super) use times::{StepKind, StepTimes};
