//! [`RequestStream`]: the events of one answer, as a blocking iterator or an async `Stream`.

use std::borrow::BorrowMut;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use anyhow::{Result, anyhow};
use futures_core::Stream;
use tokio::sync::mpsc::UnboundedReceiver;

use super::answer_decoder::AnswerDecoder;
use super::client_end::ClientEnd;
use super::event::{AnswerProgress, Event, ScoredPrompt, Summary};
use super::outbox::SequenceEvent;
use super::record::RequestRecord;
use super::request::{FinishReason, GenerateOptions};
use crate::chat::{FormatViolations, ToolCall};
use crate::engine::loading::ModelInfo;
use crate::runner::{ChosenToken, ExecutionMode};

/// The events of one answer, returned by [`EngineHandle::submit`](crate::engine::EngineHandle::submit).
///
/// A `for` loop over the stream, or over a mutable reference to the stream, blocks while it waits for an event.
/// The [`Stream`] implementation yields the same events in any async runtime.
/// The type does not implement `Iterator`, because `Iterator::next` would conflict with `StreamExt::next`.
///
/// Dropping the stream cancels the answer. The engine then ends the answer before the next step.
/// Other answers to the same request continue.
pub struct RequestStream {
    events: UnboundedReceiver<SequenceEvent>,
    decoder: AnswerDecoder,
    cancel: Option<Arc<AtomicBool>>,
    /// Tells the engine how and when this stream ended the answer.
    client_end: Arc<ClientEnd>,
    prompt_tokens: usize,
    cached_tokens: usize,
    context: usize,
    execution_mode: ExecutionMode,
    generated: usize,
    submitted: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Instant,
    finish: Option<FinishReason>,
    has_ended: bool,
    record: Option<Arc<RequestRecord>>,
    scored_prompt: Option<ScoredPrompt>,
}

impl RequestStream {
    pub(in crate::engine) fn new(
        events: UnboundedReceiver<SequenceEvent>,
        decoder: AnswerDecoder,
        options: &GenerateOptions,
        prompt_tokens: usize,
        info: &ModelInfo,
        submitted: Instant,
        client_end: Arc<ClientEnd>,
    ) -> Self {
        Self {
            events,
            decoder,
            cancel: options.cancel.clone(),
            client_end,
            prompt_tokens,
            cached_tokens: 0,
            context: info.context,
            execution_mode: info.execution_mode,
            generated: 0,
            submitted,
            started: None,
            first_token: None,
            last_token: submitted,
            finish: None,
            has_ended: false,
            record: None,
            scored_prompt: None,
        }
    }

    pub(in crate::engine) fn with_record(mut self, record: Option<Arc<RequestRecord>>) -> Self {
        self.record = record;
        self
    }

    pub(in crate::engine) fn with_scored_prompt(mut self, scored_prompt: Option<ScoredPrompt>) -> Self {
        self.scored_prompt = scored_prompt;
        self
    }

    /// Returns the record of the request, if [`GenerateOptions::keeps_record`] is set.
    ///
    /// All answers to a request share one record.
    pub fn record(&self) -> Option<&Arc<RequestRecord>> {
        self.record.as_ref()
    }

    /// Returns the prompt with its log probabilities, if [`GenerateOptions::prompt_logprobs`] is set.
    pub fn scored_prompt(&self) -> Option<&ScoredPrompt> {
        self.scored_prompt.as_ref()
    }

    /// Waits for the next event. Returns `None` after the end event or an error.
    ///
    /// Panics if called in an async task of tokio. Use the [`Stream`] implementation there.
    pub fn next_blocking(&mut self) -> Option<Result<Event>> {
        loop {
            if self.has_ended {
                return None;
            }
            if let Some(end) = self.end_event() {
                return Some(end);
            }
            let event = self.events.blocking_recv();
            if let Some(event) = self.receive(event) {
                return Some(event);
            }
        }
    }

    /// Cancels the answer. Other answers to the same request continue.
    /// Unless the answer has already ended, the next event is the end event, with [`FinishReason::Canceled`].
    pub fn cancel(&mut self) {
        self.finish_as(FinishReason::Canceled);
    }

    /// Ends the answer because the caller needs no more of it.
    /// Unlike after [`cancel`](Self::cancel), the answer counts as complete.
    ///
    /// Unless the answer has already ended, its finish reason is [`FinishReason::Stop`],
    /// or [`FinishReason::ToolCalls`] if the answer has tool calls.
    pub fn stop(&mut self) {
        self.client_end.stop();
        self.finish_as(FinishReason::Stop);
    }

    /// Returns the tool calls so far. The last call can be incomplete.
    /// In harmony, every call has a name.
    /// In other chat formats, an incomplete or invalid call has no name, and its arguments are its whole text.
    pub fn tool_calls(&self) -> &[ToolCall] {
        self.decoder.tool_calls()
    }

    /// Returns the stop string that ended the answer, or `None` if no stop string was found.
    pub fn stop_string(&self) -> Option<&str> {
        self.decoder.stop_string()
    }

    /// Returns the length in bytes of the text that the model has generated on the answer channel so far.
    ///
    /// The text of the events is the beginning of this text. The rest is held back, because it may begin a stop string,
    /// or is the stop string that ended the answer and the text after it.
    pub fn answer_bytes(&self) -> usize {
        self.decoder.answer_bytes()
    }

    /// Returns how often the model has violated its chat format so far, by kind.
    pub fn violations(&self) -> FormatViolations {
        self.decoder.violations()
    }

    /// Returns the token counts and the time to first token so far.
    pub fn progress(&self) -> AnswerProgress {
        AnswerProgress {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            completion_tokens: self.generated,
            ttft_s: self.first_token.map_or(0.0, |first| (first - self.submitted).as_secs_f64()),
        }
    }

    /// Returns the summary so far, which is final once the stream has ended.
    /// The finish reason is [`FinishReason::Canceled`] until the answer has ended, and after an error.
    pub fn summary(&self) -> Summary {
        let tool_calls = self.decoder.tool_calls().to_vec();
        let finish_reason = match self.finish.unwrap_or(FinishReason::Canceled) {
            FinishReason::Stop if !tool_calls.is_empty() => FinishReason::ToolCalls,
            other => other,
        };
        let first = self.first_token.unwrap_or(self.last_token);
        let decode_s = (self.last_token - first).as_secs_f64();
        Summary {
            finish_reason,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            completion_tokens: self.generated,
            queue_s: self.started.map_or(0.0, |started| (started - self.submitted).as_secs_f64()),
            ttft_s: (first - self.submitted).as_secs_f64(),
            tok_per_s: if decode_s > 0.0 { (self.generated - 1) as f64 / decode_s } else { 0.0 },
            context_used: self.prompt_tokens + self.generated,
            context: self.context,
            execution_mode: self.execution_mode,
            tool_calls,
            format_violations: self.violations().total(),
        }
    }

    /// Returns the end event if the answer is finished or canceled, and marks the stream as ended.
    fn end_event(&mut self) -> Option<Result<Event>> {
        // Check the cancel flag before the channel: after a cancellation, the caller gets no more tokens.
        if self.cancel.as_ref().is_some_and(|cancel| cancel.load(Ordering::Relaxed)) {
            self.finish_as(FinishReason::Canceled);
        }
        self.finish?;
        self.has_ended = true;
        let deltas = self.decoder.finish();
        Some(deltas.map(|deltas| Event::End { deltas, summary: Box::new(self.summary()) }))
    }

    /// Sets the finish reason, unless one is set. Closes the channel, so that the engine ends a running sequence.
    fn finish_as(&mut self, reason: FinishReason) {
        self.finish.get_or_insert(reason);
        self.client_end.end();
        self.events.close();
    }

    /// Updates the stream with an event of its sequence, or with `None` if the engine has closed the channel.
    /// Returns the event of the stream or the error for the caller, if any.
    fn receive(&mut self, event: Option<SequenceEvent>) -> Option<Result<Event>> {
        let result = match event {
            Some(SequenceEvent::Started { cached_tokens, at }) => {
                (self.cached_tokens, self.started) = (cached_tokens, Some(at));
                return None;
            }
            Some(SequenceEvent::PromptLogprobs(logprobs)) => {
                if let Some(prompt) = &mut self.scored_prompt {
                    prompt.logprobs.extend_from_slice(&logprobs);
                }
                return None;
            }
            Some(SequenceEvent::Finished(reason)) => {
                self.finish_as(reason);
                return None;
            }
            Some(SequenceEvent::Token { token: ChosenToken { id, logprobs }, at }) => {
                self.generated += 1;
                self.last_token = at;
                self.first_token.get_or_insert(at);
                let is_requested_stop = self.decoder.is_requested_stop(id);
                self.decoder.push(id).map(|deltas| Event::Token { id, deltas, logprobs, is_requested_stop })
            }
            Some(SequenceEvent::Failed(error)) => Err(error),
            None => Err(anyhow!("cannot complete the answer: the engine stopped")),
        };
        if self.decoder.is_stopped() {
            self.stop();
        }
        if result.is_err() {
            self.finish_as(FinishReason::Canceled);
            self.has_ended = true;
        }
        Some(result)
    }
}

/// Cancels the answer, unless it has ended.
impl Drop for RequestStream {
    fn drop(&mut self) {
        // Record the end time first: the channel closes when the field `events` is dropped, after this function.
        self.client_end.end();
    }
}

impl Stream for RequestStream {
    type Item = Result<Event>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if self.has_ended {
                return Poll::Ready(None);
            }
            if let Some(end) = self.end_event() {
                return Poll::Ready(Some(end));
            }
            let event = ready!(self.events.poll_recv(context));
            if let Some(event) = self.receive(event) {
                return Poll::Ready(Some(event));
            }
        }
    }
}

/// A blocking iterator over an owned or borrowed [`RequestStream`].
pub struct BlockingEvents<S>(S);

impl<S: BorrowMut<RequestStream>> Iterator for BlockingEvents<S> {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.borrow_mut().next_blocking()
    }
}

impl IntoIterator for RequestStream {
    type Item = Result<Event>;
    type IntoIter = BlockingEvents<RequestStream>;

    fn into_iter(self) -> Self::IntoIter {
        BlockingEvents(self)
    }
}

impl<'s> IntoIterator for &'s mut RequestStream {
    type Item = Result<Event>;
    type IntoIter = BlockingEvents<&'s mut RequestStream>;

    fn into_iter(self) -> Self::IntoIter {
        BlockingEvents(self)
    }
}
