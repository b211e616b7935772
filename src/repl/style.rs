//! What the terminal shows: dimming, figures, and nothing that a model could smuggle in.

use std::io::IsTerminal;

use crate::engine::{FinishReason, Summary};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Color {
    On,
    Off,
}

/// On for a terminal that can, unless NO_COLOR is set (no-color.org).
pub fn stderr_color() -> Color {
    color(std::io::stderr().is_terminal())
}

/// The same for stdout. Where it is off, answers are not laid out either.
pub fn stdout_color() -> Color {
    color(std::io::stdout().is_terminal())
}

fn color(terminal: bool) -> Color {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    if terminal && !refused && !dumb { Color::On } else { Color::Off }
}

/// How wide the window is, where there is one that knows.
pub fn columns(terminal: &console::Term) -> Option<usize> {
    let (_, columns) = terminal.size_checked()?;
    Some(usize::from(columns)).filter(|columns| *columns > 0)
}

/// Dimmed text.
pub fn dim(text: &str, color: Color) -> String {
    match color {
        Color::On if !text.is_empty() => format!("\x1b[2m{text}\x1b[22m"),
        _ => text.to_string(),
    }
}

/// `57 tokens · 31.2 tok/s (graph) · first token after 0.21 s · context 312 of 4096`
pub fn stats(summary: &Summary) -> String {
    let tokens = if summary.completion_tokens == 1 { "token" } else { "tokens" };
    let mut parts = vec![format!("{} {tokens}", summary.completion_tokens)];
    if summary.tok_per_s > 0.0 {
        parts.push(format!("{:.1} tok/s ({})", summary.tok_per_s, summary.executor));
    }
    parts.push(format!("first token after {:.2} s", summary.ttft_s));
    parts.push(format!("context {} of {}", summary.context_used, summary.context));
    match summary.finish_reason {
        FinishReason::Interrupted => parts.push("stopped".into()),
        // Then there is more to say: `overflow::warning` does.
        FinishReason::Length if summary.context_used >= summary.context => {}
        FinishReason::Length => parts.push("cut at --max-tokens".into()),
        FinishReason::Stop | FinishReason::ToolCalls => {}
    }
    if summary.malformed > 0 {
        parts.push("the model broke its chat format".into());
    }
    parts.join(" · ")
}
