//! Reads the messages of a chat completion request.

use serde_json::Value;

use crate::chat::{Message, Role, ToolCall};
use crate::server::http::body::Fields;
use crate::server::http::error::ApiError;

/// Reads the field `messages` of a request. Fails if there are no messages or if a message is invalid.
pub fn read(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    let items = fields.take_array("messages")?;
    let items = items.ok_or_else(|| fields.invalid("messages", "expected an array of messages"))?;
    if items.is_empty() {
        return Err(fields.invalid("messages", "expected at least one message"));
    }
    let mut messages = Vec::with_capacity(items.len());
    for (index, item) in items.into_iter().enumerate() {
        let mut message = Fields::nested(&format!("messages[{index}]"), item)?;
        messages.push(read_message(&mut message)?);
        fields.ignore_rest(message);
    }
    Ok(messages)
}

fn read_message(fields: &mut Fields) -> Result<Message, ApiError> {
    let role = fields.take_string("role")?;
    let role = match role.as_deref() {
        Some("system") => Role::System,
        Some("developer") => Role::Developer,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("tool") => Role::Tool,
        _ => return Err(fields.invalid("role", "expected system, developer, user, assistant or tool")),
    };
    fields.refuse("audio", &[], "send text")?;
    fields.refuse("function_call", &[], "use 'tool_calls'")?;
    let content = read_content(fields, "content")?;
    let reasoning = fields.take_string("reasoning")?;
    let reasoning_content = fields.take_string("reasoning_content")?;
    let reasoning = reasoning.or(reasoning_content);
    let tool_calls = read_tool_calls(fields)?;
    if role != Role::Assistant && !tool_calls.is_empty() {
        return Err(fields.invalid("tool_calls", "only an assistant message can have tool calls"));
    }
    if content.is_none() && tool_calls.is_empty() && !(role == Role::Assistant && reasoning.is_some()) {
        return Err(fields.invalid("content", "expected text"));
    }
    Ok(Message {
        content: content.unwrap_or_default(),
        reasoning: reasoning.filter(|_| role == Role::Assistant),
        tool_calls,
        tool_call_id: fields.take_string("tool_call_id")?.filter(|_| role == Role::Tool),
        name: fields.take_string("name")?,
        ..Message::new(role, "")
    })
}

/// Reads the text of a field, which is a string or an array of text parts. Joins the parts.
/// Returns `None` if the field is missing or null. Fails if a part is not text, for example an image.
pub fn read_content(fields: &mut Fields, name: &str) -> Result<Option<String>, ApiError> {
    let parts = match fields.take(name) {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(text)),
        Some(Value::Array(parts)) => parts,
        Some(_) => return Err(fields.invalid(name, "expected a string or an array of parts")),
    };
    let mut content = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        let mut part = Fields::nested(&fields.path(&format!("{name}[{index}]")), part)?;
        let kind = part.take_string("type")?.unwrap_or_default();
        let field = match kind.as_str() {
            "text" | "input_text" | "output_text" | "reasoning_text" => "text",
            "refusal" => "refusal",
            "image_url" | "image" | "input_image" | "input_audio" | "document" | "file" | "input_file"
            | "video_url" => {
                return Err(ApiError::unsupported(
                    part.path("type"),
                    &format!("only text is accepted, not parts of type '{kind}'"),
                ));
            }
            _ => return Err(part.invalid("type", "expected 'text'")),
        };
        content.push_str(&part.require_string(field)?);
        // Clients send back the parts of earlier responses, which have these fields, so do not report them as ignored.
        drop((part.take("annotations"), part.take("logprobs")));
        fields.ignore_rest(part);
    }
    Ok(Some(content))
}

fn read_tool_calls(fields: &mut Fields) -> Result<Vec<ToolCall>, ApiError> {
    let items = fields.take_array("tool_calls")?.unwrap_or_default();
    let read = |(index, item)| {
        let mut call = Fields::nested(&fields.path(&format!("tool_calls[{index}]")), item)?;
        if call.take_string("type")?.is_some_and(|kind| kind != "function") {
            return Err(call.invalid("type", "expected 'function'"));
        }
        let id = call.take_string("id")?;
        let function = call.take_object("function")?;
        let mut function = function.ok_or_else(|| call.invalid("function", "expected an object"))?;
        let name = function.require_string("name")?;
        let arguments = match function.take("arguments") {
            None => String::new(),
            Some(Value::String(text)) => text,
            Some(value @ Value::Object(_)) => value.to_string(),
            Some(_) => return Err(function.invalid("arguments", "expected a string or an object")),
        };
        Ok(ToolCall { id, name, arguments })
    };
    items.into_iter().enumerate().map(read).collect()
}
