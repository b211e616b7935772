//! Fused CUDA kernels for one decode step: one token of one sequence, in static buffers.
//!
//! Each function checks shapes and adds one or two launches to a `LaunchSequence` for a CUDA graph.
//! A CUDA graph replays fixed arguments, so the position, the token and the chosen experts are in device memory.
//! Each step reads its weights once, so the speed of these kernels depends on their memory bandwidth.
//!
//! Launches overlap (programmatic dependent launch).
//! A kernel loads its first weights while the previous kernel still runs, then waits for its input.
//!
//! All kernels share two buffers of [`StepBuffers`]:
//! - `x`: the residual stream, f32 `[hidden]`
//! - `state`: u32 `[4]` with the current position, the current token, the number of finished steps and an unused word
//!
//! In the CUDA files, `T` is bf16 or f16: the dtype of q, k, v and unquantized weights.
//! Tests compare these kernels with the eager decoder (`tests/it/decode_graph.rs`).

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
pub use head::{Embedding, add_greedy_sampling, add_head};
pub use matvec::has_decode_kernel;
pub use mxfp4_experts::{ExpertBuffers, MAX_CHOSEN_MXFP4, MAX_EXPERT_COLUMNS, add_mxfp4_down, add_mxfp4_gate_up};
pub use qkv::{QkNorm, QkvProjection, add_qkv};
pub use residual::{PostNorm, add_residual};
pub use routed_experts::{add_routed_down, add_routed_gate_up};
pub use router::add_router;

pub use crate::kernels::constants::{MAX_CHOSEN_EXPERTS, MAX_EXPERTS};
