//! [`AnswerDecoder`]: turns generated tokens into text, on the thread that reads the `RequestStream`.

use std::sync::Arc;

use anyhow::Result;

use super::request::GenerateOptions;
use super::stop::StopFilter;
use crate::chat::{AnswerParser, Channel, Delta, FormatViolations, ToolCall};
use crate::language::Language;
use crate::tokenizer::TextStream;

/// Turns the tokens of one answer into text, split into channels. Ends the answer at the first stop string.
pub struct AnswerDecoder {
    language: Arc<Language>,
    decoder: TokenDecoder,
    stop: StopFilter,
    /// The number of tokens added so far.
    tokens: usize,
    /// See [`answer_bytes`](Self::answer_bytes).
    answer_bytes: usize,
    /// See [`GenerateOptions::min_tokens`].
    min_tokens: usize,
    stop_token_ids: Vec<u32>,
    ignore_eos: bool,
}

/// A decoder for generated tokens, with or without a chat format.
enum TokenDecoder {
    /// A parser that separates reasoning, answer and tool calls.
    Chat(Box<AnswerParser>),
    /// A decoder of plain text. All text is on the answer channel.
    Raw(TextStream),
}

impl AnswerDecoder {
    /// Creates a decoder that parses the model's chat format.
    pub fn chat(language: Arc<Language>, parser: AnswerParser, options: &GenerateOptions) -> Self {
        Self::new(language, TokenDecoder::Chat(Box::new(parser)), options)
    }

    /// Creates a decoder that decodes the continuation of `prompt` as plain text.
    pub fn raw(language: Arc<Language>, prompt: &[u32], options: &GenerateOptions) -> Self {
        Self::new(language, TokenDecoder::Raw(TextStream::continuing(prompt)), options)
    }

    fn new(language: Arc<Language>, decoder: TokenDecoder, options: &GenerateOptions) -> Self {
        let GenerateOptions { stop, stop_token_ids, ignore_eos, min_tokens, .. } = options;
        let (stop, stop_token_ids) = (StopFilter::new(stop), stop_token_ids.clone());
        let (min_tokens, ignore_eos) = (*min_tokens, *ignore_eos);
        Self { language, decoder, stop, tokens: 0, answer_bytes: 0, min_tokens, stop_token_ids, ignore_eos }
    }

    /// Adds a token. Returns the new text, but holds back text that is incomplete or may begin a stop string.
    /// A token in `stop_token_ids` of the request adds no text.
    /// Without a chat format, the model's stop tokens add no text either, unless the request ignores them.
    pub fn push(&mut self, token: u32) -> Result<Vec<Delta>> {
        self.tokens += 1;
        if self.is_requested_stop(token) {
            return Ok(Vec::new());
        }
        let ends_text = self.language.is_stop(token) && !self.ignore_eos;
        let calls = self.tool_calls().len();
        let deltas = match &mut self.decoder {
            TokenDecoder::Chat(parser) => parser.push(&self.language.tokenizer, token)?,
            TokenDecoder::Raw(_) if ends_text => Vec::new(),
            TokenDecoder::Raw(stream) => answer(stream.push(&self.language.tokenizer, token)?),
        };
        let mut deltas = self.until_stop(deltas);
        if self.tool_calls().len() > calls {
            // The held-back answer text comes before the new tool call, so the client must get it before the call.
            // The call itself may have no text yet.
            deltas.extend(answer(self.stop.finish()));
        }
        Ok(deltas)
    }

    /// Returns whether the token is in `stop_token_ids` of the request.
    pub fn is_requested_stop(&self, token: u32) -> bool {
        self.stop_token_ids.contains(&token)
    }

    /// Ends the text. Returns the text that was still held back.
    pub fn finish(&mut self) -> Result<Vec<Delta>> {
        let held = match &mut self.decoder {
            TokenDecoder::Chat(parser) => parser.finish(&self.language.tokenizer)?,
            TokenDecoder::Raw(stream) => answer(stream.finish(&self.language.tokenizer)?),
        };
        let mut deltas = self.until_stop(held);
        deltas.extend(answer(self.stop.finish()));
        Ok(deltas)
    }

    /// Returns whether a stop string has ended the answer.
    pub fn is_stopped(&self) -> bool {
        self.stop.is_stopped()
    }

    /// Returns the stop string that ended the answer, if any.
    pub fn stop_string(&self) -> Option<&str> {
        self.stop.found()
    }

    /// Returns the length in bytes of the answer text that was decoded so far. This includes the text that is held back
    /// because it may begin a stop string, and the stop string and the text after it.
    pub fn answer_bytes(&self) -> usize {
        self.answer_bytes
    }

    /// Returns the tool calls so far. Without a chat format, returns an empty list.
    pub fn tool_calls(&self) -> &[ToolCall] {
        match &self.decoder {
            TokenDecoder::Chat(parser) => parser.tool_calls(),
            TokenDecoder::Raw(_) => &[],
        }
    }

    /// Returns how often the model has violated its chat format so far, by kind.
    pub fn violations(&self) -> FormatViolations {
        match &self.decoder {
            TokenDecoder::Chat(parser) => parser.violations(),
            TokenDecoder::Raw(_) => FormatViolations::default(),
        }
    }

    /// Cuts the answer text off at the first stop string that ends after the first `min_tokens` tokens, as in vLLM.
    /// Passes the text of other channels through unchanged.
    fn until_stop(&mut self, deltas: Vec<Delta>) -> Vec<Delta> {
        let mut passed = Vec::new();
        for delta in deltas {
            if delta.channel == Channel::Answer {
                self.answer_bytes += delta.text.len();
            }
            if delta.channel == Channel::Answer && self.tokens <= self.min_tokens {
                passed.extend(answer(self.stop.push_unsearched(&delta.text)));
            } else if delta.channel == Channel::Answer {
                passed.extend(answer(self.stop.push(&delta.text)));
            } else {
                // Emit the held-back answer text first: it precedes `delta`, and can no longer begin a stop string.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::Rendered;
    use crate::engine::SamplingParams;
    use crate::tokenizer::ControlTokens;

    #[test]
    fn text_before_a_tool_call_arrives_with_the_start_of_the_call() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
        let language = Arc::new(Language::load(&folder).unwrap());
        let generated = "<|channel|>commentary<|message|>One moment.\n<|end|>\
                         <|start|>assistant<|channel|>commentary to=functions.find<|message|>{\"q\": 1}<|call|>";
        for stop in ["\n\nHuman:", ".\n\n", "\n<"] {
            let prompt = Rendered { ids: Vec::new(), text: String::new() };
            let parser = language.chat_format().unwrap().parser(&prompt);
            let options =
                GenerateOptions { stop: vec![stop.to_string()], ..GenerateOptions::new(SamplingParams::greedy()) };
            let mut decoder = AnswerDecoder::chat(language.clone(), parser, &options);
            let mut text = String::new();
            for id in language.tokenizer.encode(generated, ControlTokens::Parse).unwrap() {
                let had_call = !decoder.tool_calls().is_empty();
                for delta in decoder.push(id).unwrap() {
                    assert_eq!(delta.channel == Channel::ToolCall, had_call, "{stop:?}: {delta:?}");
                    text.push_str(&delta.text);
                }
            }
            assert!(decoder.finish().unwrap().is_empty());
            assert_eq!(text, "One moment.\n{\"q\": 1}", "{stop:?}");
            assert_eq!(decoder.answer_bytes(), "One moment.\n".len());
        }
    }
}
