//! Types for rendering a conversation to token ids: the options, the result and the `Render` trait.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::message::{Message, ReasoningEffort};

/// The options for rendering a prompt from messages.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RenderOptions {
    /// Tools in OpenAI's format: `{"type": "function", "function": {"name", "description", "parameters"}}`.
    pub tools: Vec<serde_json::Value>,
    pub reasoning_effort: ReasoningEffort,
    /// The current date as `YYYY-MM-DD`.
    ///
    /// The caller keeps the same date for a whole session.
    /// A new date at midnight would change the first tokens of the prompt and invalidate the KV cache.
    pub date: String,
    /// Whether the prompt ends with the start of an assistant message.
    pub add_generation_prompt: bool,
}

/// Returns today's date in the local time zone, as `YYYY-MM-DD`.
pub fn today() -> String {
    jiff::Zoned::now().strftime("%Y-%m-%d").to_string()
}

/// A renderer that replaces the chat format of a model, for example one that runs in a worker.
pub trait Render: Send + Sync {
    fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<Rendered>;
}

/// A rendered conversation, ready for prefill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    pub ids: Vec<u32>,
    /// The prompt as text, including control tokens.
    pub text: String,
}
