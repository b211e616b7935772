//! Launches batch graphs and queued steps on the GPU of one rank.
//!
//! - `step_launcher`: launches a step as a batch graph or, if the step is queued, also operation by operation
//! - `batch_graph`: the batch graphs, one for each padded batch size
//! - `queued_step_buffers`: the inputs and the tokens of queued steps, which batch graphs also use for their inputs
//! - `row_sampling`: how a queued step chooses the token of a sequence
//! - `no_cuda`: replaces `step_launcher` in builds without CUDA

#[cfg(feature = "cuda")]
mod batch_graph;
#[cfg(not(feature = "cuda"))]
mod no_cuda;
#[cfg(feature = "cuda")]
mod queued_step_buffers;
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only builds with CUDA use all of it"))]
mod row_sampling;
#[cfg(feature = "cuda")]
mod step_launcher;

#[cfg(not(feature = "cuda"))]
pub use no_cuda::StepLauncher;
pub use row_sampling::RowSampling;
#[cfg(feature = "cuda")]
pub use step_launcher::StepLauncher;
