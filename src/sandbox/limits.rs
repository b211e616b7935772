//! The memory and CPU limits of a request. The sandbox process limits itself before it answers the request.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage, setrlimit};

use super::protocol::SandboxRequest;

/// The stack size, in bytes, of the thread that serves requests in the sandbox process.
pub const STACK_BYTES: usize = 64 << 20;

/// The page size on x86-64 Linux, in bytes. With larger pages, the result of `data_bytes` is too small,
/// and memory limits are therefore stricter than [`Budget`] states.
const PAGE_BYTES: u64 = 4096;

/// The memory and CPU time that one request to a sandbox process may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// The memory that the request may use in addition to the sandbox process's current memory, in bytes.
    pub memory_bytes: u64,
    /// The CPU time that the request may use, summed over all threads, in seconds.
    pub cpu_s: u64,
}

impl Budget {
    /// Returns the budget of a request with the given body.
    ///
    /// As measured in November 2026, loading the 28 MB tokenizer.json of gpt-oss takes 140 MB of memory
    /// and 0.5 s of CPU time. Encoding takes about 120 bytes of memory and 0.5 µs of CPU time per byte of text.
    /// Budgets are 2 to 16 times the measured amounts, plus a constant for encoding and rendering.
    pub fn of(request: &SandboxRequest, body: &[u8]) -> Self {
        let text_bytes = request.text_bytes(body) as u64;
        match request {
            SandboxRequest::Load => Self { memory_bytes: 1 << 30, cpu_s: 8 },
            SandboxRequest::Encode(_) | SandboxRequest::Render(..) => {
                Self { memory_bytes: (256 << 20) + 256 * text_bytes, cpu_s: 3 + text_bytes / 500_000 }
            }
        }
    }

    /// Returns how long inferno waits for the sandbox process's response.
    ///
    /// The wait is much longer than the CPU time limit, because other processes may slow the sandbox process down.
    /// On an idle machine, the CPU time limit ends a runaway sandbox process first.
    pub fn wait(self) -> Duration {
        Duration::from_secs(30 + 10 * self.cpu_s)
    }

    /// Applies the budget to this process. Beyond the budget, SIGXCPU or a failed allocation ends the process.
    pub fn enforce(self) -> Result<()> {
        let usage = getrusage(UsageWho::RUSAGE_SELF)?;
        let used_s = usage.user_time().tv_sec() + usage.system_time().tv_sec() + 1;
        set_soft_limit(Resource::RLIMIT_CPU, used_s.unsigned_abs() + self.cpu_s)?;
        set_soft_limit(Resource::RLIMIT_DATA, data_bytes()? + self.memory_bytes)
    }
}

/// Sets only the soft resource limit, so that the next request can raise the limit.
fn set_soft_limit(resource: Resource, limit: u64) -> Result<()> {
    let (_, hard) = getrlimit(resource)?;
    setrlimit(resource, limit.min(hard), hard).with_context(|| format!("cannot limit {resource:?}"))
}

/// Turns off core dumps for this process. The signals that end the process at a limit would otherwise dump core.
pub fn disable_core_dumps() -> Result<()> {
    set_soft_limit(Resource::RLIMIT_CORE, 0)
}

/// Returns the size in bytes of this process's private writable mappings, which RLIMIT_DATA limits.
/// The result includes the main thread's stack, which RLIMIT_DATA does not count.
fn data_bytes() -> Result<u64> {
    let statm = fs::read_to_string("/proc/self/statm").context("cannot read /proc/self/statm")?;
    let pages: u64 = statm.split(' ').nth(5).and_then(|pages| pages.parse().ok()).context("cannot parse statm")?;
    Ok(pages * PAGE_BYTES)
}
