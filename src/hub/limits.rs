//! Timeouts, retries and request sizes of the connection to a hub.

use std::time::Duration;

/// How long a server is waited for, how often a request is retried, and how much one request asks for.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The longest wait for a connection.
    pub connect_timeout: Duration,
    /// The longest wait for the headers of a response. HF_HUB_ETAG_TIMEOUT sets it.
    pub response_timeout: Duration,
    /// The longest pause between two reads of a body. HF_HUB_DOWNLOAD_TIMEOUT sets it.
    pub stall_timeout: Duration,
    /// The wait before the first retry. Each further failure in a row doubles it.
    pub first_wait: Duration,
    /// The longest wait before any retry. A server that asks for more (Retry-After) is given up.
    pub max_wait: Duration,
    /// Failures in a row, without a byte gained, before a file is given up.
    pub max_failures: u32,
    /// Failures in a row before a metadata request, such as the file list, is given up.
    pub max_metadata_failures: u32,
    /// Requests for file contents that run at the same time.
    pub connections: usize,
    /// The most bytes that one request asks for.
    pub part_bytes: u64,
    /// How often progress is saved. A killed process loses at most what arrived since then.
    pub save_interval: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(20),
            response_timeout: Duration::from_secs(60),
            stall_timeout: Duration::from_secs(30),
            first_wait: Duration::from_millis(500),
            max_wait: Duration::from_secs(300),
            max_failures: 7,
            max_metadata_failures: 3,
            connections: 8,
            part_bytes: 128 << 20,
            save_interval: Duration::from_secs(1),
        }
    }
}
