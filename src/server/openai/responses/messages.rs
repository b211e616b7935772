//! Converts the items of a conversation to the messages of a prompt.

use super::item::{Item, ItemContent};
use crate::chat::{Message, Role, ToolCall};

/// Converts a conversation to messages. `instructions` become the first message.
///
/// Consecutive assistant items (reasoning, text and calls) become one message, as in a chat completion,
/// but text starts a new message if the current message already has text or a call.
pub fn messages<'a>(instructions: Option<&str>, items: impl Iterator<Item = &'a Item>) -> Vec<Message> {
    let mut messages: Vec<Message> = instructions.map(Message::system).into_iter().collect();
    // Whether the last message is an assistant message that the next item may extend.
    let mut is_open = false;
    for item in items {
        match &item.content {
            ItemContent::Message { role: Role::Assistant, text, .. } => {
                let message = assistant(&mut messages, &mut is_open);
                if message.content.is_empty() && message.tool_calls.is_empty() {
                    message.content.clone_from(text);
                } else {
                    messages.push(Message::assistant(text.as_str()));
                }
            }
            ItemContent::Message { role, text, .. } => {
                is_open = false;
                messages.push(Message::new(*role, text.as_str()));
            }
            ItemContent::Reasoning { text, .. } => {
                assistant(&mut messages, &mut is_open).reasoning.get_or_insert_default().push_str(text);
            }
            ItemContent::Call { call_id, name, arguments } => {
                let call = ToolCall { id: Some(call_id.clone()), name: name.clone(), arguments: arguments.clone() };
                assistant(&mut messages, &mut is_open).tool_calls.push(call);
            }
            ItemContent::CallOutput { call_id, output } => {
                is_open = false;
                let tool_call_id = Some(call_id.clone());
                messages.push(Message { tool_call_id, ..Message::new(Role::Tool, output.as_str()) });
            }
        }
    }
    messages
}

/// Returns the last message if `is_open` is true.
/// Otherwise, adds an empty assistant message, sets `is_open`, and returns the new message.
fn assistant<'m>(messages: &'m mut Vec<Message>, is_open: &mut bool) -> &'m mut Message {
    if !std::mem::replace(is_open, true) || messages.is_empty() {
        messages.push(Message::assistant(""));
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

#[cfg(test)]
mod tests {
    use super::super::item::ItemStatus;
    use super::*;

    fn item(content: ItemContent) -> Item {
        Item { id: content.new_id(), status: ItemStatus::Completed, content }
    }

    fn message(role: Role, text: &str) -> Item {
        item(ItemContent::Message { role, text: text.into(), logprobs: Vec::new() })
    }

    fn reasoning(text: &str) -> Item {
        item(ItemContent::Reasoning { text: text.into(), has_encoded_text: false })
    }

    fn call(id: &str) -> Item {
        item(ItemContent::Call { call_id: id.into(), name: "f".into(), arguments: "{}".into() })
    }

    fn output(id: &str) -> Item {
        item(ItemContent::CallOutput { call_id: id.into(), output: "ok".into() })
    }

    /// Converts the instructions `i` and `items` to messages. Describes each message by the first letter of its role,
    /// a colon, `<reasoning>`, the content, and `(id)` for each call.
    fn shape(items: &[Item]) -> String {
        let describe = |message: &Message| {
            let reasoning = message.reasoning.as_ref().map_or(String::new(), |text| format!("<{text}>"));
            let calls: String =
                message.tool_calls.iter().map(|call| format!("({})", call.id.as_deref().unwrap())).collect();
            format!("{}:{reasoning}{}{calls}", &message.role.as_str()[..1], message.content)
        };
        messages(Some("i"), items.iter()).iter().map(describe).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn items_of_one_answer_become_one_message() {
        use Role::{Assistant, Developer, User};
        let turn = [message(User, "q"), reasoning("r"), message(Assistant, "t"), call("1"), call("2")];
        assert_eq!(shape(&turn), "s:i u:q a:<r>t(1)(2)");
        let rest = [output("1"), output("2"), reasoning("s"), message(Assistant, "done"), message(User, "next")];
        let all: Vec<Item> = turn.into_iter().chain(rest).collect();
        assert_eq!(shape(&all), "s:i u:q a:<r>t(1)(2) t:ok t:ok a:<s>done u:next");
        let parallel = [call("1"), reasoning("r"), call("2"), output("1"), output("2")];
        assert_eq!(shape(&parallel), "s:i a:<r>(1)(2) t:ok t:ok");
        let examples = [message(Developer, "d"), message(Assistant, "a"), message(Assistant, "b"), reasoning("r")];
        assert_eq!(shape(&examples), "s:i d:d a:a a:<r>b");
    }
}
