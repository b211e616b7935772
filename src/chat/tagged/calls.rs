//! Parses tool calls that models with a chat template write as text.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::chat::message::ToolCall;
use crate::chat::python;

/// The token before the tool calls of Mistral models.
/// A JSON list of calls, or the function name of one call, follows this token.
pub const MISTRAL_CALLS: &str = "[TOOL_CALLS]";

/// The tokens before the call id and before the arguments of a tool call, in newer Mistral models.
pub const MISTRAL_ID: &str = "[CALL_ID]";
pub const MISTRAL_ARGUMENTS: &str = "[ARGS]";

/// The token before the tool calls of Llama 3.
pub const LLAMA_CALLS: &str = "<|python_tag|>";

/// A tool call as a JSON object.
#[derive(Deserialize)]
struct JsonCall {
    name: String,
    #[serde(alias = "parameters")]
    arguments: Option<Value>,
}

impl From<JsonCall> for ToolCall {
    fn from(JsonCall { name, arguments }: JsonCall) -> Self {
        let arguments = match arguments {
            None => String::new(),
            Some(Value::String(text)) => text,
            Some(value) => python::json_dumps(&value),
        };
        Self { id: None, name, arguments }
    }
}

/// Parses the whole text of one or more tool calls. Returns `None` unless the text has one of these forms:
///
/// - `{"name": "f", "arguments": {}}`: Hermes and Qwen
/// - `{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}`: Llama 3
/// - `[{"name": "f", "arguments": {}}]`: Mistral
/// - `f[ARGS]{}` or `f[CALL_ID]123[ARGS]{}`: newer Mistral models (the call id is dropped)
///
/// The arguments may be missing, except in the last form.
pub fn read_calls(text: &str) -> Option<Vec<ToolCall>> {
    let text = text.trim();
    if let Some((head, arguments)) = text.split_once(MISTRAL_ARGUMENTS) {
        let name = head.split(MISTRAL_ID).next().unwrap_or_default().trim().to_string();
        let arguments = arguments.trim().to_string();
        let is_valid = !name.is_empty() && serde_json::from_str::<Map<String, Value>>(&arguments).is_ok();
        return is_valid.then(|| vec![ToolCall { id: None, name, arguments }]);
    }
    if text.starts_with('[') {
        let calls: Vec<JsonCall> = serde_json::from_str(text).ok()?;
        return (!calls.is_empty()).then(|| calls.into_iter().map(ToolCall::from).collect());
    }
    Some(read_objects(text, Separator::Semicolon)?.into_iter().map(ToolCall::from).collect())
}

/// Parses an answer that consists of Llama 3 tool calls. The semicolons between the calls are optional.
/// Returns `None` if the answer contains anything else, or if a tool call has no arguments.
pub fn read_bare_calls(text: &str) -> Option<Vec<ToolCall>> {
    let calls = read_objects(text.trim(), Separator::SemicolonOrWhitespace)?;
    calls.into_iter().map(|call| call.arguments.is_some().then(|| call.into())).collect()
}

/// The separators that are allowed between JSON objects.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Separator {
    Semicolon,
    SemicolonOrWhitespace,
}

/// Parses one or more tool calls, each a JSON object. Returns `None` if the text has any other form.
fn read_objects(text: &str, separator: Separator) -> Option<Vec<JsonCall>> {
    let (mut calls, mut rest) = (Vec::new(), text);
    loop {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<JsonCall>();
        calls.push(values.next()?.ok()?);
        rest = rest[values.byte_offset()..].trim_start();
        if rest.is_empty() {
            return Some(calls);
        }
        rest = match rest.strip_prefix(';') {
            Some(rest) => rest.trim_start(),
            None if separator == Separator::SemicolonOrWhitespace => rest,
            None => return None,
        };
    }
}
