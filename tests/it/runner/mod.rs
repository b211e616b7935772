//! Tests of the decode graph, and of steps that are queued before the host knows the tokens of the previous step.

#[cfg(feature = "cuda")]
mod decode_graph;
pub mod queued_steps;
