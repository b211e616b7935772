//! The routes that report the state of the server: `/health`, `/live`, `/v1/loads` and `/metrics`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use serde::Serialize;

use crate::engine::BLOCK_TOKENS;
use crate::server::http::body::json_response;
use crate::server::http::error::{ApiError, RETRY_LATER};
use crate::server::metrics::cache_usage;
use crate::server::state::ServerState;

#[derive(Serialize)]
struct HealthStatus {
    status: &'static str,
}

/// Responds with 200 if routers may send requests to this server.
/// The model must be loaded, the engine must not have failed or be stuck, and the server must not be shutting down.
/// A busy server still counts as healthy.
pub async fn health(State(server): State<Arc<ServerState>>) -> Result<Response, ApiError> {
    server.healthy_engine()?;
    live(State(server)).await
}

/// Responds with 200 if the process and the engine thread are working, even while the model is loading.
pub async fn live(State(server): State<Arc<ServerState>>) -> Result<Response, ApiError> {
    if server.is_alive() {
        json_response(&HealthStatus { status: "ok" })
    } else {
        Err(ApiError::unavailable("the engine is not making progress", RETRY_LATER))
    }
}

/// Responds with the metrics in Prometheus's text format.
pub async fn metrics(State(server): State<Arc<ServerState>>) -> Result<Response, ApiError> {
    let text = server.metrics.render(server.engine(), server.is_alive());
    let text = text.map_err(|error| ApiError::internal(format!("cannot write the metrics: {error}")))?;
    let mut response = Response::new(Body::from(text));
    let format = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, format);
    Ok(response)
}

#[derive(Serialize)]
struct Loads {
    /// The time of the report in RFC 3339 format. The router SMG (see docs/deploy.md) ignores a time that is a number.
    timestamp: String,
    dp_rank_count: usize,
    loads: [EngineLoad; 1],
}

/// The load of the engine, in the fields that routers such as SMG read.
///
/// The field `gen_throughput` is absent, because SMG would treat the current throughput as the speed of the replica,
/// and send all requests to the replica that already generates the most tokens.
#[derive(Serialize)]
struct EngineLoad {
    dp_rank: usize,
    num_running_reqs: u64,
    num_waiting_reqs: u64,
    token_usage: f64,
    num_used_tokens: u64,
    max_total_num_tokens: u64,
    max_running_requests: usize,
    cache_hit_rate: f64,
}

/// Responds with the current load of the engine.
pub async fn loads(State(server): State<Arc<ServerState>>) -> Result<Response, ApiError> {
    let engine = server.loaded_engine()?;
    let stats = engine.stats();
    let info = engine.info();
    let max_tokens = (info.cache_sequences.max(1) * info.context) as u64;
    let usage = cache_usage(&stats);
    let load = EngineLoad {
        dp_rank: 0,
        num_running_reqs: stats.running,
        num_waiting_reqs: stats.waiting,
        token_usage: usage,
        num_used_tokens: ((usage * max_tokens as f64) as u64).next_multiple_of(BLOCK_TOKENS as u64).min(max_tokens),
        max_total_num_tokens: max_tokens,
        max_running_requests: info.max_sequences,
        cache_hit_rate: stats.hit_tokens as f64 / stats.queried_tokens.max(1) as f64,
    };
    json_response(&Loads { timestamp: jiff::Timestamp::now().to_string(), dp_rank_count: 1, loads: [load] })
}
