//! The options, the result and the trait for rendering conversations to token ids.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::message::{Message, ReasoningEffort};

/// The options for rendering a prompt from messages.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RenderOptions {
    /// Tools in the format of chat completions:
    /// `{"type": "function", "function": {"name", "description", "parameters"}}`.
    pub tools: Vec<Value>,
    pub reasoning_effort: ReasoningEffort,
    /// The current date as `YYYY-MM-DD`.
    ///
    /// `inferno play` uses one date for a whole session. A new date at midnight would change the start of the prompt,
    /// and the cached prefix would no longer match.
    pub date: String,
    /// Whether the prompt ends with the start of an assistant message.
    pub add_generation_prompt: bool,
    /// Additional variables for the Jinja template, such as `enable_thinking` for Qwen3. Harmony ignores them.
    pub template_variables: Map<String, Value>,
}

/// Returns today's date in the local time zone, as `YYYY-MM-DD`.
pub fn today() -> String {
    jiff::Zoned::now().strftime("%Y-%m-%d").to_string()
}

/// Renders conversations in place of a `ChatFormat`, for example in a sandbox process.
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
