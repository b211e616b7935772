//! Converts error responses to the format of the route's API, and adds the request id header of Anthropic's API.
//!
//! Errors come from many places that do not know the API of the route, such as the API key check.

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use serde::Serialize;

use super::error::ApiError;

/// The response header that contains the request id in Anthropic's API.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// An error in the JSON format of Anthropic's API.
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

/// An error in the JSON format of ollama's API.
#[derive(Serialize)]
pub struct OllamaError {
    error: String,
}

impl OllamaError {
    pub fn new(error: &ApiError) -> Self {
        Self { error: error.message() }
    }
}

/// Converts the errors of ollama's and Anthropic's routes to the error formats of these APIs.
/// Adds the request id header to responses of Anthropic's routes.
pub fn adapt(path: &str, request_id: &str, mut response: Response) -> Response {
    let is_below = |route: &str| path.strip_prefix(route).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let is_message = is_below("/v1/messages");
    if let Ok(id) = HeaderValue::from_str(request_id)
        && is_message
    {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    let Some(error) = response.extensions_mut().remove::<ApiError>() else { return response };
    let body = match () {
        _ if is_below("/api") => serde_json::to_string(&OllamaError::new(&error)),
        _ if is_message => serde_json::to_string(&MessagesError::new(&error, request_id)),
        _ => return response,
    };
    if let Ok(body) = body {
        *response.body_mut() = Body::from(body);
    }
    response
}
