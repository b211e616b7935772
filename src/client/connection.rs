//! Sends requests to a server, and reads its responses and streams of events.

use std::cell::RefCell;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use ureq::http::{Response, StatusCode, header};
use ureq::tls::TlsConfig;
use ureq::{Agent, Body, RequestBuilder};

use super::address::ServerUrl;
use super::certificates::read_certificates;
use super::refused::RefusedResponse;
use super::sse::read_event;
use crate::error::Error;
use crate::text::library_error;

/// The time limit for connecting to a server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The time limit for a request that generates no tokens.
const SHORT_TIMEOUT: Duration = Duration::from_secs(30);

/// The time limit for each read from a stream. It is long, because a request may wait in the server's queue.
const STREAM_TIMEOUT: Duration = Duration::from_secs(600);

/// The maximum size of a successful response that is not a stream, in bytes.
const MAX_BODY_BYTES: u64 = 16 << 20;

/// How often [`Connection::stream`] checks `cancel` while it waits for the next event.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The maximum number of events that wait for `on_event`. At this number, the client pauses reading from the server.
const WAITING_EVENTS: usize = 256;

/// A client for one server. The client keeps connections open between requests.
pub struct Connection {
    pub url: ServerUrl,
    key: Option<String>,
    tls: TlsConfig,
    agent: RefCell<Agent>,
}

/// The return value of the callback `on_event` of [`Connection::stream`]: whether to read more events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    Continue,
    /// Stop reading, because the answer is complete.
    Stop,
}

/// The reason why [`Connection::stream`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamEnd {
    /// `on_event` returned [`Flow::Stop`].
    Complete,
    /// The server closed the stream before `on_event` returned [`Flow::Stop`].
    Closed,
    Canceled,
}

/// A message to [`Connection::stream`] from the thread that reads the response.
enum StreamMessage {
    Event(String),
    /// The server responded with an error status or a redirect.
    Refused(RefusedResponse),
    /// The content type is neither JSON nor an event stream, and the body has no event. Holds the start of the body.
    NotJson(Vec<u8>),
    /// There was no response.
    Failed(ureq::Error),
    /// The body of the response could not be read.
    Broken(ureq::Error),
}

/// Closes all connections of an HTTP agent on drop. A request in progress then fails.
struct CloseOnDrop(Option<Agent>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        if let Some(agent) = self.0.take() {
            agent.shutdown();
        }
    }
}

fn new_agent(url: &ServerUrl, tls: &TlsConfig) -> Agent {
    let config = Agent::config_builder();
    // Connect to a loopback address without a proxy, because a proxy would connect to its own machine instead.
    let config = if url.is_local() { config.proxy(None) } else { config };
    config
        .tls_config(tls.clone())
        .user_agent(concat!("inferno/", env!("CARGO_PKG_VERSION")))
        .accept_encoding("identity")
        .http_status_as_error(false)
        // Do not follow redirects, because ureq would drop the API key and could turn POST requests into GET requests.
        .max_redirects(0)
        .max_redirects_will_error(false)
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_per_read(Some(STREAM_TIMEOUT))
        .build()
        .into()
}

impl Connection {
    /// Creates a client without connecting to the server.
    ///
    /// `ca_cert` is a PEM file with the certificates to trust instead of the built-in certificate authorities.
    pub fn new(url: ServerUrl, key: Option<String>, ca_cert: Option<&Path>) -> Result<Self> {
        // Ignore `ca_cert` without TLS: it may come from `SSL_CERT_FILE`, which is often set for other programs.
        let tls = match ca_cert.filter(|_| url.is_encrypted()) {
            Some(path) => TlsConfig::builder().root_certs(read_certificates(path)?).build(),
            None => TlsConfig::default(),
        };
        let agent = RefCell::new(new_agent(&url, &tls));
        Ok(Self { url, key, tls, agent })
    }

    /// Sends a GET request to a route of OpenAI's API and parses the JSON response.
    pub fn get(&self, route: &str) -> Result<Value> {
        let request = self.agent.borrow().get(self.url.route(route));
        let request = self.authorized(request).config().timeout_global(Some(SHORT_TIMEOUT)).build();
        self.read_json(request.call())
    }

    /// Sends a JSON body to a URL that some servers do not support, and parses the JSON response.
    ///
    /// Returns `None` if the status is 404 or 405, or if a successful response is not JSON:
    /// in these cases, the server does not support the URL.
    pub fn post_if_supported(&self, url: &str, body: &Value) -> Result<Option<Value>> {
        let request = self.agent.borrow().post(url).content_type("application/json");
        let request = self.authorized(request).config().timeout_global(Some(SHORT_TIMEOUT)).build();
        let response = request.send(body.to_string());
        let status = response.as_ref().map(Response::status);
        if matches!(status, Ok(StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED)) {
            return Ok(None);
        }
        Ok(serde_json::from_slice(&self.read_body(response)?).ok())
    }

    /// Sends a JSON body to a route of OpenAI's API and passes the data of each event of the response to `on_event`.
    /// A JSON response that is not a stream counts as one event.
    ///
    /// If `cancel` is set or `on_event` fails, closes the connection, so that the server stops generating.
    pub fn stream(
        &self,
        route: &str,
        body: &Value,
        cancel: &AtomicBool,
        on_event: &mut dyn FnMut(&str) -> Result<Flow>,
    ) -> Result<StreamEnd> {
        // If this request does not complete, its HTTP agent is shut down, so prepare a new agent for the next request.
        // If this request completes, its agent is put back.
        let agent = self.agent.replace(new_agent(&self.url, &self.tls));
        let mut open = CloseOnDrop(Some(agent.clone()));
        let request = self.authorized(agent.post(self.url.route(route)).content_type("application/json"));
        let (sender, events) = mpsc::sync_channel(WAITING_EVENTS);
        let body = body.to_string();
        thread::Builder::new()
            .name("inferno-client".into())
            .spawn(move || read_stream(request.send(body), &sender))
            .context("cannot start a thread for the request")?;
        loop {
            let message = match events.recv_timeout(POLL_INTERVAL) {
                Ok(message) => message,
                Err(RecvTimeoutError::Timeout) if cancel.load(Ordering::Relaxed) => return Ok(StreamEnd::Canceled),
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return Ok(StreamEnd::Closed),
            };
            if cancel.load(Ordering::Relaxed) {
                return Ok(StreamEnd::Canceled);
            }
            match message {
                StreamMessage::Event(data) => {
                    if on_event(&data)? == Flow::Stop {
                        self.agent.replace(agent);
                        // Keep the agent open. The other thread reads the response to its end, so that the next
                        // request can reuse the connection.
                        open.0 = None;
                        return Ok(StreamEnd::Complete);
                    }
                }
                StreamMessage::Refused(refused) => return Err(refused.error(&self.url)),
                StreamMessage::NotJson(body) => return Err(self.not_json(&body)),
                StreamMessage::Failed(error) => return Err(self.failure(&error)),
                StreamMessage::Broken(error) => return Err(self.broken_response(&error)),
            }
        }
    }

    fn authorized<B>(&self, request: RequestBuilder<B>) -> RequestBuilder<B> {
        match &self.key {
            Some(key) => request.header(header::AUTHORIZATION, format!("Bearer {key}")),
            None => request,
        }
    }

    fn read_json(&self, response: Result<Response<Body>, ureq::Error>) -> Result<Value> {
        let body = self.read_body(response)?;
        serde_json::from_slice(&body).map_err(|_| self.not_json(&body))
    }

    /// Returns the body of a response. Fails if the request failed, the status is not 2xx, or the body cannot be read.
    fn read_body(&self, response: Result<Response<Body>, ureq::Error>) -> Result<Vec<u8>> {
        let mut response = response.map_err(|error| self.failure(&error))?;
        if !response.status().is_success() {
            return Err(RefusedResponse::read(response).error(&self.url));
        }
        let body = response.body_mut().with_config().limit(MAX_BODY_BYTES).read_to_vec();
        body.map_err(|error| self.broken_response(&error))
    }

    /// Returns the error for a response whose body could not be read.
    fn broken_response(&self, error: &ureq::Error) -> anyhow::Error {
        Error::ResponseBroken { url: self.url.to_string(), cause: library_error(error) }.into()
    }

    /// Returns the error for a request without a response.
    fn failure(&self, error: &ureq::Error) -> anyhow::Error {
        Error::ServerUnreachable { url: self.url.to_string(), cause: library_error(error) }.into()
    }

    /// Returns the error for a successful response whose body is not JSON.
    fn not_json(&self, body: &[u8]) -> anyhow::Error {
        let body = String::from_utf8_lossy(body).into_owned();
        Error::ServerNotJson { url: self.url.to_string(), body }.into()
    }
}

/// Reads a response to its end and sends its events to [`Connection::stream`], which runs on another thread.
fn read_stream(response: Result<Response<Body>, ureq::Error>, events: &SyncSender<StreamMessage>) {
    // Sending fails only if `stream` has returned and no longer receives events. Ignore this failure.
    let mut response = match response {
        Ok(response) => response,
        Err(error) => return drop(events.send(StreamMessage::Failed(error))),
    };
    if !response.status().is_success() {
        return drop(events.send(StreamMessage::Refused(RefusedResponse::read(response))));
    }
    let content_type = response.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if content_type.is_some_and(|kind| kind.starts_with("application/json")) {
        let body = response.body_mut().with_config().limit(MAX_BODY_BYTES).read_to_string();
        return drop(events.send(body.map_or_else(StreamMessage::Broken, StreamMessage::Event)));
    }
    // Some servers send events with another content type. Their first event shows that the response is a stream.
    let mut is_event_stream = content_type.is_some_and(|kind| kind.starts_with("text/event-stream"));
    let mut stream = BufReader::new(response.body_mut().as_reader());
    let start = match stream.fill_buf() {
        Ok(start) => start.to_vec(),
        Err(error) => return drop(events.send(StreamMessage::Broken(error.into()))),
    };
    let mut is_awaited = true;
    loop {
        match read_event(&mut stream) {
            // Read to the end, even if `stream` has returned, so that the connection can be reused.
            Ok(Some(data)) if is_awaited => {
                is_event_stream = true;
                is_awaited = events.send(StreamMessage::Event(data)).is_ok();
            }
            Ok(Some(_)) => {}
            Ok(None) if !is_event_stream => return drop(events.send(StreamMessage::NotJson(start))),
            Ok(None) => return,
            Err(error) => return drop(events.send(StreamMessage::Broken(error.into()))),
        }
    }
}
