//! Parses the user's choice of devices, and opens CPUs and GPUs.
//!
//! inferno targets NVIDIA GPUs. If the chosen GPU is missing, [`open`] fails and suggests a next step.
//! It never falls back to the CPU, which is an explicit choice for development, tests and the demo model.

#[cfg(feature = "cuda")]
mod capture;
#[cfg(feature = "cuda")]
mod cuda;
mod facts;
mod info;
#[cfg(feature = "cuda")]
mod libraries;
#[cfg(any(feature = "cuda", test))]
mod reused_memory;
#[cfg(feature = "cuda")]
mod stream_memory;

use std::str::FromStr;

use anyhow::Result;
use candle_core::{DType, Device};

#[cfg(feature = "cuda")]
pub use capture::capture_lock;
#[cfg(feature = "cuda")]
pub use cuda::{gpu_count, info, info_after_trim};
pub use facts::{GpuFacts, GpuState, NvidiaSmiList};
pub use info::DeviceInfo;

/// The CPU or a GPU, for example as one entry of `--device`.
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
            Some(("cuda", ordinal)) => ordinal
                .parse()
                .map(DeviceChoice::Cuda)
                .map_err(|_| format!("'{ordinal}' is not a GPU number; try cuda:0")),
            _ => Err(format!("unknown device '{text}'; use cuda, cuda:N, cuda:N,M or cpu")),
        }
    }
}

/// How several devices divide a model. The value of `--split`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Split {
    /// Every device holds a part of each layer and of the output head.
    /// This is the faster split if the devices have a fast connection.
    #[default]
    Tensor,
    /// Every device holds whole layers and a part of the output head.
    /// The devices run their layers one after another, so a step is hardly faster than on one device.
    /// This split suits devices with slow connections or with different amounts of memory.
    Layers,
}

/// The devices that run one model together, one per rank. The value of `--device` or `--gpus`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Devices(Vec<DeviceChoice>);

impl Devices {
    /// Returns the first `count` GPUs. The caller passes a `count` from 1 to [`MAX_RANKS`].
    pub fn gpus(count: usize) -> Self {
        Self((0..count).map(DeviceChoice::Cuda).collect())
    }

    /// Returns the device of the first rank.
    pub fn first(&self) -> DeviceChoice {
        self.0[0]
    }

    /// Returns the number of ranks. Several ranks can run on the same device, for example with `cpu,cpu`.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = DeviceChoice> {
        self.0.iter().copied()
    }

    /// Returns the largest number of ranks that run on the same device, where they share the memory.
    pub fn max_ranks_per_device(&self) -> usize {
        self.0.iter().map(|device| self.0.iter().filter(|other| *other == device).count()).max().unwrap_or(1)
    }
}

impl Default for Devices {
    /// Returns the first GPU.
    fn default() -> Self {
        DeviceChoice::default().into()
    }
}

impl From<DeviceChoice> for Devices {
    fn from(device: DeviceChoice) -> Self {
        Self(vec![device])
    }
}

impl FromStr for Devices {
    type Err = String;

    /// Parses a list such as `cuda:0,1`, `cuda:0,cuda:1`, or `cpu,cpu` for two ranks on the CPU.
    fn from_str(text: &str) -> Result<Self, String> {
        let parse = |part: &str| match part.parse::<usize>() {
            Ok(ordinal) if text.starts_with("cuda") => Ok(DeviceChoice::Cuda(ordinal)),
            _ => part.parse(),
        };
        let devices = text.split(',').map(parse).collect::<Result<Vec<_>, String>>()?;
        if devices.contains(&DeviceChoice::Cpu) && devices.iter().any(|device| *device != DeviceChoice::Cpu) {
            return Err("a model runs on GPUs or on the CPU, not on both".into());
        }
        if devices.len() > MAX_RANKS {
            return Err(format!("a model can use at most {MAX_RANKS} devices"));
        }
        // Replace `cuda` with `cuda:0`, so that `max_ranks_per_device` counts both as one GPU.
        let named = |device| if device == DeviceChoice::FirstCuda { DeviceChoice::Cuda(0) } else { device };
        Ok(match devices.as_slice() {
            [device] => (*device).into(),
            _ => Self(devices.into_iter().map(named).collect()),
        })
    }
}

/// The maximum number of ranks that can run one model together.
pub const MAX_RANKS: usize = 8;

/// Opens a device. Fails for a GPU that does not exist or cannot be used.
/// A build without GPU support opens only the CPU.
///
/// On a GPU, turns off cudarc's event tracking, because candle uses only one stream.
/// `kernels::upload` copies on a second stream and records its own events to order the copies.
pub fn open(choice: DeviceChoice) -> Result<Device> {
    match choice {
        DeviceChoice::Cpu => Ok(Device::Cpu),
        DeviceChoice::FirstCuda => open_cuda(0),
        DeviceChoice::Cuda(ordinal) => open_cuda(ordinal),
    }
}

#[cfg(feature = "cuda")]
fn open_cuda(ordinal: usize) -> Result<Device> {
    cuda::open(ordinal)
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_: usize) -> Result<Device> {
    let next = "build inferno with GPU support: cargo install --locked --path . --features cuda";
    Err(crate::error::Error::no_gpu("this build of inferno has no GPU support", next).into())
}

/// Returns whether an operation failed because the GPU has too little free memory.
///
/// Searches the error message for `OUT_OF_MEMORY`, as in the driver's `CUDA_ERROR_OUT_OF_MEMORY`.
/// anyhow cannot downcast to the driver's error, because candle wraps that error in transparent errors,
/// whose `source` skips the wrapped error.
pub fn is_out_of_memory(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains("OUT_OF_MEMORY")
}

/// Returns the default compute dtype: bf16 on a GPU, f32 on a CPU.
pub fn default_dtype(device: &Device) -> DType {
    if device.is_cuda() { DType::BF16 } else { DType::F32 }
}

/// Returns the target compute capability of this build, for which the kernels contain PTX.
/// Returns `None` in a build without GPU support.
pub fn built_compute_capability() -> Option<(u32, u32)> {
    let number: u32 = option_env!("INFERNO_COMPUTE_CAP")?.parse().ok()?;
    Some((number / 10, number % 10))
}

/// Returns whether this build contains machine code for GPUs of this compute capability.
pub fn has_machine_code((major, minor): (u32, u32)) -> bool {
    let built = option_env!("INFERNO_NATIVE_CAPS").unwrap_or_default();
    built.split(',').any(|capability| capability == format!("{major}{minor}"))
}

/// Returns 0, because a build without the feature `cuda` cannot use GPUs.
#[cfg(not(feature = "cuda"))]
pub fn gpu_count() -> usize {
    0
}

/// Describes the CPU, the only device of a build without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub fn info(_: &Device) -> Result<DeviceInfo> {
    Ok(DeviceInfo::cpu())
}

/// Returns [`info()`]. A build without the feature `cuda` has no GPU memory to release.
#[cfg(not(feature = "cuda"))]
pub fn info_after_trim(device: &Device) -> Result<DeviceInfo> {
    info(device)
}
