//! Streams answers to clients, as server-sent events or as lines of JSON.

use std::convert::Infallible;
use std::fmt::Write;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::HeaderValue;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::Response;
use futures_core::Stream;
use serde::Serialize;
use tokio::time::{Instant, Sleep};

use super::answers::Answers;
use super::pieces::AnswerUpdate;
use crate::server::http::error::ApiError;

/// The size of a full batch of events in bytes. A full batch is sent even if more events are ready.
const BATCH_BYTES: usize = 16 << 10;

const EVENT_STREAM: &str = "text/event-stream; charset=utf-8";

/// Writes answers in the event format of one API.
pub trait EventWriter: Send + 'static {
    fn content_type(&self) -> &'static str {
        EVENT_STREAM
    }

    /// Writes the events that come before the first token.
    fn begin(&mut self, _out: &mut EventBuffer) {}

    /// Writes an update of the answer with the index `index`.
    fn write(&mut self, index: usize, update: AnswerUpdate, answers: &Answers, out: &mut EventBuffer);

    /// Writes the last events, after all answers have ended.
    fn finish(&mut self, answers: &Answers, out: &mut EventBuffer);

    /// Writes the error that ended the answers.
    fn fail(&mut self, error: &ApiError, _answers: &Answers, out: &mut EventBuffer) {
        out.push_text(&error.body());
    }

    /// Ends the stream after the last event or an error. By default, writes `data: [DONE]`, as in OpenAI's API.
    fn end(&mut self, out: &mut EventBuffer) {
        out.push_text("[DONE]");
    }

    /// Keeps the stream alive during a pause without events. By default, writes an SSE comment, which clients ignore.
    fn keep_alive(&mut self, out: &mut EventBuffer) {
        out.0.push_str(": ping\n\n");
    }
}

/// Events that were written but not yet sent.
#[derive(Default)]
pub struct EventBuffer(String);

impl EventBuffer {
    /// Adds a server-sent event with JSON data. The JSON fits in one `data:` line, because it has no line breaks.
    pub fn push(&mut self, event: &impl Serialize) {
        if let Some(json) = to_json(event) {
            self.push_text(&json);
        }
    }

    pub fn push_named(&mut self, name: &str, event: &impl Serialize) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "event: {name}");
        self.push(event);
    }

    /// Adds an object as a line of JSON, for streams that are not server-sent events.
    pub fn push_line(&mut self, object: &impl Serialize) {
        if let Some(json) = to_json(object) {
            self.0.push_str(&json);
            self.0.push('\n');
        }
    }

    fn push_text(&mut self, text: &str) {
        // Writing to a string cannot fail.
        let _ = write!(self.0, "data: {text}\n\n");
    }

    fn take(&mut self) -> Bytes {
        Bytes::from(std::mem::take(&mut self.0))
    }
}

/// An event sink that discards all events, for answers that are not streamed.
pub struct NoEvents;

/// Returns an event as JSON. If the serialization fails, logs the error and returns `None`.
fn to_json(event: &impl Serialize) -> Option<String> {
    serde_json::to_string(event)
        .inspect_err(|error| tracing::error!("internal error: cannot convert a stream event to JSON: {error}"))
        .ok()
}

/// Creates a response that streams answers as they are generated.
pub fn response(answers: Answers, mut writer: impl EventWriter, ping: Duration) -> Response {
    let mut buffer = EventBuffer::default();
    writer.begin(&mut buffer);
    let content_type = writer.content_type();
    let events = EventStream {
        answers: Some(answers),
        writer: Box::new(writer),
        buffer,
        ping,
        next_ping: Box::pin(tokio::time::sleep(ping)),
    };
    let mut response = Response::new(Body::from_stream(events));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Without this header, proxies such as nginx would buffer the events.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// The body of a streamed response.
struct EventStream {
    /// The source of events. `None` after the last event or an error.
    answers: Option<Answers>,
    writer: Box<dyn EventWriter>,
    buffer: EventBuffer,
    ping: Duration,
    next_ping: Pin<Box<Sleep>>,
}

impl EventStream {
    fn end(&mut self) {
        self.writer.end(&mut self.buffer);
        self.answers = None;
    }

    /// Writes events to the buffer until no more events are ready or the batch is full.
    fn fill(&mut self, context: &mut Context<'_>) {
        while let Some(answers) = &mut self.answers
            && self.buffer.0.len() < BATCH_BYTES
            && let Poll::Ready(update) = answers.poll_next(context)
        {
            match update {
                Some(Ok((index, update))) => self.writer.write(index, update, answers, &mut self.buffer),
                Some(Err(error)) => {
                    self.writer.fail(&error, answers, &mut self.buffer);
                    self.end();
                }
                None => {
                    self.writer.finish(answers, &mut self.buffer);
                    self.end();
                }
            }
        }
    }
}

impl Stream for EventStream {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.fill(context);
        let deadline = Instant::now() + self.ping;
        if !self.buffer.0.is_empty() {
            self.next_ping.as_mut().reset(deadline);
            return Poll::Ready(Some(Ok(self.buffer.take())));
        }
        if self.answers.is_none() {
            return Poll::Ready(None);
        }
        // Clients and proxies close idle connections, so send a keep-alive.
        if self.next_ping.as_mut().poll(context).is_ready() {
            self.next_ping.as_mut().reset(deadline);
            let Self { writer, buffer, .. } = &mut *self;
            writer.keep_alive(buffer);
            return Poll::Ready(Some(Ok(buffer.take())));
        }
        Poll::Pending
    }
}
