//! Errors in the JSON format of Anthropic's API.

use axum::http::StatusCode;
use serde::Serialize;

use crate::server::http::error::ApiError;

/// The body of an error response, and the data of the stream event `error`.
#[derive(Serialize)]
pub struct MessagesError<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    error: MessagesErrorDetail,
    request_id: &'a str,
}

#[derive(Serialize)]
struct MessagesErrorDetail {
    #[serde(rename = "type")]
    kind: &'static str,
    message: String,
}

impl<'a> MessagesError<'a> {
    pub fn new(error: &ApiError, request_id: &'a str) -> Self {
        let kind = match error.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "api_error",
        };
        Self { kind: "error", error: MessagesErrorDetail { kind, message: error.message() }, request_id }
    }
}
