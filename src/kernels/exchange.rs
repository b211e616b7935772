//! Exchange of data between ranks on GPUs that can access each other's memory, without the host (`exchange.cu`).
//!
//! The kernels run in stream order like all others, so passes that exchange data can be captured as CUDA graphs.

#[cfg(feature = "cuda")]
mod mailbox;

#[cfg(feature = "cuda")]
pub use mailbox::{add_columns, add_sum, measure};

use candle_core::{Device, Result};

use crate::device::World;

/// The memory of each GPU for the values of the others, in bytes. Long prompts need several operations if their tensors are
/// larger than the part of a rank.
pub const MAILBOX_BYTES: usize = 64 << 20;

/// The time in which the GPUs of all ranks add a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExchangeTimes {
    /// For [`SMALL_ELEMENTS`], in seconds. The host queues one operation after another.
    pub small: f64,
    /// For [`LARGE_ELEMENTS`], in seconds.
    pub large: f64,
}

/// The elements of the hidden state of one token in gpt-oss.
pub const SMALL_ELEMENTS: usize = 2880;
/// The elements of a part of a prompt.
pub const LARGE_ELEMENTS: usize = 1 << 20;

/// Connects the GPUs of all ranks. Returns the world of this rank, which from then on exchanges data between the GPUs
/// directly if they can access each other's memory, and by the host otherwise.
///
/// The environment variable `INFERNO_EXCHANGE=host` also selects the exchange by the host.
///
/// All ranks must call this function, each on its own thread.
pub fn connect(world: World, device: &Device) -> Result<World> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device)
            if world.size() > 1 && std::env::var_os("INFERNO_EXCHANGE").is_none_or(|by| by != "host") =>
        {
            mailbox::connect(world, device)
        }
        _ => Ok(world),
    }
}
