//! What a decode step costs: the bytes it must read, the launches it makes, the time of each kernel.

use serde::Serialize;

/// Bytes that one decode step cannot avoid reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepBytes {
    /// Every dense tensor once, the chosen experts, one row of the embedding.
    pub weights: u64,
    /// Keys and values that the token attends to.
    pub cache: u64,
}

impl StepBytes {
    pub fn total(&self) -> u64 {
        self.weights + self.cache
    }
}

/// The cost of one kernel in a decode step.
#[derive(Clone, Debug, Serialize)]
pub struct KernelTime {
    pub name: String,
    /// Launches per token.
    pub calls: usize,
    /// Seconds per token, all launches together.
    pub seconds: f64,
    /// Bytes read and written per token, all launches together.
    pub bytes: u64,
}

/// The work of the host and the driver for one token.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LaunchCounts {
    pub kernels: usize,
    /// Nodes of the graph that is launched; 0 without a graph.
    pub graph_nodes: usize,
    pub host_syncs: usize,
    pub copies: usize,
}
