//! Launches steps on the GPU of one rank.
//!
//! - `step_launcher`: launches batch graphs and queued steps
//! - `batch_graph`: the batch graphs, one for each padded batch size
//! - `no_cuda`: replaces `step_launcher` in builds without CUDA

#[cfg(feature = "cuda")]
mod batch_graph;
#[cfg(not(feature = "cuda"))]
mod no_cuda;
#[cfg(feature = "cuda")]
mod step_launcher;

#[cfg(not(feature = "cuda"))]
pub use no_cuda::StepLauncher;
#[cfg(feature = "cuda")]
pub use step_launcher::StepLauncher;
