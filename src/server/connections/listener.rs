//! Accepts connections, and closes them when the server shuts down.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream, lookup_host};
use tokio_rustls::TlsAcceptor;

use super::limit::OpenConnection;
use super::parse_error::ParseErrorStream;
use super::write_limit::WriteLimit;
use crate::error::Error;
use crate::server::router::{router, spare_router};
use crate::server::state::ServerState;

/// The listen backlog: how many connections may wait to be accepted. The operating system may lower this number.
const BACKLOG: u32 = 4096;

/// The requested size of the send buffer of each connection, in bytes.
/// If a client stops reading, a small buffer is soon full, so that the write timeout starts early.
const SEND_BUFFER_BYTES: u32 = 128 << 10;

/// The maximum size of hyper's read buffer and of its write buffer, in bytes.
/// The headers of a request must fit in the read buffer.
const BUFFER_BYTES: usize = 64 << 10;

/// The maximum header timeout on a spare connection. The header timeout also limits the TLS handshake.
const SPARE_HEADER_TIMEOUT: Duration = Duration::from_secs(1);

/// The pause after a failure to accept a connection, for example because too many files are open.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The time limit for each of the last two steps of a shutdown: ending the requests that exceed the drain timeout,
/// and sending the last responses.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The time limit that replaces the drain timeout and [`CLOSE_TIMEOUT`] after an engine failure.
/// The limit is short, so that a supervisor can restart the server soon.
const FAILED_CLOSE_TIMEOUT: Duration = Duration::from_millis(250);

/// Listens on a TCP port of the first address that `host` resolves to. Port 0 selects a free port.
pub async fn bind(host: &str, port: u16) -> Result<TcpListener> {
    let what = || format!("cannot listen on {host}:{port}");
    let mut addresses = lookup_host((host, port)).await.with_context(what)?;
    let address: SocketAddr = addresses.next().ok_or_else(|| anyhow!("{}: the host has no address", what()))?;
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }.with_context(what)?;
    // Allow a restarted server to use the port while old connections are still closing.
    // On Windows, address reuse would let two programs share the port.
    #[cfg(unix)]
    socket.set_reuseaddr(true).with_context(what)?;
    socket.set_send_buffer_size(SEND_BUFFER_BYTES).with_context(what)?;
    socket.bind(address).with_context(what)?;
    socket.listen(BACKLOG).with_context(what)
}

/// Serves connections until `shutdown` resolves, and then drains the server. Fails if the engine stops or a GPU fails.
///
/// During the drain delay, the server reports itself as unhealthy, but still accepts requests.
/// Then, the server rejects new requests for answers. Requests in progress may continue until the drain timeout.
pub async fn serve(server: Arc<ServerState>, listener: TcpListener, shutdown: impl Future<Output = ()>) -> Result<()> {
    let connections = Arc::new(GracefulShutdown::new());
    let accepting = tokio::spawn(accept(server.clone(), listener, connections.clone()));
    let mut shutdown = pin!(shutdown);
    let mut failed = pin!(server.wait_for_failure());
    let ends = |context: &mut Context<'_>| {
        let is_ending = shutdown.as_mut().poll(context).is_ready() || failed.as_mut().poll(context).is_ready();
        if is_ending { Poll::Ready(()) } else { Poll::Pending }
    };
    std::future::poll_fn(ends).await;
    let timeouts = &server.options.timeouts;
    if server.engine().is_some() && !server.has_failed() && !timeouts.drain_delay.is_zero() {
        server.leave();
        tokio::time::sleep(timeouts.drain_delay).await;
    }
    server.drain();
    // If the engine has stopped, all requests have failed, and only their error responses remain to be sent.
    let (drain_time, close_time) = if server.has_failed() {
        (FAILED_CLOSE_TIMEOUT, FAILED_CLOSE_TIMEOUT)
    } else {
        (timeouts.drain, CLOSE_TIMEOUT)
    };
    let is_late = tokio::time::timeout(drain_time, server.admission.wait_until_idle()).await.is_err();
    if is_late {
        // End the requests before closing connections, so that streaming clients receive an error event.
        server.end();
        let _ = tokio::time::timeout(close_time, server.admission.wait_until_idle()).await;
    }
    accepting.abort();
    let _ = accepting.await;
    if let Ok(connections) = Arc::try_unwrap(connections) {
        // Idle connections close immediately. Other connections close after the last bytes of their responses.
        let _ = tokio::time::timeout(close_time, connections.shutdown()).await;
    }
    if !server.has_failed() {
        return Ok(());
    }
    match server.failure() {
        Some(error) => bail!(Error::GpuFailed(format!("{error}\n  start the server again"))),
        None => bail!("cannot answer requests: the engine stopped; the log says why\n  start the server again"),
    }
}

/// Accepts connections until its task is aborted.
async fn accept(server: Arc<ServerState>, listener: TcpListener, connections: Arc<GracefulShutdown>) {
    let (router, spare_router) = (router(&server), spare_router(&server));
    let metrics = &server.metrics;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let open = OpenConnection::new(&metrics.http.connections, server.options.max_connections);
                if open.as_ref().is_none_or(|open| open.is_spare) {
                    metrics.http.refused_connections.inc();
                }
                let Some(open) = open else { continue };
                let router = if open.is_spare { &spare_router } else { &router };
                tokio::spawn(connect(stream, router.clone(), server.clone(), connections.watcher(), open));
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Performs the TLS handshake if the server has a certificate, and serves the requests of the connection.
async fn connect(stream: TcpStream, router: Router, server: Arc<ServerState>, watcher: Watcher, open: OpenConnection) {
    let timeouts = &server.options.timeouts;
    let header_time = if open.is_spare { timeouts.header.min(SPARE_HEADER_TIMEOUT) } else { timeouts.header };
    // Disable Nagle's algorithm, which would delay small packets such as the events of a stream.
    let _ = stream.set_nodelay(true);
    let stream = WriteLimit::new(stream, timeouts.write);
    let Some(tls) = &server.options.tls else {
        return serve_requests(stream, router, &server, header_time, watcher).await;
    };
    match tokio::time::timeout(header_time, TlsAcceptor::from(tls.clone()).accept(stream)).await {
        Ok(Ok(stream)) => serve_requests(stream, router, &server, header_time, watcher).await,
        Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
        Err(_) => tracing::debug!("TLS handshake timed out"),
    }
}

/// Serves the requests of one connection.
async fn serve_requests<S>(stream: S, router: Router, server: &ServerState, header_time: Duration, watcher: Watcher)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let stream = TokioIo::new(ParseErrorStream::new(stream, server.metrics.clone()));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(header_time)
        .max_buf_size(BUFFER_BYTES)
        .serve_connection(stream, TowerToHyperService::new(router));
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "connection closed");
    }
}
