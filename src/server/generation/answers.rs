//! Merges the events of the answers to one HTTP request.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::Stream;
use tokio::sync::oneshot;

use super::accounting::{Accounting, GenerationEnd};
use super::answer_stream::AnswerStream;
use super::pieces::AnswerUpdate;
use super::usage::Usage;
use crate::engine::{EngineHandle, ScoredPrompt, Summary};
use crate::error::Error;
use crate::server::http::error::ApiError;
use crate::server::limits::Permit;

/// The answers to one HTTP request. Dropping this value cancels the answers that have not ended.
pub struct Answers {
    answers: Vec<AnswerStream>,
    /// The index of the answer to poll first. It advances after each result, so that no answer is starved.
    first: usize,
    ending: Pin<Box<dyn Future<Output = ()> + Send>>,
    engine: EngineHandle,
    accounting: Accounting,
    is_deterministic: bool,
    /// The error message if generating the answers failed.
    failure: Option<String>,
    /// Receives a message when another HTTP request cancels these answers.
    cancel: Option<oneshot::Receiver<()>>,
    is_canceled: bool,
    _permit: Permit,
}

impl Answers {
    /// Merges the events of `answers`. Keeps `permit` until this value is dropped.
    pub fn new(
        answers: Vec<AnswerStream>,
        accounting: Accounting,
        engine: EngineHandle,
        is_deterministic: bool,
        permit: Permit,
    ) -> Self {
        Self {
            answers,
            first: 0,
            ending: Box::pin(accounting.server.wait_for_end()),
            engine,
            accounting,
            is_deterministic,
            failure: None,
            cancel: None,
            is_canceled: false,
            _permit: permit,
        }
    }

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
        self.accounting.elapsed()
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
                let update = self.accounting.push(&mut self.answers[index], event, self.engine.tokenizer());
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
                let wait = self.accounting.server.admission.wait_to_start(self.engine.stats().waiting as usize);
                ApiError::overloaded("the request waited in the queue for too long", wait)
            }
            // The engine has accepted the prompt, so no error names the field of the prompt.
            _ => ApiError::from_engine(error, "messages"),
        };
        self.failure = Some(api_error.message());
        Poll::Ready(Some(Err(api_error)))
    }

    /// Returns the token counts so far. Prompt tokens count once per prompt, not once per answer.
    pub fn usage(&self) -> Usage {
        self.accounting.usage(&self.answers)
    }
}

/// Counts the answers on drop, so that canceled and failed answers are included.
impl Drop for Answers {
    fn drop(&mut self) {
        let end = GenerationEnd { failure: self.failure.take(), is_canceled: self.is_canceled };
        self.accounting.finish(&mut self.answers, end, self.engine.info());
    }
}
