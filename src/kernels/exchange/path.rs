//! The choice of the path on which GPUs exchange data.

use crate::text::quote;

/// The path on which GPU kernels exchange data with other GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangePath {
    /// Each GPU writes to the memory of the other GPUs, over NVLink or PCIe.
    Direct,
    /// Each GPU writes to host memory that the other GPUs read. The GPUs need no access to each other's memory.
    HostMemory,
}

impl ExchangePath {
    /// Returns the paths to try, in order. The environment variable `INFERNO_EXCHANGE` can restrict them:
    /// `host` allows only host memory, and `copy` allows no path, so that memory copies replace the exchange kernels.
    /// An empty value counts as unset. Fails if the variable has any other value.
    pub fn from_environment() -> Result<&'static [Self], String> {
        let value = std::env::var_os("INFERNO_EXCHANGE").unwrap_or_default();
        match &*value.to_string_lossy() {
            "" => Ok(&[Self::Direct, Self::HostMemory]),
            "host" => Ok(&[Self::HostMemory]),
            "copy" => Ok(&[]),
            other => Err(format!(
                "cannot exchange data between GPUs: INFERNO_EXCHANGE is {}; use host or copy",
                quote(other)
            )),
        }
    }
}
