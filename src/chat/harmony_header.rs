//! What stands between `<|start|>` and `<|message|>` in generated harmony: role, recipient, channel, content type, in
//! whatever order and state a model leaves them.

use anyhow::Result;

use super::Channel;
use crate::tokenizer::Tokenizer;

/// Where a header begins.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// After `<|start|>`: a role comes first.
    Start,
    /// After the prompt's own `<|start|>assistant`, or after a message that no `<|start|>` follows.
    Implied,
}

/// A header as far as it has come.
pub struct Header {
    pub opening: Opening,
    /// Before the first `<|channel|>`: the role, perhaps a recipient.
    pub role: Vec<u32>,
    /// After `<|channel|>`: its name, perhaps a recipient and a content type.
    pub channel: Option<Vec<u32>>,
    /// After `<|constrain|>`: the content type.
    pub constrain: Option<Vec<u32>>,
    /// From an earlier channel part that a second `<|channel|>` replaced.
    pub recipient: Option<String>,
}

/// What a header says.
pub struct Reading {
    pub channel: Channel,
    pub recipient: Option<String>,
    /// Whether everything needed was there, in its place.
    pub well_formed: bool,
    /// Text that is no part of a header: it belongs to the content.
    pub rest: String,
    /// Whether `rest` could still turn out to be part of the header.
    pub undecided: bool,
    /// All words, for want of anything better.
    pub words: String,
}

impl Header {
    pub fn new(opening: Opening) -> Self {
        Self { opening, role: Vec::new(), channel: None, constrain: None, recipient: None }
    }

    /// The part that is being written.
    pub fn part(&mut self) -> &mut Vec<u32> {
        self.constrain.as_mut().or(self.channel.as_mut()).unwrap_or(&mut self.role)
    }

    pub fn tokens(&self) -> usize {
        self.role.len() + self.channel.as_ref().map_or(0, Vec::len) + self.constrain.as_ref().map_or(0, Vec::len)
    }

    /// Whether it holds nothing that was generated.
    pub fn is_fresh(&self) -> bool {
        self.tokens() == 0 && self.channel.is_none() && self.constrain.is_none()
    }

    pub fn read(&self, tokenizer: &Tokenizer) -> Result<Reading> {
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
        // `assistant` once more, though the prompt has it, or after a message without a `<|start|>`.
        let repeated = self.opening == Opening::Implied && !role.is_empty();
        let parts = [Some(&role_text), channel_text.as_ref(), constrain_text.as_ref()];
        let words: Vec<&str> = parts.into_iter().flatten().flat_map(|text| text.split_whitespace()).collect();
        Ok(Reading {
            channel,
            recipient: recipient.map(str::to_string),
            well_formed: self.channel.is_some() && CHANNELS.contains(&name) && !foreign && !repeated,
            rest: rest.to_string(),
            undecided,
            words: words.join(" "),
        })
    }
}

pub const CHANNELS: [&str; 3] = ["analysis", "commentary", "final"];

impl Reading {
    /// Read as a header that `<|message|>` has closed: what was undecided was part of it.
    pub fn closed(mut self) -> Self {
        if self.undecided {
            self.rest.clear();
        }
        self
    }
}

pub fn push_words(text: &mut String, more: &str) {
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

/// The recipient that `text` begins with, `to=functions.f`, and what follows; None where the name may go on.
fn split_recipient(text: &str) -> Option<(&str, Option<&str>)> {
    let text = text.strip_prefix("to=")?;
    Some(match text.find(|c| !(is_name_character(c) || ".:".contains(c))) {
        Some(end) => (&text[..end], Some(text[end..].trim_start())),
        None => (text, None),
    })
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
    let trimmed = text.trim_start();
    if let Some((recipient, after)) = split_recipient(trimmed) {
        return Words { recipient: Some(recipient), rest: after.unwrap_or_default(), ..Words::default() };
    }
    let (first, after) = split_word(trimmed);
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
    if let Some((recipient, after)) = after.and_then(split_recipient) {
        let rest = after.unwrap_or_default();
        return Words { name: Some(first), recipient: Some(recipient), rest, undecided: false };
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
    let after_type = split_word(rest).1;
    if let Some((recipient, after)) = split_recipient(rest).or_else(|| split_recipient(after_type?)) {
        words.recipient = Some(recipient);
        rest = after.unwrap_or_default();
        words.undecided &= split_word(rest).1.is_none_or(str::is_empty);
    } else if let Some(second) = after_type {
        words.undecided &= !second.contains(char::is_whitespace) && may_be_recipient(second);
    }
    words.undecided &= rest.chars().all(|c| is_name_character(c) || c.is_whitespace());
    words.rest = rest;
    words
}
