//! Defines the [`Limits`] for the connection to a hub, and their default values.

use std::time::Duration;

/// The maximum number of parallel requests of a download, even if [`Limits::connections`] is larger.
pub(super) const MAX_CONNECTIONS: usize = 64;

/// Timeouts, retry limits, and the number and size of parallel requests to a hub.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The maximum time to open a connection, without the DNS lookup of the host.
    pub connect_timeout: Duration,
    /// The maximum time to receive the headers of a response. HF_HUB_ETAG_TIMEOUT sets this value.
    ///
    /// The limit for the body of a metadata response is `response_timeout` plus `TIME_PER_BYTE` (`remote/mod.rs`) for
    /// each byte, but at most five times `response_timeout`.
    pub response_timeout: Duration,
    /// The maximum wait for the next bytes of a response, headers included, while a file is downloaded.
    /// HF_HUB_DOWNLOAD_TIMEOUT sets this value.
    pub stall_timeout: Duration,
    /// The maximum wait before the first retry. The maximum doubles with each consecutive failure,
    /// up to `MAX_BACKOFF` (`remote/retry.rs`).
    ///
    /// The actual wait before a retry is a random time between half of the maximum and the maximum,
    /// or the wait that the server asks for with Retry-After, whichever is longer.
    pub first_wait: Duration,
    /// The longest wait that a server may ask for with Retry-After. If a server asks for more, inferno does not retry.
    pub max_wait: Duration,
    /// The maximum number of consecutive retries for a range of a file.
    /// The count starts again at 0 whenever `min_progress` more bytes of the range have arrived.
    pub max_failures: u32,
    /// The maximum number of retries of a metadata request, such as a request for the list of files.
    pub max_metadata_failures: u32,
    /// The maximum number of parallel requests of a download.
    /// 0 counts as 1, and values above `MAX_CONNECTIONS` count as `MAX_CONNECTIONS`.
    pub connections: usize,
    /// The maximum size of a range of a file, in bytes. Each range has its own request.
    /// If a server ignores range requests, the whole file is one range, whatever its size.
    pub range_bytes: u64,
    /// The minimum time between two saves of the record of which bytes of a file have arrived.
    /// If the process is killed, the bytes that arrived after the last save must be fetched again.
    pub save_interval: Duration,
}

impl Limits {
    /// Returns the number of bytes that must arrive to reset the count of consecutive failures.
    /// The result is 1% of the file, but at least 4 KiB and at most 1 MiB.
    ///
    /// The bytes may arrive over several attempts, so that downloads over slow or unstable connections can finish.
    /// If a server sends only one byte per attempt, the download fails before so many bytes have arrived.
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
            range_bytes: 128 << 20,
            save_interval: Duration::from_secs(1),
        }
    }
}
