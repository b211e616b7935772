//! The decode graph: a decode step of a single sequence as one CUDA graph of fused kernels.
//!
//! - `graph`: [`DecodeGraph`], which captures the kernel launches of a step and runs the steps
//! - `layers`: the kernel launches of the decoder's layers
//! - `support`: decides whether the decode graph supports a model

mod graph;
mod layers;
mod support;

pub use graph::DecodeGraph;
