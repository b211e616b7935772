//! API errors in the JSON format of OpenAI's API.

use std::time::Duration;

use axum::body::Body;
use axum::http::header::{CONNECTION, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tokio::task::JoinError;

use crate::error::Error;
use crate::text::{counted, error_message};

/// The suggested wait before a retry if this server can probably answer soon, for example once it has loaded the model.
pub const RETRY_SOON: Duration = Duration::from_secs(1);
/// The suggested wait before a retry if a new server may have to answer, for example because this one shuts down.
pub const RETRY_LATER: Duration = Duration::from_secs(5);

/// The [`code`](ApiError::code) of errors about a prompt that is too long.
pub const CONTEXT_LENGTH_EXCEEDED: &str = "context_length_exceeded";

/// The maximum length of an error message in characters. Messages can quote parts of the request, which can be long.
const MAX_MESSAGE_CHARS: usize = 1000;

/// An error response. Its body is `{"error": {"message", "type", "param", "code"}}`, unless `dialect` converts it.
#[derive(Clone, Debug)]
pub struct ApiError {
    pub status: StatusCode,
    kind: &'static str,
    /// The request field that caused the error, such as `messages[0].content`.
    param: Option<String>,
    pub code: Option<&'static str>,
    message: String,
    retry_after: Option<Duration>,
}

#[derive(Serialize)]
struct WireError<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

#[derive(Serialize)]
struct WireBody<'a> {
    error: WireError<'a>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, param: None, code: None, message: message.into(), retry_after: None }
    }

    /// Creates a 400 error about the request as a whole.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// Creates a 400 error about one field of the request.
    pub fn invalid(param: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        let param = param.into();
        Self { message: format!("invalid '{param}': {problem}"), param: Some(param), ..Self::bad_request("") }
    }

    /// Creates a 400 error about a field that inferno does not support.
    pub fn unsupported(param: impl Into<String>, hint: &str) -> Self {
        let param = param.into();
        let message = format!("'{param}' is not supported{}{hint}", if hint.is_empty() { "" } else { ": " });
        Self { message, param: Some(param), code: Some("unsupported_parameter"), ..Self::bad_request("") }
    }

    /// Creates a 400 error about a field whose value does not have its full effect. `note` describes the difference.
    pub fn partly_supported(param: impl Into<String>, note: &str, hint: &str) -> Self {
        let param = param.into();
        let message = format!("the value of '{param}' is not fully supported ({note}): {hint}");
        Self { message, param: Some(param), code: Some("unsupported_parameter"), ..Self::bad_request("") }
    }

    /// Creates a 401 error for a missing or wrong API key.
    pub fn unauthorized(message: &str) -> Self {
        let code = Some("invalid_api_key");
        Self { code, ..Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message) }
    }

    /// Creates a 403 error, for example for a request from a web page of another site.
    pub fn forbidden(message: &str) -> Self {
        Self::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// Creates a 404 error, for example for an unknown route or id.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    /// Creates a 404 error for an unknown id in a field or query parameter of the request.
    pub fn unknown_id(param: impl Into<String>, code: Option<&'static str>, message: String) -> Self {
        Self { param: Some(param.into()), code, ..Self::not_found(message) }
    }

    /// Creates a 400 error for a prompt that is too long, for example because it does not fit in the context.
    pub fn too_long(param: &str, message: String) -> Self {
        Self { code: Some(CONTEXT_LENGTH_EXCEEDED), param: Some(param.to_string()), ..Self::bad_request(message) }
    }

    /// Creates a 404 error for an unknown model.
    pub fn unknown_model(message: String) -> Self {
        Self { param: Some("model".to_string()), code: Some("model_not_found"), ..Self::not_found(message) }
    }

    /// Creates an error with a 4xx status for which there is no other constructor, such as 405 or 413.
    pub fn client(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", message)
    }

    /// Creates a 429 error. `retry_after` is the suggested wait before a retry.
    pub fn overloaded(problem: &str, retry_after: Duration) -> Self {
        // Codex reads the wait from the error message: the number of seconds after `try again in`.
        let message = format!("{problem}: please try again in {}s", whole_seconds(retry_after));
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        Self { code: Some("rate_limit_exceeded"), retry_after: Some(retry_after), ..error }
    }

    /// Creates a 503 error. `retry_after` is the suggested wait before a retry.
    pub fn unavailable(message: impl Into<String>, retry_after: Duration) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
        Self { code: Some("unavailable"), retry_after: Some(retry_after), ..error }
    }

    /// Creates the 503 error for requests while the model loads.
    pub fn loading() -> Self {
        Self::unavailable("the model is loading", RETRY_SOON)
    }

    /// Creates the 503 error for requests while the server shuts down.
    pub fn shutting_down() -> Self {
        Self::unavailable("the server is shutting down", RETRY_LATER)
    }

    /// Creates a 500 error for a failure inside the server.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// Creates a 500 error for a panic while the server tried to do `action`, such as "count the tokens".
    /// Only the log gets the text of the panic.
    pub fn panicked(action: &str, panic: &JoinError) -> Self {
        tracing::error!("internal error: cannot {action}: {panic}");
        Self::internal(format!("cannot {action}: an internal error occurred"))
    }

    /// Converts an error of tokenizing a prompt, of [submitting](crate::EngineHandle::submit) a request, or of an
    /// answer. `prompt_field` is the request field that contains the prompt.
    ///
    /// An error without a specific HTTP status becomes a 500 error.
    pub fn from_engine(error: &anyhow::Error, prompt_field: &str) -> Self {
        match error.downcast_ref() {
            Some(Error::InvalidRequest(_)) => Self::bad_request(error_message(error)),
            Some(Error::ContextFull { prompt_tokens, context_tokens, .. }) => {
                let message = format!(
                    "the prompt has {}, but the maximum context length is {}: shorten the prompt to at most {}",
                    counted(*prompt_tokens, "token"),
                    counted(*context_tokens, "token"),
                    counted(context_tokens - 1, "token")
                );
                Self::too_long(prompt_field, message)
            }
            Some(Error::PromptTooLong { prompt_bytes, context_tokens }) => {
                let message = format!(
                    "the prompt has {prompt_bytes} bytes of text, but the maximum context length is {}: \
                     shorten the prompt",
                    counted(*context_tokens, "token")
                );
                Self::too_long(prompt_field, message)
            }
            Some(Error::InvalidConstraint { name, reason }) => Self::invalid(name, reason),
            Some(Error::NotDeterministic { reason }) => Self::invalid("deterministic", reason),
            Some(Error::CompilerBusy { wait_s }) => {
                let message =
                    format!("cannot compile the grammars of the request within {wait_s} s: the server is busy");
                Self::unavailable(message, RETRY_SOON)
            }
            Some(Error::Draining) => Self::shutting_down(),
            _ => Self::internal(error_message(error)),
        }
    }

    /// Returns the error message, cut off after `MAX_MESSAGE_CHARS` characters.
    pub fn message(&self) -> String {
        match self.message.char_indices().nth(MAX_MESSAGE_CHARS) {
            Some((end, _)) => format!("{}…", &self.message[..end]),
            None => self.message.clone(),
        }
    }

    pub fn body(&self) -> String {
        let message = self.message();
        let error = WireError { message: &message, kind: self.kind, param: self.param.as_deref(), code: self.code };
        serde_json::to_string(&WireBody { error }).unwrap_or_default()
    }
}

/// Converts a wait to whole seconds, rounded up. Returns at least 1.
fn whole_seconds(time: Duration) -> u64 {
    time.as_secs_f64().ceil().max(1.0) as u64
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.body()));
        // Attach the error, so that `dialect` can convert it on routes of other APIs.
        response.extensions_mut().insert(self.clone());
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self.status {
            StatusCode::UNAUTHORIZED => drop(headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))),
            // After these errors, the request body is not read further, so the connection cannot carry another request.
            StatusCode::PAYLOAD_TOO_LARGE | StatusCode::REQUEST_TIMEOUT => {
                drop(headers.insert(CONNECTION, HeaderValue::from_static("close")));
            }
            _ => {}
        }
        if let Some(delay) = self.retry_after {
            // `Retry-After` has whole seconds. OpenAI's clients also read `retry-after-ms`.
            headers.insert(RETRY_AFTER, HeaderValue::from(whole_seconds(delay)));
            let milliseconds = HeaderValue::from(delay.as_millis().max(1) as u64);
            headers.insert(HeaderName::from_static("retry-after-ms"), milliseconds);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_that_the_request_causes_blame_the_request() {
        let status = |error: anyhow::Error| ApiError::from_engine(&error, "prompt").status;
        let message = "cannot render the conversation";
        assert_eq!(status(Error::invalid_request(message)), StatusCode::BAD_REQUEST);
        assert_eq!(status(anyhow::anyhow!(message)), StatusCode::INTERNAL_SERVER_ERROR);
    }

    #[test]
    fn all_keys_are_present_and_long_messages_are_cut() {
        let body = ApiError::invalid("stop", "é".repeat(5000)).body();
        let json: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert!(body.len() < 4096, "{}", body.len());
        assert_eq!(json["error"]["param"], "stop");
        assert!(json["error"].as_object().unwrap().contains_key("code") && json["error"]["code"].is_null());
    }
}
