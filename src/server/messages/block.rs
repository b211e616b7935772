//! The content blocks of a message.

use serde::Serialize;
use serde_json::Value;

/// The signature of thinking blocks. Clients send back only blocks that have a signature. inferno ignores the value.
pub const SIGNATURE: &str = "inferno";

/// A content block.
/// Anthropic's API requires the fields of type `()`. They are null, because inferno has no values for them.
#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block {
    Thinking { thinking: String, signature: &'static str },
    Text { text: String, citations: () },
    ToolUse { id: String, name: String, input: Value, caller: Caller },
}

/// Who called a tool. In inferno, the caller is always the model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Caller {
    Direct,
}
