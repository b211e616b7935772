//! Memory bandwidth as measured, which is what a decode step is judged by: a data sheet's figure is never reached.

use anyhow::Result;
use candle_core::Device;
use serde::Serialize;

/// The best of ten.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Bandwidth {
    /// Of a kernel that only reads.
    pub read_bytes_per_s: f64,
    /// Of a copy on the device; what is read and what is written both count.
    pub copy_bytes_per_s: f64,
    /// How much was read, and how much copied.
    pub buffer_bytes: usize,
}

/// Measures the device. Takes 4 GiB for as long as it runs, or less if less than 5 are free. `None` for a CPU, or when
/// almost nothing is free.
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
    use crate::kernels::launch::cuda::{Arg, address, launch, module};

    const ROUNDS: usize = 10;
    const BLOCK: usize = 512;
    const GIB: usize = 1 << 30;

    pub fn measure(device: &CudaDevice) -> Result<Option<Bandwidth>> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let (free, _) = context.mem_get_info()?;
        // Halved until two of them leave a fifth of what is free.
        let mut bytes = 2 * GIB;
        while bytes * 5 / 2 > free {
            bytes /= 2;
        }
        if bytes < GIB / 16 {
            return Ok(None);
        }
        // As many blocks as run at once.
        use sys::CUdevice_attribute as Attribute;
        let multiprocessors = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let threads = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?;
        let grid = (multiprocessors as usize * (threads as usize / BLOCK), 1, 1);
        let words = bytes / 16;

        let on = Device::Cuda(device.clone());
        // SAFETY: `fill_random` writes all of `from`; nothing reads `to` or `sum`.
        let (from, to, sum) = unsafe {
            (
                Tensor::empty(bytes, DType::U8, &on)?,
                Tensor::empty(bytes, DType::U8, &on)?,
                Tensor::empty(1, DType::U32, &on)?,
            )
        };
        // SAFETY: `from` holds that many 16-byte words, and the allocator aligns to 256 bytes.
        unsafe {
            launch(device, &module!("bandwidth"), "fill_random", grid, BLOCK, 0, &[Arg::tensor(&from)?, words.into()])?
        };
        let best = |run: &dyn Fn() -> Result<()>, moved: usize| -> Result<f64> {
            let mut best = 0f64;
            for _ in 0..ROUNDS {
                let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
                let start = stream.record_event(flags)?;
                run()?;
                let end = stream.record_event(flags)?;
                best = best.max(moved as f64 / (start.elapsed_ms(&end)? as f64 / 1e3));
            }
            Ok(best)
        };
        let read = || {
            let args = [Arg::tensor(&from)?, Arg::tensor(&sum)?, words.into()];
            // SAFETY: as above; `words`, a power of two of at least 2^22, is a multiple of 8 blocks.
            unsafe { launch(device, &module!("bandwidth"), "read_all", grid, BLOCK, 0, &args)? };
            Ok(())
        };
        let copy = || {
            // SAFETY: both hold `bytes`, and the stream is the one that they were allocated on.
            unsafe { result::memcpy_dtod_async(address(&to)?, address(&from)?, bytes, stream.cu_stream())? };
            Ok(())
        };
        let (read_bytes_per_s, copy_bytes_per_s) = (best(&read, bytes)?, best(&copy, 2 * bytes)?);
        Ok(Some(Bandwidth { read_bytes_per_s, copy_bytes_per_s, buffer_bytes: bytes }))
    }
}
