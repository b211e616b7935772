//! The messages of a conversation, and their JSON form in OpenAI's chat completions.

use std::fmt;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

use super::python;

/// The role of a message's author.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    System,
    Developer,
    User,
    Assistant,
    #[serde(alias = "function")]
    Tool,
}

impl Role {
    /// Returns the name of the role in JSON and in templates.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::Developer => "developer",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// How much a model reasons. These are the levels of gpt-oss, which has no level without reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReasoningEffort {
    Low,
    #[default]
    Medium,
    High,
}

impl fmt::Display for ReasoningEffort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReasoningEffort::Low => "low",
            ReasoningEffort::Medium => "medium",
            ReasoningEffort::High => "high",
        })
    }
}

impl FromStr for ReasoningEffort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "low" => Ok(ReasoningEffort::Low),
            "medium" => Ok(ReasoningEffort::Medium),
            "high" => Ok(ReasoningEffort::High),
            other => Err(format!("unknown reasoning effort '{other}'; choose low, medium or high")),
        }
    }
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    pub role: Role,
    /// The text of the message. Empty if the JSON value is null or absent, as in many messages with tool calls.
    pub content: String,
    /// The assistant's reasoning before the answer.
    pub reasoning: Option<String>,
    /// The function calls of the assistant.
    pub tool_calls: Vec<ToolCall>,
    /// In a tool message, the id of the tool call that the message answers.
    pub tool_call_id: Option<String>,
    /// The name of the author. In a tool message, the name of the function.
    pub name: Option<String>,
}

impl Message {
    /// Creates a message with only a role and a text.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), reasoning: None, tool_calls: Vec::new(), tool_call_id: None, name: None }
    }

    pub fn system(content: impl Into<String>) -> Self {
        Self::new(Role::System, content)
    }

    pub fn user(content: impl Into<String>) -> Self {
        Self::new(Role::User, content)
    }

    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new(Role::Assistant, content)
    }

    /// Returns all strings in the message and in its tool calls.
    pub fn texts(&self) -> Vec<&str> {
        let mut texts = vec![self.content.as_str()];
        let optional = [&self.reasoning, &self.tool_call_id, &self.name];
        texts.extend(optional.into_iter().flatten().map(String::as_str));
        for call in &self.tool_calls {
            texts.extend([call.name.as_str(), call.arguments.as_str()]);
            texts.extend(call.id.as_deref());
        }
        texts
    }

    /// Returns the total size of all strings in the message, in bytes.
    pub fn text_bytes(&self) -> usize {
        self.texts().into_iter().map(str::len).sum()
    }
}

/// A function call by the assistant.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ToolCall {
    pub id: Option<String>,
    /// The name of the function, without harmony's `functions.` prefix.
    pub name: String,
    /// The arguments as text. Usually valid JSON, but a model may write any text.
    pub arguments: String,
}

/// A message in JSON. Unknown JSON fields are ignored, because clients send many fields that no chat format uses.
#[derive(Deserialize)]
struct WireMessage {
    role: Role,
    #[serde(default)]
    content: Option<WireContent>,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default)]
    reasoning: Option<String>,
    #[serde(default)]
    thinking: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<WireToolCall>>,
    #[serde(default)]
    tool_call_id: Option<String>,
    #[serde(default)]
    name: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "content must be a string, null or an array of {\"type\": \"text\"} parts")]
enum WireContent {
    Text(String),
    Parts(Vec<WirePart>),
}

#[derive(Deserialize)]
struct WirePart {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
}

/// A tool call in JSON, in OpenAI's form `{"id", "type", "function": {"name", "arguments"}}`.
/// The flat form `{"id", "name", "arguments"}` is accepted too.
#[derive(Deserialize)]
struct WireToolCall {
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    function: Option<WireFunction>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    arguments: Option<Value>,
}

#[derive(Deserialize)]
struct WireFunction {
    name: String,
    #[serde(default)]
    arguments: Option<Value>,
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wire = WireMessage::deserialize(deserializer)?;
        let content = match wire.content {
            None => String::new(),
            Some(WireContent::Text(text)) => text,
            Some(WireContent::Parts(parts)) => {
                let mut content = String::new();
                for part in parts {
                    let kind = part.kind;
                    if !matches!(kind.as_str(), "text" | "input_text" | "output_text") {
                        let message = format!("content of type '{kind}' is not supported; use 'text'");
                        return Err(D::Error::custom(message));
                    }
                    let text = part.text;
                    content +=
                        &text.ok_or_else(|| D::Error::custom(format!("content of type '{kind}' has no text")))?;
                }
                content
            }
        };
        let tool_calls = wire.tool_calls.unwrap_or_default().into_iter().map(ToolCall::try_from);
        Ok(Self {
            role: wire.role,
            content,
            reasoning: wire.reasoning_content.or(wire.reasoning).or(wire.thinking),
            tool_calls: tool_calls.collect::<Result<_, _>>().map_err(D::Error::custom)?,
            tool_call_id: wire.tool_call_id,
            name: wire.name,
        })
    }
}

impl TryFrom<WireToolCall> for ToolCall {
    type Error = &'static str;

    fn try_from(wire: WireToolCall) -> Result<Self, Self::Error> {
        let (name, arguments) = match (wire.function, wire.name) {
            (Some(function), _) => (function.name, function.arguments),
            (None, Some(name)) => (name, wire.arguments),
            (None, None) => return Err("a tool call has no function name"),
        };
        let arguments = match arguments {
            None => String::new(),
            Some(Value::String(text)) => text,
            Some(value) => python::json_dumps(&value),
        };
        Ok(Self { id: wire.id, name, arguments })
    }
}

impl Serialize for ToolCall {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut call = Map::new();
        if let Some(id) = &self.id {
            call.insert("id".into(), json!(id));
        }
        call.insert("type".into(), json!("function"));
        call.insert("function".into(), json!({ "name": self.name, "arguments": self.arguments }));
        call.serialize(serializer)
    }
}

impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut message = Map::new();
        message.insert("role".into(), json!(self.role.as_str()));
        message.insert("content".into(), json!(self.content));
        let optional =
            [("reasoning_content", &self.reasoning), ("tool_call_id", &self.tool_call_id), ("name", &self.name)];
        for (key, value) in optional {
            if let Some(value) = value {
                message.insert(key.into(), json!(value));
            }
        }
        if !self.tool_calls.is_empty() {
            message.insert("tool_calls".into(), json!(self.tool_calls));
        }
        message.serialize(serializer)
    }
}
