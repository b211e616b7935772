//! CUDA graphs of captured launches. The host queues a whole graph, such as a decode step, with a single call.

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

use super::arguments::ArgumentMemory;
use super::list::LaunchList;
use crate::device::capture_lock;

/// A CUDA graph of captured launches.
pub struct LaunchGraph {
    graph: CudaGraph,
    /// The memory of the launch lists that [`capture`](Self::capture) captured, kept alive as long as the graph.
    /// Empty after [`capture_with`](Self::capture_with).
    _memory: Vec<ArgumentMemory>,
}

// SAFETY: any thread may use a graph, but only one thread at a time. `LaunchGraph` is not `Sync`.
unsafe impl Send for LaunchGraph {}

impl LaunchGraph {
    /// Captures the launches of `first`, followed by the launches of `second`, on the stream of their device.
    ///
    /// The graph keeps the memory alive that the lists keep alive.
    ///
    /// # Safety
    /// All other memory that the launches use, such as the mailboxes of a world, must live as long as the graph.
    /// No other thread may use the stream during the capture.
    pub unsafe fn capture(first: &LaunchList, second: &LaunchList) -> anyhow::Result<Self> {
        let enqueue = || Ok(first.enqueue().and_then(|()| second.enqueue())?);
        // SAFETY: `LaunchList::enqueue` only launches kernels, so it allocates nothing.
        // `_memory` keeps the memory of the lists alive. The caller guarantees the rest.
        let graph = unsafe { Self::capture_with(first.device(), enqueue)? };
        Ok(Self { _memory: first.memory().chain(second.memory()).cloned().collect(), ..graph })
    }

    /// Captures everything that `enqueue` queues on the stream of `device`.
    ///
    /// # Safety
    /// Memory that `enqueue` allocates must be freed before `enqueue` returns.
    /// All other memory that the launches use must live as long as the graph.
    /// No other thread may use the stream during the capture.
    pub unsafe fn capture_with(
        device: &CudaDevice,
        enqueue: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let _lock = capture_lock();
        let stream = device.cuda_stream();
        stream.context().bind_to_thread().w()?;
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w()?;
        let queued = enqueue();
        // If freeing a tensor fails, cudarc stores the error and returns it from its next call.
        // Fetch the error here, because `end_capture` would return it without ending the capture.
        let freed = stream.context().check_err().w();
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).w();
        // If `end_capture` stored another error, discard it, so that it does not make an unrelated call fail.
        let _ = stream.context().check_err();
        queued?;
        freed?;
        let Some(graph) = graph? else { anyhow::bail!("cannot capture a CUDA graph: no launches were captured") };
        graph.upload().w()?;
        Ok(Self { graph, _memory: Vec::new() })
    }

    /// Returns the number of nodes in the graph.
    pub fn nodes(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: the graph is valid. If the node array is null, the driver writes only the number of nodes.
        unsafe { sys::cuGraphGetNodes(self.graph.cu_graph(), std::ptr::null_mut(), &mut count) }.result().w()?;
        Ok(count)
    }

    /// Queues all launches of the graph on the stream on which they were captured.
    pub fn enqueue(&self) -> Result<()> {
        self.graph.launch().w()
    }
}
