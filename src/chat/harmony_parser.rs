//! Harmony, the chat format of gpt-oss: generated token ids to channels of text, as they come.
//!
//! Models get this format wrong in a few of every hundred turns (llama.cpp #27720, openai/harmony #33 #80 #82), so the
//! parser never fails and never drops what was said: it reads control tokens by id, recovers at the next thing it
//! understands, counts what was malformed, and hands out text as soon as it is certain that it is no header.

use anyhow::Result;

use super::harmony::Harmony;
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

/// Where a header begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Opening {
    /// After `<|start|>`: a role comes first.
    Start,
    /// After the prompt's own `<|start|>assistant`, or after a message that no `<|start|>` follows.
    Implied,
}

/// A header as far as it has come.
struct Header {
    opening: Opening,
    /// Before the first `<|channel|>`: the role, perhaps a recipient.
    role: Vec<u32>,
    /// After `<|channel|>`: its name, perhaps a recipient and a content type.
    channel: Option<Vec<u32>>,
    /// After `<|constrain|>`: the content type.
    constrain: Option<Vec<u32>>,
    /// From an earlier channel part that a second `<|channel|>` replaced.
    recipient: Option<String>,
}

/// What a header says.
struct Reading {
    channel: Channel,
    recipient: Option<String>,
    /// Whether everything needed was there, in its place.
    well_formed: bool,
    /// Text that is no part of a header: it belongs to the content.
    rest: String,
    /// Whether `rest` could still turn out to be part of the header.
    undecided: bool,
    /// All words, for want of anything better.
    words: String,
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
            self.close(tokenizer, false, &mut out)?;
            self.state = State::Header(Header::new(Opening::Start));
        } else if id == harmony.end || id == harmony.end_of_turn || Some(id) == harmony.call {
            self.close(tokenizer, true, &mut out)?;
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
        self.close(tokenizer, true, &mut out)?;
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
                self.open(reading.as_header(), out);
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
            State::Content { .. } => self.close(tokenizer, false, out)?,
            // <|start|> is missing.
            State::Between => self.malformed += 1,
        }
        header.channel = Some(Vec::new());
        self.state = State::Header(header);
        Ok(())
    }

    /// Ends whatever is open. `ended`: by a token made for it.
    fn close(&mut self, tokenizer: &Tokenizer, ended: bool, out: &mut Vec<Delta>) -> Result<()> {
        match std::mem::replace(&mut self.state, State::Between) {
            // Nothing has come yet, or a redundant <|return|> has.
            State::Between => {}
            State::Content { channel, mut stream } => {
                self.malformed += usize::from(!ended);
                let text = stream.finish(tokenizer)?;
                self.give(channel, text, out);
            }
            State::Header(header) => {
                let reading = header.read(tokenizer)?;
                if header.is_fresh() {
                    return Ok(());
                }
                self.malformed += 1;
                if reading.rest.is_empty() && reading.recipient.is_none() {
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

impl Header {
    fn new(opening: Opening) -> Self {
        Self { opening, role: Vec::new(), channel: None, constrain: None, recipient: None }
    }

    /// The part that is being written.
    fn part(&mut self) -> &mut Vec<u32> {
        self.constrain.as_mut().or(self.channel.as_mut()).unwrap_or(&mut self.role)
    }

    fn tokens(&self) -> usize {
        self.role.len() + self.channel.as_ref().map_or(0, Vec::len) + self.constrain.as_ref().map_or(0, Vec::len)
    }

    /// Whether it holds nothing that was generated.
    fn is_fresh(&self) -> bool {
        self.tokens() == 0 && self.channel.is_none() && self.constrain.is_none()
    }

    fn read(&self, tokenizer: &Tokenizer) -> Result<Reading> {
        let role_text = tokenizer.decode(&self.role)?;
        let channel_text = self.channel.as_ref().map(|ids| tokenizer.decode(ids)).transpose()?;
        let constrain_text = self.constrain.as_ref().map(|ids| tokenizer.decode(ids)).transpose()?;

        let Words { name: role, mut recipient, mut rest, mut undecided } = read_role(&role_text, self.opening);
        recipient = recipient.or(self.recipient.as_deref());
        let mut channel = None;
        if let Some(text) = &channel_text {
            // Whatever was undecided before a control token was part of the header.
            let words = read_channel(text);
            channel = words.name;
            recipient = words.recipient.or(recipient);
            (rest, undecided) = (words.rest, words.undecided);
        }
        if let Some(text) = &constrain_text {
            // The content type ends where it can be no word any more: `json{"a": 1}`.
            let text = text.trim_start();
            (rest, undecided) = (text.trim_start_matches(is_name_character).trim_start(), false);
        }

        let role = role.unwrap_or_default();
        let foreign = matches!(role, "user" | "system" | "developer" | "tool")
            || role.contains('.')
            || (recipient == Some("assistant") && !matches!(role, "" | "assistant"));
        let recipient = recipient.filter(|to| !foreign && !matches!(*to, "assistant" | "user" | "all" | ""));
        // `<|start|>final<|message|>` names the channel in the role's place.
        let name = channel.unwrap_or(role);
        let channel = match name {
            _ if recipient.is_some() => Channel::ToolCall,
            // A message in someone else's name is made up: shown, but not as the answer.
            _ if foreign => Channel::Reasoning,
            "analysis" => Channel::Reasoning,
            _ => Channel::Answer,
        };
        let parts = [Some(&role_text), channel_text.as_ref(), constrain_text.as_ref()];
        let words: Vec<&str> = parts.into_iter().flatten().flat_map(|text| text.split_whitespace()).collect();
        Ok(Reading {
            channel,
            recipient: recipient.map(str::to_string),
            well_formed: self.channel.is_some() && CHANNELS.contains(&name) && !foreign,
            rest: rest.to_string(),
            undecided,
            words: words.join(" "),
        })
    }
}

const CHANNELS: [&str; 3] = ["analysis", "commentary", "final"];

impl Reading {
    /// Read as a header that `<|message|>` has closed: what was undecided was part of it.
    fn as_header(mut self) -> Self {
        if self.undecided {
            self.rest.clear();
        }
        self
    }
}

fn push_words(text: &mut String, more: &str) {
    if !text.is_empty() && !more.is_empty() {
        text.push(' ');
    }
    text.push_str(more);
}

/// One part of a header, read as words.
#[derive(Default)]
struct Words<'t> {
    /// The role or the channel.
    name: Option<&'t str>,
    recipient: Option<&'t str>,
    /// From the first word on that is neither.
    rest: &'t str,
    /// Whether `rest` may still become part of the header.
    undecided: bool,
}

/// The first word of `text` and what follows it; None where the word may go on.
fn split_word(text: &str) -> (&str, Option<&str>) {
    match text.find(char::is_whitespace) {
        Some(end) => (&text[..end], Some(text[end..].trim_start())),
        None => (text, None),
    }
}

/// Whether a word is a recipient, or may become one.
fn may_be_recipient(word: &str) -> bool {
    word.starts_with("to=") || "to=".starts_with(word)
}

fn is_name_character(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_-/+".contains(c)
}

/// Reads what stands before `<|channel|>`: `assistant to=functions.f`, ` to=functions.f`, `functions.f to=assistant`.
fn read_role(text: &str, opening: Opening) -> Words<'_> {
    let (first, after) = split_word(text.trim_start());
    if let Some(recipient) = first.strip_prefix("to=") {
        return Words { recipient: Some(recipient), rest: after.unwrap_or_default(), ..Words::default() };
    }
    let known = matches!(first, "assistant" | "user" | "system" | "developer" | "tool") || CHANNELS.contains(&first);
    let may_be_role = match (opening, after) {
        (Opening::Start, _) => true,
        (Opening::Implied, None) => "assistant".starts_with(first) || may_be_recipient(first),
        (Opening::Implied, Some(_)) => first == "assistant",
    };
    let (second, after_second) = split_word(after.unwrap_or_default());
    if !may_be_role {
        return Words { rest: text, ..Words::default() };
    }
    if let Some(recipient) = second.strip_prefix("to=") {
        return Words {
            name: Some(first),
            recipient: Some(recipient),
            rest: after_second.unwrap_or_default(),
            undecided: false,
        };
    }
    if second.is_empty() || (after_second.is_none() && may_be_recipient(second)) {
        // Nothing but a role so far; a word that is no role we know is content if nothing more comes.
        let rest = if known { second } else { text };
        return Words { name: Some(first), recipient: None, rest, undecided: true };
    }
    match opening {
        // Words after a role: content whose <|message|> is missing.
        Opening::Start if known => Words { name: Some(first), rest: after.unwrap_or_default(), ..Words::default() },
        _ => Words { rest: text, ..Words::default() },
    }
}

/// Reads what stands after `<|channel|>`: `commentary to=functions.f json`. More words than these are content whose
/// `<|message|>` is missing.
fn read_channel(text: &str) -> Words<'_> {
    let trimmed = text.trim_start();
    let mut words = Words { undecided: true, ..Words::default() };
    let mut rest = trimmed;
    if !trimmed.starts_with("to=") {
        // Content may be glued to the name: `final你好`, `finalHello`.
        let name_end = trimmed.find(|c| !is_name_character(c)).unwrap_or(trimmed.len());
        let known = CHANNELS.iter().find(|name| trimmed.starts_with(**name));
        let (name, after) = trimmed.split_at(known.map_or(name_end, |name| name.len()));
        words.name = (!name.is_empty()).then_some(name);
        words.undecided = after.is_empty() || after.starts_with(char::is_whitespace);
        rest = after.trim_start();
    }
    // A recipient comes first, or after the content type.
    let (first, after) = split_word(rest);
    let (second, after_second) = split_word(after.unwrap_or_default());
    if let Some(recipient) = first.strip_prefix("to=") {
        words.recipient = Some(recipient);
        rest = after.unwrap_or_default();
        words.undecided &= second.is_empty() || after_second.is_none();
    } else if let Some(recipient) = second.strip_prefix("to=") {
        words.recipient = Some(recipient);
        rest = after_second.unwrap_or_default();
    } else {
        words.undecided &= after_second.is_none() && may_be_recipient(second);
    }
    words.undecided &= rest.chars().all(|c| is_name_character(c) || c.is_whitespace());
    words.rest = rest;
    words
}
