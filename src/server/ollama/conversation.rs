//! Reads the messages of an ollama request.

use std::collections::VecDeque;

use serde_json::{Value, json};

use crate::chat::{Message, Role};
use crate::server::http::body::Fields;
use crate::server::http::error::ApiError;
use crate::server::openai::chat;

/// Reads the field `messages`. Returns `None` if there are no messages.
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

/// Renames the fields of an ollama message that have other names in chat completions.
/// Adds empty content if there is none. Fails if the message has images.
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
    // `read_messages` rejects most messages without content, but ollama accepts all of them.
    let content = message.entry("content").or_insert(Value::Null);
    if content.is_null() {
        *content = json!("");
    }
    Ok(item)
}

/// Adds missing ids to tool calls, and to the tool results that belong to a call.
/// A result without an id belongs to the first unanswered call of the function that the result names.
/// If there is no such call, the result belongs to the first unanswered call of any function.
/// Only the calls of the last assistant message before the result count.
fn link_results(messages: &mut [Message]) {
    // The function name and the id of each unanswered call.
    let mut open: VecDeque<(String, String)> = VecDeque::new();
    for (index, message) in messages.iter_mut().enumerate() {
        if message.role == Role::Assistant {
            open.clear();
            for (position, call) in message.tool_calls.iter_mut().enumerate() {
                let id = call.id.get_or_insert_with(|| format!("call_{index}_{position}")).clone();
                open.push_back((call.name.clone(), id));
            }
        } else if message.role == Role::Tool {
            if let Some(id) = &message.tool_call_id {
                open.retain(|(_, open)| open != id);
                continue;
            }
            let named = open.iter().position(|(name, _)| Some(name) == message.name.as_ref());
            message.tool_call_id = open.remove(named.unwrap_or(0)).map(|(_, id)| id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::ToolCall;

    #[test]
    fn results_belong_to_the_call_with_their_name() {
        let call = |name: &str| ToolCall { id: None, name: name.to_string(), arguments: "{}".to_string() };
        let result = |name: Option<&str>| Message { name: name.map(str::to_string), ..Message::new(Role::Tool, "") };
        let mut asked = Message::new(Role::Assistant, "");
        asked.tool_calls = vec![call("f"), call("g"), call("g")];
        let mut messages = vec![asked, result(Some("g")), result(None), result(Some("g")), result(Some("g"))];
        link_results(&mut messages);
        let ids: Vec<Option<&str>> = messages[1..].iter().map(|message| message.tool_call_id.as_deref()).collect();
        assert_eq!(ids, [Some("call_0_1"), Some("call_0_0"), Some("call_0_2"), None]);
    }

    #[test]
    fn results_with_an_id_leave_the_other_calls_open() {
        let call = |id: &str| ToolCall { id: Some(id.to_string()), name: "f".to_string(), arguments: "{}".to_string() };
        let result =
            |id: Option<&str>| Message { tool_call_id: id.map(str::to_string), ..Message::new(Role::Tool, "") };
        let mut asked = Message::new(Role::Assistant, "");
        asked.tool_calls = vec![call("a"), call("b")];
        let mut messages = vec![asked, result(Some("b")), result(None)];
        link_results(&mut messages);
        assert_eq!(messages[2].tool_call_id.as_deref(), Some("a"));
    }
}
