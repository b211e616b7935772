//! Writes log lines to stderr on a separate thread.
//!
//! A write to stderr can block, for example while a terminal's output is paused or a pipe is full.
//! A server must keep running, so it drops new log lines while `MAX_LINES` lines wait to be written.

use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

/// The maximum number of log lines that can wait to be written.
const MAX_LINES: usize = 10_000;

/// The longest time that [`flush`] waits for the remaining log lines.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

static SENDER: OnceLock<SyncSender<WriterMessage>> = OnceLock::new();

/// The number of lines that were dropped since the last warning about dropped lines.
static DROPPED: AtomicU64 = AtomicU64::new(0);

enum WriterMessage {
    Line(Vec<u8>),
    /// Asks the writer thread to reply once all earlier lines are written.
    Flush(SyncSender<()>),
}

/// A tracing writer that creates a [`Line`] for each log event.
pub struct LogWriter;

impl LogWriter {
    /// Starts the thread that writes log lines to stderr, unless the thread is already running.
    pub fn start() -> Self {
        SENDER.get_or_init(|| {
            let (sender, receiver) = sync_channel(MAX_LINES);
            // If the writer thread cannot start, the receiver is gone and all log lines are dropped.
            let _ = std::thread::Builder::new().name("inferno-log".into()).spawn(move || write_lines(&receiver));
            sender
        });
        Self
    }
}

/// Waits up to `FLUSH_TIMEOUT` for all earlier log lines to be written. Does not wait if the queue is full.
pub fn flush() {
    let (sender, receiver) = sync_channel(1);
    if SENDER.get().is_some_and(|lines| lines.try_send(WriterMessage::Flush(sender)).is_ok()) {
        let _ = receiver.recv_timeout(FLUSH_TIMEOUT);
    }
}

fn write_lines(receiver: &Receiver<WriterMessage>) {
    for message in receiver {
        match message {
            // Ignore write errors: the server must keep running even if stderr is closed.
            WriterMessage::Line(line) => drop(io::stderr().write_all(&line)),
            WriterMessage::Flush(done) => drop(done.try_send(())),
        }
        let dropped = DROPPED.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            tracing::warn!(dropped, "log lines were dropped because stderr was blocked or too slow");
        }
    }
}

impl<'w> MakeWriter<'w> for LogWriter {
    type Writer = Line;

    fn make_writer(&'w self) -> Line {
        Line(Vec::new())
    }
}

/// A log line. Its destructor sends the text to the thread that writes to stderr, or discards it if the queue is full.
pub struct Line(Vec<u8>);

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let line = WriterMessage::Line(std::mem::take(&mut self.0));
        if SENDER.get().is_none_or(|sender| sender.try_send(line).is_err()) {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    }
}
