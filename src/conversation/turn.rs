//! The result of one turn, and the line of statistics below an answer.

use crate::engine::{FinishReason, Summary};

/// One answer from the model.
pub struct Turn {
    pub text: String,
    pub reasoning: String,
    pub tokens: Vec<u32>,
    pub summary: Summary,
    /// Notes for the user, shown below the statistics.
    pub notes: Vec<String>,
}

impl Turn {
    /// Returns the statistics of the turn on one line. Example:
    /// `57 tokens · 31.2 tok/s (graph) · first token after 0.21 s · context 312 of 4096`.
    pub fn statistics(&self) -> String {
        let summary = &self.summary;
        let tokens = if summary.completion_tokens == 1 { "token" } else { "tokens" };
        let mut parts = vec![format!("{} {tokens}", summary.completion_tokens)];
        if summary.tok_per_s > 0.0 {
            parts.push(format!("{:.1} tok/s ({})", summary.tok_per_s, summary.executor));
        }
        parts.push(format!("first token after {:.2} s", summary.ttft_s));
        parts.push(format!("context {} of {}", summary.context_used, summary.context));
        match summary.finish_reason {
            FinishReason::Canceled => parts.push("stopped".into()),
            // A separate note says that the context is full.
            FinishReason::Length if summary.context_used >= summary.context => {}
            FinishReason::Length => parts.push("reached --max-tokens".into()),
            FinishReason::Stop | FinishReason::ToolCalls => {}
        }
        if summary.format_violations > 0 {
            parts.push("the model violated its chat format".into());
        }
        parts.join(" · ")
    }
}
