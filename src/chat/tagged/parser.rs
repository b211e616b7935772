//! Parses the output of models with a chat template, and splits the output into channels.
//!
//! Reasoning comes before the answer, between the tags `<think>` and `</think>`.
//! These tags are single tokens in some vocabularies and several tokens in others.
//! The parser therefore recognizes a tag in both forms: as a token and as text.
//!
//! Tool calls come after the reasoning. Hermes and Qwen models write them between `<tool_call>` and `</tool_call>`.
//! Mistral models write `[TOOL_CALLS]` before calls, and Llama 3 models write `<|python_tag|>`.
//! The text of these calls ends at the next tool call token, or at the end of the answer.
//! The parser recognizes tool call tags only as tokens, because an answer may quote the tags as text.
//! If a whole answer consists of calls of tools in the request, `<|python_tag|>` may be missing (see `bare_call`).
//!
//! All other control tokens in the output are dropped, except `[CALL_ID]` and `[ARGS]` in a tool call.
//!
//! Sources of the tool call formats: github.com/NousResearch/Hermes-Function-Calling, the chat templates of Qwen, the
//! prompt formats in github.com/meta-llama/llama-models, and github.com/mistralai/mistral-common.
//! Other formats are not parsed. Without tokens of the formats above, such calls stay text. Between `<tool_call>` and
//! `</tool_call>`, calls that are not JSON, such as the XML of Qwen3-Coder, count as invalid tool calls.

use anyhow::Result;

use super::bare_call::BareCalls;
use super::calls::{LLAMA_CALLS, MISTRAL_ARGUMENTS, MISTRAL_CALLS, MISTRAL_ID, read_calls};
use crate::chat::channel::{Channel, Delta};
use crate::chat::message::ToolCall;
use crate::chat::violations::{FormatViolation, FormatViolations};
use crate::tokenizer::{TextStream, Tokenizer};

/// The tags around reasoning and tool calls.
pub const THINK: &str = "<think>";
pub const END_THINK: &str = "</think>";
pub const TOOL_CALL: &str = "<tool_call>";
pub const END_TOOL_CALL: &str = "</tool_call>";

/// The maximum number of newlines to drop after a tag. Models write `</think>\n\n`.
const MAX_NEWLINES: usize = 2;

/// Splits the tokens of one completion into reasoning, answer and tool calls.
pub struct TaggedParser {
    channel: Channel,
    stream: TextStream,
    /// Text whose channel is uncertain, because it may begin a tag or a bare call, or be whitespace before a tag.
    held: String,
    /// Recognizes bare calls: tool calls without a control token. `None` if every tool call needs a control token.
    bare_calls: Option<BareCalls>,
    /// The number of newlines that may still be dropped after the last tag.
    skip_newlines: usize,
    /// Whether the answer has begun. From then on, `<think>` counts as a tag only if it is a single token.
    has_answered: bool,
    tool_calls: Vec<ToolCall>,
    /// Whether the current tool call must end with `</tool_call>`.
    has_end_tag: bool,
    violations: FormatViolations,
}

impl TaggedParser {
    /// Creates a parser for the output after `prompt`. If the prompt ends with `<think>`, the output begins in the
    /// reasoning channel.
    pub fn new(prompt: &str) -> Self {
        let prompt = prompt.trim_end();
        let thinking = prompt.ends_with(THINK);
        Self {
            channel: if thinking { Channel::Reasoning } else { Channel::Answer },
            stream: TextStream::new(),
            held: String::new(),
            bare_calls: None,
            skip_newlines: if thinking || prompt.ends_with(END_THINK) { MAX_NEWLINES } else { 0 },
            has_answered: false,
            tool_calls: Vec::new(),
            has_end_tag: false,
            violations: FormatViolations::default(),
        }
    }

    /// Accepts bare calls: an answer that consists only of calls of the tools `names`, without a control token.
    pub fn with_bare_calls(self, names: Vec<String>) -> Self {
        Self { bare_calls: Some(BareCalls::new(names)), ..self }
    }

    pub fn tool_calls(&self) -> &[ToolCall] {
        &self.tool_calls
    }

    pub fn violations(&self) -> FormatViolations {
        self.violations
    }

    /// Adds a token and returns the text whose channel is now certain.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<Vec<Delta>> {
        let mut out = Vec::new();
        if !tokenizer.is_control(id) {
            let text = self.stream.push(tokenizer, id)?;
            self.feed(&text, &mut out);
            return Ok(out);
        }
        let text = std::mem::take(&mut self.stream).finish(tokenizer)?;
        self.feed(&text, &mut out);
        let token = tokenizer.decode(&[id])?;
        match (token.as_str(), self.channel) {
            (THINK, Channel::Answer) => self.enter(Channel::Reasoning, &mut out),
            (END_THINK, Channel::Reasoning) => self.enter(Channel::Answer, &mut out),
            (TOOL_CALL, _) => {
                self.violations.add_if(self.channel != Channel::Answer, FormatViolation::MissingToken);
                self.start_tool_call(&mut out);
                self.has_end_tag = true;
            }
            // In a tool call, these tokens end the call and start the next one, so no token is missing.
            (MISTRAL_CALLS | LLAMA_CALLS, _) => {
                self.violations.add_if(self.channel == Channel::Reasoning, FormatViolation::MissingToken);
                self.start_tool_call(&mut out);
                self.has_end_tag = false;
            }
            (MISTRAL_ID | MISTRAL_ARGUMENTS, Channel::ToolCall) => self.emit(&token, &mut out),
            (END_TOOL_CALL, Channel::ToolCall) => self.enter(Channel::Answer, &mut out),
            _ => {}
        }
        Ok(out)
    }

    /// Ends the answer and returns the text that was held back.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<Vec<Delta>> {
        let mut out = Vec::new();
        let text = std::mem::take(&mut self.stream).finish(tokenizer)?;
        self.feed(&text, &mut out);
        let held = std::mem::take(&mut self.held);
        let calls =
            if self.has_only_held() { self.bare_calls.as_mut().and_then(|bare| bare.finish(&held)) } else { None };
        if let Some(calls) = calls {
            out.push(Delta { channel: Channel::ToolCall, text: held });
            self.tool_calls = calls;
            return Ok(out);
        }
        self.emit(&held, &mut out);
        if self.channel == Channel::ToolCall {
            self.violations.add_if(self.has_end_tag, FormatViolation::MissingToken);
            self.read_tool_call();
            self.channel = Channel::Answer;
        }
        Ok(out)
    }

    fn start_tool_call(&mut self, out: &mut Vec<Delta>) {
        self.enter(Channel::ToolCall, out);
        self.tool_calls.push(ToolCall::default());
    }

    /// Returns the text of the tag that ends the current channel, and the next channel.
    /// Returns `None` if only a control token can end the current channel.
    fn tag(&self) -> Option<(&'static str, Channel)> {
        match self.channel {
            Channel::Reasoning => Some((END_THINK, Channel::Answer)),
            Channel::Answer if !self.has_answered => Some((THINK, Channel::Reasoning)),
            _ => None,
        }
    }

    /// Adds text and emits the part whose channel is certain.
    fn feed(&mut self, text: &str, out: &mut Vec<Delta>) {
        self.held.push_str(text);
        while let Some((tag, next)) = self.tag() {
            let Some(at) = self.held.find(tag) else { break };
            // As text, `<think>` counts as a tag only if nothing but whitespace comes before it.
            if self.channel == Channel::Answer && !self.held[..at].trim().is_empty() {
                break;
            }
            let rest = self.held.split_off(at + tag.len());
            self.held.truncate(at);
            self.enter(next, out);
            self.held = rest;
        }
        let keep = self.undecided_start();
        let held = self.held.split_off(keep);
        let certain = std::mem::replace(&mut self.held, held);
        self.emit(&certain, out);
    }

    /// Returns whether the output after the reasoning consists only of the held text, apart from whitespace.
    fn has_only_held(&self) -> bool {
        self.channel == Channel::Answer && !self.has_answered && self.tool_calls.is_empty()
    }

    /// Returns the offset in `held` at which a tag, whitespace before a tag, or a bare call may begin.
    /// The text from this offset on must be held back.
    fn undecided_start(&mut self) -> usize {
        let Some((tag, _)) = self.tag() else { return self.held.len() };
        if self.channel == Channel::Answer {
            // Whitespace before `<think>` is dropped, so hold whitespace back until it is clear whether a tag follows.
            let is_tag = tag.starts_with(self.held.trim_start());
            let is_call =
                self.has_only_held() && self.bare_calls.as_mut().is_some_and(|bare| bare.is_possible(&self.held));
            return if is_tag || is_call { 0 } else { self.held.len() };
        }
        let begins_tag = |at: &usize| self.held.is_char_boundary(*at) && tag.starts_with(&self.held[*at..]);
        let earliest = self.held.len().saturating_sub(tag.len());
        let at = (earliest..=self.held.len()).find(begins_tag).unwrap_or(self.held.len());
        self.held[..at].trim_end_matches('\n').len()
    }

    /// Ends the current channel at a tag: emits the held text, parses the tool call, if any, and switches to `next`.
    fn enter(&mut self, next: Channel, out: &mut Vec<Delta>) {
        let held = std::mem::take(&mut self.held);
        self.bare_calls.iter_mut().for_each(BareCalls::reset);
        let text = match self.channel {
            Channel::Reasoning => held.trim_end_matches('\n'),
            Channel::Answer if held.trim().is_empty() => "",
            _ => &held,
        };
        self.emit(text, out);
        if self.channel == Channel::ToolCall {
            self.read_tool_call();
        }
        self.channel = next;
        self.skip_newlines = MAX_NEWLINES;
    }

    /// Appends text to the output and, in a tool call, to its arguments. Drops newlines directly after a tag.
    fn emit(&mut self, text: &str, out: &mut Vec<Delta>) {
        let mut text = text;
        while let Some(rest) = text.strip_prefix('\n').filter(|_| self.skip_newlines > 0) {
            self.skip_newlines -= 1;
            text = rest;
        }
        if text.is_empty() {
            return;
        }
        self.skip_newlines = 0;
        self.has_answered |= self.channel == Channel::Answer && !text.trim().is_empty();
        if self.channel == Channel::ToolCall
            && let Some(call) = self.tool_calls.last_mut()
        {
            call.arguments.push_str(text);
        }
        out.push(Delta { channel: self.channel, text: text.to_string() });
    }

    /// Parses the text of the last tool call, and replaces the call with the calls in its text.
    ///
    /// If the text is in no known format, counts a violation, and `arguments` keeps the whole text.
    fn read_tool_call(&mut self) {
        let Some(call) = self.tool_calls.pop() else { return };
        match read_calls(&call.arguments) {
            Some(calls) => self.tool_calls.extend(calls),
            None => {
                self.violations.add(FormatViolation::InvalidToolCall);
                self.tool_calls.push(call);
            }
        }
    }
}
