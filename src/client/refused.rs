//! [`RefusedResponse`]: a response with an error status or a redirect, and the Rust error for it.

use std::io::Read;

use anyhow::anyhow;
use serde_json::Value;
use ureq::Body;
use ureq::http::{HeaderMap, Response, StatusCode, header};

use super::address::ServerUrl;
use crate::error::Error;
use crate::text::{library_error, quote};

/// The maximum number of bytes to read from the body of an error response.
const MAX_ERROR_BYTES: u64 = 64 << 10;

/// A response with an error status, or a redirect.
pub struct RefusedResponse {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl RefusedResponse {
    /// Reads the start of the body, at most [`MAX_ERROR_BYTES`] bytes.
    pub fn read(mut response: Response<Body>) -> Self {
        let mut body = Vec::new();
        // If the body of an error response cannot be read, the status alone describes the error.
        let _ = response.body_mut().as_reader().take(MAX_ERROR_BYTES).read_to_end(&mut body);
        Self { status: response.status(), headers: response.headers().clone(), body }
    }

    /// Returns the error for this response from the server at `url`.
    pub fn error(&self, url: &ServerUrl) -> anyhow::Error {
        let url = url.to_string();
        let message = self.message();
        let wait = match self.retry_after() {
            Some(seconds) => format!("try again in {seconds} s"),
            None => "try again later".to_string(),
        };
        match self.status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Error::ServerAccess { url, message }.into(),
            StatusCode::NOT_FOUND => Error::ServerRoute { url, message }.into(),
            StatusCode::TOO_MANY_REQUESTS => {
                anyhow!("cannot use the server at {url}: too many requests: {message}\n  {wait}")
            }
            StatusCode::SERVICE_UNAVAILABLE => {
                anyhow!("cannot use the server at {url}: it is not ready: {message}\n  {wait}")
            }
            status if status.is_redirection() => match self.header(header::LOCATION) {
                Some(target) => anyhow!(
                    "cannot use the server at {url}: it redirects to {}\n  use the URL of that server",
                    quote(target)
                ),
                None => anyhow!(
                    "cannot use the server at {url}: it responded with status {status}, without a valid header \
                     'Location'\n  check the URL; the API of most servers ends in /v1"
                ),
            },
            _ if self.is_context_full() => Error::ServerContextFull { message }.into(),
            status => {
                anyhow!("cannot use the server at {url}: it responded with status {}: {message}", status.as_u16())
            }
        }
    }

    fn header(&self, name: header::HeaderName) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// Returns the wait from the Retry-After header, in seconds.
    fn retry_after(&self) -> Option<u64> {
        self.header(header::RETRY_AFTER)?.trim().parse().ok()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// Returns whether the request is too long for the context. Servers say so in different JSON fields.
    fn is_context_full(&self) -> bool {
        let json = self.json();
        json["error"]["code"] == "context_length_exceeded"
            || json["error"]["type"] == "exceed_context_size_error"
            || self.message().contains("maximum context length")
    }

    /// Returns the error message in the body, or else the start of the body. If the body is empty, returns the status.
    fn message(&self) -> String {
        match error_message(&self.json()) {
            Some(message) => message,
            None if self.body.is_empty() => self.status.to_string(),
            None => library_error(&String::from_utf8_lossy(&self.body).trim()),
        }
    }
}

/// Returns the error message in a JSON response. Tries each JSON field where a server may put the message.
pub fn error_message(json: &Value) -> Option<String> {
    let texts = [&json["error"]["message"], &json["error"], &json["message"], &json["detail"]];
    texts.into_iter().find_map(Value::as_str).map(|message| library_error(&message))
}
