//! The decode graph: a decode step of a single sequence as one CUDA graph of fused kernels.
//!
//! - `graph`: `DecodeGraph`, which captures the kernel launches of a step and runs the steps
//! - `layers`: the kernel launches of the decoder's layers
//! - `plan`: plans the decode graph of a runner, on all ranks or on none
//! - `support`: decides whether the decode graph supports a model
//! - `no_decode_graph`: why a runner has no decode graph
//! - `no_cuda`: replaces `graph` in builds without CUDA

#[cfg(feature = "cuda")]
mod graph;
#[cfg(feature = "cuda")]
mod layers;
#[cfg(not(feature = "cuda"))]
mod no_cuda;
mod no_decode_graph;
mod plan;
#[cfg(feature = "cuda")]
mod support;

#[cfg(feature = "cuda")]
pub use graph::DecodeGraph;
#[cfg(not(feature = "cuda"))]
pub(super) use no_cuda::DecodeGraph;
pub use no_decode_graph::NoDecodeGraph;
pub(super) use plan::{PlannedGraph, plan_together};
