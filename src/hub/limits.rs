//! How long a server is waited for, how often it is asked again, and how much is asked for at once.

use std::time::Duration;

/// Times and amounts of downloads. The default is for people; tests are less patient.
#[derive(Clone, Debug)]
pub struct Limits {
    /// To open a connection.
    pub connect: Duration,
    /// For the head of an answer. HF_HUB_ETAG_TIMEOUT sets it.
    pub answer: Duration,
    /// Between two pieces of a body. HF_HUB_DOWNLOAD_TIMEOUT sets it.
    pub stall: Duration,
    /// Before the first retry; doubles with each more in a row.
    pub retry: Duration,
    /// Before any retry, also where a server asks for more patience (Retry-After).
    pub longest_retry: Duration,
    /// Failures in a row, without a byte gained, before a file is given up.
    pub tries: u32,
    /// The same for questions about a repository, before anything is fetched.
    pub question_tries: u32,
    /// Files, and parts of files, that are fetched at the same time.
    pub connections: usize,
    /// What one request asks for at most.
    pub part_bytes: u64,
    /// At most so much of a download is lost when the process is killed.
    pub save_every: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(20),
            answer: Duration::from_secs(60),
            stall: Duration::from_secs(30),
            retry: Duration::from_millis(500),
            longest_retry: Duration::from_secs(300),
            tries: 7,
            question_tries: 3,
            connections: 8,
            part_bytes: 128 << 20,
            save_every: Duration::from_secs(1),
        }
    }
}
