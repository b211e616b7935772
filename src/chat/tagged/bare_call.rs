//! Recognizes bare calls: answers that consist only of tool calls, without a control token before the calls.
//!
//! Small Llama 3 models often omit `<|python_tag|>`. Their answer then consists of one or more JSON objects such as
//! `{"name": "get_weather", "parameters": {"city": "Paris"}}`, separated by semicolons or newlines.
//!
//! An answer in JSON can also be the text that a user asked for. The parser therefore holds an answer back only while
//! it can consist of calls of tools in the request, and otherwise shows it as it arrives.
//! It reads a subset of JSON, in which keys and tool names have no escape sequences, byte by byte.

use super::calls::read_bare_calls;
use crate::chat::message::ToolCall;

/// The accepted keys of a call. If every key were accepted, most JSON answers would be held back until they end.
const KEYS: [&str; 4] = ["name", "parameters", "arguments", "type"];

/// Reads an answer as it grows, and reports whether the answer can still consist of calls of known tools.
///
/// [`is_possible`](Self::is_possible) reads each byte only once, and checks only part of the JSON.
/// [`finish`](Self::finish) checks all of it.
pub struct BareCalls {
    /// The names of the tools in the request.
    names: Vec<String>,
    /// The number of bytes of the answer read so far.
    read: usize,
    state: BareCallState,
    /// The JSON key that was read last.
    key: &'static str,
    /// The bytes read so far of the current key, tool name or type.
    word: Vec<u8>,
    /// The number of open braces in the arguments of the current call.
    depth: usize,
    quote: Quote,
}

#[derive(Clone, Copy)]
enum BareCallState {
    BeforeCall,
    BeforeKey,
    Key,
    BeforeColon,
    BeforeValue,
    /// In the value of `name` or `type`.
    NameOrType,
    /// In the value of `parameters` or `arguments`.
    Arguments,
    AfterValue,
    AfterCall,
    /// After a call and a newline, which may separate this call from the next one.
    AfterLine,
    /// The answer is ordinary text, not tool calls.
    Text,
}

/// Whether the reader is inside a JSON string of the arguments.
#[derive(Clone, Copy)]
enum Quote {
    Outside,
    Inside,
    /// Directly after a backslash in a JSON string.
    Escaped,
}

impl BareCalls {
    /// Creates a reader for calls of the tools with these names.
    pub fn new(names: Vec<String>) -> Self {
        let state = BareCallState::BeforeCall;
        let key = KEYS[0];
        let quote = Quote::Outside;
        Self { names, read: 0, state, key, word: Vec::new(), depth: 0, quote }
    }

    /// Discards the answer, so that the reader can read a new one.
    pub fn reset(&mut self) {
        *self = Self::new(std::mem::take(&mut self.names));
    }

    /// Returns whether `answer` can still become tool calls. `answer` must begin with the text that was read before.
    pub fn is_possible(&mut self, answer: &str) -> bool {
        for &byte in &answer.as_bytes()[self.read..] {
            self.state = self.next(byte);
        }
        self.read = answer.len();
        !matches!(self.state, BareCallState::Text)
    }

    /// Returns the tool calls in a complete answer, or `None` if it has anything but valid calls. Resets the reader.
    pub fn finish(&mut self, answer: &str) -> Option<Vec<ToolCall>> {
        self.is_possible(answer);
        let is_complete = matches!(self.state, BareCallState::AfterCall | BareCallState::AfterLine);
        self.reset();
        if is_complete { read_bare_calls(answer) } else { None }
    }

    fn next(&mut self, byte: u8) -> BareCallState {
        match (self.state, byte) {
            (BareCallState::Key | BareCallState::NameOrType, _) => self.next_in_word(byte),
            (BareCallState::Arguments, _) => self.next_in_arguments(byte),
            (BareCallState::AfterCall, b'\n') => BareCallState::AfterLine,
            (state, b' ' | b'\t' | b'\n' | b'\r') => state,
            (BareCallState::BeforeCall | BareCallState::AfterLine, b'{') => BareCallState::BeforeKey,
            (BareCallState::BeforeKey, b'"') => BareCallState::Key,
            (BareCallState::BeforeColon, b':') => BareCallState::BeforeValue,
            (BareCallState::BeforeValue, b'"') if matches!(self.key, "name" | "type") => BareCallState::NameOrType,
            (BareCallState::BeforeValue, b'{') if matches!(self.key, "parameters" | "arguments") => {
                self.depth = 1;
                BareCallState::Arguments
            }
            (BareCallState::AfterValue, b',') => BareCallState::BeforeKey,
            (BareCallState::AfterValue, b'}') => BareCallState::AfterCall,
            (BareCallState::AfterCall | BareCallState::AfterLine, b';') => BareCallState::BeforeCall,
            _ => BareCallState::Text,
        }
    }

    /// Reads a byte of a key, a tool name or a type. Does not decode escape sequences, because valid keys, tool names
    /// and types need none.
    fn next_in_word(&mut self, byte: u8) -> BareCallState {
        let is_key = matches!(self.state, BareCallState::Key);
        let known: Vec<&str> = match self.key {
            _ if is_key => KEYS.to_vec(),
            "type" => vec!["function"],
            _ => self.names.iter().map(String::as_str).collect(),
        };
        if byte != b'"' {
            self.word.push(byte);
            let is_start = known.iter().any(|word| word.as_bytes().starts_with(&self.word));
            return if is_start { self.state } else { BareCallState::Text };
        }
        let word = std::mem::take(&mut self.word);
        if !known.iter().any(|known| known.as_bytes() == word) {
            return BareCallState::Text;
        }
        if !is_key {
            return BareCallState::AfterValue;
        }
        self.key = KEYS.into_iter().find(|key| key.as_bytes() == word).unwrap_or(KEYS[0]);
        BareCallState::BeforeColon
    }

    fn next_in_arguments(&mut self, byte: u8) -> BareCallState {
        match (self.quote, byte) {
            (Quote::Inside, b'\\') => self.quote = Quote::Escaped,
            (Quote::Inside, b'"') => self.quote = Quote::Outside,
            (Quote::Escaped, _) | (Quote::Outside, b'"') => self.quote = Quote::Inside,
            (Quote::Outside, b'{') => self.depth += 1,
            (Quote::Outside, b'}') => self.depth -= 1,
            _ => {}
        }
        if self.depth == 0 { BareCallState::AfterValue } else { BareCallState::Arguments }
    }
}
