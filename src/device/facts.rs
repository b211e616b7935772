//! GPU properties for `inferno bench` and `inferno doctor`, such as the driver version, clocks and power limit.

use std::process::Command;

use anyhow::Result;
use candle_core::Device;
use serde::Serialize;

/// GPU properties that stay constant while the program runs.
#[derive(Clone, Debug, Serialize)]
pub struct GpuFacts {
    pub multiprocessors: u32,
    /// The latest CUDA version that the driver supports.
    pub cuda_version: String,
    /// The GPU's UUID in the format of nvidia-smi.
    #[serde(skip)]
    uuid: String,
}

/// The GPU state that nvidia-smi reports at one moment.
#[derive(Clone, Debug, Serialize)]
pub struct GpuState {
    pub driver_version: String,
    pub sm_clock_mhz: Option<f64>,
    pub sm_clock_max_mhz: Option<f64>,
    pub memory_clock_mhz: Option<f64>,
    pub power_limit_w: Option<f64>,
    pub temperature_c: Option<f64>,
}

impl GpuFacts {
    /// Reads the properties of an open device. Returns `None` for a CPU.
    pub fn for_device(device: &Device) -> Result<Option<Self>> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => with_cuda::facts(device).map(Some),
            _ => Ok(None),
        }
    }

    /// Reads the current state from nvidia-smi. Returns `None` if nvidia-smi is missing or fails.
    pub fn state(&self) -> Option<GpuState> {
        let query = format!("--query-gpu={}", GpuState::QUERY_FIELDS);
        let text = run_nvidia_smi(&[query.as_str(), "--format=csv,noheader,nounits", "--id", &self.uuid])?;
        GpuState::parse(&text)
    }
}

impl GpuState {
    /// The fields to request from nvidia-smi, in the order of the fields of [`GpuState`].
    const QUERY_FIELDS: &str = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu";

    /// Parses a line of nvidia-smi output with the fields of [`Self::QUERY_FIELDS`].
    /// A field that is not a number, such as `[N/A]`, becomes `None`.
    fn parse(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.trim().split(',').map(str::trim).collect();
        let [driver, numbers @ ..] = fields.as_slice() else { return None };
        let number = |index: usize| numbers.get(index).and_then(|field| field.parse().ok());
        Some(Self {
            driver_version: driver.to_string(),
            sm_clock_mhz: number(0),
            sm_clock_max_mhz: number(1),
            memory_clock_mhz: number(2),
            power_limit_w: number(3),
            temperature_c: number(4),
        })
    }
}

/// The driver and the GPUs that nvidia-smi lists.
pub struct NvidiaSmiList {
    pub driver_version: String,
    /// The names of the GPUs, at least one.
    pub gpu_names: Vec<String>,
}

impl NvidiaSmiList {
    /// Runs nvidia-smi. Returns `None` if nvidia-smi is missing, fails or finds no GPU.
    pub fn read() -> Option<Self> {
        Self::parse(&run_nvidia_smi(&["--query-gpu=driver_version,name", "--format=csv,noheader"])?)
    }

    /// Parses the output of nvidia-smi: one line per GPU, with the driver version and the name of the GPU.
    fn parse(text: &str) -> Option<Self> {
        let lines = || text.lines().filter_map(|line| line.split_once(", "));
        let (driver_version, _) = lines().next()?;
        let gpu_names = lines().map(|(_, name)| name.to_string()).collect();
        Some(Self { driver_version: driver_version.to_string(), gpu_names })
    }
}

fn run_nvidia_smi(args: &[&str]) -> Option<String> {
    let output = Command::new("nvidia-smi").args(args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(feature = "cuda")]
mod with_cuda {
    use std::ops::Range;

    use anyhow::Result;
    use candle_core::cuda_backend::CudaDevice;
    use candle_core::cuda_backend::cudarc::driver::sys;

    use super::GpuFacts;

    pub fn facts(device: &CudaDevice) -> Result<GpuFacts> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let mut version = 0;
        // SAFETY: the call writes one integer to the pointer.
        unsafe { sys::cuDriverGetVersion(&mut version).result()? };
        let multiprocessors = context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let hex: Vec<String> = context.uuid()?.bytes.iter().map(|&byte| format!("{:02x}", byte as u8)).collect();
        let group = |range: Range<usize>| hex[range].concat();
        Ok(GpuFacts {
            multiprocessors: multiprocessors as u32,
            cuda_version: format!("{}.{}", version / 1000, version % 1000 / 10),
            uuid: format!("GPU-{}-{}-{}-{}-{}", group(0..4), group(4..6), group(6..8), group(8..10), group(10..16)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{GpuState, NvidiaSmiList};

    #[test]
    fn nvidia_smi_line_is_parsed() {
        let state = GpuState::parse("580.159.04, 345, 1980, 3201, 700.00, 31\n").unwrap();
        assert_eq!(state.driver_version, "580.159.04");
        assert_eq!((state.sm_clock_mhz, state.sm_clock_max_mhz), (Some(345.0), Some(1980.0)));
        assert_eq!((state.memory_clock_mhz, state.power_limit_w), (Some(3201.0), Some(700.0)));
        assert_eq!(state.temperature_c, Some(31.0));
        assert_eq!(GpuState::parse("580.1, [N/A], [N/A], 5, [N/A], 3").unwrap().power_limit_w, None);
    }

    #[test]
    fn nvidia_smi_list_is_parsed() {
        let list = NvidiaSmiList::parse("580.1, NVIDIA H200\n580.1, NVIDIA L4\n").unwrap();
        assert_eq!(list.driver_version, "580.1");
        assert_eq!(list.gpu_names, ["NVIDIA H200", "NVIDIA L4"]);
        assert!(NvidiaSmiList::parse("No devices were found\n").is_none());
    }
}
