//! Exchange of data between ranks on GPUs, without copies by the host (`exchange.cuh`).
//!
//! Kernels send and receive all data, so CUDA graphs can capture the exchange.
//!
//! - `gpu_exchange`: the exchange of a rank, on which the operations run
//! - `exchange_sum`, `exchange_add_norm`, `exchange_columns`: the operations
//! - `connect`: connects the GPUs of all ranks, and measures the exchange
//! - `mailbox`: the memory to which other ranks write; `path`: where this memory is; `sizes`: the sizes of the exchange

#[cfg(feature = "cuda")]
mod connect;
#[cfg(feature = "cuda")]
mod exchange_add_norm;
#[cfg(feature = "cuda")]
mod exchange_columns;
#[cfg(feature = "cuda")]
mod exchange_sum;
#[cfg(feature = "cuda")]
mod gpu_exchange;
#[cfg(feature = "cuda")]
mod mailbox;
mod path;
mod sizes;

#[cfg(feature = "cuda")]
pub use connect::measure;
#[cfg(feature = "cuda")]
pub use exchange_columns::add_columns;
#[cfg(feature = "cuda")]
pub use exchange_sum::{add_sum, add_sum_of_sent, sender};
#[cfg(feature = "cuda")]
pub use gpu_exchange::RawMailboxes;
pub use path::ExchangePath;
pub use sizes::{ExchangeTimes, LARGE_ELEMENTS, MAILBOX_BYTES, MIN_ROUNDED_ELEMENTS, SMALL_ELEMENTS};

use candle_core::{Device, Result};

use crate::world::World;

/// Connects the GPUs of all ranks on the first of `paths` that works, and returns the connected world of this rank.
/// If no path works, returns `world` unchanged: the ranks then exchange data by memory copies that the host starts.
/// On a CPU or with a single rank, returns `world` unchanged.
///
/// Fails if the world has ended, or ends because a rank does not answer.
///
/// All ranks must call `connect` with the same paths, each rank on its own thread.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only builds with CUDA use `paths`"))]
pub fn connect(world: World, device: &Device, paths: &[ExchangePath]) -> Result<World> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) if world.size() > 1 => connect::connect(world, device, paths),
        _ => Ok(world),
    }
}
