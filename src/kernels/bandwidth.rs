//! Measures the memory bandwidth of a GPU.
//!
//! `inferno bench` compares the bandwidth of decode steps with this measurement.
//! The bandwidth in a GPU's data sheet is not a useful reference, because no kernel reaches it.

use anyhow::Result;
use candle_core::Device;
use serde::Serialize;

/// The memory bandwidth of a GPU: the fastest of ten reads and the fastest of ten copies.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Bandwidth {
    /// The bandwidth of a kernel that only reads, in bytes per second.
    pub read_bytes_per_s: f64,
    /// The bandwidth of a copy within GPU memory, in bytes per second. Counts both bytes read and bytes written.
    pub copy_bytes_per_s: f64,
    /// The size in bytes of the buffer that is read or copied.
    pub buffer_bytes: usize,
}

/// Measures the memory bandwidth of a GPU. Returns `None` for a CPU, or if less than 160 MiB of GPU memory is free.
///
/// Allocates 4 GiB of GPU memory if at least 5 GiB is free, otherwise at most 80% of the free memory.
pub fn measure(device: &Device) -> Result<Option<Bandwidth>> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => with_cuda::measure(device),
        _ => Ok(None),
    }
}

#[cfg(feature = "cuda")]
mod with_cuda {
    use anyhow::Result;
    use candle_core::cuda_backend::CudaDevice;
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    use candle_core::{DType, Device, Tensor};

    use super::Bandwidth;
    use crate::kernels::launch::{Arguments, Launch, LaunchShape, address, module};

    const ROUNDS: usize = 10;
    const BLOCK: usize = 512;
    const GIB: usize = 1 << 30;

    pub fn measure(device: &CudaDevice) -> Result<Option<Bandwidth>> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let (free, _) = context.mem_get_info()?;
        // The two buffers together leave at least a fifth of the free memory unused.
        let mut bytes = 2 * GIB;
        while bytes * 5 / 2 > free {
            bytes /= 2;
        }
        if bytes < GIB / 16 {
            return Ok(None);
        }
        // Launch enough blocks to use all thread slots of every multiprocessor.
        use sys::CUdevice_attribute as Attribute;
        let multiprocessors = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let threads = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?;
        let shape = LaunchShape::linear(multiprocessors as usize * (threads as usize / BLOCK), BLOCK);
        let words = bytes / 16;

        let candle_device = Device::Cuda(device.clone());
        // SAFETY: `fill_random` writes all of `from` before anything reads `from`. Nothing reads `to` or `sum`.
        let (from, to, sum) = unsafe {
            (
                Tensor::empty(bytes, DType::U8, &candle_device)?,
                Tensor::empty(bytes, DType::U8, &candle_device)?,
                Tensor::empty(1, DType::U32, &candle_device)?,
            )
        };
        let arguments = Arguments::new().tensor(&from)?.int(words);
        // SAFETY: `from` holds `words` 16-byte words, and the allocator aligns to 256 bytes.
        unsafe { Launch::new(module!("bandwidth"), "fill_random", shape, arguments).enqueue(device)? };
        let fastest = |run: &dyn Fn() -> Result<()>, bytes_moved: usize| -> Result<f64> {
            let mut bytes_per_s = 0f64;
            for _ in 0..ROUNDS {
                let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
                let start = stream.record_event(flags)?;
                run()?;
                let end = stream.record_event(flags)?;
                bytes_per_s = bytes_per_s.max(bytes_moved as f64 / (start.elapsed_ms(&end)? as f64 / 1e3));
            }
            Ok(bytes_per_s)
        };
        let read = || {
            let arguments = Arguments::new().tensor(&from)?.tensor(&sum)?.int(words);
            let launch = Launch::new(module!("bandwidth"), "read_all", shape, arguments);
            // SAFETY: `from` holds `words` 16-byte words.
            // `words` is a power of two of at least 2^22, and therefore a multiple of 8 · `BLOCK`.
            unsafe { launch.enqueue(device)? };
            Ok(())
        };
        let copy = || {
            // SAFETY: both buffers hold `bytes` bytes and were allocated on this stream.
            unsafe { result::memcpy_dtod_async(address(&to)?, address(&from)?, bytes, stream.cu_stream())? };
            Ok(())
        };
        let read_bytes_per_s = fastest(&read, bytes)?;
        let copy_bytes_per_s = fastest(&copy, 2 * bytes)?;
        Ok(Some(Bandwidth { read_bytes_per_s, copy_bytes_per_s, buffer_bytes: bytes }))
    }
}
