//! Converts error responses to the format of the route's API, and adds the request id header of Anthropic's API.
//!
//! Errors come from many places that do not know the API of the route, such as the API key check.

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;

use super::anthropic::MessagesError;
use super::http::error::ApiError;
use super::ollama::OllamaError;

/// The response header that contains the request id in Anthropic's API.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

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
