//! Submits requests to the engine and merges the events of their answers.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_core::Stream;
use tokio::sync::oneshot;

use super::choice::{AnswerUpdate, Choice, Finish};
use super::text_tokens::finite_logprob;
use super::usage::Usage;
use crate::engine::{
    EngineHandle, Event, GenerationRecord, RecordedAnswer, RecordedRequest, Request, RequestStream, ScoredPrompt,
    Summary,
};
use crate::error::Error;
use crate::server::http::error::ApiError;
use crate::server::http::log::{AnswerLog, RequestLog};
use crate::server::limits::Permit;
use crate::server::state::Server;

/// The answers to one HTTP request. Dropping this value cancels the answers that have not ended.
pub struct Answers {
    answers: Vec<AnswerStream>,
    /// The number of answers to each prompt.
    per_prompt: usize,
    /// The index of the answer to poll first. It advances after each result, so that no answer is starved.
    first: usize,
    ending: Pin<Box<dyn Future<Output = ()> + Send>>,
    engine: EngineHandle,
    server: Arc<Server>,
    log: Arc<RequestLog>,
    is_stream: bool,
    is_deterministic: bool,
    submitted: Instant,
    /// The error message if generating the answers failed.
    failure: Option<String>,
    /// Receives a message when another HTTP request cancels these answers.
    cancel: Option<oneshot::Receiver<()>>,
    is_canceled: bool,
    _permit: Permit,
}

/// One answer: the stream of its events, and the state that converts events to pieces of text and tool calls.
struct AnswerStream {
    stream: RequestStream,
    choice: Choice,
    last_token: Option<Instant>,
    recorded: RecordedAnswer,
    /// The summary of the answer. `None` until the answer has ended.
    summary: Option<Box<Summary>>,
    /// The finish reason in the response. `None` until the answer has ended.
    finish: Option<Finish>,
}

impl AnswerStream {
    /// Adds a token to the record of the answer, if the answer is recorded.
    fn record(&mut self, token: u32, logprob: Option<f32>) {
        if self.stream.record().is_some() {
            self.recorded.tokens.push(token);
            // JSON cannot represent -inf, so replace the log probability of an impossible token.
            self.recorded.logprobs.extend(logprob.map(finite_logprob));
        }
    }
}

/// The engine requests of one HTTP request, and how to convert their answers to the response.
pub struct Submission {
    /// One engine request per prompt.
    pub requests: Vec<Request>,
    /// The number of answers to each prompt.
    pub choices: usize,
    pub can_call_in_parallel: bool,
    /// Whether the client named the tool that the model must call.
    pub must_call_named: bool,
    /// Whether the log probabilities cover tokens without text, such as stop tokens.
    pub keeps_all_tokens: bool,
    pub is_stream: bool,
    /// The name of the HTTP request field that contains the prompt. Error messages quote this name.
    pub prompt_field: &'static str,
}

/// Submits the requests to the engine. Fails if the model is loading, the server is draining, or a request is invalid.
///
/// Also fails with status 429 if the server cannot admit all answers now,
/// and with status 400 if there are more answers than the server can ever admit at once.
pub async fn submit(server: &Arc<Server>, log: Arc<RequestLog>, submission: Submission) -> Result<Answers, ApiError> {
    let engine = server.open_engine()?.clone();
    let submitted = Instant::now();
    let permit = admit(server, &log, &submission)?;
    let (mut requests, choices) = (submission.requests, submission.choices);
    server.metrics.sizes.choices.observe(choices as f64);
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
    let streams = submit_to_engine(engine.clone(), requests, choices).await?;
    let streams = streams.map_err(|error| {
        if server.is_alive() {
            ApiError::from_submit(&error, submission.prompt_field)
        } else {
            ApiError::from_stream(&error)
        }
    })?;
    let answer = |stream| {
        let choice = Choice::new()
            .with_parallel_calls(submission.can_call_in_parallel)
            .with_named_call(submission.must_call_named)
            .with_all_tokens(submission.keeps_all_tokens);
        AnswerStream {
            stream,
            choice,
            last_token: None,
            recorded: RecordedAnswer::default(),
            summary: None,
            finish: None,
        }
    };
    Ok(Answers {
        answers: streams.into_iter().map(answer).collect(),
        per_prompt: submission.choices,
        first: 0,
        ending: Box::pin(server.wait_for_end()),
        engine,
        server: server.clone(),
        log,
        is_stream: submission.is_stream,
        is_deterministic,
        submitted,
        failure: None,
        cancel: None,
        is_canceled: false,
        _permit: permit,
    })
}

/// Fails if a request asks for more answers than the server can ever admit at once.
/// The error is about `field`, the request field that sets the number of answers.
pub fn check_answer_count(server: &Server, count: usize, field: &str) -> Result<(), ApiError> {
    let limit = server.admission.limit();
    if count > limit {
        return Err(ApiError::invalid(field, format!("cannot accept {count} answers at once: the limit is {limit}")));
    }
    Ok(())
}

/// Admits the answers to an HTTP request, either all of them or none. Each answer is one sequence.
fn admit(server: &Server, log: &RequestLog, submission: &Submission) -> Result<Permit, ApiError> {
    let count = submission.requests.len() * submission.choices;
    let field = if submission.choices > 1 { "n" } else { submission.prompt_field };
    check_answer_count(server, count, field)?;
    server.admission.admit(log.tenant().index(), count).map_err(|wait| {
        server.metrics.admission_rejections.with_label_values(&["queue"]).inc();
        ApiError::overloaded("the queue has no room for the request", wait)
    })
}

/// Submits requests to the engine, with `choices` answers to each prompt.
/// The inner error is an error of the engine. The outer error means that the submission panicked.
async fn submit_to_engine(
    engine: EngineHandle,
    requests: Vec<Request>,
    choices: usize,
) -> Result<anyhow::Result<Vec<RequestStream>>, ApiError> {
    // Rendering and tokenizing take milliseconds of CPU time, so they must not block a worker thread of the runtime.
    let submit = move || -> anyhow::Result<Vec<RequestStream>> {
        let mut streams = Vec::new();
        for request in requests {
            streams.extend(engine.submit_n(request, choices)?);
        }
        Ok(streams)
    };
    let submitted = tokio::task::spawn_blocking(submit).await;
    submitted.map_err(|panic| ApiError::internal(format!("cannot submit the request: {panic}")))
}

impl Answers {
    /// Returns the number of answers to all prompts.
    pub fn len(&self) -> usize {
        self.answers.len()
    }

    /// Makes the answers end when `cancel` receives a message.
    pub fn cancel_on(&mut self, cancel: oneshot::Receiver<()>) {
        self.cancel = Some(cancel);
    }

    /// Returns whether another HTTP request canceled the answers.
    pub fn is_canceled(&self) -> bool {
        self.is_canceled
    }

    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// Returns whether the answers are deterministic, which means that concurrent requests do not affect them.
    pub fn is_deterministic(&self) -> bool {
        self.is_deterministic
    }

    /// Returns the time since the request was submitted.
    pub fn elapsed(&self) -> Duration {
        self.submitted.elapsed()
    }

    /// Returns the prompt of an answer with the log probabilities of its tokens, if the request asked for these.
    /// They are complete once the first pieces of the answer have arrived.
    pub fn scored_prompt(&self, index: usize) -> Option<&ScoredPrompt> {
        self.answers.get(index)?.stream.scored_prompt()
    }

    /// Returns the stop string that ended an answer, if any.
    pub fn stop_string(&self, index: usize) -> Option<&str> {
        self.answers.get(index)?.stream.stop_string()
    }

    /// Returns the summary of an answer, or `None` before the answer has ended.
    pub fn summary(&self, index: usize) -> Option<&Summary> {
        self.answers.get(index)?.summary.as_deref()
    }

    /// Waits for the next update of any answer. Returns the index of the answer and the update, or an error if
    /// generating the answers failed. Returns `None` once all answers have ended or an error was returned.
    pub async fn next(&mut self) -> Option<Result<(usize, AnswerUpdate), ApiError>> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// Polls for the next update of any answer. Skips events that add neither pieces nor a finish reason.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<(usize, AnswerUpdate), ApiError>>> {
        if self.failure.is_some() || self.answers.iter().all(|answer| answer.summary.is_some()) {
            return Poll::Ready(None);
        }
        if self.ending.as_mut().poll(context).is_ready() {
            return self.fail(&Error::Draining.into());
        }
        if let Some(cancel) = &mut self.cancel
            && let Poll::Ready(message) = Pin::new(cancel).poll(context)
        {
            self.cancel = None;
            if message.is_ok() {
                self.is_canceled = true;
                self.answers.iter_mut().for_each(|answer| answer.stream.cancel());
            }
        }
        for offset in 0..self.answers.len() {
            let index = (self.first + offset) % self.answers.len();
            if self.answers[index].summary.is_some() {
                continue;
            }
            while let Poll::Ready(event) = Pin::new(&mut self.answers[index].stream).poll_next(context) {
                let event = match event {
                    Some(Ok(event)) => event,
                    Some(Err(error)) => return self.fail(&error),
                    None => return self.fail(&anyhow::anyhow!("internal error: an answer ended without a summary")),
                };
                let update = self.push(index, event);
                if !update.pieces.is_empty() || update.finish.is_some() {
                    self.first = index + 1;
                    return Poll::Ready(Some(Ok((index, update))));
                }
            }
        }
        Poll::Pending
    }

    fn fail(&mut self, error: &anyhow::Error) -> Poll<Option<Result<(usize, AnswerUpdate), ApiError>>> {
        let api_error = match error.downcast_ref() {
            Some(Error::WaitedTooLong) => {
                let wait = self.server.admission.wait_to_start(self.engine.stats().waiting as usize);
                ApiError::overloaded("the request waited in the queue for too long", wait)
            }
            _ => ApiError::from_stream(error),
        };
        self.failure = Some(api_error.message());
        Poll::Ready(Some(Err(api_error)))
    }

    /// Updates the metrics and the record with an event, and converts the event to an update of the answer.
    fn push(&mut self, index: usize, event: Event) -> AnswerUpdate {
        let answer = &mut self.answers[index];
        let metrics = &self.server.metrics;
        if let Some(token) = event.token() {
            answer.record(token, event.logprobs().map(|logprobs| logprobs.chosen));
            let now = Instant::now();
            match answer.last_token.replace(now) {
                None => metrics.times.first_token.observe((now - self.submitted).as_secs_f64()),
                Some(last) => metrics.times.inter_token.observe((now - last).as_secs_f64()),
            }
        }
        let summary = match &event {
            Event::End { summary, .. } => Some(summary.clone()),
            Event::Token { .. } => None,
        };
        let update = answer.choice.push(
            event,
            answer.stream.tool_calls(),
            answer.stream.answer_bytes(),
            self.engine.tokenizer(),
        );
        if update.is_complete {
            answer.stream.complete();
        }
        if let (Some(summary), Some(finish)) = (&summary, update.finish) {
            metrics.requests.with_label_values(&[finish.as_str()]).inc();
            metrics.times.observe_answer(summary, self.submitted.elapsed().as_secs_f64());
        }
        (answer.summary, answer.finish) = (summary, update.finish);
        update
    }

    /// Adds a record of the request and its answers to the server's recorder, if the request is recorded.
    fn record(&mut self) {
        let options = &self.server.options;
        let (id, model, revision) = (self.log.id.clone(), options.model.clone(), options.record.revision.clone());
        let mut record = GenerationRecord::new(id, model, revision, self.engine.info());
        record.requests.reserve_exact(self.answers.len() / self.per_prompt);
        let (is_canceled, failure) = (self.is_canceled, self.failure.take());
        for answers in self.answers.chunks_mut(self.per_prompt) {
            let Some(request) = answers.first().and_then(|answer| answer.stream.record()).cloned() else { return };
            let take = |answer: &mut AnswerStream| {
                let progress = answer.stream.progress();
                let finish = finish_name(answer.finish, failure.is_some(), is_canceled);
                let recorded = std::mem::take(&mut answer.recorded);
                let (cached_tokens, ttft_s) = (progress.cached_tokens, progress.ttft_s);
                RecordedAnswer { finish: finish.to_string(), cached_tokens, ttft_s, ..recorded }
            };
            let answers = answers.iter_mut().map(take).collect();
            record.requests.push(RecordedRequest { request: Arc::unwrap_or_clone(request), answers });
        }
        record.error = failure;
        self.server.recorder.add(self.log.tenant(), record);
    }

    /// Returns the token counts so far. Prompt tokens count once per prompt, not once per answer.
    pub fn usage(&self) -> Usage {
        let (mut prompt_tokens, mut cached_tokens, mut completion_tokens, mut reasoning_tokens) = (0, 0, 0, 0);
        for (index, answer) in self.answers.iter().enumerate() {
            let progress = answer.stream.progress();
            if index % self.per_prompt == 0 {
                prompt_tokens += progress.prompt_tokens;
                cached_tokens += progress.cached_tokens;
            }
            completion_tokens += progress.completion_tokens;
            reasoning_tokens += answer.choice.reasoning_tokens();
        }
        Usage::new(prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens)
    }
}

/// Updates the metrics, the log and the records on drop, so that canceled and failed answers are included.
impl Drop for Answers {
    fn drop(&mut self) {
        let metrics = &self.server.metrics;
        metrics.times.end_to_end.observe(self.submitted.elapsed().as_secs_f64());
        for (index, answer) in self.answers.iter().enumerate() {
            let progress = answer.stream.progress();
            if index % self.per_prompt == 0 {
                metrics.count_prompt(progress.prompt_tokens, progress.cached_tokens);
            }
            metrics.sizes.generation_tokens.observe(progress.completion_tokens as f64);
            metrics.count_violations(&answer.stream.violations());
        }
        let longest = self.answers.iter().map(|answer| answer.stream.progress().completion_tokens).max();
        metrics.sizes.max_generation_tokens.observe(longest.unwrap_or(0) as f64);
        let has_ended = self.answers.iter().all(|answer| answer.summary.is_some());
        // All answers share one log line, with the finish reason of the first answer or the reason for an early end.
        let finish = self.answers.first().and_then(|answer| answer.finish);
        let finish = finish.filter(|_| has_ended && self.failure.is_none());
        let finish = finish_name(finish, self.failure.is_some(), self.is_canceled);
        self.record();
        let usage = self.usage();
        self.log.set_answer(AnswerLog {
            choices: self.len(),
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.prompt_tokens_details.cached_tokens,
            completion_tokens: usage.completion_tokens,
            ttft_s: self.answers.first().map_or(0.0, |answer| answer.stream.progress().ttft_s),
            is_stream: self.is_stream,
            finish,
        });
    }
}

/// Returns how an answer ended, for the log and the records: its finish reason, `error` or `canceled`.
///
/// In a record, `finish` is `None` if the answer failed, or was dropped before it ended.
/// For the log line, which covers all answers, `finish` is `None` if this applies to any of them.
fn finish_name(finish: Option<Finish>, has_failed: bool, is_canceled: bool) -> &'static str {
    match finish {
        None if has_failed => "error",
        None => "canceled",
        Some(_) if is_canceled => "canceled",
        Some(finish) => finish.as_str(),
    }
}
