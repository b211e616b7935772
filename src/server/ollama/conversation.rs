//! Reads the messages of a request.

use serde_json::{Value, json};

use crate::chat::{Message, Role};
use crate::server::chat;
use crate::server::http::body::Fields;
use crate::server::http::error::ApiError;

/// Reads `messages`. Returns `None` if there are no messages.
pub fn read(fields: &mut Fields) -> Result<Option<Vec<Message>>, ApiError> {
    let items = fields.take_array("messages")?.unwrap_or_default();
    if items.is_empty() {
        return Ok(None);
    }
    let items: Result<Vec<Value>, ApiError> = items.into_iter().enumerate().map(renamed).collect();
    fields.put("messages", Value::Array(items?));
    let mut messages = chat::read_messages(fields)?;
    link_results(&mut messages);
    Ok(Some(messages))
}

/// Renames the fields of a message to those of a chat completion. Fails if the message has images.
fn renamed((index, mut item): (usize, Value)) -> Result<Value, ApiError> {
    let Some(message) = item.as_object_mut() else { return Ok(item) };
    let has_images = |images: Value| !images.is_null() && images != json!([]);
    if message.remove("images").is_some_and(has_images) {
        return Err(ApiError::unsupported(format!("messages[{index}].images"), "only text is supported"));
    }
    for (from, to) in [("thinking", "reasoning"), ("tool_name", "name")] {
        if let Some(value) = message.remove(from) {
            message.insert(to.to_string(), value);
        }
    }
    // `content` is often missing, for example in assistant messages with tool calls.
    let content = message.entry("content").or_insert(Value::Null);
    if content.is_null() {
        *content = json!("");
    }
    Ok(item)
}

/// Adds missing ids to tool calls and results. Results without an id belong to the latest calls, in order.
fn link_results(messages: &mut [Message]) {
    let mut open: std::collections::VecDeque<String> = Default::default();
    for (index, message) in messages.iter_mut().enumerate() {
        if message.role == Role::Assistant {
            open.clear();
            for (position, call) in message.tool_calls.iter_mut().enumerate() {
                open.push_back(call.id.get_or_insert_with(|| format!("call_{index}_{position}")).clone());
            }
        } else if message.role == Role::Tool {
            let next = open.pop_front();
            message.tool_call_id = message.tool_call_id.take().or(next);
        }
    }
}
