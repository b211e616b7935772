//! Reads the messages of a request in Anthropic's format.

use serde_json::Value;

use crate::chat::{Message, Role, ToolCall};
use crate::server::http::body::Fields;
use crate::server::http::error::ApiError;
use crate::server::openai::chat::read_content;

/// Reads the fields `system` and `messages` into one list.
/// Fails if a field is invalid, if there are no messages, or if the last message is an assistant message.
pub fn read(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    let system = read_content(fields, "system")?;
    let mut messages: Vec<Message> = system.filter(|text| !text.is_empty()).map(Message::system).into_iter().collect();
    let items = fields.take_array("messages")?;
    let items = items.filter(|items| !items.is_empty());
    for (index, item) in items.ok_or_else(|| fields.invalid("messages", "expected messages"))?.into_iter().enumerate() {
        let mut message = Fields::nested(&format!("messages[{index}]"), item)?;
        match message.take_string("role")?.as_deref() {
            Some("user") => read_user(&mut message, &mut messages)?,
            Some("assistant") => messages.push(read_assistant(&mut message)?),
            Some("system") => {
                let text = read_content(&mut message, "content")?;
                messages.push(Message::system(text.ok_or_else(|| message.invalid("content", "expected text"))?));
            }
            _ => return Err(message.invalid("role", "expected user, assistant or system")),
        }
        fields.ignore_rest(message);
    }
    match messages.last().map(|message| message.role) {
        Some(Role::Assistant) => {
            Err(fields.invalid("messages", "inferno cannot continue an answer; end with a user message"))
        }
        _ => Ok(messages),
    }
}

/// Returns the content blocks of a message. A string counts as one text block.
fn blocks(message: &mut Fields) -> Result<Vec<Fields>, ApiError> {
    let items = match message.take("content") {
        Some(Value::String(text)) => vec![serde_json::json!({ "type": "text", "text": text })],
        Some(Value::Array(items)) => items,
        _ => return Err(message.invalid("content", "expected a string or an array of blocks")),
    };
    let block = |(index, item)| Fields::nested(&message.path(&format!("content[{index}]")), item);
    items.into_iter().enumerate().map(block).collect()
}

fn unsupported(block: &Fields, kind: &str) -> ApiError {
    match kind {
        "" => block.invalid("type", "expected a type such as 'text'"),
        _ => ApiError::unsupported(block.path("type"), &format!("blocks of type '{kind}' are not accepted here")),
    }
}

/// Reads a user message. Tool results in the message become separate messages.
fn read_user(message: &mut Fields, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let mut content: Option<String> = None;
    for mut block in blocks(message)? {
        let kind = block.take_string("type")?.unwrap_or_default();
        match kind.as_str() {
            "text" => content.get_or_insert_default().push_str(&block.require_string("text")?),
            "tool_result" => {
                messages.extend(content.take().map(Message::user));
                messages.push(read_result(&mut block)?);
            }
            _ => return Err(unsupported(&block, &kind)),
        }
        message.ignore_rest(block);
    }
    messages.extend(content.map(Message::user));
    Ok(())
}

fn read_result(block: &mut Fields) -> Result<Message, ApiError> {
    let id = block.require_string("tool_use_id")?;
    let result = read_content(block, "content")?.unwrap_or_default();
    // Chat formats have no flag for failed tool calls, so the text of the tool result reports the failure.
    let result = match block.take_bool("is_error")? {
        Some(true) => format!("Error: {result}"),
        _ => result,
    };
    Ok(Message { tool_call_id: Some(id), ..Message::new(Role::Tool, result) })
}

fn read_assistant(message: &mut Fields) -> Result<Message, ApiError> {
    let mut answer = Message::assistant("");
    for mut block in blocks(message)? {
        let kind = block.take_string("type")?.unwrap_or_default();
        match kind.as_str() {
            "text" => answer.content.push_str(&block.require_string("text")?),
            "thinking" => {
                let thinking = block.require_string("thinking")?;
                if !thinking.is_empty() {
                    answer.reasoning.get_or_insert_default().push_str(&thinking);
                }
                block.take_string("signature")?;
            }
            // Drop redacted thinking: only the service that encrypted it can read it.
            "redacted_thinking" => {
                block.take("data");
                message.ignore_with_note("messages[].content[]", "redacted_thinking");
            }
            "tool_use" => {
                let id = block.require_string("id")?;
                let name = block.require_string("name")?;
                let arguments = match block.take("input") {
                    Some(input @ Value::Object(_)) => input.to_string(),
                    _ => return Err(block.invalid("input", "expected an object")),
                };
                // The field `caller` repeats what the server reported, and does not affect the prompt.
                block.take("caller");
                answer.tool_calls.push(ToolCall { id: Some(id), name, arguments });
            }
            _ => return Err(unsupported(&block, &kind)),
        }
        message.ignore_rest(block);
    }
    Ok(answer)
}
