//! The content blocks of a message.

use serde::Serialize;
use serde_json::Value;

/// The signature of thinking blocks. Clients send blocks back only if they have one. inferno does not check it.
pub const SIGNATURE: &str = "inferno";

/// A content block.
#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block {
    Thinking { thinking: String, signature: &'static str },
    Text { text: String },
    ToolUse { id: String, name: String, input: Value },
}
