//! Admits requests and submits them to the engine.

use std::sync::Arc;
use std::time::Instant;

use super::accounting::Accounting;
use super::answer_stream::AnswerStream;
use super::answers::Answers;
use super::pieces::PieceBuilder;
use crate::engine::Request;
use crate::server::http::blocking::run_blocking;
use crate::server::http::error::ApiError;
use crate::server::http::log::RequestLog;
use crate::server::limits::Permit;
use crate::server::state::ServerState;

/// The engine requests of one HTTP request, and how to convert their answers to the response.
pub struct Submission {
    /// One engine request per prompt.
    pub requests: Vec<Request>,
    pub answers_per_prompt: usize,
    pub can_call_in_parallel: bool,
    /// Whether the client named the tool that the model must call.
    pub must_call_named: bool,
    /// Whether the log probabilities cover tokens without text, such as stop tokens.
    pub keeps_all_tokens: bool,
    pub is_stream: bool,
    /// The name of the HTTP request field that contains the prompt. Error messages quote this name.
    pub prompt_field: &'static str,
}

impl Submission {
    /// Creates a submission of one request for one answer, which may have several tool calls.
    pub fn new(request: Request, is_stream: bool, prompt_field: &'static str) -> Self {
        Self {
            requests: vec![request],
            answers_per_prompt: 1,
            can_call_in_parallel: true,
            must_call_named: false,
            keeps_all_tokens: false,
            is_stream,
            prompt_field,
        }
    }
}

/// Submits the requests to the engine. Fails if the model is loading, the server is draining, or a request is invalid.
///
/// Also fails with status 429 if the server cannot admit all answers now,
/// and with status 400 if there are more answers than the server can ever admit at once.
pub async fn submit(
    server: &Arc<ServerState>,
    log: Arc<RequestLog>,
    submission: Submission,
) -> Result<Answers, ApiError> {
    let engine = server.open_engine()?.clone();
    let submitted = Instant::now();
    let permit = admit(server, &log, &submission)?;
    let Submission { mut requests, answers_per_prompt, is_stream, .. } = submission;
    server.metrics.sizes.answers_per_prompt.observe(answers_per_prompt as f64);
    for options in requests.iter_mut().filter_map(|request| request.options.as_mut()) {
        if let Some(limit) = options.max_tokens {
            server.metrics.sizes.max_tokens.observe(limit as f64);
        }
        options.tenant = log.tenant().index() as u64;
        options.deterministic |= log.is_deterministic;
        options.keeps_record = server.recorder.is_on();
    }
    let asks = requests.iter().any(|request| request.options.as_ref().is_some_and(|options| options.deterministic));
    let is_deterministic = asks || engine.info().is_deterministic;
    let handle = engine.clone();
    let submit = move || {
        let mut streams = Vec::new();
        for request in requests {
            streams.extend(handle.submit_n(request, answers_per_prompt)?);
        }
        Ok(streams)
    };
    let streams = run_blocking("submit the request", submission.prompt_field, submit).await?;
    let pieces = || {
        PieceBuilder::new()
            .with_parallel_calls(submission.can_call_in_parallel)
            .with_named_call(submission.must_call_named)
            .with_all_tokens(submission.keeps_all_tokens)
    };
    let streams = streams.into_iter().map(|stream| AnswerStream::new(stream, pieces())).collect();
    let accounting = Accounting { server: server.clone(), log, answers_per_prompt, is_stream, submitted };
    Ok(Answers::new(streams, accounting, engine, is_deterministic, permit))
}

/// Fails if a request asks for more answers than the server can ever admit at once.
/// The error is about `field`, the request field that sets the number of answers.
pub fn check_answer_count(server: &ServerState, count: usize, field: &str) -> Result<(), ApiError> {
    let limit = server.admission.limit();
    if count > limit {
        return Err(ApiError::invalid(field, format!("cannot accept {count} answers at once: the limit is {limit}")));
    }
    Ok(())
}

/// Admits the answers to an HTTP request, either all of them or none. Each answer is one sequence.
fn admit(server: &ServerState, log: &RequestLog, submission: &Submission) -> Result<Permit, ApiError> {
    let count = submission.requests.len() * submission.answers_per_prompt;
    let field = if submission.answers_per_prompt > 1 { "n" } else { submission.prompt_field };
    check_answer_count(server, count, field)?;
    server.admission.admit(log.tenant().index(), count).map_err(|wait| {
        server.metrics.admission_rejections.with_label_values(&["queue"]).inc();
        ApiError::overloaded("the queue has no room for the request", wait)
    })
}
