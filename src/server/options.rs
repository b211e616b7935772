//! The options of a server.

use std::sync::Arc;
use std::time::Duration;

use tokio_rustls::rustls::ServerConfig;

use super::records::RecordOptions;

/// The options of a server. `inferno serve` sets them from its arguments, the environment and the configuration file.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The name of the model in requests and responses.
    pub model: String,
    /// The valid API keys. Without keys, every client has access, except web pages whose origin is neither local,
    /// nor in `cors_origins`, nor allowed by `no_auth`.
    pub api_keys: Vec<String>,
    /// The origins of web pages that may use the API. `*` allows every origin.
    pub cors_origins: Vec<String>,
    /// Whether clients on other machines need no API key (`--no-auth`).
    /// If true, the chat page of this server has access under any host name. With DNS rebinding, any web page can pass
    /// as this chat page. If false, a server without API keys therefore accepts its chat page only under `localhost`,
    /// `127.0.0.1`, `[::1]` or an origin in `cors_origins`.
    pub no_auth: bool,
    /// The maximum number of sequences that run at once.
    pub max_sequences: usize,
    /// The maximum number of sequences that wait in the queue while `max_sequences` are running.
    pub max_waiting: usize,
    /// The maximum number of open connections, not counting spare ones that serve only health and metrics.
    pub max_connections: usize,
    pub timeouts: Timeouts,
    /// The TLS certificate and the private key. `None` for plain HTTP.
    pub tls: Option<Arc<ServerConfig>>,
    pub record: RecordOptions,
    /// Whether `/metrics` also lists metrics under the names that vLLM uses.
    pub has_vllm_metrics: bool,
}

/// The time limits of a server, and the interval of keep-alive messages.
#[derive(Clone, Debug)]
pub struct Timeouts {
    /// The time limit for a TLS handshake, for receiving the headers of a request,
    /// and for waiting for the next request on an idle connection.
    pub header: Duration,
    /// The time limit for the body of a request to arrive.
    pub body: Duration,
    /// The maximum time that a request waits before its prefill starts.
    pub queue: Duration,
    /// The time limit for a client to accept the next 4 KiB of a response, or all waiting bytes if there are fewer.
    pub write: Duration,
    /// The time between keep-alive messages while a stream has no events.
    pub ping: Duration,
    /// The drain delay: how long after the shutdown signal the server still accepts requests.
    /// During this delay, the server reports itself as unhealthy, so that routers stop sending requests.
    pub drain_delay: Duration,
    /// The drain timeout: how long the accepted requests may continue once the server rejects new requests.
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
