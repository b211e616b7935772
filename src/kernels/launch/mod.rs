//! How a kernel is launched.
//!
//! A [`Launch`] names a kernel, its grid and block, its shared memory and its arguments. It is queued at once with
//! [`Launch::enqueue`], or added to a [`LaunchSequence`], which queues all its launches together and can be captured as a
//! [`LaunchGraph`].
//!
//! Every launch goes to the stream of the candle device, and candle frees memory in the order of that stream. So a tensor
//! may be dropped as soon as a launch on it is queued, and no launch needs an event.

mod arguments;
mod device;
mod graph;
mod kernel_launch;
mod mailbox;
mod module;
mod sequence;

pub use arguments::{Arg, Arguments, address};
pub use device::{attribute, dtype_suffix, is_idle, max_shared_bytes, multiprocessors};
pub use graph::LaunchGraph;
pub use kernel_launch::{Launch, LaunchShape};
pub use mailbox::Mailbox;
pub use module::Module;
pub(crate) use module::module;
pub use sequence::{LaunchSequence, TimedLaunch};
