//! The events of one answer, and the updates that they become.

use std::time::Instant;

use super::pieces::{AnswerUpdate, Finish, PieceBuilder};
use super::text_tokens::finite_logprob;
use crate::engine::{Event, RecordedAnswer, RequestStream, Summary};
use crate::tokenizer::Tokenizer;

/// One answer: the stream of its events, and the state that converts events to pieces of text and tool calls.
pub struct AnswerStream {
    pub stream: RequestStream,
    /// The summary of the answer. `None` until the answer has ended.
    pub summary: Option<Box<Summary>>,
    /// The finish reason in the response. `None` until the answer has ended.
    pub finish: Option<Finish>,
    /// The time at which the last token arrived.
    pub last_token: Option<Instant>,
    pieces: PieceBuilder,
    recorded: RecordedAnswer,
}

impl AnswerStream {
    pub fn new(stream: RequestStream, pieces: PieceBuilder) -> Self {
        Self { stream, summary: None, finish: None, last_token: None, pieces, recorded: RecordedAnswer::default() }
    }

    /// Converts an event to an update of the answer, and adds the event to the record of the answer.
    pub fn push(&mut self, event: Event, tokenizer: &Tokenizer) -> AnswerUpdate {
        if let Some(token) = event.token() {
            self.record(token, event.logprobs().map(|logprobs| logprobs.chosen));
            self.last_token = Some(Instant::now());
        }
        let summary = match &event {
            Event::End { summary, .. } => Some(summary.clone()),
            Event::Token { .. } => None,
        };
        let update = self.pieces.push(event, self.stream.tool_calls(), self.stream.answer_bytes(), tokenizer);
        if update.is_complete {
            self.stream.stop();
        }
        (self.summary, self.finish) = (summary, update.finish);
        update
    }

    /// Adds a token to the record of the answer, if the answer is recorded.
    fn record(&mut self, token: u32, logprob: Option<f32>) {
        if self.stream.record().is_some() {
            self.recorded.tokens.push(token);
            // JSON cannot represent -inf, so replace the log probability of an impossible token.
            self.recorded.logprobs.extend(logprob.map(finite_logprob));
        }
    }

    /// Takes the record of the answer out of this value. `finish` says how the answer ended.
    pub fn take_record(&mut self, finish: &str) -> RecordedAnswer {
        let progress = self.stream.progress();
        let (cached_tokens, ttft_s) = (progress.cached_tokens, progress.ttft_s);
        RecordedAnswer { finish: finish.to_string(), cached_tokens, ttft_s, ..std::mem::take(&mut self.recorded) }
    }

    /// Returns the number of reasoning tokens so far.
    pub fn reasoning_tokens(&self) -> usize {
        self.pieces.reasoning_tokens()
    }
}
