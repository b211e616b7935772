//! Lets the retry of a request receive the answer to an earlier attempt.
//!
//! Clients such as OpenAI's retry a request if the connection breaks.
//! If the request has an idempotency key, or a retry count other than 0, the server therefore continues to generate
//! the answer for a short time after such a break.
//! OpenAI's clients send the retry count in the header `x-stainless-retry-count`.
//! A retry with the same path, body, API key, idempotency key and `x-inferno-*` headers receives this answer.
//! For all other requests, a broken connection cancels the answer, because nothing shows that the client will retry.
//! Once the stream of an answer has begun, a broken connection cancels the answer,
//! because clients do not retry such a stream.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use ring::digest::{Context, SHA256};

use super::http::body;
use super::http::error::ApiError;
use super::http::log::RequestLog;
use super::orphans::{RetryKey, Waiter};
use super::state::ServerState;
use super::tenant::Tenant;

/// The request header in which OpenAI's clients count retries. The count is 0 in the first request.
const RETRY_COUNT: &str = "x-stainless-retry-count";

/// The request header with the idempotency key, which is the same in a request and its retries.
const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// The request headers that can change the answer. The hash that identifies retries includes these headers.
const OPTIONS: [&str; 2] = ["x-inferno-strict", "x-inferno-deterministic"];

/// The response header with the id of the first request for the answer.
/// Only the response to a retry that receives the answer to an earlier attempt has this header.
const JOINED: HeaderName = HeaderName::from_static("x-inferno-joined");

/// Runs a request. If the request is a retry and the server still has the answer to an earlier attempt,
/// waits for that answer instead.
pub async fn join(State(server): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let (count, idempotency_key) = (headers.get(RETRY_COUNT), headers.get(IDEMPOTENCY_KEY));
    if idempotency_key.is_none() && count.is_none_or(|count| count == "0") {
        return next.run(request).await;
    }
    let (parts, body) = request.into_parts();
    let bytes = match body::collect(&parts.headers, body, &server.options.timeouts).await {
        Ok(bytes) => bytes,
        Err(error) => return error.into_response(),
    };
    let tenant = parts.extensions.get::<Tenant>().copied().unwrap_or_default();
    let key = key(tenant, parts.uri.path(), &parts.headers, &bytes);
    let adopted = Waiter::adopt(&server.orphans, key);
    let joined = adopted.as_ref().map(|waiter| waiter.request_id().to_string());
    let waiter = adopted.unwrap_or_else(|| {
        let id = parts.extensions.get::<Arc<RequestLog>>().map_or_else(String::new, |log| log.id.clone());
        Waiter::new(&server.orphans, key, id, next.run(Request::from_parts(parts, Body::from(bytes))))
    });
    let mut response = match waiter.response().await {
        Ok(response) => response,
        Err(panic) => ApiError::panicked("answer the request", &panic).into_response(),
    };
    if let Some(id) = joined.and_then(|id| HeaderValue::from_str(&id).ok()) {
        server.metrics.joined_retries.inc();
        response.headers_mut().insert(JOINED, id);
    }
    response
}

/// Returns a hash that is the same for a request and its retries.
fn key(tenant: Tenant, path: &str, headers: &HeaderMap, body: &[u8]) -> RetryKey {
    let mut hash = Context::new(&SHA256);
    let options = OPTIONS.iter().chain([&IDEMPOTENCY_KEY]);
    let values = options.map(|name| headers.get(*name).map_or(&[][..], HeaderValue::as_bytes));
    for part in [&tenant.index().to_le_bytes()[..], path.as_bytes()].into_iter().chain(values).chain([body]) {
        hash.update(&part.len().to_le_bytes());
        hash.update(part);
    }
    let mut key = RetryKey::default();
    key.copy_from_slice(hash.finish().as_ref());
    key
}
