//! Options and result of rendering a conversation.

use super::message::ReasoningEffort;

/// The inputs of a prompt other than its messages.
#[derive(Clone, Debug)]
pub struct RenderOptions {
    /// Tools as OpenAI's objects: `{"type": "function", "function": {"name", "description", "parameters"}}`.
    pub tools: Vec<serde_json::Value>,
    pub reasoning_effort: ReasoningEffort,
    /// The current date, `YYYY-MM-DD`.
    /// The caller keeps it for a whole session:
    /// a new date at midnight would change the first tokens of the prompt and invalidate the KV cache.
    pub date: String,
    /// Whether the prompt ends with the beginning of an assistant message.
    pub add_generation_prompt: bool,
}

/// A conversation in the form that a model reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    pub ids: Vec<u32>,
    /// The same as text, including control tokens.
    pub text: String,
}
