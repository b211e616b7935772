//! In debug builds, checks that the arguments of a launch have the sizes of the kernel's parameters.
//!
//! The driver cannot check this: it reads as many bytes from each argument as the kernel expects.

use std::sync::OnceLock;

use candle_core::cuda_backend::cudarc::driver::{CudaFunction, sys};
use candle_core::{Result, bail};
use libloading::Library;

use super::arguments::Arguments;

/// `cuFuncGetParamInfo`: writes the offset and the size of the kernel parameter with an index.
/// Fails if the kernel has no parameter with this index.
type GetParamInfo = unsafe extern "C" fn(sys::CUfunction, usize, *mut usize, *mut usize) -> sys::CUresult;

/// Returns the driver's `cuFuncGetParamInfo`, or `None` if the driver is older than CUDA 12.4.
/// cudarc declares this function only in builds with CUDA 12.4 or later.
fn get_param_info() -> Option<GetParamInfo> {
    static FUNCTION: OnceLock<Option<GetParamInfo>> = OnceLock::new();
    *FUNCTION.get_or_init(|| {
        // SAFETY: the driver library is already loaded, so no initializer runs.
        let driver = unsafe { Library::new("libcuda.so.1") }.ok()?;
        // SAFETY: the type equals the declaration in NVIDIA's `cuda.h`.
        let function = unsafe { driver.get::<GetParamInfo>(b"cuFuncGetParamInfo") }.map(|function| *function).ok();
        // Never unload the library, because the function's address points into it.
        std::mem::forget(driver);
        function
    })
}

/// Fails unless there are as many arguments as parameters, and each argument has the size of its parameter.
/// Checks nothing if the driver is older than CUDA 12.4.
pub(super) fn check(function: &CudaFunction, arguments: &Arguments) -> Result<()> {
    let Some(get_param_info) = get_param_info() else { return Ok(()) };
    let size = |index| {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is loaded, and both pointers are valid.
        let result = unsafe { get_param_info(function.cu_function(), index, &mut offset, &mut size) };
        (result == sys::CUresult::CUDA_SUCCESS).then_some(size)
    };
    let parameters: Vec<usize> = (0..).map_while(size).collect();
    let arguments = arguments.sizes();
    if arguments != parameters {
        bail!("the arguments have {arguments:?} bytes, but the kernel's parameters have {parameters:?} bytes");
    }
    Ok(())
}
