//! Recognizes tool calls that are the whole answer, without a control token before them.
//!
//! Small Llama 3 models often omit `<|python_tag|>`. Their answer is then one or more JSON objects such as
//! `{"name": "get_weather", "parameters": {"city": "Paris"}}`, separated by semicolons or newlines.

use super::message::ToolCall;
use super::tagged_call::read_bare_calls;

/// The keys of a call. Without this limit, every answer in JSON would be held back until its end.
const KEYS: [&str; 4] = ["name", "parameters", "arguments", "type"];

/// Reads an answer as it grows, and tells whether it can still consist of calls of known tools.
///
/// Reads each byte once. Does not check the JSON inside the arguments until the end of the answer.
pub struct BareCalls {
    /// The names of the tools.
    names: Vec<String>,
    /// The number of bytes that were read.
    read: usize,
    state: State,
    /// The key whose value comes next.
    key: &'static str,
    /// The bytes of the current key or name so far.
    word: Vec<u8>,
    /// The number of open braces in the arguments.
    depth: usize,
    quote: Quote,
}

#[derive(Clone, Copy)]
enum State {
    BeforeCall,
    BeforeKey,
    Key,
    BeforeColon,
    BeforeValue,
    Name,
    Arguments,
    AfterValue,
    AfterCall,
    /// After a call and a newline, which may separate the call from the next one.
    AfterLine,
    /// The answer is text.
    Text,
}

/// Whether a byte of the arguments is part of a JSON string.
#[derive(Clone, Copy)]
enum Quote {
    Outside,
    Inside,
    /// After a backslash.
    Escaped,
}

impl BareCalls {
    /// Creates a reader for calls of the tools with these names.
    pub fn new(names: Vec<String>) -> Self {
        let (state, key, quote) = (State::BeforeCall, KEYS[0], Quote::Outside);
        Self { names, read: 0, state, key, word: Vec::new(), depth: 0, quote }
    }

    /// Forgets the answer, because other text comes before it.
    pub fn reset(&mut self) {
        *self = Self::new(std::mem::take(&mut self.names));
    }

    /// Returns whether `answer` can still grow into tool calls. `answer` must start with the text of the last call.
    pub fn is_possible(&mut self, answer: &str) -> bool {
        for &byte in &answer.as_bytes()[self.read..] {
            self.state = self.next(byte);
        }
        self.read = answer.len();
        !matches!(self.state, State::Text)
    }

    /// Returns the calls in a complete answer, and forgets the answer. Returns `None` if the answer is text.
    pub fn finish(&mut self, answer: &str) -> Option<Vec<ToolCall>> {
        self.is_possible(answer);
        let is_complete = matches!(self.state, State::AfterCall | State::AfterLine);
        self.reset();
        if is_complete { read_bare_calls(answer) } else { None }
    }

    fn next(&mut self, byte: u8) -> State {
        match (self.state, byte) {
            (State::Key | State::Name, _) => self.next_in_word(byte),
            (State::Arguments, _) => self.next_in_arguments(byte),
            (State::AfterCall, b'\n') => State::AfterLine,
            (state, b' ' | b'\t' | b'\n' | b'\r') => state,
            (State::BeforeCall | State::AfterLine, b'{') => State::BeforeKey,
            (State::BeforeKey, b'"') => State::Key,
            (State::BeforeColon, b':') => State::BeforeValue,
            (State::BeforeValue, b'"') if matches!(self.key, "name" | "type") => State::Name,
            (State::BeforeValue, b'{') if matches!(self.key, "parameters" | "arguments") => {
                self.depth = 1;
                State::Arguments
            }
            (State::AfterValue, b',') => State::BeforeKey,
            (State::AfterValue, b'}') => State::AfterCall,
            (State::AfterCall | State::AfterLine, b';') => State::BeforeCall,
            _ => State::Text,
        }
    }

    /// Reads a byte of a key, of a tool's name or of the type. None of these words contains an escape sequence.
    fn next_in_word(&mut self, byte: u8) -> State {
        let is_key = matches!(self.state, State::Key);
        let known: Vec<&str> = match self.key {
            _ if is_key => KEYS.to_vec(),
            "type" => vec!["function"],
            _ => self.names.iter().map(String::as_str).collect(),
        };
        if byte != b'"' {
            self.word.push(byte);
            let is_start = known.iter().any(|word| word.as_bytes().starts_with(&self.word));
            return if is_start { self.state } else { State::Text };
        }
        let word = std::mem::take(&mut self.word);
        if !known.iter().any(|known| known.as_bytes() == word) {
            return State::Text;
        }
        if !is_key {
            return State::AfterValue;
        }
        self.key = KEYS.into_iter().find(|key| key.as_bytes() == word).unwrap_or(KEYS[0]);
        State::BeforeColon
    }

    fn next_in_arguments(&mut self, byte: u8) -> State {
        match (self.quote, byte) {
            (Quote::Inside, b'\\') => self.quote = Quote::Escaped,
            (Quote::Inside, b'"') => self.quote = Quote::Outside,
            (Quote::Escaped, _) | (Quote::Outside, b'"') => self.quote = Quote::Inside,
            (Quote::Outside, b'{') => self.depth += 1,
            (Quote::Outside, b'}') => self.depth -= 1,
            _ => {}
        }
        if self.depth == 0 { State::AfterValue } else { State::Arguments }
    }
}
