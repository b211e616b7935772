//! Splits generated tokens into channels of text.

use anyhow::Result;
use serde_json::Value;

use super::channel::Delta;
use super::harmony::parser::HarmonyParser;
use super::message::ToolCall;
use super::tagged::calls::LLAMA_CALLS;
use super::tagged::parser::TaggedParser;
use super::violations::FormatViolations;
use crate::tokenizer::Tokenizer;

/// A parser of harmony output, or of output with tags such as `<think>`.
///
/// `push` and `finish` take the tokenizer, so that one struct can own both the parser and the tokenizer.
pub struct AnswerParser(ParserKind);

/// The parser for one of the two kinds of chat format.
pub enum ParserKind {
    Harmony(Box<HarmonyParser>),
    Tagged(Box<TaggedParser>),
}

impl AnswerParser {
    pub(super) fn new(kind: ParserKind) -> Self {
        Self(kind)
    }

    /// Sets the tools of the request, in the format of chat completions.
    ///
    /// Models with `<|python_tag|>` sometimes omit this token before tool calls. Their answer therefore counts as tool
    /// calls even without the token if it consists only of calls of these tools. For other models, this has no effect.
    pub fn with_tools(self, tokenizer: &Tokenizer, tools: &[Value]) -> Self {
        let names: Vec<String> =
            tools.iter().filter_map(|tool| tool["function"]["name"].as_str()).map(str::to_string).collect();
        Self(match self.0 {
            ParserKind::Tagged(parser)
                if !names.is_empty() && tokenizer.controls().any(|(name, _)| name == LLAMA_CALLS) =>
            {
                ParserKind::Tagged(Box::new(parser.with_bare_calls(names)))
            }
            kind => kind,
        })
    }

    /// Adds a token and returns the text whose channel is now certain, in zero or more pieces.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<Vec<Delta>> {
        match &mut self.0 {
            ParserKind::Harmony(parser) => parser.push(tokenizer, id),
            ParserKind::Tagged(parser) => parser.push(tokenizer, id),
        }
    }

    /// Ends the answer and returns the text that was held back. The caller need not push the stop token first.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<Vec<Delta>> {
        match &mut self.0 {
            ParserKind::Harmony(parser) => parser.finish(tokenizer),
            ParserKind::Tagged(parser) => parser.finish(tokenizer),
        }
    }

    /// Returns the tool calls of the answer so far. The arguments of the last call may still grow.
    ///
    /// In output with tags, a call that has not ended or cannot be parsed has no name, and its arguments are its text.
    /// Llama 3 calls without `<|python_tag|>` appear only after [`finish`](Self::finish).
    pub fn tool_calls(&self) -> &[ToolCall] {
        match &self.0 {
            ParserKind::Harmony(parser) => parser.tool_calls(),
            ParserKind::Tagged(parser) => parser.tool_calls(),
        }
    }

    /// Returns the number of format violations of each kind.
    pub fn violations(&self) -> FormatViolations {
        match &self.0 {
            ParserKind::Harmony(parser) => parser.violations(),
            ParserKind::Tagged(parser) => parser.violations(),
        }
    }
}
