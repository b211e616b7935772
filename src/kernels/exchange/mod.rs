//! Exchange of data between ranks on GPUs that can access each other's memory, without the host (`exchange.cu`).
//!
//! The kernels run in stream order like all other kernels, so passes with exchanges can be captured as CUDA graphs.

#[cfg(feature = "cuda")]
mod connect;
#[cfg(feature = "cuda")]
mod gpu_exchange;
#[cfg(feature = "cuda")]
mod mailbox;
mod sizes;

#[cfg(feature = "cuda")]
pub use connect::measure;
#[cfg(feature = "cuda")]
pub use gpu_exchange::{add_columns, add_sum};
pub use sizes::{ExchangeTimes, LARGE_ELEMENTS, MAILBOX_BYTES, SMALL_ELEMENTS};

use candle_core::{Device, Result};

use crate::device::World;

/// Connects the GPUs of all ranks, and returns the world of this rank.
/// On a CPU or with a single rank, returns `world` unchanged.
///
/// The ranks exchange data directly if the GPUs can access each other's memory. Otherwise, they use host memory.
/// The environment variable `INFERNO_EXCHANGE=host` forces copies through host memory.
///
/// All ranks must call this function, each on its own thread.
pub fn connect(world: World, device: &Device) -> Result<World> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device)
            if world.size() > 1 && std::env::var_os("INFERNO_EXCHANGE").is_none_or(|by| by != "host") =>
        {
            connect::connect(world, device)
        }
        _ => Ok(world),
    }
}
