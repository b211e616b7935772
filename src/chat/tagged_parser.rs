//! What models with a chat template generate: an answer, before it perhaps reasoning between `<think>` and `</think>`,
//! in it perhaps tool calls between `<tool_call>` and `</tool_call>`.
//!
//! The tags of reasoning are single tokens in some vocabularies and several in others, so they are found both by token
//! and by text; those of tool calls only by token, because an answer may well spell them. Any other control token is
//! dropped.

use anyhow::Result;
use serde::Deserialize;
use serde_json::Value;

use super::message::ToolCall;
use super::{Channel, Delta, python};
use crate::tokenizer::{TextStream, Tokenizer};

const THINK: &str = "<think>";
const END_THINK: &str = "</think>";
const TOOL_CALL: &str = "<tool_call>";
const END_TOOL_CALL: &str = "</tool_call>";

/// Newlines after a tag that belong to it: models write `</think>\n\n`.
const MAX_NEWLINES: usize = 2;

pub struct TaggedParser {
    channel: Channel,
    stream: TextStream,
    /// Text that may be the beginning of a tag, or newlines that a tag may swallow.
    held: String,
    /// How many newlines a tag still swallows.
    swallow: usize,
    /// Whether the answer has begun: after that, `<think>` is a word like any other.
    answered: bool,
    tool_calls: Vec<ToolCall>,
    malformed: usize,
}

impl TaggedParser {
    /// `prompt`: the rendered conversation. Templates of reasoning models often end it with `<think>` already.
    pub fn new(prompt: &str) -> Self {
        let prompt = prompt.trim_end();
        let thinking = prompt.ends_with(THINK);
        Self {
            channel: if thinking { Channel::Reasoning } else { Channel::Answer },
            stream: TextStream::new(),
            held: String::new(),
            swallow: if thinking || prompt.ends_with(END_THINK) { MAX_NEWLINES } else { 0 },
            answered: false,
            tool_calls: Vec::new(),
            malformed: 0,
        }
    }

    pub fn tool_calls(&self) -> &[ToolCall] {
        &self.tool_calls
    }

    pub fn malformed(&self) -> usize {
        self.malformed
    }

    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<Vec<Delta>> {
        let mut out = Vec::new();
        if !tokenizer.is_control(id) {
            let text = self.stream.push(tokenizer, id)?;
            self.feed(&text, &mut out);
            return Ok(out);
        }
        let text = std::mem::take(&mut self.stream).finish(tokenizer)?;
        self.feed(&text, &mut out);
        match (tokenizer.decode(&[id])?.as_str(), self.channel) {
            (THINK, Channel::Answer) => self.enter(Channel::Reasoning, &mut out),
            (END_THINK, Channel::Reasoning) => self.enter(Channel::Answer, &mut out),
            (TOOL_CALL, _) => {
                self.malformed += usize::from(self.channel != Channel::Answer);
                self.enter(Channel::ToolCall, &mut out);
                self.tool_calls.push(ToolCall::default());
            }
            (END_TOOL_CALL, Channel::ToolCall) => self.enter(Channel::Answer, &mut out),
            _ => {}
        }
        Ok(out)
    }

    /// What is still held back, at the end of a generation.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<Vec<Delta>> {
        let mut out = Vec::new();
        let text = std::mem::take(&mut self.stream).finish(tokenizer)?;
        self.feed(&text, &mut out);
        let held = std::mem::take(&mut self.held);
        self.give(&held, &mut out);
        if self.channel == Channel::ToolCall {
            self.malformed += 1;
            self.read_tool_call();
            self.channel = Channel::Answer;
        }
        Ok(out)
    }

    /// The tag, written out as text, that changes the channel here.
    fn tag(&self) -> Option<(&'static str, Channel)> {
        match self.channel {
            Channel::Reasoning => Some((END_THINK, Channel::Answer)),
            Channel::Answer if !self.answered => Some((THINK, Channel::Reasoning)),
            _ => None,
        }
    }

    fn feed(&mut self, text: &str, out: &mut Vec<Delta>) {
        self.held.push_str(text);
        while let Some((tag, next)) = self.tag() {
            let Some(at) = self.held.find(tag) else { break };
            // Before an answer, what stands before `<think>` must be nothing but space.
            if self.channel == Channel::Answer && !self.held[..at].trim().is_empty() {
                break;
            }
            let after = self.held.split_off(at + tag.len());
            self.held.truncate(at);
            self.enter(next, out);
            self.held = after;
        }
        let keep = self.undecided();
        let held = self.held.split_off(keep);
        let certain = std::mem::replace(&mut self.held, held);
        self.give(&certain, out);
    }

    /// From where on the held text may still turn into a tag, or be swallowed by one.
    fn undecided(&self) -> usize {
        let Some((tag, _)) = self.tag() else { return self.held.len() };
        if self.channel == Channel::Answer {
            // Space before a tag, and the beginning of the tag: all of it or nothing.
            return if tag.starts_with(self.held.trim_start()) { 0 } else { self.held.len() };
        }
        let begins_tag = |at: &usize| self.held.is_char_boundary(*at) && tag.starts_with(&self.held[*at..]);
        let earliest = self.held.len().saturating_sub(tag.len());
        let at = (earliest..=self.held.len()).find(begins_tag).unwrap_or(self.held.len());
        self.held[..at].trim_end_matches('\n').len()
    }

    /// Gives out what is held, without the newlines and the space that belong to the tag, and changes the channel.
    fn enter(&mut self, next: Channel, out: &mut Vec<Delta>) {
        let held = std::mem::take(&mut self.held);
        let text = match self.channel {
            Channel::Reasoning => held.trim_end_matches('\n'),
            Channel::Answer if held.trim().is_empty() => "",
            _ => &held,
        };
        self.give(text, out);
        if self.channel == Channel::ToolCall {
            self.read_tool_call();
        }
        self.channel = next;
        self.swallow = MAX_NEWLINES;
    }

    fn give(&mut self, text: &str, out: &mut Vec<Delta>) {
        let mut text = text;
        while let Some(rest) = text.strip_prefix('\n').filter(|_| self.swallow > 0) {
            self.swallow -= 1;
            text = rest;
        }
        if text.is_empty() {
            return;
        }
        self.swallow = 0;
        self.answered |= self.channel == Channel::Answer && !text.trim().is_empty();
        if self.channel == Channel::ToolCall
            && let Some(call) = self.tool_calls.last_mut()
        {
            call.arguments.push_str(text);
        }
        out.push(Delta { channel: self.channel, text: text.to_string() });
    }

    /// `{"name": .., "arguments": ..}` as Hermes and Qwen write it. What cannot be read stays as it is.
    fn read_tool_call(&mut self) {
        #[derive(Deserialize)]
        struct Call {
            name: String,
            #[serde(alias = "parameters")]
            arguments: Option<Value>,
        }
        let Some(call) = self.tool_calls.last_mut() else { return };
        match serde_json::from_str::<Call>(&call.arguments) {
            Ok(Call { name, arguments }) => {
                call.name = name;
                call.arguments = match arguments {
                    None => String::new(),
                    Some(Value::String(text)) => text,
                    Some(value) => python::json_dumps(&value),
                };
            }
            Err(_) => self.malformed += 1,
        }
    }
}
