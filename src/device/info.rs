//! A device's name, compute capability and memory.

use std::fmt;

use crate::text::counted;

/// The properties of a device that [`info`](super::info()) reads.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    pub name: String,
    /// Compute capability as (major, minor). `None` for a CPU.
    pub compute_capability: Option<(u32, u32)>,
    pub free_bytes: u64,
    /// All memory of the device, used and free. 0 if unknown.
    pub total_bytes: u64,
}

impl DeviceInfo {
    /// Describes the CPU: the number of threads that the process can use, and the system memory if /proc/meminfo exists.
    pub fn cpu() -> Self {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let bytes = |field: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(field));
            line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) * 1024
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            name: format!("CPU ({})", counted(threads, "thread")),
            compute_capability: None,
            free_bytes: bytes("MemAvailable:"),
            total_bytes: bytes("MemTotal:"),
        }
    }
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
