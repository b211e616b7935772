//! What one request to a worker may use. The worker sets these limits for itself before it touches untrusted data.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage, setrlimit};

use super::protocol::Request;

/// The stack of the thread that serves requests.
pub const STACK_BYTES: usize = 64 << 20;

/// The page size of x86-64 Linux. On a system with larger pages, the limits are lower than stated.
const PAGE_BYTES: u64 = 4096;

/// What one request may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Memory in addition to what the worker already uses, in bytes.
    pub memory_bytes: u64,
    /// Processor time of all threads, in seconds.
    pub cpu_s: u64,
}

impl Budget {
    /// Returns the budget of a request with this body.
    ///
    /// The 28 MB tokenizer.json of gpt-oss needs 0.3 GB and 0.6 s. A text needs about 120 bytes and 0.5 µs for each of its
    /// bytes. The budgets are several times as large.
    pub fn of(request: &Request, body: &[u8]) -> Self {
        let text_bytes = request.text_bytes(body) as u64;
        match request {
            Request::Load => Self { memory_bytes: 1 << 30, cpu_s: 8 },
            Request::Encode(_) | Request::Render(..) => {
                Self { memory_bytes: (256 << 20) + 256 * text_bytes, cpu_s: 3 + text_bytes / 500_000 }
            }
        }
    }

    /// The time after which inferno stops waiting for a worker. It is long because other processes may be busy:
    /// the limit on processor time ends a worker first.
    pub fn wait(self) -> Duration {
        Duration::from_secs(30 + 10 * self.cpu_s)
    }

    /// Limits this process to the budget. A process that exceeds it receives SIGXCPU or fails to allocate, which aborts it.
    pub fn enforce(self) -> Result<()> {
        let usage = getrusage(UsageWho::RUSAGE_SELF)?;
        let used_s = usage.user_time().tv_sec() + usage.system_time().tv_sec() + 1;
        set_soft_limit(Resource::RLIMIT_CPU, used_s.unsigned_abs() + self.cpu_s)?;
        set_soft_limit(Resource::RLIMIT_DATA, data_bytes()? + self.memory_bytes)
    }
}

/// Sets the soft limit, so that the next request can raise it again.
fn set_soft_limit(resource: Resource, limit: u64) -> Result<()> {
    let (_, hard) = getrlimit(resource)?;
    setrlimit(resource, limit.min(hard), hard).with_context(|| format!("cannot limit {resource:?}"))
}

/// Turns off core dumps for this process.
pub fn disable_core_dumps() -> Result<()> {
    set_soft_limit(Resource::RLIMIT_CORE, 0)
}

/// Returns the writable private memory of this process in bytes, which is what RLIMIT_DATA limits.
fn data_bytes() -> Result<u64> {
    let statm = fs::read_to_string("/proc/self/statm").context("cannot read /proc/self/statm")?;
    let pages: u64 = statm.split(' ').nth(5).and_then(|pages| pages.parse().ok()).context("cannot parse statm")?;
    Ok(pages * PAGE_BYTES)
}
