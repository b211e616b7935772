//! The limits for the connection to a hub, and their default values.

use std::time::Duration;

/// Timeouts, retry limits and request sizes for the connection to a hub.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The maximum time to open a connection.
    pub connect_timeout: Duration,
    /// The maximum wait for the headers of a response. Set by HF_HUB_ETAG_TIMEOUT.
    /// The time limit for the body of a metadata response is this value plus some time for each byte.
    pub response_timeout: Duration,
    /// The maximum pause between two reads of a body. Set by HF_HUB_DOWNLOAD_TIMEOUT.
    pub stall_timeout: Duration,
    /// The wait before the first retry. Each consecutive failure doubles the wait, up to 15 seconds.
    pub first_wait: Duration,
    /// The maximum wait before a retry. The request fails if the server asks for a longer wait with Retry-After.
    pub max_wait: Duration,
    /// The maximum number of consecutive retries for a part of a file. Sufficient progress resets the count.
    pub max_failures: u32,
    /// The maximum number of retries for a metadata request, such as a request for the file list.
    pub max_metadata_failures: u32,
    /// The maximum number of parallel requests for files.
    pub connections: usize,
    /// The maximum size of a part of a file, in bytes. Each part has its own request.
    pub part_bytes: u64,
    /// The minimum time between two saves of a file's progress.
    ///
    /// A killed process loses only the bytes that arrived since the last save.
    pub save_interval: Duration,
}

impl Limits {
    /// Returns the number of bytes that must arrive to reset the count of consecutive failures.
    ///
    /// The number is 1% of the file size, but at least 4 KiB and at most 1 MiB.
    /// A slow connection may receive these bytes over several attempts.
    /// If a server sends only one byte per attempt, the count reaches its maximum before that many bytes arrive.
    pub(super) fn min_progress(file_bytes: u64) -> u64 {
        (file_bytes / 100).clamp(4 << 10, 1 << 20)
    }
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
