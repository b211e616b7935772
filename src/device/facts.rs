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
        let fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu";
        let query = format!("--query-gpu={fields}");
        let text = run_nvidia_smi(&[query.as_str(), "--format=csv,noheader,nounits", "--id", &self.uuid])?;
        GpuState::parse(&text)
    }
}

impl GpuState {
    /// Parses a line of nvidia-smi output with the fields that [`GpuFacts::state`] requests.
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

/// Returns the driver version and the GPU names, or `None` if nvidia-smi is missing, fails or finds no GPU.
pub fn nvidia_smi_gpus() -> Option<(String, Vec<String>)> {
    let text = run_nvidia_smi(&["--query-gpu=driver_version,name", "--format=csv,noheader"])?;
    let lines: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once(", ")).collect();
    let driver = lines.first()?.0.to_string();
    Some((driver, lines.into_iter().map(|(_, name)| name.to_string()).collect()))
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
    use super::GpuState;

    #[test]
    fn nvidia_smi_line_is_parsed() {
        let state = GpuState::parse("580.159.04, 345, 1980, 3201, 700.00, 31\n").unwrap();
        assert_eq!(state.driver_version, "580.159.04");
        assert_eq!((state.sm_clock_mhz, state.sm_clock_max_mhz), (Some(345.0), Some(1980.0)));
        assert_eq!((state.memory_clock_mhz, state.power_limit_w), (Some(3201.0), Some(700.0)));
        assert_eq!(state.temperature_c, Some(31.0));
        assert_eq!(GpuState::parse("580.1, [N/A], [N/A], 5, [N/A], 3").unwrap().power_limit_w, None);
    }
}
