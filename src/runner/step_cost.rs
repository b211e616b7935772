//! The cost of a decode step: bytes read, launches, and time per kernel.

use serde::Serialize;

/// The bytes that one decode step must read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepBytes {
    /// The bytes of the chosen experts, one row of the embedding, and all other weights.
    pub weights: u64,
    /// The bytes of the cached keys and values that the token attends to.
    pub cache: u64,
}

impl StepBytes {
    pub fn total(&self) -> u64 {
        self.weights + self.cache
    }
}

/// The launches, time and memory traffic of one kernel in a decode step.
#[derive(Clone, Debug, Serialize)]
pub struct KernelTime {
    pub name: String,
    /// Launches per token.
    pub calls: usize,
    /// Seconds per token, summed over all launches.
    pub seconds: f64,
    /// Bytes read and written per token, summed over all launches.
    pub bytes: u64,
}

/// The numbers of kernel launches and CUDA graph nodes in one decode step.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LaunchCounts {
    pub kernels: usize,
    /// All nodes of the CUDA graph, including the kernels.
    pub graph_nodes: usize,
    /// The graph nodes that are not kernels, such as memory copies.
    pub copies: usize,
}
