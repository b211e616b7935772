//! Writes the request log: one line per request, without prompts and answers.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use axum::http::{Method, StatusCode};

use crate::server::metrics::Metrics;
use crate::server::tenant::Tenant;

/// The `tracing` target of entries in the request log.
pub const TARGET: &str = "inferno::requests";

/// The HTTP status in the log and the metrics if the connection closed before the response was ready.
const CLIENT_CLOSED: u16 = 499;

/// The log entry of a request. The request's handler and the body of a streamed response share the entry.
/// Dropping the entry writes the log line.
pub struct RequestLog {
    pub id: String,
    method: Method,
    path: String,
    traceparent: Option<String>,
    /// Whether a request header asks for a deterministic answer.
    pub is_deterministic: bool,
    started: Instant,
    metrics: Arc<Metrics>,
    tenant: OnceLock<Tenant>,
    outcome: Mutex<RequestOutcome>,
}

/// The outcome of a request. Each field is `None` until its value is known.
#[derive(Default)]
struct RequestOutcome {
    status: Option<StatusCode>,
    answer: Option<AnswerLog>,
}

/// What the log reports about the generated answers.
#[derive(Clone, Debug, Default)]
pub struct AnswerLog {
    pub answer_count: usize,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub completion_tokens: usize,
    pub ttft_s: f64,
    pub is_stream: bool,
    /// The finish reason of the first answer, or `canceled` or `error` if not all answers were completed.
    pub finish: &'static str,
}

impl RequestLog {
    pub fn new(id: String, method: Method, path: String, traceparent: Option<String>, metrics: Arc<Metrics>) -> Self {
        let (tenant, outcome) = (OnceLock::new(), Mutex::default());
        let is_deterministic = false;
        Self { id, method, path, traceparent, is_deterministic, started: Instant::now(), metrics, tenant, outcome }
    }

    pub fn with_determinism(mut self, is_deterministic: bool) -> Self {
        self.is_deterministic = is_deterministic;
        self
    }

    /// Records the tenant that the request belongs to. Only the first call has an effect.
    pub fn set_tenant(&self, tenant: Tenant) {
        let _ = self.tenant.set(tenant);
    }

    /// Returns the tenant that the request belongs to. All clients without an API key belong to one tenant.
    pub fn tenant(&self) -> Tenant {
        self.tenant.get().copied().unwrap_or_default()
    }

    pub fn set_status(&self, status: StatusCode) {
        self.lock().status = Some(status);
    }

    pub fn set_answer(&self, answer: AnswerLog) {
        self.lock().answer = Some(answer);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, RequestOutcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the request only checks the state of the server.
    /// Such requests can be frequent, so they are logged only at the debug level.
    fn is_check(&self) -> bool {
        matches!(self.path.as_str(), "/health" | "/live" | "/metrics" | "/v1/loads")
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        let RequestOutcome { status, answer } = std::mem::take(&mut *self.lock());
        let status = status.map_or(CLIENT_CLOSED, |status| status.as_u16());
        self.metrics.http.responses.with_label_values(&[status.to_string().as_str()]).inc();
        let id = self.id.as_str();
        let method = self.method.as_str();
        let path = self.path.as_str();
        let traceparent = self.traceparent.as_deref();
        let duration_ms = milliseconds(self.started.elapsed().as_secs_f64());
        match answer {
            Some(answer) => tracing::info!(
                target: TARGET,
                id,
                method,
                path,
                status,
                duration_ms,
                stream = answer.is_stream,
                choices = answer.answer_count,
                prompt_tokens = answer.prompt_tokens,
                cached_tokens = answer.cached_tokens,
                completion_tokens = answer.completion_tokens,
                ttft_ms = milliseconds(answer.ttft_s),
                finish = answer.finish,
                traceparent,
                "request"
            ),
            None if self.is_check() => {
                tracing::debug!(target: TARGET, id, method, path, status, duration_ms, "request")
            }
            None => {
                // With status 499, the connection closed before the server had a response,
                // for example while the client was sending the body.
                let finish = (status == CLIENT_CLOSED).then_some("canceled");
                tracing::info!(target: TARGET, id, method, path, status, duration_ms, finish, traceparent, "request")
            }
        }
    }
}

/// Converts a time to milliseconds, rounded to whole microseconds.
fn milliseconds(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e3
}
