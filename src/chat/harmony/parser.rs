//! Parses model output in harmony, the chat format of gpt-oss, into channels of text. `harmony` describes the format.
//!
//! The parser is a state machine over tokens: in a header, in the content of a message, or between messages.
//! Models sometimes violate the format (openai/harmony #33 #80 #82). For example, a user of gpt-oss-20b reports
//! malformed headers in about 1% of turns at temperature 1 (llama.cpp #27720).
//! Unlike `StreamableParser` of openai/harmony, the parser therefore never rejects output, and keeps all text outside
//! headers.
//! If the model generates no such text and no tool call, the words of headers without `<|message|>` become the answer.
//! A valid header that the end of the generation cuts off after `<|channel|>` is dropped.
//! The parser recognizes control tokens by id, counts violations, and continues after them.
//! It returns text as soon as the text can no longer be part of a header.

use anyhow::Result;

use super::HarmonyTokens;
use super::header::{Opening, ParsedHeader, PartialHeader, push_words};
use crate::chat::channel::{Channel, Delta};
use crate::chat::message::ToolCall;
use crate::chat::violations::{FormatViolation, FormatViolations};
use crate::tokenizer::{TextStream, Tokenizer};

/// The maximum length of a message header in tokens. Valid headers are usually much shorter.
/// If a header grows longer than this without `<|message|>`, its text counts as content.
const MAX_HEADER_TOKENS: usize = 64;

/// Splits the generated tokens of one answer into channels and tool calls.
pub struct HarmonyParser {
    tokens: HarmonyTokens,
    state: HarmonyState,
    tool_calls: Vec<ToolCall>,
    violations: FormatViolations,
    /// Whether the parser has returned any text or found a tool call.
    has_output: bool,
    /// The words of headers without a message. These words become the answer if the model generates nothing else.
    header_words: String,
}

/// The position of the parser in the output.
enum HarmonyState {
    Header(PartialHeader),
    Content {
        channel: Channel,
        stream: TextStream,
    },
    /// After a message. If another message follows, it should begin with `<|start|>`.
    Between,
}

/// How a message ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MessageEnding {
    /// The message ended with `<|end|>`, `<|call|>` or `<|return|>`.
    Marked,
    /// The next message started, but the end token of this message is missing.
    Missing,
    /// The generation ended, and the parser received no end token for the message.
    Generation,
}

impl HarmonyParser {
    pub fn new(tokens: HarmonyTokens) -> Self {
        Self {
            tokens,
            state: HarmonyState::Header(PartialHeader::new(Opening::Implied)),
            tool_calls: Vec::new(),
            violations: FormatViolations::default(),
            has_output: false,
            header_words: String::new(),
        }
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
        let tokens = self.tokens;
        if id == tokens.start {
            let doubled = matches!(&self.state, HarmonyState::Header(header) if header.is_fresh());
            self.violations.add_if(doubled, FormatViolation::UnexpectedToken);
            self.close(tokenizer, MessageEnding::Missing, &mut out)?;
            self.state = HarmonyState::Header(PartialHeader::new(Opening::Start));
        } else if id == tokens.end || id == tokens.end_of_turn || Some(id) == tokens.call {
            self.close(tokenizer, MessageEnding::Marked, &mut out)?;
        } else if id == tokens.channel {
            self.channel_marker(tokenizer, &mut out)?;
        } else if id == tokens.message {
            self.message_marker(tokenizer, &mut out)?;
        } else if Some(id) == tokens.constrain {
            match &mut self.state {
                HarmonyState::Header(header) => {
                    self.violations.add_if(header.constrain.is_some(), FormatViolation::UnexpectedToken);
                    // Keep tokens after an earlier `<|constrain|>`, because they count toward the header's length.
                    header.constrain.get_or_insert_default();
                }
                _ => self.violations.add(FormatViolation::UnexpectedToken),
            }
        } else if !tokenizer.is_control(id) {
            self.text(tokenizer, id, &mut out)?;
        }
        Ok(out)
    }

    /// Ends the answer and returns the remaining text.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<Vec<Delta>> {
        let mut out = Vec::new();
        self.close(tokenizer, MessageEnding::Generation, &mut out)?;
        let words = std::mem::take(&mut self.header_words);
        if !self.has_output && !words.is_empty() {
            self.emit(Channel::Answer, words, &mut out);
        }
        Ok(out)
    }

    /// Adds a token of ordinary text to the content or to the header, or starts a header without `<|start|>`.
    fn text(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut Vec<Delta>) -> Result<()> {
        match &mut self.state {
            HarmonyState::Content { channel, stream } => {
                let channel = *channel;
                let text = stream.push(tokenizer, id)?;
                self.emit(channel, text, out);
            }
            HarmonyState::Between => {
                let mut header = PartialHeader::new(Opening::Implied);
                header.role.push(id);
                self.state = HarmonyState::Header(header);
                self.leave_header_if_text(tokenizer, out)?;
            }
            HarmonyState::Header(header) => {
                header.part().push(id);
                self.leave_header_if_text(tokenizer, out)?;
            }
        }
        Ok(())
    }

    /// Starts the content of a message if the header is too long or contains text that cannot belong to a header.
    /// In both cases, the model omitted `<|message|>`.
    fn leave_header_if_text(&mut self, tokenizer: &Tokenizer, out: &mut Vec<Delta>) -> Result<()> {
        let HarmonyState::Header(header) = &self.state else { return Ok(()) };
        let mut parsed = header.parse(tokenizer)?;
        if header.tokens() > MAX_HEADER_TOKENS {
            if parsed.rest.is_empty() {
                parsed.rest = std::mem::take(&mut parsed.words);
            }
        } else if parsed.rest.is_empty() || parsed.is_undecided || parsed.rest.ends_with('\u{FFFD}') {
            // U+FFFD at the end marks an incomplete character, which the next token may complete.
            return Ok(());
        }
        self.violations.add(FormatViolation::MissingToken);
        self.open(parsed, out);
        Ok(())
    }

    /// Starts the content of a message, and a tool call if the header names a recipient.
    /// The content begins with any text left over from the header.
    fn open(&mut self, parsed: ParsedHeader, out: &mut Vec<Delta>) {
        if let Some(recipient) = parsed.recipient {
            let name = recipient.strip_prefix("functions.").unwrap_or(&recipient).to_string();
            self.tool_calls.push(ToolCall { id: None, name, arguments: String::new() });
            self.has_output = true;
        }
        self.state = HarmonyState::Content { channel: parsed.channel, stream: TextStream::new() };
        self.emit(parsed.channel, parsed.rest, out);
    }

    /// Ends the header and starts the content at the control token `<|message|>`.
    fn message_marker(&mut self, tokenizer: &Tokenizer, out: &mut Vec<Delta>) -> Result<()> {
        match &self.state {
            HarmonyState::Header(header) => {
                let parsed = header.parse(tokenizer)?;
                self.violations.add_if(!parsed.is_well_formed, FormatViolation::InvalidHeader);
                self.open(parsed.closed(), out);
            }
            // A second `<|message|>` is a violation, but the content continues.
            HarmonyState::Content { .. } => self.violations.add(FormatViolation::UnexpectedToken),
            HarmonyState::Between => {
                self.violations.add(FormatViolation::MissingToken);
                self.state = HarmonyState::Content { channel: Channel::Answer, stream: TextStream::new() };
            }
        }
        Ok(())
    }

    /// Expects a channel name after the control token `<|channel|>`. Starts a new header if no header is open.
    fn channel_marker(&mut self, tokenizer: &Tokenizer, out: &mut Vec<Delta>) -> Result<()> {
        let mut header = PartialHeader::new(Opening::Implied);
        match &mut self.state {
            HarmonyState::Header(current) if current.channel.is_none() && current.constrain.is_none() => {
                current.channel = Some(Vec::new());
                return Ok(());
            }
            // After a second `<|channel|>`, or a `<|channel|>` after `<|constrain|>`, the last channel name counts.
            // An earlier recipient stays, unless a new one follows.
            HarmonyState::Header(current) => {
                self.violations.add(FormatViolation::UnexpectedToken);
                header.recipient = current.parse(tokenizer)?.recipient;
                header.opening = current.opening;
                header.role = std::mem::take(&mut current.role);
            }
            // The previous message lacks its end token.
            HarmonyState::Content { .. } => self.close(tokenizer, MessageEnding::Missing, out)?,
            // The new message lacks its `<|start|>`.
            HarmonyState::Between => self.violations.add(FormatViolation::MissingToken),
        }
        header.channel = Some(Vec::new());
        self.state = HarmonyState::Header(header);
        Ok(())
    }

    /// Ends the current message, in its header or its content.
    fn close(&mut self, tokenizer: &Tokenizer, ending: MessageEnding, out: &mut Vec<Delta>) -> Result<()> {
        match std::mem::replace(&mut self.state, HarmonyState::Between) {
            HarmonyState::Between => {}
            HarmonyState::Content { channel, mut stream } => {
                self.violations.add_if(ending == MessageEnding::Missing, FormatViolation::MissingToken);
                let text = stream.finish(tokenizer)?;
                self.emit(channel, text, out);
            }
            HarmonyState::Header(header) => {
                if header.is_fresh() {
                    return Ok(());
                }
                let parsed = header.parse(tokenizer)?;
                let unfinished = UnfinishedHeader::new(&header, &parsed, ending);
                self.violations.add_if(unfinished != UnfinishedHeader::ValidStart, FormatViolation::MissingToken);
                match unfinished {
                    UnfinishedHeader::ValidStart => {}
                    UnfinishedHeader::Words => push_words(&mut self.header_words, &parsed.words),
                    UnfinishedHeader::Content => {
                        self.open(parsed, out);
                        self.state = HarmonyState::Between;
                    }
                }
            }
        }
        Ok(())
    }

    /// Appends text to the output. Text in the tool call channel is also appended to the arguments of the last call.
    fn emit(&mut self, channel: Channel, text: String, out: &mut Vec<Delta>) {
        if text.is_empty() {
            return;
        }
        self.has_output = true;
        if channel == Channel::ToolCall
            && let Some(call) = self.tool_calls.last_mut()
        {
            call.arguments.push_str(&text);
        }
        out.push(Delta { channel, text });
    }
}

/// The kind of a header that ends without `<|message|>`.
#[derive(Clone, Copy, PartialEq)]
enum UnfinishedHeader {
    /// The start of a valid header, cut off by the end of the generation. Not a violation.
    ValidStart,
    /// The words of a header that is not followed by content.
    Words,
    /// Any other header that is followed by content or names a recipient.
    Content,
}

impl UnfinishedHeader {
    fn new(header: &PartialHeader, parsed: &ParsedHeader, ending: MessageEnding) -> Self {
        let is_cut_off = ending == MessageEnding::Generation && header.channel.is_some();
        if is_cut_off && parsed.is_valid_start && (parsed.rest.is_empty() || parsed.is_undecided) {
            Self::ValidStart
        } else if (is_cut_off && parsed.is_undecided) || (parsed.rest.is_empty() && parsed.recipient.is_none()) {
            Self::Words
        } else {
            // The header ends without `<|message|>`, so words that could be header or content count as content.
            Self::Content
        }
    }
}
