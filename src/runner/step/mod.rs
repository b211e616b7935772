//! What a step consists of: its input, the decision how it runs, and its results. No code here runs a step.
//!
//! - `route`: decides what runs a step, and whether the step is queued
//! - `sequence`: the input of one sequence in a step
//! - `queued_step`: a step whose tokens the engine has not taken yet, and how a GPU chooses these tokens
//! - `times`: the mean durations of steps
//! - `cost`: the bytes, launches and kernel times of a decode step

mod cost;
mod queued_step;
mod route;
mod sequence;
mod times;

pub use cost::{KernelTime, LaunchCounts, StepBytes};
pub use queued_step::QueuedStep;
pub(super) use queued_step::{ExpectedToken, QueuedTokens, RowSampling};
pub use route::ExecutionMode;
pub(super) use route::{RunnerFacts, StepExecutor, StepFacts, route};
pub(super) use sequence::samplers;
pub use sequence::{StepSequence, TokensToScore};
pub use times::StepTime;
pub(super) use times::{StepKind, StepTimes};
