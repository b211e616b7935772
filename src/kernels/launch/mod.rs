//! Launches CUDA kernels.
//!
//! A [`Launch`] specifies a kernel, the sizes of its grid, blocks and shared memory, and its arguments.
//! [`Launch::enqueue`] queues a launch immediately. A [`LaunchList`] records launches, and can queue them many times.
//! A [`LaunchGraph`] contains launches that were captured as a CUDA graph.
//!
//! Every launch goes to the candle device's stream, and candle frees memory in stream order.
//! A tensor may therefore be dropped as soon as the last launch that uses it is queued.

mod arguments;
mod device;
mod graph;
mod host_mailbox;
mod host_words;
mod kernel_launch;
mod list;
mod module;
mod parameters;
mod tensor_map;

pub use arguments::{Arguments, address, kernel_size, optional_address};
pub use device::{attribute, dtype_suffix, is_idle, max_shared_bytes, multiprocessors, runs_hopper_code, runs_wgmma};
pub use graph::LaunchGraph;
pub use host_mailbox::{HostMailbox, MailboxSlots};
pub use host_words::{HostWordRange, HostWords};
pub use kernel_launch::{Launch, LaunchShape};
pub use list::{LaunchList, TimedLaunch};
pub use module::Module;
pub(crate) use module::module;
pub use tensor_map::{BoxOrder, TensorMap};
