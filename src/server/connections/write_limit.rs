//! Makes a connection fail if its client reads too slowly or not at all.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// The number of bytes that a client must accept within the time limit, unless the server has fewer bytes to write.
/// With a minimum of one byte, a client could keep its connection open by reading one byte at a time.
const MIN_BYTES: usize = 4 << 10;

/// A connection on which a waiting write fails unless the client accepts `MIN_BYTES` bytes, or all that is left to write,
/// within `limit`.
pub struct WriteLimit<S> {
    stream: S,
    limit: Duration,
    /// When this timer ends, a waiting write fails.
    deadline: Pin<Box<Sleep>>,
    is_waiting: bool,
    /// The number of bytes that the client has accepted since the deadline was set.
    accepted: usize,
}

impl<S> WriteLimit<S> {
    pub fn new(stream: S, limit: Duration) -> Self {
        Self { stream, limit, deadline: Box::pin(tokio::time::sleep(limit)), is_waiting: false, accepted: 0 }
    }

    /// Returns the outcome of a write of `offered` bytes, or an error if the write has waited for too long.
    fn check(
        &mut self,
        context: &mut Context<'_>,
        offered: usize,
        outcome: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        match outcome {
            Poll::Ready(Ok(bytes)) => {
                self.accepted += bytes;
                if self.accepted >= MIN_BYTES || bytes == offered {
                    self.is_waiting = false;
                }
                Poll::Ready(Ok(bytes))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => {
                if !self.is_waiting {
                    (self.is_waiting, self.accepted) = (true, 0);
                    self.deadline.as_mut().reset(Instant::now() + self.limit);
                }
                ready!(self.deadline.as_mut().poll(context));
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client reads the response too slowly")))
            }
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteLimit<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteLimit<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.check(context, bytes.len(), outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(context, buffers);
        self.check(context, buffers.iter().map(|buffer| buffer.len()).sum(), outcome)
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
