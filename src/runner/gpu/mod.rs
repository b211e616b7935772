//! The part of the runner that exists only in builds with CUDA. In other builds, `no_cuda.rs` replaces this module.
//!
//! - `decode_graph/`: the decode graph, which runs the decode steps of a single sequence
//! - `step_launcher`: launches a step as a batch graph or, if the step is queued, also operation by operation
//! - `batch_graph`: the batch graphs, one for each padded batch size
//! - `queued_step_buffers`: the inputs and the tokens of queued steps, which batch graphs also use for their inputs
//! - `sampling`: chooses tokens on the GPU, and computes log probabilities there

mod batch_graph;
mod decode_graph;
mod queued_step_buffers;
mod sampling;
mod step_launcher;

pub use decode_graph::DecodeGraph;
pub(super) use sampling::{choose_on_device, logprobs_on_device};
pub(super) use step_launcher::StepLauncher;
