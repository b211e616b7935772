//! Queued steps: steps whose tokens the engine has not taken yet.
//!
//! - `queued_step`: the host's state of a queued step
//! - `buffers`: the inputs and outputs of queued steps on a GPU
//! - `row_sampling`: how a queued step on a GPU chooses the token of a sequence
//!
//! The code that queues the steps is in `src/runner/run/`.

#[cfg(feature = "cuda")]
mod buffers;
mod queued_step;
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only builds with CUDA use all of it"))]
mod row_sampling;

#[cfg(feature = "cuda")]
pub use buffers::QueuedStepBuffers;
pub(super) use queued_step::QueuedTokens;
pub use queued_step::{ExpectedToken, QueuedStep};
pub use row_sampling::RowSampling;
