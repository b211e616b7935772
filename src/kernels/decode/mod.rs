//! The fused CUDA kernels of the decode graph, except attention and the exchange of data between ranks.
//! A step computes one token of one sequence in static buffers.
//!
//! Each `add_*` function checks shapes and dtypes, and adds its launches to a `LaunchList`.
//! The launches of a step are captured as a CUDA graph, which replays each launch with the same arguments.
//! Values that change from step to step, such as the position and the token, are therefore in device memory.
//! A step multiplies each weight by at most one vector, so memory bandwidth limits the speed of these kernels.
//!
//! On Hopper and later GPUs, launches overlap (programmatic dependent launch).
//! Most matrix-vector kernels load their first weights while the previous kernel runs, and then wait for their input.
//! The gate and up projections of routed experts wait before they load weights, because the previous kernel computes
//! the router logits, which determine the experts.
//!
//! Two buffers of [`StepBuffers`] carry data from one step to the next:
//! - `x`: the residual stream, f32 `[hidden]`; between steps, the embedding of the next input token
//! - `state`: u32 `[4]`, the current position, the current token, the number of finished steps and an unused word
//!   (the `STATE_` constants)
//!
//! In the CUDA files, `T` is the compute dtype of the model: bf16 or f16.
//! Tests compare these kernels with the eager decoder (`tests/it/runner/decode_graph.rs`).

mod buffers;
mod gate_up;
mod head;
mod matvec;
mod mxfp4_experts;
mod qkv;
mod residual;
mod routed_experts;
mod router;
pub mod sample;

pub use buffers::{RmsNormParams, StepBuffers};
pub use gate_up::{Projection, add_gate_up};
pub use head::{Embedding, add_greedy_sampling, add_head, add_logits_of_ranks};
pub use matvec::has_decode_kernel;
pub use mxfp4_experts::{
    ExpertBuffers, MAX_CHOSEN_MXFP4, MAX_MXFP4_INTERMEDIATE_SIZE, add_mxfp4_down, add_mxfp4_gate_up,
};
pub use qkv::{QkNormBuffers, QkvProjection, add_qkv};
pub use residual::{PostNorm, add_residual};
pub use routed_experts::{add_routed_down, add_routed_gate_up};
pub use router::add_router;
