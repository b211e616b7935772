//! Launching our kernels: at once on a device's stream, or recorded as a list of launches and captured as a CUDA graph.

pub mod chain;
pub mod cuda;
