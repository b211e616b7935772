//! [`ExecutionMode`]: whether decode steps run as CUDA graphs.

use std::fmt;

use serde::Serialize;

/// How decode steps usually run while only one request is active.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExecutionMode {
    /// As a CUDA graph: the decode graph, or a batch graph of one sequence.
    Graph,
    /// Operation by operation, without a CUDA graph.
    Eager,
}

impl fmt::Display for ExecutionMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Graph => "graph",
            Self::Eager => "eager",
        })
    }
}
