//! The options of a server.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio_rustls::rustls::ServerConfig;

use super::receipt_key::ReceiptKey;

/// The options of a server, set by the flags of `inferno serve`.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The name of the model in requests and responses.
    pub model: String,
    /// The keys that clients may send. Without keys, every client has access.
    pub api_keys: Vec<String>,
    /// The origins of web pages that may read responses. `*` allows every origin.
    pub cors_origins: Vec<String>,
    /// Whether the server's own page may use it under any host name. Otherwise, only pages at a loopback address may.
    /// A web page can give its own host name the server's address, so this is safe only if every client has access.
    pub is_open: bool,
    /// The most sequences that run at once.
    pub max_sequences: usize,
    /// The most sequences that wait while `max_sequences` run.
    pub queue: usize,
    pub timeouts: Timeouts,
    /// The certificate and the private key. `None` serves plain HTTP.
    pub tls: Option<Arc<ServerConfig>>,
    pub record: RecordOptions,
    /// Whether `/metrics` also contains the names that vLLM uses.
    pub has_vllm_metrics: bool,
}

/// Which records of requests a server keeps.
#[derive(Clone, Debug, Default)]
pub struct RecordOptions {
    /// The most memory for the records of the last requests, in bytes. 0 keeps none.
    pub memory_bytes: usize,
    /// The folder to which all records are written.
    pub folder: Option<PathBuf>,
    /// The commit of the model, or a hash of the demo's files, to name in records.
    pub revision: Option<String>,
    /// Signs receipts. `None` gives none.
    pub receipt_key: Option<Arc<ReceiptKey>>,
}

/// The time limits of a server.
#[derive(Clone, Debug)]
pub struct Timeouts {
    /// The longest time to agree on TLS, to receive the headers of a request, or to wait for the next request of a connection.
    pub header: Duration,
    /// The longest time to receive the body of a request.
    pub body: Duration,
    /// The longest time that a request waits before its prefill starts.
    pub queue: Duration,
    /// The longest time in which a client may accept less than a few kilobytes of a response.
    pub write: Duration,
    /// The time between comments in a stream without events.
    pub ping: Duration,
    /// The time after the signal to shut down in which the server still accepts requests, but is no longer healthy.
    /// Routers notice the latter and stop sending requests.
    pub drain_delay: Duration,
    /// The longest time that running requests may take once the server accepts no more.
    pub drain: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            header: Duration::from_secs(10),
            body: Duration::from_secs(30),
            queue: Duration::from_secs(60),
            write: Duration::from_secs(30),
            ping: Duration::from_secs(15),
            drain_delay: Duration::ZERO,
            drain: Duration::from_secs(150),
        }
    }
}
