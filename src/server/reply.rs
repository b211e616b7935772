//! The headers that all generating routes share.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::Response;

use super::error::ApiError;

/// The response header that names the request fields without effect.
const IGNORED: HeaderName = HeaderName::from_static("x-inferno-ignored");

/// The request header that makes such fields an error.
const STRICT: &str = "x-inferno-strict";

/// Fails if the client asked for strict handling and some fields have no effect.
pub fn check_strict(headers: &HeaderMap, ignored: &[String]) -> Result<(), ApiError> {
    let is_strict = headers.get(STRICT).is_some_and(|value| value == "1");
    match ignored.first() {
        Some(first) if is_strict => Err(ApiError::unsupported(first, "without x-inferno-strict, it is ignored")),
        _ => Ok(()),
    }
}

/// Names the ignored fields in the response.
pub fn with_ignored(mut response: Response, ignored: &[String]) -> Response {
    // Field names come from the client and can contain any character.
    let is_safe = |c: char| c.is_ascii_graphic() && c != ',' || c == ' ';
    let name = |name: &String| name.chars().take(64).map(|c| if is_safe(c) { c } else { '?' }).collect::<String>();
    let names: Vec<String> = ignored.iter().take(32).map(name).collect();
    if let Ok(value) = HeaderValue::from_str(&names.join(", "))
        && !names.is_empty()
    {
        response.headers_mut().insert(IGNORED, value);
    }
    response
}
