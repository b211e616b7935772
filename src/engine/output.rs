//! The client's side of a request: generated tokens become text, and a stop string ends the answer.

use std::sync::Arc;

use anyhow::Result;

use super::request::GenerateOptions;
use super::stop::StopStrings;
use crate::chat::{Channel, Delta, Parser, ToolCall};
use crate::language::Language;
use crate::tokenizer::TextStream;

/// Turns the tokens of one generation into text on channels.
pub struct Output {
    language: Arc<Language>,
    reader: Reader,
    stop: StopStrings,
    ignore_eos: bool,
}

/// How tokens are read.
enum Reader {
    /// By the parser of a chat format.
    Chat(Box<Parser>),
    /// As continued text: everything is the answer.
    Raw(TextStream),
}

impl Output {
    /// Reads the answer to a conversation with the parser of its chat format.
    pub fn chat(language: Arc<Language>, parser: Parser, options: &GenerateOptions) -> Self {
        Self::new(language, Reader::Chat(Box::new(parser)), options)
    }

    /// Reads the continuation of `prompt`.
    pub fn raw(language: Arc<Language>, prompt: &[u32], options: &GenerateOptions) -> Self {
        Self::new(language, Reader::Raw(TextStream::continuing(prompt)), options)
    }

    fn new(language: Arc<Language>, reader: Reader, options: &GenerateOptions) -> Self {
        Self { language, reader, stop: StopStrings::new(&options.stop), ignore_eos: options.ignore_eos }
    }

    /// Returns the text that became certain with `token`, possibly none.
    pub fn push(&mut self, token: u32) -> Result<Vec<Delta>> {
        let ends_text = self.language.is_stop(token) && !self.ignore_eos;
        let deltas = match &mut self.reader {
            Reader::Chat(parser) => parser.push(&self.language.tokenizer, token)?,
            Reader::Raw(_) if ends_text => Vec::new(),
            Reader::Raw(stream) => answer(stream.push(&self.language.tokenizer, token)?),
        };
        Ok(self.until_stop(deltas))
    }

    /// Returns the text that the parser and the stop strings held back, at the end of a generation.
    pub fn finish(&mut self) -> Result<Vec<Delta>> {
        let held = match &mut self.reader {
            Reader::Chat(parser) => parser.finish(&self.language.tokenizer)?,
            Reader::Raw(stream) => answer(stream.finish(&self.language.tokenizer)?),
        };
        let mut deltas = self.until_stop(held);
        deltas.extend(answer(self.stop.finish()));
        Ok(deltas)
    }

    /// Returns whether a stop string was generated.
    pub fn is_stopped(&self) -> bool {
        self.stop.is_stopped()
    }

    /// The tools that the model asked for so far.
    pub fn tool_calls(&self) -> &[ToolCall] {
        match &self.reader {
            Reader::Chat(parser) => parser.tool_calls(),
            Reader::Raw(_) => &[],
        }
    }

    /// How often the model broke its chat format.
    pub fn malformed(&self) -> usize {
        match &self.reader {
            Reader::Chat(parser) => parser.malformed(),
            Reader::Raw(_) => 0,
        }
    }

    /// Searches the answer for stop strings. The other channels pass unchanged.
    fn until_stop(&mut self, deltas: Vec<Delta>) -> Vec<Delta> {
        let mut passed = Vec::new();
        for delta in deltas {
            if delta.channel == Channel::Answer {
                passed.extend(answer(self.stop.push(&delta.text)));
            } else {
                // Text that was held back precedes this delta.
                passed.extend(answer(self.stop.finish()));
                passed.push(delta);
            }
        }
        passed
    }
}

fn answer(text: String) -> Vec<Delta> {
    if text.is_empty() { Vec::new() } else { vec![Delta { channel: Channel::Answer, text }] }
}
