//! Opens NVIDIA GPUs and queries their memory.

use std::ptr;

use anyhow::{Context, Result};
use candle_core::Device;
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, result, sys};

use super::info::DeviceInfo;
use super::{libraries, stream_memory};
use crate::error::Error;
use crate::text::plain_cuda_errors;

/// Opens GPU `ordinal`. Fails with [`Error::NoGpu`] if NVIDIA's libraries or driver cannot be loaded or initialized,
/// or if the GPU does not exist.
pub fn open(ordinal: usize) -> Result<Device> {
    libraries::load().map_err(|error| Error::no_gpu(&error.reason, error.hint))?;
    let driver_error = |error: DriverError| {
        let next = "check that `nvidia-smi` lists a GPU and that CUDA_VISIBLE_DEVICES does not hide it";
        Error::no_gpu(plain_cuda_errors(&error.to_string()), next)
    };
    result::init().map_err(driver_error)?;
    let count = CudaContext::device_count().map_err(driver_error)?;
    if ordinal >= count as usize {
        let reason = format!("GPU {ordinal} does not exist (visible GPUs: {count})");
        return Err(Error::no_gpu(reason, "list the GPUs: nvidia-smi").into());
    }
    let device = CudaDevice::new_with_stream(ordinal).with_context(|| format!("cannot open GPU {ordinal}"))?;
    // SAFETY: candle uses and frees all tensors of this device on one stream.
    // `kernels::upload` copies on a second stream and records its own events.
    unsafe { device.disable_event_tracking() };
    keep_freed_memory(&device)?;
    stream_memory::reuse(device.cuda_stream().cu_stream());
    Ok(Device::Cuda(device))
}

/// Returns the number of visible GPUs, or 0 if NVIDIA's libraries or driver cannot be used.
pub fn gpu_count() -> usize {
    if libraries::load().is_err() {
        return 0;
    }
    let count = result::init().and_then(|()| CudaContext::device_count());
    count.map_or(0, |count| count as usize)
}

/// Configures the driver's stream-ordered allocator to keep freed memory in its default pool.
///
/// By default, the allocator returns freed memory to the operating system at every synchronization.
/// Allocations after a synchronization are then slower.
fn keep_freed_memory(device: &CudaDevice) -> Result<()> {
    let context = device.cuda_stream().context().clone();
    context.bind_to_thread()?;
    let mut pool = ptr::null_mut();
    let mut threshold = u64::MAX;
    // SAFETY: the first call writes `pool` before the second reads it; the attribute is a u64.
    unsafe {
        sys::cuDeviceGetDefaultMemPool(&mut pool, context.cu_device()).result()?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        sys::cuMemPoolSetAttribute(pool, attribute, (&mut threshold as *mut u64).cast()).result()?;
    }
    Ok(())
}

/// Returns [`info`] after releasing the unused memory of `stream_memory` and of the driver's memory pool.
/// Without this release, the driver would count this unused memory as used.
pub fn info_after_trim(device: &Device) -> Result<DeviceInfo> {
    if let Device::Cuda(cuda) = device {
        let stream = cuda.cuda_stream();
        stream.context().bind_to_thread()?;
        stream_memory::release(stream.cu_stream()).map_err(DriverError)?;
        stream.synchronize()?;
        let mut pool = ptr::null_mut();
        // SAFETY: the first call writes `pool` before the second reads it; trimming frees no memory in use.
        unsafe {
            sys::cuDeviceGetDefaultMemPool(&mut pool, stream.context().cu_device()).result()?;
            sys::cuMemPoolTrimTo(pool, 0).result()?;
        }
    }
    info(device)
}

/// Returns the name, compute capability and memory of a device.
pub fn info(device: &Device) -> Result<DeviceInfo> {
    let Device::Cuda(device) = device else { return Ok(DeviceInfo::cpu()) };
    let stream = device.cuda_stream();
    let context = stream.context();
    let (major, minor) = context.compute_capability()?;
    let (free, total) = context.mem_get_info()?;
    Ok(DeviceInfo {
        name: context.name()?,
        compute_capability: Some((major as u32, minor as u32)),
        free_bytes: free as u64,
        total_bytes: total as u64,
    })
}
