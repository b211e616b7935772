//! The items of a conversation: messages, reasoning, function calls and their outputs.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::chat::Role;
use crate::server::ids;
use crate::server::openai::chat::TokenLogprob;

/// The prefix of `encrypted_content` that marks reasoning from inferno, not from another service.
const REASONING_PREFIX: &str = "inferno-";

/// The estimated memory of an item in bytes, without its id, texts and log probabilities.
const ITEM_BYTES: usize = 512;
/// The estimated memory of a token and its log probability, in bytes.
const LOGPROB_BYTES: usize = 128;

/// An item of the input or the output of a response.
#[derive(Clone)]
pub struct Item {
    pub id: String,
    pub status: ItemStatus,
    pub content: ItemContent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ItemStatus {
    InProgress,
    Completed,
    /// The item was cut off by a token limit, a full context, an error or a cancellation.
    Incomplete,
}

#[derive(Clone)]
pub enum ItemContent {
    Message {
        role: Role,
        text: String,
        logprobs: Vec<TokenLogprob>,
    },
    Reasoning {
        text: String,
        /// Whether the serialized item repeats the reasoning in `encrypted_content`.
        /// Some clients send back only `encrypted_content`, without the plain text.
        has_encoded_text: bool,
    },
    Call {
        call_id: String,
        name: String,
        arguments: String,
    },
    CallOutput {
        call_id: String,
        output: String,
    },
}

/// The content part of a message or of a reasoning item.
#[derive(Serialize)]
#[serde(tag = "type")]
pub enum ContentPart<'a> {
    #[serde(rename = "input_text")]
    Input { text: &'a str },
    #[serde(rename = "output_text")]
    Output { text: &'a str, annotations: [&'a str; 0], logprobs: &'a [TokenLogprob] },
    #[serde(rename = "reasoning_text")]
    Reasoning { text: &'a str },
}

impl ItemContent {
    /// Returns a new item id, with the prefix that OpenAI's API uses for this type of item.
    pub fn new_id(&self) -> String {
        ids::new(match self {
            ItemContent::Message { .. } => "msg_",
            ItemContent::Reasoning { .. } => "rs_",
            ItemContent::Call { .. } => "fc_",
            ItemContent::CallOutput { .. } => "fco_",
        })
    }

    fn is_empty(&self) -> bool {
        match self {
            ItemContent::Message { text, .. }
            | ItemContent::Reasoning { text, .. }
            | ItemContent::Call { arguments: text, .. }
            | ItemContent::CallOutput { output: text, .. } => text.is_empty(),
        }
    }

    /// Returns the content part of a message or of a reasoning item. Other items have no content parts.
    pub fn part(&self) -> Option<ContentPart<'_>> {
        match self {
            ItemContent::Message { role: Role::Assistant, text, logprobs } => {
                Some(ContentPart::Output { text, annotations: [], logprobs })
            }
            ItemContent::Message { text, .. } => Some(ContentPart::Input { text }),
            ItemContent::Reasoning { text, .. } => Some(ContentPart::Reasoning { text }),
            ItemContent::Call { .. } | ItemContent::CallOutput { .. } => None,
        }
    }
}

impl Item {
    /// Returns the estimated memory of the item in bytes.
    pub fn bytes(&self) -> usize {
        let content = match &self.content {
            ItemContent::Message { text, logprobs, .. } => {
                text.len() + logprobs.iter().map(|token| LOGPROB_BYTES * (1 + token.alternatives())).sum::<usize>()
            }
            ItemContent::Reasoning { text, .. } => text.len(),
            ItemContent::Call { call_id, name, arguments } => call_id.len() + name.len() + arguments.len(),
            ItemContent::CallOutput { call_id, output } => call_id.len() + output.len(),
        };
        ITEM_BYTES + self.id.len() + content
    }
}

impl Serialize for Item {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("id", &self.id)?;
        map.serialize_entry(
            "type",
            match &self.content {
                ItemContent::Message { .. } => "message",
                ItemContent::Reasoning { .. } => "reasoning",
                ItemContent::Call { .. } => "function_call",
                ItemContent::CallOutput { .. } => "function_call_output",
            },
        )?;
        map.serialize_entry("status", &self.status)?;
        let has_ended = self.status != ItemStatus::InProgress;
        // Omit the content part of an item that has just started, because a separate event adds the part.
        let has_part = has_ended || !self.content.is_empty();
        let parts = || self.content.part().into_iter().filter(|_| has_part).collect::<Vec<ContentPart>>();
        match &self.content {
            ItemContent::Message { role, .. } => {
                map.serialize_entry("role", role)?;
                map.serialize_entry("content", &parts())?;
            }
            ItemContent::Reasoning { text, has_encoded_text } => {
                map.serialize_entry("summary", &[""; 0])?;
                map.serialize_entry("content", &parts())?;
                if *has_encoded_text && has_ended {
                    map.serialize_entry("encrypted_content", &encode_reasoning(text))?;
                }
            }
            ItemContent::Call { call_id, name, arguments } => {
                map.serialize_entry("call_id", call_id)?;
                map.serialize_entry("name", name)?;
                map.serialize_entry("arguments", arguments)?;
            }
            ItemContent::CallOutput { call_id, output } => {
                map.serialize_entry("call_id", call_id)?;
                map.serialize_entry("output", output)?;
            }
        }
        map.end()
    }
}

/// Returns the value of `encrypted_content` for a reasoning text: `REASONING_PREFIX`, then the text in hexadecimal.
/// Encryption is not needed, because the response also contains the plain text.
fn encode_reasoning(text: &str) -> String {
    format!("{REASONING_PREFIX}{}", ids::hex(text.as_bytes()))
}

/// Extracts the reasoning from a value of `encrypted_content`.
/// Returns `None` if the value lacks `REASONING_PREFIX` or is damaged.
pub fn decode_reasoning(encoded: &str) -> Option<String> {
    let digits = encoded.strip_prefix(REASONING_PREFIX)?.as_bytes();
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let pairs = digits.chunks(2).map(|pair| match pair {
        [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
        _ => None,
    });
    String::from_utf8(pairs.collect::<Option<_>>()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasoning_survives_its_encoding() {
        for text in ["", "Let me look 🦀."] {
            assert_eq!(decode_reasoning(&encode_reasoning(text)).as_deref(), Some(text));
        }
        for invalid in ["", "gAAAAA", "inferno-4", "inferno-4g", "inferno-ff", "inferno-é"] {
            assert_eq!(decode_reasoning(invalid), None, "{invalid}");
        }
    }
}
