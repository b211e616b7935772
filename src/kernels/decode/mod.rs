//! The fused kernels of a decode step: one token of one sequence, on static buffers.
//!
//! Each function checks shapes and adds one launch to a sequence; the sequence is made for a CUDA graph.
//! Whatever changes from token to token lies in device memory: the position, the token, the choice of experts.
//! Every weight is read once per token, so a kernel is good if it reads bytes fast.
//!
//! Launches overlap (programmatic dependent launch).
//! A kernel loads its first weights while the previous kernel still runs; then it waits and reads its input.
//!
//! The kernels share these buffers: x f32 \[C\], the residual stream, and state u32 \[4\]:
//! the position of the token in this step, the token, the number of finished steps, and an unused word.
//! T stands for bf16 or f16, the dtype of q, k, v and of weights that are not quantized.
//! The eager decoder on a CPU is the reference (`tests/it/decode_graph.rs`).

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

pub use buffers::{RmsNorm, StepBuffers};
pub use gate_up::{Projection, add_gate_up};
pub use head::{Embedding, add_argmax, add_head};
pub use matvec::can_multiply;
pub use mxfp4_experts::{ExpertBuffers, MAX_CHOSEN_MXFP4, MAX_EXPERT_COLUMNS, add_mxfp4_down, add_mxfp4_gate_up};
pub use qkv::{QkNorm, QkvProjection, add_qkv};
pub use residual::{PostNorm, add_residual};
pub use routed_experts::{add_routed_down, add_routed_gate_up};
pub use router::add_router;

pub use crate::kernels::constants::{MAX_CHOSEN_EXPERTS, MAX_EXPERTS};
