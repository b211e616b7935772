//! The result of one turn, and the line of statistics below an answer.

use crate::chat::ToolCall;
use crate::engine::{FinishReason, Summary};
use crate::runner::ExecutionMode;

/// One answer from the model, with its token ids and statistics.
pub struct Turn {
    pub text: String,
    pub reasoning: String,
    /// The ids of the generated tokens, or `None` for a model on a server.
    pub tokens: Option<Vec<u32>>,
    pub summary: TurnSummary,
    /// Notes for the user, shown below the statistics.
    pub notes: Vec<String>,
}

/// How a turn ended, with its token counts, timings and tool calls. A server may not report token counts.
#[derive(Clone, Debug, PartialEq)]
pub struct TurnSummary {
    pub finish_reason: FinishReason,
    pub prompt_tokens: Option<usize>,
    pub completion_tokens: Option<usize>,
    /// Seconds from the request to the first token, or to the first text from a server. 0 if none arrived.
    pub ttft_s: f64,
    /// Decode speed in tokens per second, or 0 if it is unknown.
    pub tok_per_s: f64,
    /// The context length in tokens. `None` if a server does not report it.
    pub context: Option<usize>,
    /// How decode steps usually run, or `None` for a server.
    pub execution_mode: Option<ExecutionMode>,
    pub tool_calls: Vec<ToolCall>,
    /// The number of times the model violated its chat format. 0 for a server, which does not report them.
    pub format_violations: usize,
}

impl From<Summary> for TurnSummary {
    fn from(summary: Summary) -> Self {
        Self {
            finish_reason: summary.finish_reason,
            prompt_tokens: Some(summary.prompt_tokens),
            completion_tokens: Some(summary.completion_tokens),
            ttft_s: summary.ttft_s,
            tok_per_s: summary.tok_per_s,
            context: Some(summary.context),
            execution_mode: Some(summary.execution_mode),
            tool_calls: summary.tool_calls,
            format_violations: summary.format_violations,
        }
    }
}

impl TurnSummary {
    /// Returns the number of tokens in the prompt and the answer together, or `None` if it is unknown.
    pub fn context_used(&self) -> Option<usize> {
        Some(self.prompt_tokens? + self.completion_tokens?)
    }

    /// Returns the number of context tokens in use and the context length, or `None` if either is unknown.
    fn context_use(&self) -> Option<(usize, usize)> {
        Some((self.context_used()?, self.context?))
    }

    /// Returns whether the answer ended because the context is full.
    pub fn is_context_full(&self) -> bool {
        let is_full = self.context_use().is_some_and(|(used, context)| used >= context);
        is_full && self.finish_reason == FinishReason::Length
    }

    /// Returns a warning if at least 80% of the context is used, otherwise `None`.
    /// The caller adds what the user can do about it.
    pub fn context_warning(&self) -> Option<String> {
        let (used, context) = self.context_use()?;
        if self.is_context_full() {
            return Some("the context is full".to_string());
        }
        (used * 10 >= context * 8).then(|| format!("{}% of the context is used", used * 100 / context.max(1)))
    }
}

impl Turn {
    /// Returns the statistics of the turn on one line. Example:
    /// `57 tokens · 31.2 tok/s (graph) · first token after 0.21 s · context 312 of 4096`.
    pub fn statistics(&self) -> String {
        let summary = &self.summary;
        let mut parts = Vec::new();
        if let Some(count) = summary.completion_tokens {
            parts.push(format!("{count} {}", if count == 1 { "token" } else { "tokens" }));
        }
        if summary.tok_per_s > 0.0 {
            let executor = summary.execution_mode.map_or_else(String::new, |mode| format!(" ({mode})"));
            parts.push(format!("{:.1} tok/s{executor}", summary.tok_per_s));
        }
        parts.push(format!("first token after {:.2} s", summary.ttft_s));
        match (summary.context_used(), summary.context) {
            (Some(used), Some(context)) => parts.push(format!("context {used} of {context}")),
            (Some(used), None) => parts.push(format!("context {used}")),
            (None, _) => {}
        }
        match summary.finish_reason {
            FinishReason::Canceled => parts.push("stopped".into()),
            // Add nothing, because `context_warning` tells the user that the context is full.
            FinishReason::Length if summary.is_context_full() => {}
            FinishReason::Length if summary.context_use().is_some() => parts.push("reached --max-tokens".into()),
            FinishReason::Length => parts.push("reached a token limit".into()),
            FinishReason::Stop | FinishReason::ToolCalls => {}
        }
        if summary.format_violations > 0 {
            parts.push("the model violated its chat format".into());
        }
        parts.join(" · ")
    }
}
