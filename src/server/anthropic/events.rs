//! The stream events of a message in Anthropic's API.

use serde::Serialize;
use serde_json::{Map, Value};

use super::block::Caller;
use super::object::{MessageObject, MessagesUsage, StopDelta};
use crate::server::generation::event_stream::{EventBuffer, NoEvents};

/// Receives the stream events of a message.
pub trait MessageEventSink {
    fn send(&mut self, event: Event<'_>);
}

impl MessageEventSink for NoEvents {
    fn send(&mut self, _event: Event<'_>) {}
}

impl MessageEventSink for EventBuffer {
    fn send(&mut self, event: Event<'_>) {
        self.push_named(event.name(), &event);
    }
}

/// An event of a streamed message in Anthropic's API, except `error`.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event<'a> {
    MessageStart { message: &'a MessageObject },
    ContentBlockStart { index: usize, content_block: BlockStart<'a> },
    ContentBlockDelta { index: usize, delta: BlockDelta<'a> },
    ContentBlockStop { index: usize },
    MessageDelta { delta: &'a StopDelta, usage: MessagesUsage },
    MessageStop {},
    Ping {},
}

impl Event<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop {} => "message_stop",
            Self::Ping {} => "ping",
        }
    }
}

/// A content block as it is before its first delta.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum BlockStart<'a> {
    Thinking { thinking: &'a str, signature: &'a str },
    Text { text: &'a str, citations: () },
    ToolUse { id: &'a str, name: &'a str, input: Map<String, Value>, caller: Caller },
}

/// A delta: the next part of a content block.
#[derive(Serialize)]
#[serde(tag = "type")]
pub enum BlockDelta<'a> {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "signature_delta")]
    Signature { signature: &'a str },
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: &'a str },
}
