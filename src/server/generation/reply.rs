//! The response fields and the request and response headers that several routes share.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::Response;

use serde::Serialize;

use super::answers::Answers;
use crate::server::http::body::{IgnoredField, MAX_IGNORED};
use crate::server::ids;
use crate::server::state::ServerState;

/// The response header that lists the request fields that have no effect, or only part of their effect.
const IGNORED: HeaderName = HeaderName::from_static("x-inferno-ignored");

/// If this request header is `1`, the answer is deterministic, as with the request field `deterministic`.
const DETERMINISTIC: &str = "x-inferno-deterministic";

/// The fingerprint of an answer: the version and the commit of the inferno build that computed the answer.
const FINGERPRINT: &str = concat!("inferno-", env!("CARGO_PKG_VERSION"), "-", env!("INFERNO_COMMIT"));

/// The fingerprint of a deterministic answer, which does not depend on concurrent requests.
const DETERMINISTIC_FINGERPRINT: &str =
    concat!("inferno-", env!("CARGO_PKG_VERSION"), "-", env!("INFERNO_COMMIT"), "-deterministic");

/// The first fields of a chat completion, of a text completion, and of each chunk of a streamed one.
#[derive(Serialize)]
pub struct ReplyHeader {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    system_fingerprint: &'static str,
}

impl ReplyHeader {
    /// Creates the first fields of a response. The id of the response starts with `prefix`.
    pub fn new(server: &ServerState, answers: &Answers, prefix: &str, object: &'static str) -> Self {
        Self {
            id: ids::new(prefix),
            object,
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            model: server.options.model.clone(),
            system_fingerprint: if answers.is_deterministic() { DETERMINISTIC_FINGERPRINT } else { FINGERPRINT },
        }
    }
}

/// Returns whether the headers of a request ask for a deterministic answer.
pub fn is_deterministic(headers: &HeaderMap) -> bool {
    headers.get(DETERMINISTIC).is_some_and(|value| value == "1")
}

/// Lists up to [`MAX_IGNORED`] ignored fields, with their notes, in a header of the response.
/// Cuts off each entry after 64 characters.
pub fn with_ignored(mut response: Response, ignored: &[IgnoredField]) -> Response {
    // Field names come from the client. Replace characters that a header must not contain, and the separator `,`.
    let is_safe = |c: char| c.is_ascii_graphic() && c != ',' || c == ' ';
    let safe = |text: String| text.chars().take(64).map(|c| if is_safe(c) { c } else { '?' }).collect::<String>();
    let entries: Vec<String> = ignored.iter().take(MAX_IGNORED).map(|field| safe(field.to_string())).collect();
    if let Ok(value) = HeaderValue::from_str(&entries.join(", "))
        && !entries.is_empty()
    {
        response.headers_mut().insert(IGNORED, value);
    }
    response
}
