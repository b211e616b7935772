//! Harmony, the chat format of gpt-oss: generated token ids to channels of text, as they come.
//!
//! Models get this format wrong in a few of every hundred turns (llama.cpp #27720, openai/harmony #33 #80 #82), so the
//! parser never fails and never drops what was said: it reads control tokens by id, recovers at the next thing it
//! understands, counts what was malformed, and hands out text as soon as it is certain that it is no header.

use anyhow::Result;

use super::harmony::Harmony;
use super::harmony_header::{CHANNELS, Header, Opening, Reading, push_words};
use super::message::ToolCall;
use super::{Channel, Delta};
use crate::tokenizer::{TextStream, Tokenizer};

/// A header with more tokens than this and no `<|message|>` is text.
const MAX_HEADER_TOKENS: usize = 64;

pub struct HarmonyParser {
    harmony: Harmony,
    state: State,
    tool_calls: Vec<ToolCall>,
    malformed: usize,
    /// Whether any text, or a tool call, was handed out.
    gave: bool,
    /// Words of headers that never became messages: the answer of last resort.
    orphans: String,
}

enum State {
    Header(Header),
    Content {
        channel: Channel,
        stream: TextStream,
    },
    /// A message has ended; `<|start|>` should come.
    Between,
}

/// How a message ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// With `<|end|>`, `<|call|>` or `<|return|>`.
    Marked,
    /// Without, because the next one begins.
    Missing,
    /// Nothing more comes.
    Generation,
}

impl HarmonyParser {
    pub fn new(harmony: Harmony) -> Self {
        Self {
            harmony,
            state: State::Header(Header::new(Opening::Implied)),
            tool_calls: Vec::new(),
            malformed: 0,
            gave: false,
            orphans: String::new(),
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
        let harmony = self.harmony;
        if id == harmony.start {
            let doubled = matches!(&self.state, State::Header(header) if header.is_fresh());
            self.malformed += usize::from(doubled);
            self.close(tokenizer, Ending::Missing, &mut out)?;
            self.state = State::Header(Header::new(Opening::Start));
        } else if id == harmony.end || id == harmony.end_of_turn || Some(id) == harmony.call {
            self.close(tokenizer, Ending::Marked, &mut out)?;
        } else if id == harmony.channel {
            self.channel_marker(tokenizer, &mut out)?;
        } else if id == harmony.message {
            self.message_marker(tokenizer, &mut out)?;
        } else if Some(id) == harmony.constrain {
            match &mut self.state {
                State::Header(header) => header.constrain = Some(Vec::new()),
                _ => self.malformed += 1,
            }
        } else if !tokenizer.is_control(id) {
            self.text(tokenizer, id, &mut out)?;
        }
        Ok(out)
    }

    /// What is still held back, at the end of a generation.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<Vec<Delta>> {
        let mut out = Vec::new();
        self.close(tokenizer, Ending::Generation, &mut out)?;
        let orphans = std::mem::take(&mut self.orphans);
        if !self.gave && !orphans.is_empty() {
            self.give(Channel::Answer, orphans, &mut out);
        }
        Ok(out)
    }

    fn text(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut Vec<Delta>) -> Result<()> {
        match &mut self.state {
            State::Content { channel, stream } => {
                let (channel, text) = (*channel, stream.push(tokenizer, id)?);
                self.give(channel, text, out);
            }
            State::Between => {
                let mut header = Header::new(Opening::Implied);
                header.role.push(id);
                self.state = State::Header(header);
                self.leave_header_if_text(tokenizer, out)?;
            }
            State::Header(header) => {
                header.part().push(id);
                self.leave_header_if_text(tokenizer, out)?;
            }
        }
        Ok(())
    }

    /// A `<|message|>` is missing where what came cannot be a header any more.
    fn leave_header_if_text(&mut self, tokenizer: &Tokenizer, out: &mut Vec<Delta>) -> Result<()> {
        let State::Header(header) = &self.state else { return Ok(()) };
        let mut reading = header.read(tokenizer)?;
        if header.tokens() > MAX_HEADER_TOKENS {
            if reading.rest.is_empty() {
                reading.rest = std::mem::take(&mut reading.words);
            }
        } else if reading.rest.is_empty() || reading.undecided || reading.rest.ends_with('\u{FFFD}') {
            // The last of these: bytes of a character that is not complete yet. The next token tells.
            return Ok(());
        }
        self.malformed += 1;
        self.open(reading, out);
        Ok(())
    }

    /// Starts the content of a message, with what of its header was content already.
    fn open(&mut self, reading: Reading, out: &mut Vec<Delta>) {
        if let Some(recipient) = reading.recipient {
            let name = recipient.strip_prefix("functions.").unwrap_or(&recipient).to_string();
            self.tool_calls.push(ToolCall { id: None, name, arguments: String::new() });
            self.gave = true;
        }
        self.state = State::Content { channel: reading.channel, stream: TextStream::new() };
        self.give(reading.channel, reading.rest, out);
    }

    fn message_marker(&mut self, tokenizer: &Tokenizer, out: &mut Vec<Delta>) -> Result<()> {
        match &self.state {
            State::Header(header) => {
                let reading = header.read(tokenizer)?;
                self.malformed += usize::from(!reading.well_formed);
                self.open(reading.closed(), out);
            }
            // A second <|message|>: the content goes on.
            State::Content { .. } => self.malformed += 1,
            State::Between => {
                self.malformed += 1;
                self.state = State::Content { channel: Channel::Answer, stream: TextStream::new() };
            }
        }
        Ok(())
    }

    fn channel_marker(&mut self, tokenizer: &Tokenizer, out: &mut Vec<Delta>) -> Result<()> {
        let mut header = Header::new(Opening::Implied);
        match &mut self.state {
            State::Header(current) if current.channel.is_none() && current.constrain.is_none() => {
                current.channel = Some(Vec::new());
                return Ok(());
            }
            // A second <|channel|> in one header: the last one counts, but a recipient is not forgotten.
            State::Header(current) => {
                self.malformed += 1;
                header.recipient = current.read(tokenizer)?.recipient;
                header.opening = current.opening;
                header.role = std::mem::take(&mut current.role);
            }
            // <|end|> is missing.
            State::Content { .. } => self.close(tokenizer, Ending::Missing, out)?,
            // <|start|> is missing.
            State::Between => self.malformed += 1,
        }
        header.channel = Some(Vec::new());
        self.state = State::Header(header);
        Ok(())
    }

    /// Ends whatever is open.
    fn close(&mut self, tokenizer: &Tokenizer, ending: Ending, out: &mut Vec<Delta>) -> Result<()> {
        match std::mem::replace(&mut self.state, State::Between) {
            // Nothing has come yet, or a redundant <|return|> has.
            State::Between => {}
            State::Content { channel, mut stream } => {
                self.malformed += usize::from(ending == Ending::Missing);
                let text = stream.finish(tokenizer)?;
                self.give(channel, text, out);
            }
            State::Header(header) => {
                let reading = header.read(tokenizer)?;
                if header.is_fresh() {
                    return Ok(());
                }
                // Cut off in a header that was right so far: nothing was said, and nothing is wrong.
                let words = reading.words.trim_start();
                let started = CHANNELS.iter().any(|channel| channel.starts_with(words) || words.starts_with(channel));
                if ending == Ending::Generation
                    && header.channel.is_some()
                    && started
                    && (reading.rest.is_empty() || reading.undecided)
                {
                    return Ok(());
                }
                self.malformed += 1;
                // A word after the channel is content if the message ends there, but not if the generation does.
                let cut_off = ending == Ending::Generation && header.channel.is_some() && reading.undecided;
                if cut_off || (reading.rest.is_empty() && reading.recipient.is_none()) {
                    push_words(&mut self.orphans, &reading.words);
                } else {
                    self.open(reading, out);
                    self.state = State::Between;
                }
            }
        }
        Ok(())
    }

    fn give(&mut self, channel: Channel, text: String, out: &mut Vec<Delta>) {
        if text.is_empty() {
            return;
        }
        self.gave = true;
        if channel == Channel::ToolCall
            && let Some(call) = self.tool_calls.last_mut()
        {
            call.arguments.push_str(&text);
        }
        out.push(Delta { channel, text });
    }
}
