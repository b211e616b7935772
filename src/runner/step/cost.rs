//! The cost of a decode step: bytes read, launches, and time per kernel.

use serde::Serialize;

/// The bytes that the first rank reads from memory in one decode step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepBytes {
    /// The bytes of the weights: one row of the embedding, the chosen experts, and all other weights of the layers,
    /// norms and output head.
    pub weights: u64,
    /// The bytes of the cached keys and values that the tokens of the step attend to.
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
    /// Approximate number of bytes read and written per token, summed over all launches. 0 if the number is not known.
    pub bytes: u64,
}

/// The number of kernels and of CUDA graph nodes in one step of the decode graph.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LaunchCounts {
    pub kernels: usize,
    /// The number of all nodes in the CUDA graph, including kernels.
    pub graph_nodes: usize,
    /// The number of graph nodes that are not kernels, such as memory copies.
    pub copies: usize,
}
