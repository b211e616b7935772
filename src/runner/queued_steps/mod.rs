//! Queued steps: the state that the host keeps until it knows their tokens, and their buffers on a GPU.
//!
//! `steps/queue.rs`, `steps/queue_on_gpu.rs` and `steps/queue_on_cpu.rs` queue the steps.

#[cfg(feature = "cuda")]
mod buffers;
mod queued_step;
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only GPUs choose tokens of queued steps"))]
mod row_sampling;

#[cfg(feature = "cuda")]
pub use buffers::QueuedStepBuffers;
pub use queued_step::QueuedStep;
pub(super) use queued_step::QueuedTokens;
pub use row_sampling::RowSampling;
