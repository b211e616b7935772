//! Parses the headers of generated harmony messages, between `<|start|>` and `<|message|>`.
//!
//! A header has three parts, which control tokens separate. The recipient can be in the first or the second part, and
//! the content type in the second or the third:
//!
//! ```text
//! ROLE to=RECIPIENT <|channel|>CHANNEL to=RECIPIENT CONTENT_TYPE <|constrain|>CONTENT_TYPE
//! ```
//!
//! Models sometimes omit a required part, or omit `<|message|>`, so that the content directly follows the header.
//! Tokens arrive one at a time. The rules therefore decide for each new token whether the text so far belongs to the
//! header, belongs to the content, or can still become either.

use anyhow::Result;

use crate::chat::channel::Channel;
use crate::tokenizer::Tokenizer;

/// Whether the model generated the `<|start|>` before a message header.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// The model generated `<|start|>`. The header should begin with a role.
    Start,
    /// The prompt ends with `<|start|>assistant`, or the model omitted `<|start|>`.
    Implied,
}

/// The token ids of a message header that is still being generated.
pub struct PartialHeader {
    pub opening: Opening,
    /// The ids before `<|channel|>`: the role, and possibly a recipient.
    pub role: Vec<u32>,
    /// The ids after `<|channel|>`: the channel name, and possibly a recipient and a content type.
    pub channel: Option<Vec<u32>>,
    /// The ids after `<|constrain|>`: the content type.
    pub constrain: Option<Vec<u32>>,
    /// The recipient named before a misplaced `<|channel|>`: a second one, or one after `<|constrain|>`.
    /// This recipient applies unless the text after the misplaced `<|channel|>` names another one.
    pub recipient: Option<String>,
}

/// A parsed header: its channel, its recipient, and any content that follows the header without `<|message|>`.
pub struct ParsedHeader {
    pub channel: Channel,
    pub recipient: Option<String>,
    /// Whether `<|channel|>` and a channel that harmony defines are present, and the role is allowed in this header.
    pub is_well_formed: bool,
    /// Whether the header may become well-formed: before `<|channel|>` are only the role `assistant`, a recipient, both
    /// or nothing, and the text after it begins with a channel that harmony defines, or is the beginning of one.
    /// This text may be empty.
    pub is_valid_start: bool,
    /// The text at the end of the header that belongs, or may belong, to the content instead.
    pub rest: String,
    /// Whether later tokens may show that `rest` is part of the header.
    pub is_undecided: bool,
    /// All words of the header, including the words of `rest`.
    /// If no message follows the header and the model generates nothing else, these words can become the answer.
    pub words: String,
}

impl PartialHeader {
    pub fn new(opening: Opening) -> Self {
        Self { opening, role: Vec::new(), channel: None, constrain: None, recipient: None }
    }

    /// Returns the ids of the current part: the role, the channel or the content type.
    pub fn part(&mut self) -> &mut Vec<u32> {
        self.constrain.as_mut().or(self.channel.as_mut()).unwrap_or(&mut self.role)
    }

    /// Returns the number of tokens in the header, without control tokens.
    pub fn tokens(&self) -> usize {
        self.role.len() + self.channel.as_ref().map_or(0, Vec::len) + self.constrain.as_ref().map_or(0, Vec::len)
    }

    /// Returns whether the header is still empty.
    pub fn is_fresh(&self) -> bool {
        self.tokens() == 0 && self.channel.is_none() && self.constrain.is_none()
    }

    /// Parses the generated tokens of the header.
    /// The tokens may include content, because models sometimes omit `<|message|>`.
    pub fn parse(&self, tokenizer: &Tokenizer) -> Result<ParsedHeader> {
        let role_text = tokenizer.decode(&self.role)?;
        let channel_text = self.channel.as_ref().map(|ids| tokenizer.decode(ids)).transpose()?;
        let constrain_text = self.constrain.as_ref().map(|ids| tokenizer.decode(ids)).transpose()?;

        let role_part = read_role(&role_text, self.opening);
        let channel_part = channel_text.as_deref().map(read_channel).unwrap_or_default();
        let (rest, is_undecided) = match (&channel_text, &constrain_text) {
            // The content type ends at the first character that is not valid in a name, as in `json{"a": 1}`.
            (_, Some(text)) => (text.trim_start().trim_start_matches(is_name_character).trim_start(), false),
            // `<|channel|>` ends the role part, so all words before it belong to the header.
            (Some(_), None) => (channel_part.rest, channel_part.is_undecided),
            (None, None) => (role_part.rest, role_part.is_undecided),
        };

        let role = role_part.name.unwrap_or_default();
        let recipient = channel_part.recipient.or(role_part.recipient).or(self.recipient.as_deref());
        let is_foreign = is_foreign_author(role, recipient);
        let recipient = recipient.filter(|to| !is_foreign && !matches!(*to, "assistant" | "user" | "all" | ""));
        // In `<|start|>final<|message|>`, the channel name replaces the role.
        let name = channel_part.name.unwrap_or(role);
        // Without a generated `<|start|>`, a role violates the format. But if the prompt ends with
        // `<|start|>assistant`, models often generate `assistant` again.
        let is_repeated = self.opening == Opening::Implied && !role.is_empty();
        let is_assistant = matches!(role, "" | "assistant") && role_part.rest.trim().is_empty();
        let parts = [Some(&role_text), channel_text.as_ref(), constrain_text.as_ref()];
        let words: Vec<&str> = parts.into_iter().flatten().flat_map(|text| text.split_whitespace()).collect();
        Ok(ParsedHeader {
            channel: channel_of(name, recipient, is_foreign),
            recipient: recipient.map(str::to_string),
            is_well_formed: self.channel.is_some() && CHANNELS.contains(&name) && !is_foreign && !is_repeated,
            is_valid_start: is_assistant && !is_repeated && channel_text.as_deref().is_some_and(may_begin_channel),
            rest: rest.to_string(),
            is_undecided,
            words: words.join(" "),
        })
    }
}

/// The channel names that harmony defines.
pub const CHANNELS: [&str; 3] = ["analysis", "commentary", "final"];

impl ParsedHeader {
    /// Ends the header at `<|message|>`. Words that could be content or header become part of the header.
    pub fn closed(mut self) -> Self {
        if self.is_undecided {
            self.rest.clear();
        }
        self
    }
}

/// Appends the words `more` to `text`, separated by a space.
pub fn push_words(text: &mut String, more: &str) {
    if !text.is_empty() && !more.is_empty() {
        text.push(' ');
    }
    text.push_str(more);
}

/// Returns whether the model wrote a message in the name of another author than the assistant.
fn is_foreign_author(role: &str, recipient: Option<&str>) -> bool {
    matches!(role, "user" | "system" | "developer" | "tool")
        || role.contains('.')
        || (recipient == Some("assistant") && !matches!(role, "" | "assistant"))
}

/// Returns the channel of a message. `name` is the name of its channel in harmony, or its role if it has no channel.
fn channel_of(name: &str, recipient: Option<&str>, is_foreign: bool) -> Channel {
    match name {
        _ if recipient.is_some() => Channel::ToolCall,
        // Show a message in the name of another author as reasoning, not as the answer.
        _ if is_foreign => Channel::Reasoning,
        "analysis" => Channel::Reasoning,
        _ => Channel::Answer,
    }
}

/// Returns whether a text begins with a channel that harmony defines, or is the beginning of one.
fn may_begin_channel(text: &str) -> bool {
    let text = text.trim_start();
    CHANNELS.iter().any(|channel| channel.starts_with(text) || text.starts_with(channel))
}

/// The role part or the channel part of a header.
#[derive(Default)]
struct HeaderPart<'t> {
    /// The role or the channel name.
    name: Option<&'t str>,
    recipient: Option<&'t str>,
    /// The text that belongs, or may belong, to the content instead of the header.
    rest: &'t str,
    /// Whether later tokens may show that `rest` is part of the header.
    is_undecided: bool,
}

/// Returns the first word and the text after it. The second value is `None` if the word may be incomplete.
fn split_word(text: &str) -> (&str, Option<&str>) {
    match text.find(char::is_whitespace) {
        Some(end) => (&text[..end], Some(text[end..].trim_start())),
        None => (text, None),
    }
}

/// Splits off a recipient, such as `to=functions.f`. Returns `None` if the text does not start with a recipient.
///
/// The first returned value is the recipient without `to=`.
/// The second value is the text after the recipient, or `None` if the recipient may be incomplete.
fn split_recipient(text: &str) -> Option<(&str, Option<&str>)> {
    let text = text.strip_prefix("to=")?;
    Some(match text.find(|c| !(is_name_character(c) || ".:".contains(c))) {
        Some(end) => (&text[..end], Some(text[end..].trim_start())),
        None => (text, None),
    })
}

/// Returns whether a word is a recipient such as `to=functions.f`, or the beginning of a recipient.
fn may_be_recipient(word: &str) -> bool {
    word.starts_with("to=") || "to=".starts_with(word)
}

fn is_name_character(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_-/+".contains(c)
}

/// Parses the role part of a header, which comes before `<|channel|>`.
///
/// Examples of role parts: `assistant to=functions.f`, ` to=functions.f`, `functions.f to=assistant`.
fn read_role(text: &str, opening: Opening) -> HeaderPart<'_> {
    let trimmed = text.trim_start();
    if let Some((recipient, tail)) = split_recipient(trimmed) {
        return HeaderPart { recipient: Some(recipient), rest: tail.unwrap_or_default(), ..HeaderPart::default() };
    }
    let (first, tail) = split_word(trimmed);
    let is_known = matches!(first, "assistant" | "user" | "system" | "developer" | "tool") || CHANNELS.contains(&first);
    let may_be_role = match (opening, tail) {
        (Opening::Start, _) => true,
        (Opening::Implied, None) => "assistant".starts_with(first) || may_be_recipient(first),
        (Opening::Implied, Some(_)) => first == "assistant",
    };
    let (second, after_second) = split_word(tail.unwrap_or_default());
    if !may_be_role {
        return HeaderPart { rest: text, ..HeaderPart::default() };
    }
    if let Some((recipient, tail)) = tail.and_then(split_recipient) {
        let rest = tail.unwrap_or_default();
        return HeaderPart { name: Some(first), recipient: Some(recipient), rest, is_undecided: false };
    }
    if second.is_empty() || (after_second.is_none() && may_be_recipient(second)) {
        // The role part contains a single word, or a role and the possible start of a recipient.
        // An unknown role becomes content if neither `<|channel|>` nor `<|message|>` follows.
        let rest = if is_known { second } else { text };
        return HeaderPart { name: Some(first), recipient: None, rest, is_undecided: true };
    }
    match opening {
        // The model omitted `<|message|>` after the role, so the words after the role are content.
        Opening::Start if is_known => {
            HeaderPart { name: Some(first), rest: tail.unwrap_or_default(), ..HeaderPart::default() }
        }
        _ => HeaderPart { rest: text, ..HeaderPart::default() },
    }
}

/// Removes the content type before the JSON arguments of a tool call, as in `json {"a": 1}`.
/// Models sometimes omit both `<|constrain|>` before the type and `<|message|>` after it.
fn without_content_type(text: &str) -> &str {
    let arguments = text.trim_start_matches(is_name_character).trim_start();
    if arguments.starts_with('{') { arguments } else { text }
}

/// Parses the channel part of a header, which comes after `<|channel|>`, such as `commentary to=functions.f json`.
///
/// If the words after the name and the recipient cannot all belong to the header, these words are content:
/// the model omitted `<|message|>` before them.
fn read_channel(text: &str) -> HeaderPart<'_> {
    let trimmed = text.trim_start();
    let mut part = HeaderPart { is_undecided: true, ..HeaderPart::default() };
    let mut rest = trimmed;
    if !trimmed.starts_with("to=") {
        // Content may directly follow the channel name, without a space, as in `final你好` or `finalHello`.
        let name_end = trimmed.find(|c| !is_name_character(c)).unwrap_or(trimmed.len());
        let known = CHANNELS.iter().find(|name| trimmed.starts_with(**name));
        let (name, tail) = trimmed.split_at(known.map_or(name_end, |name| name.len()));
        part.name = (!name.is_empty()).then_some(name);
        part.is_undecided = tail.is_empty() || tail.starts_with(char::is_whitespace);
        rest = tail.trim_start();
    }
    // The recipient may come before or after the content type.
    let after_type = split_word(rest).1;
    if let Some((recipient, tail)) = split_recipient(rest).or_else(|| split_recipient(after_type?)) {
        part.recipient = Some(recipient);
        rest = without_content_type(tail.unwrap_or_default());
        part.is_undecided &= split_word(rest).1.is_none_or(str::is_empty);
    } else if let Some(second) = after_type {
        part.is_undecided &= !second.contains(char::is_whitespace) && may_be_recipient(second);
    }
    part.is_undecided &= rest.chars().all(|c| is_name_character(c) || c.is_whitespace());
    part.rest = rest;
    part
}
