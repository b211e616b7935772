//! The content blocks of a message in Anthropic's API.

use serde::Serialize;
use serde_json::Value;

/// The signature of every thinking block that inferno sends.
/// Anthropic's API requires a signature, so clients can drop thinking blocks without one.
/// inferno does not check the signatures that it receives.
pub const SIGNATURE: &str = "inferno";

/// A content block of a message.
/// Fields of type `()` are always null: Anthropic's API requires them, but inferno has no values for them.
#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentBlock {
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
