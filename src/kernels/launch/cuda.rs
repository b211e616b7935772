//! The former interface to single launches, for callers that do not build a [`Launch`] yet.

use candle_core::Result;
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;

use super::arguments::Arguments;
use super::kernel_launch::{Launch, LaunchShape};

pub use super::arguments::{Arg, address};
pub use super::device::{attribute, dtype_suffix as suffix, multiprocessors};
pub use super::module::Module;
pub(crate) use super::module::module;

impl Arg {
    /// A C struct by value.
    #[allow(non_snake_case)]
    pub fn Parts<T: DeviceRepr + Send + Sync + 'static>(value: T) -> Self {
        Arg::Struct(std::sync::Arc::new(value))
    }
}

/// Queues a kernel on the device's stream.
///
/// # Safety
/// The same as for [`Launch::enqueue`].
pub unsafe fn launch(
    device: &CudaDevice,
    module: &Module,
    name: &str,
    grid: (usize, usize, usize),
    block: usize,
    shared_bytes: usize,
    args: &[Arg],
) -> Result<()> {
    let shape = LaunchShape::new(grid, block).with_shared_bytes(shared_bytes);
    // SAFETY: the caller answers for arguments and addresses.
    unsafe { Launch::new(*module, name, shape, Arguments::from(args.to_vec())).enqueue(device) }
}
