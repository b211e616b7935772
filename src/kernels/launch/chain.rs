//! The former interface to recorded launches, for callers that do not build a [`Launch`] yet.

use candle_core::Result;

use super::kernel_launch::Launch;
use super::module::Module;

pub use super::arguments::Arguments;
pub use super::device::is_idle;
pub use super::graph::LaunchGraph as Graph;
pub use super::kernel_launch::LaunchShape as Shape;
pub use super::mailbox::Mailbox;
pub use super::sequence::{LaunchSequence as Chain, TimedLaunch as Timed};

impl Chain {
    /// Adds a launch.
    ///
    /// # Safety
    /// The same as for [`Chain::add`].
    pub unsafe fn push(
        &mut self,
        module: &Module,
        name: &str,
        shape: Shape,
        bytes: u64,
        arguments: Arguments,
    ) -> Result<()> {
        // SAFETY: the caller answers for arguments and addresses.
        unsafe { self.add(Launch::new(*module, name, shape, arguments).with_bytes_moved(bytes)) }
    }

    /// Queues all launches.
    pub fn issue(&self) -> Result<()> {
        self.enqueue()
    }

    /// Captures the launches and then those of `tail`.
    pub fn capture(&self, tail: &Chain) -> Result<Graph> {
        Graph::capture(self, tail)
    }

    /// Times each launch.
    pub fn times(&self) -> Result<Vec<Timed>> {
        self.time_each()
    }
}

impl Graph {
    /// Queues the graph.
    pub fn launch(&self) -> Result<()> {
        self.enqueue()
    }
}
