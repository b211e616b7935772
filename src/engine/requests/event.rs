//! What an answer's stream returns: events, the summary of the answer, its progress, and the scores of its prompt.

use super::request::FinishReason;
use crate::chat::{Channel, Delta, ToolCall};
use crate::runner::{ExecutionMode, TokenLogprobs};

/// An event of a [`RequestStream`](crate::engine::RequestStream): a token or the end.
#[derive(Clone, Debug)]
pub enum Event {
    /// A generated token, and the text that the token completes.
    /// `deltas` can be empty, for example if the token ends inside a character or its text may begin a stop string.
    /// `logprobs` is `Some` if [`GenerateOptions::logprobs`](crate::engine::GenerateOptions::logprobs) is set.
    /// `is_requested_stop` says whether the token is one of
    /// [`GenerateOptions::stop_token_ids`](crate::engine::GenerateOptions::stop_token_ids), which add no text.
    Token { id: u32, deltas: Vec<Delta>, logprobs: Option<TokenLogprobs>, is_requested_stop: bool },
    /// The end of the answer: the text that was still held back, and the summary.
    End { deltas: Vec<Delta>, summary: Box<Summary> },
}

impl Event {
    /// Returns the generated token, or `None` for the end event.
    pub fn token(&self) -> Option<u32> {
        match self {
            Event::Token { id, .. } => Some(*id),
            Event::End { .. } => None,
        }
    }

    /// Returns the token's log probabilities. `None` for the end event, or if the request did not ask for any.
    pub fn logprobs(&self) -> Option<&TokenLogprobs> {
        match self {
            Event::Token { logprobs, .. } => logprobs.as_ref(),
            Event::End { .. } => None,
        }
    }

    /// Returns the text of this event, split by channel.
    pub fn deltas(&self) -> &[Delta] {
        match self {
            Event::Token { deltas, .. } | Event::End { deltas, .. } => deltas,
        }
    }

    /// Returns the summary of the end event, or `None` for a token.
    pub fn summary(&self) -> Option<&Summary> {
        match self {
            Event::Token { .. } => None,
            Event::End { summary, .. } => Some(summary),
        }
    }

    /// Returns the text of this event on the answer channel.
    pub fn answer(&self) -> String {
        self.text(Channel::Answer)
    }

    /// Returns the text of this event on one channel.
    pub fn text(&self, channel: Channel) -> String {
        self.deltas().iter().filter(|delta| delta.channel == channel).map(|delta| delta.text.as_str()).collect()
    }
}

/// How an answer ended, with its token counts, times and tool calls.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    pub finish_reason: FinishReason,
    pub prompt_tokens: usize,
    /// Prompt tokens reused from the KV cache.
    pub cached_tokens: usize,
    pub completion_tokens: usize,
    /// Seconds from the call of [`submit`](crate::engine::EngineHandle::submit) to the answer's first step.
    /// 0 if the first step has not started.
    pub queue_s: f64,
    /// Seconds from the call of [`submit`](crate::engine::EngineHandle::submit) to the first token, including
    /// rendering, tokenizing and waiting. 0 if no token was generated.
    pub ttft_s: f64,
    /// The decode speed in tokens per second, not counting the first token. 0 for fewer than two tokens.
    pub tok_per_s: f64,
    /// The sum of `prompt_tokens` and `completion_tokens`.
    pub context_used: usize,
    /// The context length of the engine, in tokens.
    pub context: usize,
    /// How decode steps usually run while only one request is active: as a CUDA graph, or operation by operation.
    pub execution_mode: ExecutionMode,
    pub tool_calls: Vec<ToolCall>,
    /// How often the model violated its chat format.
    pub format_violations: usize,
}

/// A prompt with the log probabilities of its tokens.
#[derive(Clone, Debug, Default)]
pub struct ScoredPrompt {
    pub tokens: Vec<u32>,
    /// The number of most likely tokens that the request asked for.
    pub top: usize,
    /// The log probabilities of all tokens except the first, each given the tokens before it.
    /// The list is complete once the stream has returned an event, unless the caller ended the request earlier.
    pub logprobs: Vec<TokenLogprobs>,
}

/// The token counts and the time to first token of an answer in progress.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnswerProgress {
    pub prompt_tokens: usize,
    /// Prompt tokens reused from the KV cache. 0 before the first step of the answer.
    pub cached_tokens: usize,
    pub completion_tokens: usize,
    /// See [`Summary::ttft_s`]. 0 before the first token.
    pub ttft_s: f64,
}
