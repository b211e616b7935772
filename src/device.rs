//! Choosing the device. Inference is for NVIDIA GPUs: without one, this is an error that says what to do next, never a
//! silent fallback. The CPU is an explicit choice for development, tests and the demo model.

mod facts;
#[cfg(feature = "cuda")]
mod libraries;

use std::fmt;
use std::str::FromStr;

use anyhow::Result;
use candle_core::{DType, Device};

pub use facts::{GpuFacts, GpuState, nvidia_smi};

use crate::error::Error;

/// What `--device` says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    Cpu,
    Cuda(usize),
    /// `cuda` without a number: the first GPU.
    #[default]
    FirstCuda,
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(DeviceChoice::Cpu),
            None if text == "cuda" => Ok(DeviceChoice::FirstCuda),
            Some(("cuda", ordinal)) => {
                ordinal.parse().map(DeviceChoice::Cuda).map_err(|_| format!("'{ordinal}' is no GPU number; try cuda:0"))
            }
            _ => Err(format!("unknown device '{text}'; use cuda, cuda:N or cpu")),
        }
    }
}

/// What a person is told about the device at start.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    pub name: String,
    /// Compute capability as (major, minor); `None` on a CPU.
    pub compute_capability: Option<(u32, u32)>,
    pub free_bytes: u64,
    pub total_bytes: u64,
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |bytes: u64| bytes as f64 / 1e9;
        write!(f, "{}", self.name)?;
        if let Some((major, minor)) = self.compute_capability {
            write!(f, ", compute capability {major}.{minor}")?;
        }
        if self.total_bytes > 0 {
            write!(f, ", {:.1} of {:.1} GB free", gb(self.free_bytes), gb(self.total_bytes))?;
        }
        Ok(())
    }
}

/// Opens the chosen device: on a GPU with a stream of its own and candle's per-tensor events off: what is
/// uploaded on another stream is handed over with an event of its own (`kernels::upload`).
pub fn open(choice: DeviceChoice) -> Result<Device> {
    match choice {
        DeviceChoice::Cpu => Ok(Device::Cpu),
        DeviceChoice::FirstCuda => open_cuda(0),
        DeviceChoice::Cuda(ordinal) => open_cuda(ordinal),
    }
}

/// Whether a driver's allocation has failed: it says so in words only.
pub fn is_out_of_memory(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains("OUT_OF_MEMORY")
}

/// The dtype computed in unless the user asks for another: bf16 on a GPU, f32 on a CPU.
pub fn default_dtype(device: &Device) -> DType {
    if device.is_cuda() { DType::BF16 } else { DType::F32 }
}

/// The compute capability that the kernels of this build are for; `None` in a build without GPU support.
pub fn built_for() -> Option<(u32, u32)> {
    let number: u32 = option_env!("INFERNO_COMPUTE_CAP")?.parse().ok()?;
    Some((number / 10, number % 10))
}

/// How many GPUs can be seen.
#[cfg(not(feature = "cuda"))]
pub fn gpus() -> usize {
    0
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_: usize) -> Result<Device> {
    Err(no_gpu(
        "this build of inferno has no GPU support",
        "build it with: cargo install --locked --path . --features cuda",
    )
    .into())
}

#[cfg(not(feature = "cuda"))]
pub fn info(_: &Device) -> Result<DeviceInfo> {
    Ok(cpu_info())
}

/// The same as `info`, after giving back what this process holds but does not use.
#[cfg(not(feature = "cuda"))]
pub fn info_without_ours(device: &Device) -> Result<DeviceInfo> {
    info(device)
}

fn no_gpu(reason: impl Into<String>, first: &str) -> Error {
    let hint = format!("{first}\n  or run a small model without a GPU: inferno play demo --device cpu");
    Error::NoGpu { reason: reason.into(), hint }
}

/// What is known of the CPU; its memory is read from /proc/meminfo where there is one.
fn cpu_info() -> DeviceInfo {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    DeviceInfo {
        name: format!("CPU ({threads} threads)"),
        compute_capability: None,
        free_bytes: field("MemAvailable:"),
        total_bytes: field("MemTotal:"),
    }
}

#[cfg(feature = "cuda")]
use with_cuda::open_cuda;
#[cfg(feature = "cuda")]
pub use with_cuda::{gpus, info, info_without_ours};

#[cfg(feature = "cuda")]
mod with_cuda {
    use anyhow::{Context, Result};
    use candle_core::Device;
    use candle_core::cuda_backend::CudaDevice;
    use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, result, sys};

    use super::{DeviceInfo, cpu_info, libraries, no_gpu};

    pub fn open_cuda(ordinal: usize) -> Result<Device> {
        libraries::load().map_err(|unusable| no_gpu(&unusable.reason, unusable.hint))?;
        let driver = |error: DriverError| {
            let reason = format!("the driver answers {error:?}");
            no_gpu(reason, "check that `nvidia-smi` lists a GPU and that CUDA_VISIBLE_DEVICES does not hide it")
        };
        result::init().map_err(driver)?;
        let count = CudaContext::device_count().map_err(driver)? as usize;
        if ordinal >= count {
            let reason = format!("GPU {ordinal} was asked for, {count} can be seen");
            return Err(no_gpu(reason, "see which there are: nvidia-smi").into());
        }
        let device = CudaDevice::new_with_stream(ordinal).with_context(|| format!("cannot open GPU {ordinal}"))?;
        // SAFETY: every tensor of this device is used and freed on its one stream; what another stream wrote is waited for.
        unsafe { device.disable_event_tracking() };
        keep_freed_memory(&device)?;
        Ok(Device::Cuda(device))
    }

    /// How many GPUs can be seen; none without a driver.
    pub fn gpus() -> usize {
        if libraries::load().is_err() {
            return 0;
        }
        let count = result::init().and_then(|()| CudaContext::device_count());
        count.map_or(0, |count| count as usize)
    }

    /// Lets the stream-ordered allocator keep what is freed: by default it returns memory to the driver at every
    /// synchronization, which makes each following allocation a slow one.
    fn keep_freed_memory(device: &CudaDevice) -> Result<()> {
        let context = device.cuda_stream().context().clone();
        context.bind_to_thread()?;
        let mut pool = std::ptr::null_mut();
        let mut threshold = u64::MAX;
        // SAFETY: `pool` is written by the first call before the second reads it; the attribute's type is a u64.
        unsafe {
            sys::cuDeviceGetDefaultMemPool(&mut pool, context.cu_device()).result()?;
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            sys::cuMemPoolSetAttribute(pool, attribute, (&mut threshold as *mut u64).cast()).result()?;
        }
        Ok(())
    }

    /// The same as `info`, after giving back what this process holds but does not use.
    pub fn info_without_ours(device: &Device) -> Result<DeviceInfo> {
        if let Device::Cuda(cuda) = device {
            let stream = cuda.cuda_stream();
            stream.synchronize()?;
            let mut pool = std::ptr::null_mut();
            // SAFETY: `pool` is written by the first call before the second reads it; nothing in use is trimmed.
            unsafe {
                sys::cuDeviceGetDefaultMemPool(&mut pool, stream.context().cu_device()).result()?;
                sys::cuMemPoolTrimTo(pool, 0).result()?;
            }
        }
        info(device)
    }

    pub fn info(device: &Device) -> Result<DeviceInfo> {
        let Device::Cuda(device) = device else { return Ok(cpu_info()) };
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
}
