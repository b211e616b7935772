//! Maps paths to route handlers, and runs shared code before and after each handler.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::CONNECTION;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::generation::reply;
use super::http::auth::Access;
use super::http::error::{ApiError, RETRY_SOON};
use super::http::log::RequestLog;
use super::openai::{chat, completions, models, responses};
use super::routes::{admission_preview, health, receipts, records, tokenize};
use super::state::ServerState;
use super::{anthropic, dialect, ids, ollama, page, retries};

/// The header with the request id, which logs and records contain. The client may choose the id.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The maximum length of a request id that a client chose, in bytes.
const MAX_ID_LENGTH: usize = 128;

/// The routes that remain available on connections above the limit.
/// If health checks failed under load, a supervisor would restart the server.
const SPARE_PATHS: [&str; 3] = ["/health", "/live", "/metrics"];

/// Creates the routes of a server.
pub fn router(server: &Arc<ServerState>) -> Router {
    log_requests(server, routes(server))
}

/// Creates the routes for connections above the limit. Requests are rejected unless their path is in `SPARE_PATHS`.
/// Each connection closes after its first request.
pub fn spare_router(server: &Arc<ServerState>) -> Router {
    log_requests(server, routes(server).layer(middleware::from_fn_with_state(server.clone(), reject)))
}

async fn reject(State(server): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    let mut response = if SPARE_PATHS.contains(&request.uri().path()) {
        next.run(request).await
    } else {
        let message = format!("all connections that the server allows ({}) are in use", server.options.max_connections);
        ApiError::unavailable(message, RETRY_SOON).into_response()
    };
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

fn log_requests(server: &Arc<ServerState>, routes: Router<Arc<ServerState>>) -> Router {
    routes.layer(middleware::from_fn_with_state(server.clone(), log_request)).with_state(server.clone())
}

fn routes(server: &Arc<ServerState>) -> Router<Arc<ServerState>> {
    let options = &server.options;
    let access = Arc::new(Access::new(options));
    let generating = Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/responses", post(responses::create))
        .route("/v1/messages", post(anthropic::create))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route_layer(middleware::from_fn_with_state(server.clone(), retries::join));
    let routes = Router::new()
        .merge(generating)
        .route("/health", get(health::health))
        .route("/live", get(health::live))
        .route("/metrics", get(health::metrics))
        .route("/v1/loads", get(health::loads))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::get))
        .route("/v1/responses/input_tokens", post(responses::count_tokens))
        .route("/v1/responses/{id}", get(responses::get).delete(responses::delete))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/responses/{id}/input_items", get(responses::input_items))
        .route("/v1/records/{*id}", get(records::get))
        .route("/v1/receipts/key", get(receipts::key))
        .route("/v1/receipts/{*id}", get(receipts::get))
        .route("/v1/admission", post(admission_preview::preview))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::running))
        .route("/api/show", post(ollama::show))
        .route("/api/version", get(ollama::version))
        .route("/api/pull", post(ollama::pull))
        .route("/api/embed", post(no_embeddings))
        .route("/v1/embeddings", post(no_embeddings))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .merge(page::routes())
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(Extension(Arc::new(responses::Store::default())))
        .layer(middleware::from_fn_with_state(access, check_access));
    if options.cors_origins.is_empty() { routes } else { routes.layer(cors(&options.cors_origins)) }
}

/// The response headers that web pages from the origins of `--cors-origin` may read.
const EXPOSED_HEADERS: [&str; 6] =
    ["x-request-id", "request-id", "x-inferno-ignored", "x-inferno-joined", "retry-after", "retry-after-ms"];

/// Lets browsers pass responses to web pages from the given origins (CORS).
fn cors(origins: &[String]) -> CorsLayer {
    let origin = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()))
    };
    CorsLayer::new()
        .allow_origin(origin)
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        // Repeat the names of the requested headers, because in the header `Access-Control-Allow-Headers`,
        // the wildcard `*` does not include `Authorization`.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED_HEADERS.map(HeaderName::from_static))
}

async fn check_access(State(access): State<Arc<Access>>, mut request: Request, next: Next) -> Response {
    match access.check(request.uri().path(), request.headers()) {
        Ok(tenant) => {
            if let Some(log) = request.extensions().get::<Arc<RequestLog>>() {
                log.set_tenant(tenant);
            }
            request.extensions_mut().insert(tenant);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

/// Gives each request an id and a log entry. Converts error responses to the format of the route's API.
async fn log_request(State(server): State<Arc<ServerState>>, mut request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    let traceparent = request.headers().get("traceparent").and_then(|value| value.to_str().ok()).map(str::to_string);
    let (method, path) = (request.method().clone(), request.uri().path().to_string());
    let is_deterministic = reply::is_deterministic(request.headers());
    let log = RequestLog::new(id, method, path.clone(), traceparent, server.metrics.clone());
    let log = Arc::new(log.with_determinism(is_deterministic));
    request.extensions_mut().insert(log.clone());
    let mut response = dialect::adapt(&path, &log.id, next.run(request).await);
    log.set_status(response.status());
    if let Ok(id) = HeaderValue::from_str(&log.id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Returns the request id that the client chose, if it is valid, or a new id.
fn request_id(headers: &HeaderMap) -> String {
    let chosen = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let is_valid = |id: &&str| (1..=MAX_ID_LENGTH).contains(&id.len()) && id.chars().all(|c| c.is_ascii_graphic());
    chosen.filter(is_valid).map_or_else(|| ids::new("req-"), str::to_string)
}

async fn unknown_route(request: Request) -> ApiError {
    ApiError::not_found(format!("the route {} {} does not exist", request.method(), request.uri().path()))
}

async fn wrong_method(request: Request) -> ApiError {
    let message = format!("the route {} does not allow {}", request.uri().path(), request.method());
    ApiError::client(StatusCode::METHOD_NOT_ALLOWED, message)
}

async fn no_embeddings() -> ApiError {
    ApiError::not_found("inferno does not compute embeddings: it serves models that generate text")
}
