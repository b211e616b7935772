//! The route `POST /v1/admission`. Reports when a chat completion request would start, without running it.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;

use crate::engine::BLOCK_TOKENS;
use crate::server::generation::{check_answer_count, reply};
use crate::server::http::blocking::run_blocking;
use crate::server::http::body::{json_response, read_json};
use crate::server::http::error::{ApiError, CONTEXT_LENGTH_EXCEEDED};
use crate::server::openai::chat::ChatRequest;
use crate::server::state::ServerState;
use crate::server::tenant::Tenant;

#[derive(Serialize)]
struct AdmissionPreview {
    object: &'static str,
    /// Whether the prompt is short enough to leave space in the context for an answer.
    fits: bool,
    /// Whether the server would admit the request now. False if the request's answers would exceed the limit on
    /// waiting and running sequences, or the tenant's share.
    accepted: bool,
    starts_now: bool,
    /// If `accepted` is false, the seconds to wait before sending the request.
    /// If `accepted` is true, the expected seconds until the request would start, or `None` if the request would have
    /// to wait and there is no estimate, because no sequence has ended yet.
    expected_wait_s: Option<f64>,
    requests_ahead: usize,
    prompt_tokens: usize,
    cached_tokens: usize,
    max_tokens: usize,
    kv_cache: KvCacheSpace,
}

/// The size and the free space of the KV cache, and the space that the request needs, in blocks.
/// A block holds the keys and values of `block_tokens` tokens in one layer group.
#[derive(Serialize)]
struct KvCacheSpace {
    block_tokens: usize,
    needed_blocks: usize,
    longest_answer_blocks: usize,
    free_blocks: usize,
    total_blocks: usize,
}

/// The response for a prompt that is too long.
#[derive(Serialize)]
struct PromptTooLong {
    object: &'static str,
    fits: bool,
    accepted: bool,
    starts_now: bool,
    reason: String,
}

const OBJECT: &str = "admission";

/// Reports when a chat completion request would start, and how many tokens and KV cache blocks it would need.
pub async fn preview(
    State(server): State<Arc<ServerState>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let engine = server.open_engine()?.clone();
    let headers = request.headers().clone();
    let fields = read_json(request, &server.options.timeouts).await?;
    let ChatRequest { mut request, answers_per_prompt, ignored, .. } = ChatRequest::read(fields, &server, &engine)?;
    check_answer_count(&server, answers_per_prompt, "n")?;
    if let Some(options) = &mut request.options {
        options.tenant = tenant.index() as u64;
        options.deterministic |= reply::is_deterministic(&headers);
    }
    let preview = move || engine.preview(request, answers_per_prompt);
    let found = match run_blocking("preview the request", "messages", preview).await {
        Ok(found) => found,
        Err(error) if error.code == Some(CONTEXT_LENGTH_EXCEEDED) => {
            let reason = error.message();
            let misfit = PromptTooLong { object: OBJECT, fits: false, accepted: false, starts_now: false, reason };
            return Ok(reply::with_ignored(json_response(&misfit)?, &ignored));
        }
        Err(error) => return Err(error),
    };
    let full = server.admission.wait(tenant.index(), answers_per_prompt);
    let starts_now = found.preview.starts_now && full.is_none();
    let expected_wait = match full {
        Some(wait) => Some(wait),
        None if starts_now => Some(std::time::Duration::ZERO),
        None => server.admission.expected_start(found.preview.ahead),
    };
    let admission = AdmissionPreview {
        object: OBJECT,
        fits: true,
        accepted: full.is_none(),
        starts_now,
        expected_wait_s: expected_wait.map(|wait| wait.as_secs_f64()),
        requests_ahead: found.preview.ahead,
        prompt_tokens: found.prompt_tokens,
        cached_tokens: found.preview.cached_tokens,
        max_tokens: found.max_tokens,
        kv_cache: KvCacheSpace {
            block_tokens: BLOCK_TOKENS,
            needed_blocks: found.preview.needed_blocks,
            longest_answer_blocks: found.preview.longest_blocks,
            free_blocks: found.preview.free_blocks,
            total_blocks: found.preview.total_blocks,
        },
    };
    Ok(reply::with_ignored(json_response(&admission)?, &ignored))
}
