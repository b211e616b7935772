//! Exchange of data between ranks on GPUs, without copies by the host (`exchange.cu`).
//!
//! The kernels run in stream order like all other kernels, so passes with exchanges can be captured as CUDA graphs.

#[cfg(feature = "cuda")]
mod connect;
#[cfg(feature = "cuda")]
mod gpu_exchange;
#[cfg(feature = "cuda")]
mod mailbox;
mod path;
mod sizes;

#[cfg(feature = "cuda")]
pub use connect::measure;
#[cfg(feature = "cuda")]
pub use gpu_exchange::{add_columns, add_sum};
pub use path::ExchangePath;
pub use sizes::{ExchangeTimes, LARGE_ELEMENTS, MAILBOX_BYTES, SMALL_ELEMENTS};

use candle_core::{Device, Result};

use crate::device::World;

/// Connects the GPUs of all ranks, and returns the world of this rank.
/// On a CPU or with a single rank, returns `world` unchanged.
///
/// Uses the first of `paths` that works. If none works, returns `world` unchanged, and the host copies all data.
///
/// All ranks must call this function with the same paths, each on its own thread.
pub fn connect(world: World, device: &Device, paths: &[ExchangePath]) -> Result<World> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) if world.size() > 1 => connect::connect(world, device, paths),
        _ => {
            // Only builds for GPUs use the paths.
            let _ = paths;
            Ok(world)
        }
    }
}
