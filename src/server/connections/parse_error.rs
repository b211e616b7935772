//! Adds a JSON body to hyper's own error responses to requests with invalid HTTP or an overlong URL or headers.
//!
//! hyper sends these error responses before a request reaches a route, and has no option to give them a body.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::server::http::error::ApiError;
use crate::server::metrics::Metrics;

/// For each error response of hyper: its first bytes, and the status and the message of the replacement.
///
/// No other data that the server writes starts with these bytes: the responses of routes have other headers before
/// `content-length`, and JSON in response bodies and events contains no unescaped line breaks.
const HEADS: [(&[u8], StatusCode, &str); 3] = [
    (
        b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n",
        StatusCode::BAD_REQUEST,
        "the request is not valid HTTP/1.1",
    ),
    (
        b"HTTP/1.1 414 URI Too Long\r\nconnection: close\r\ncontent-length: 0\r\n",
        StatusCode::URI_TOO_LONG,
        "the URL of the request is too long",
    ),
    (
        b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n",
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        "the headers of the request are too large: at most 64 KiB and 100 headers are allowed",
    ),
];

/// A connection that replaces hyper's own error responses.
pub struct ParseErrorStream<S> {
    stream: S,
    metrics: Arc<Metrics>,
    /// The bytes of the replacement response that have not been written yet.
    rest: Vec<u8>,
}

impl<S> ParseErrorStream<S> {
    pub fn new(stream: S, metrics: Arc<Metrics>) -> Self {
        Self { stream, metrics, rest: Vec::new() }
    }

    /// Returns whether to write the replacement response instead of `bytes`.
    /// If `bytes` starts an error response of hyper, prepares and counts the replacement response.
    fn replaces(&mut self, bytes: &[u8]) -> bool {
        if !self.rest.is_empty() {
            return true;
        }
        let Some((_, status, message)) = HEADS.iter().find(|(head, ..)| bytes.starts_with(head)) else { return false };
        self.metrics.http.responses.with_label_values(&[status.as_str()]).inc();
        let body = ApiError::client(*status, *message).body();
        let head = format!(
            "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.rest = [head.into_bytes(), body.into_bytes()].concat();
        true
    }
}

impl<S: AsyncWrite + Unpin> ParseErrorStream<S> {
    /// Writes the rest of the replacement response. Then returns `accepted`, the number of bytes that hyper wanted to
    /// write, so that hyper considers them written.
    fn write_rest(&mut self, context: &mut Context<'_>, accepted: usize) -> Poll<io::Result<usize>> {
        while !self.rest.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.rest))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.rest.drain(..written);
        }
        Poll::Ready(Ok(accepted))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ParseErrorStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.replaces(bytes) {
            return self.write_rest(context, bytes.len());
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.replaces(buffers.first().map_or(&[], |buffer| buffer)) {
            return self.write_rest(context, buffers.iter().map(|buffer| buffer.len()).sum());
        }
        Pin::new(&mut self.stream).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ParseErrorStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}
