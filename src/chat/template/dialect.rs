//! Detects the features in which chat templates differ, and converts messages to the form that a template expects.

use std::borrow::Cow;

use anyhow::Result;
use serde_json::{Map, Value as Json, json};

use super::injection::Marker;
use crate::chat::message::{Message, Role, ToolCall};

/// The length of tool call ids that Mistral's templates accept.
const SHORT_CALL_ID: usize = 9;

/// The tags around reasoning. In the text and reasoning of assistant messages, [`Marker`] inserts no marks into these
/// tags, because a template that removes earlier reasoning would not find a marked tag.
const ASSISTANT_TAGS: [&str; 2] = ["<think>", "</think>"];

/// The features of a template, detected from words in its source.
pub struct TemplateDialect {
    /// Whether the template supports the `developer` role. If not, developer messages become system messages.
    has_developer_role: bool,
    /// The message fields from which the template reads reasoning.
    reasoning_keys: Vec<&'static str>,
    /// Whether the template checks for null content. If so, messages with tool calls but no text have null content.
    has_null_content: bool,
    /// Whether the template accepts only tool call ids of nine letters and digits, as Mistral's templates do.
    has_short_call_ids: bool,
    /// Whether the template reads the tools of a request. Some templates, such as Gemma 2's, do not.
    pub reads_tools: bool,
}

/// The form in which tool call arguments are passed to the template.
/// Arguments that are not a JSON object are always passed as a string.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ArgumentForm {
    Objects,
    Strings,
}

impl TemplateDialect {
    /// Detects the features of the template `source`.
    pub fn of(source: &str) -> Self {
        let reasoning_keys = ["reasoning_content", "reasoning", "thinking"];
        let null_tests = [".content", "'content']", "\"content\"]"]
            .iter()
            .flat_map(|content| [format!("{content} is none"), format!("{content} is not none")]);
        let length_tests = ["id|length != 9", "id | length != 9"];
        Self {
            has_developer_role: has_word(source, "developer"),
            reasoning_keys: reasoning_keys.into_iter().filter(|key| has_word(source, key)).collect(),
            has_null_content: null_tests.into_iter().any(|test| source.contains(&test)),
            has_short_call_ids: length_tests.iter().any(|test| source.contains(test)),
            reads_tools: has_word(source, "tools"),
        }
    }

    /// Returns a message as the dictionary that templates expect, with marked control tokens.
    /// Omits optional fields without a value.
    pub fn message(&self, message: &Message, marker: &Marker, arguments: ArgumentForm) -> Result<Json> {
        let allowed = if message.role == Role::Assistant { &ASSISTANT_TAGS[..] } else { &[] };
        let mark_content = |text: &str| marker.mark_except(text, allowed);
        let mark = |text: &str| marker.mark(text);
        let role = match message.role {
            Role::Developer if !self.has_developer_role => Role::System,
            role => role,
        };
        let mut dict = Map::new();
        dict.insert("role".into(), json!(role.as_str()));
        let absent = self.has_null_content && message.content.is_empty() && !message.tool_calls.is_empty();
        dict.insert("content".into(), if absent { Json::Null } else { json!(mark_content(&message.content)?) });
        if let Some(name) = &message.name {
            dict.insert("name".into(), json!(mark(name)?));
        }
        if let Some(id) = &message.tool_call_id {
            dict.insert("tool_call_id".into(), json!(mark(&self.call_id(id))?));
        }
        if let Some(reasoning) = &message.reasoning {
            for key in &self.reasoning_keys {
                dict.insert((*key).into(), json!(mark_content(reasoning)?));
            }
        }
        if !message.tool_calls.is_empty() {
            let calls = message.tool_calls.iter().map(|call| self.tool_call(call, marker, arguments));
            dict.insert("tool_calls".into(), calls.collect::<Result<_>>()?);
        }
        Ok(Json::Object(dict))
    }

    /// Returns a tool call as the dictionary that templates expect, with marked control tokens.
    fn tool_call(&self, call: &ToolCall, marker: &Marker, arguments: ArgumentForm) -> Result<Json> {
        let mark = |text: &str| marker.mark(text);
        let mut dict = Map::new();
        if let Some(id) = &call.id {
            dict.insert("id".into(), json!(mark(&self.call_id(id))?));
        }
        dict.insert("type".into(), json!("function"));
        let parsed = serde_json::from_str::<Json>(&call.arguments).ok().filter(Json::is_object);
        let arguments = match parsed.filter(|_| arguments == ArgumentForm::Objects) {
            Some(object) => map_strings(&object, &mark)?,
            None => json!(mark(&call.arguments)?),
        };
        dict.insert("function".into(), json!({ "name": mark(&call.name)?, "arguments": arguments }));
        Ok(Json::Object(dict))
    }

    /// Converts a tool call id to a form that the template accepts. Equal ids stay equal.
    fn call_id<'i>(&self, id: &'i str) -> Cow<'i, str> {
        let is_short = id.len() == SHORT_CALL_ID && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if !self.has_short_call_ids || is_short {
            return id.into();
        }
        // Use a hash, because removing the invalid characters would make `call_1_11` and `call_11_1` equal.
        // Use FNV-1a, because Rust's default hasher, and with it the prompt, may change between Rust versions.
        let hash = id
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let hash = format!("{hash:016x}");
        hash[hash.len() - SHORT_CALL_ID..].to_string().into()
    }
}

/// Returns whether `source` contains `word` as a whole identifier.
fn has_word(source: &str, word: &str) -> bool {
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    source
        .match_indices(word)
        .any(|(at, _)| !is_part(source[..at].chars().next_back()) && !is_part(source[at + word.len()..].chars().next()))
}

/// Applies a function to all strings in a JSON value, including keys.
pub fn map_strings(value: &Json, change: &dyn Fn(&str) -> Result<String>) -> Result<Json> {
    Ok(match value {
        Json::String(text) => Json::String(change(text)?),
        Json::Array(items) => Json::Array(items.iter().map(|item| map_strings(item, change)).collect::<Result<_>>()?),
        Json::Object(map) => Json::Object(
            map.iter().map(|(key, value)| Ok((change(key)?, map_strings(value, change)?))).collect::<Result<_>>()?,
        ),
        other => other.clone(),
    })
}
