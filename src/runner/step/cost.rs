//! The cost of a decode step: bytes read, launches, and time per kernel.

use serde::Serialize;

/// The bytes that the first rank reads from memory in one decode step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepBytes {
    /// The bytes of the weights: all dense weights, the chosen experts, and one row of the embedding.
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
    /// Bytes read and written per token, summed over all launches. Small inputs and outputs are not counted.
    pub bytes: u64,
}

/// How many kernels and CUDA graph nodes one step of the decode graph launches.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LaunchCounts {
    pub kernels: usize,
    /// The number of all nodes in the CUDA graph, including kernels.
    pub graph_nodes: usize,
    /// The number of graph nodes that are not kernels, such as memory copies.
    pub copies: usize,
}
