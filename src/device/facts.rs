//! What a measurement is to be read with: the GPU's driver, clocks and limits, as far as they can be told.

use std::process::Command;

use anyhow::Result;
use candle_core::Device;
use serde::Serialize;

/// What does not change while a program runs.
#[derive(Clone, Debug, Serialize)]
pub struct GpuFacts {
    pub multiprocessors: u32,
    /// The latest CUDA that the driver supports.
    pub cuda_version: String,
    /// As nvidia-smi names the GPU.
    #[serde(skip)]
    uuid: String,
}

/// What nvidia-smi tells at one moment.
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
    /// Of an open device; `None` for a CPU.
    pub fn of(device: &Device) -> Result<Option<Self>> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => with_cuda::facts(device).map(Some),
            _ => Ok(None),
        }
    }

    /// The state now. Without an nvidia-smi there is none, which is no error.
    pub fn state(&self) -> Option<GpuState> {
        let fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu";
        let query = format!("--query-gpu={fields}");
        let args = [query.as_str(), "--format=csv,noheader,nounits", "--id", &self.uuid];
        let output = Command::new("nvidia-smi").args(args).output().ok().filter(|output| output.status.success())?;
        GpuState::read(&String::from_utf8_lossy(&output.stdout))
    }
}

/// The driver's version and the GPUs' names, as nvidia-smi tells them; `None` without it, or if it finds no GPU.
pub fn nvidia_smi() -> Option<(String, Vec<String>)> {
    let args = ["--query-gpu=driver_version,name", "--format=csv,noheader"];
    let output = Command::new("nvidia-smi").args(args).output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once(", ")).collect();
    let driver = lines.first()?.0.to_string();
    Some((driver, lines.into_iter().map(|(_, name)| name.to_string()).collect()))
}

impl GpuState {
    /// One line of nvidia-smi's, fields in the order asked for above. What a GPU does not tell stands as `[N/A]`.
    fn read(line: &str) -> Option<Self> {
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

#[cfg(feature = "cuda")]
mod with_cuda {
    use anyhow::Result;
    use candle_core::cuda_backend::CudaDevice;
    use candle_core::cuda_backend::cudarc::driver::sys;

    use super::GpuFacts;

    pub fn facts(device: &CudaDevice) -> Result<GpuFacts> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let mut version = 0;
        // SAFETY: writes the one number that it is given.
        unsafe { sys::cuDriverGetVersion(&mut version).result()? };
        let multiprocessors = context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let hex: Vec<String> = context.uuid()?.bytes.iter().map(|&byte| format!("{:02x}", byte as u8)).collect();
        let group = |range: std::ops::Range<usize>| hex[range].concat();
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
    fn a_line_of_nvidia_smi_is_read() {
        let state = GpuState::read("580.159.04, 345, 1980, 3201, 700.00, 31\n").unwrap();
        assert_eq!(state.driver_version, "580.159.04");
        assert_eq!((state.sm_clock_mhz, state.sm_clock_max_mhz), (Some(345.0), Some(1980.0)));
        assert_eq!((state.memory_clock_mhz, state.power_limit_w), (Some(3201.0), Some(700.0)));
        assert_eq!(state.temperature_c, Some(31.0));
        assert_eq!(GpuState::read("580.1, [N/A], [N/A], 5, [N/A], 3").unwrap().power_limit_w, None);
    }
}
