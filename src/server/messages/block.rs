//! The content blocks of a message.

use serde::Serialize;
use serde_json::Value;

/// The signature of thinking blocks. Clients send blocks back only if they have one. inferno does not check it.
pub const SIGNATURE: &str = "inferno";

/// A content block. Fields of type `()` are required in Anthropic's API, and null because
/// inferno has no value for them.
#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block {
    Thinking { thinking: String, signature: &'static str },
    Text { text: String, citations: () },
    ToolUse { id: String, name: String, input: Value, caller: Caller },
}

/// Who called a tool. In inferno, it is always the model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Caller {
    Direct,
}
