//! Launch sequences captured as one CUDA graph, so a whole decode step costs the host a single call.

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, sys};
use candle_core::{Result, bail};

use super::arguments::Memory;
use super::sequence::LaunchSequence;

/// Captured launches.
pub struct LaunchGraph {
    graph: CudaGraph,
    /// Keeps the memory of the launches alive.
    _memory: Vec<Memory>,
}

// SAFETY: the driver lets any thread use a graph, one at a time, and a `LaunchGraph` is not `Sync`.
unsafe impl Send for LaunchGraph {}

impl LaunchGraph {
    /// Captures the launches of `first` and then those of `second` on their device's stream.
    pub fn capture(first: &LaunchSequence, second: &LaunchSequence) -> Result<Self> {
        let stream = first.device().cuda_stream();
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w()?;
        let queued = first.enqueue().and_then(|()| second.enqueue());
        // The capture must end even if one of its launches failed.
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).w();
        queued?;
        let Some(graph) = graph? else { bail!("cannot capture a CUDA graph: the stream captured no launch") };
        graph.upload().w()?;
        Ok(Self { graph, _memory: first.memory().chain(second.memory()).cloned().collect() })
    }

    /// Queues all launches on the stream they were captured on.
    pub fn enqueue(&self) -> Result<()> {
        self.graph.launch().w()
    }
}
