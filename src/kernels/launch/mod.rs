//! Launches CUDA kernels.
//!
//! A [`Launch`] specifies a kernel, the sizes of its grid, blocks and shared memory, and its arguments.
//! [`Launch::enqueue`] queues a launch immediately. A [`LaunchList`] records launches and queues them together.
//! A [`LaunchGraph`] contains launches that were captured as a CUDA graph.
//!
//! Every launch goes to the candle device's stream, and candle frees memory in stream order.
//! A tensor may therefore be dropped as soon as a launch that uses it is queued. No CUDA event needs to track its use.

mod arguments;
mod device;
mod graph;
mod host_words;
mod kernel_launch;
mod list;
mod mailbox;
mod module;

pub use arguments::{Arg, Arguments, address};
pub use device::{attribute, dtype_suffix, is_idle, max_shared_bytes, multiprocessors};
pub use graph::LaunchGraph;
pub use host_words::HostWords;
pub use kernel_launch::{Launch, LaunchShape};
pub use list::{LaunchList, TimedLaunch};
pub use mailbox::Mailbox;
pub use module::Module;
pub(crate) use module::module;
