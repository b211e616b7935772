//! What a CUDA device supports, whether it is idle, and the dtype suffixes of kernel names.

use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, bail};

use crate::device::has_machine_code;

/// Returns the value of a device attribute, as `cuDeviceGetAttribute` does.
pub fn attribute(device: &CudaDevice, attribute: sys::CUdevice_attribute) -> Result<usize> {
    Ok(device.cuda_stream().context().attribute(attribute).w()? as usize)
}

/// Returns the number of streaming multiprocessors (SMs) of the device.
pub fn multiprocessors(device: &CudaDevice) -> Result<usize> {
    attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
}

/// Returns the maximum shared memory per block in bytes, including memory that a kernel must opt in to.
pub fn max_shared_bytes(device: &CudaDevice) -> Result<usize> {
    attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
}

/// Returns whether the device runs kernels that were compiled for compute capability 9.0 (Hopper) or later.
/// Only these kernels overlap with the previous kernel (`pdl.cuh`) and use clusters (`cluster.cuh`).
///
/// A GPU runs the machine code for its own compute capability.
/// If the build has no such code, this function assumes that the GPU runs the code for the build's target.
pub fn runs_hopper_code(device: &CudaDevice) -> Result<bool> {
    let (major, minor) = device.cuda_stream().context().compute_capability().w()?;
    let is_target_new = env!("INFERNO_COMPUTE_CAP").parse::<u32>().is_ok_and(|capability| capability >= 90);
    Ok(major >= 9 && (is_target_new || has_machine_code((major as u32, minor as u32))))
}

/// Returns whether the device runs the kernels that use wgmma instructions.
/// A build contains these instructions only in its machine code for compute capability 9.0, if it has such code.
/// Only GPUs of exactly this compute capability run the code.
pub fn runs_wgmma(device: &CudaDevice) -> bool {
    matches!(device.cuda_stream().context().compute_capability(), Ok((9, 0))) && has_machine_code((9, 0))
}

/// Returns whether the device's stream has finished all queued work. Fails if queued work failed.
pub fn is_idle(device: &CudaDevice) -> Result<bool> {
    let stream = device.cuda_stream();
    stream.context().bind_to_thread().w()?;
    // SAFETY: the stream belongs to the device and is alive.
    match unsafe { sys::cuStreamQuery(stream.cu_stream()) } {
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        result => result.result().w().map(|()| true),
    }
}

/// Returns the suffix of kernel names for `dtype`, such as `bf16` in `add_norm_bf16`.
/// Fails if `dtype` is not f32, f16 or bf16.
pub fn dtype_suffix(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::F16 => Ok("f16"),
        DType::BF16 => Ok("bf16"),
        other => bail!("cannot choose a kernel: no kernel supports the dtype {other:?}"),
    }
}
