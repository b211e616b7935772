//! The paths on which GPUs can exchange data.

/// The path on which GPU kernels exchange data with other GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangePath {
    /// Each GPU writes to the memory of the other GPUs, over NVLink or PCIe.
    Direct,
    /// Each GPU writes to host memory that the other GPUs read. This path needs no access to the memory of other GPUs.
    HostMemory,
}

impl ExchangePath {
    /// Returns the paths to try, in order. The environment variable `INFERNO_EXCHANGE` can restrict them:
    /// `host` allows only host memory, and `copy` allows no path, so that the host copies the data.
    /// An empty value counts as unset. Fails if the variable has any other value.
    pub fn from_environment() -> Result<&'static [Self], String> {
        match std::env::var("INFERNO_EXCHANGE").as_deref() {
            Err(_) | Ok("") => Ok(&[Self::Direct, Self::HostMemory]),
            Ok("host") => Ok(&[Self::HostMemory]),
            Ok("copy") => Ok(&[]),
            Ok(other) => Err(format!("INFERNO_EXCHANGE is '{other}'; use host or copy")),
        }
    }
}
