//! Renders conversations in harmony, the chat format of gpt-oss.
//!
//! A conversation is a list of messages. `docs/format.md` in the GitHub repository openai/harmony specifies the format:
//!
//! ```text
//! <|start|>AUTHOR to=RECIPIENT<|channel|>CHANNEL <|constrain|>CONTENT_TYPE<|message|>CONTENT<|end|>
//! ```
//!
//! Only the author and the content are in every message. Channels are `analysis` (reasoning), `commentary` (tool calls
//! and text before them) and `final` (the answer). A generated tool call ends with `<|call|>`, and the last message of
//! an answer with `<|return|>`. The prompt ends with `<|start|>assistant`, and the model continues from there.
//!
//! Except for one difference, the output matches openai/harmony v0.0.8 (`src/encoding.rs`) token for token.
//! Like openai/harmony, this code encodes each message text and each part of a message header separately.
//!
//! The difference is intentional: this code drops all reasoning up to the last final answer.
//! The documentation of openai/harmony (`docs/format.md`) requires this, and gpt-oss's chat_template.jinja does it.
//! The code of openai/harmony drops reasoning only up to the first final answer, and only if the last assistant message
//! is a final answer.
//!
//! This code does not use gpt-oss's chat_template.jinja, because that template differs from openai/harmony:
//!
//! - The template writes the content type `json` without `<|constrain|>` before it.
//! - The template quotes tool results as JSON strings.
//! - The template adds a blank line after the instructions.

mod header;
pub mod parser;
mod typescript;

use anyhow::Result;

use crate::chat::message::{Message, Role, ToolCall};
use crate::chat::rendered::{RenderOptions, Rendered};
use crate::error::Error;
use crate::tokenizer::{ControlTokens, Tokenizer};
use typescript::tools_section;

/// The ids of harmony's control tokens in a model's vocabulary.
#[derive(Clone, Copy, Debug)]
pub struct HarmonyTokens {
    pub start: u32,
    pub channel: u32,
    pub message: u32,
    pub end: u32,
    /// `<|return|>`, which ends the last message of an answer without a tool call.
    pub end_of_turn: u32,
    /// `<|call|>`, which ends a tool call.
    pub call: Option<u32>,
    /// `<|constrain|>`, which comes before the content type of a tool call.
    pub constrain: Option<u32>,
}

impl HarmonyTokens {
    /// Looks up the control tokens. Returns `None` if one is missing, except `<|call|>` and `<|constrain|>`, which only
    /// tool calls need.
    pub fn find(tokenizer: &Tokenizer) -> Option<Self> {
        Some(Self {
            start: tokenizer.token_id("<|start|>")?,
            channel: tokenizer.token_id("<|channel|>")?,
            message: tokenizer.token_id("<|message|>")?,
            end: tokenizer.token_id("<|end|>")?,
            end_of_turn: tokenizer.token_id("<|return|>")?,
            call: tokenizer.token_id("<|call|>"),
            constrain: tokenizer.token_id("<|constrain|>"),
        })
    }

    /// Returns the ids that end a generation: `<|return|>` and, if present, `<|call|>`.
    pub fn stop_ids(&self) -> Vec<u32> {
        [Some(self.end_of_turn), self.call].into_iter().flatten().collect()
    }
}

/// Renders a conversation in harmony. Fails if a tool, a tool call or a tool result cannot be rendered.
pub fn render(
    tokens: &HarmonyTokens,
    tokenizer: &Tokenizer,
    messages: &[Message],
    options: &RenderOptions,
) -> Result<Rendered> {
    let mut out = HarmonyWriter { tokens, tokenizer, ids: Vec::new(), text: String::new() };
    out.message(MessageHeader::from_author("system"), &system_text(options), tokens.end)?;
    let (instructions, turns) = split_instructions(messages);
    if !instructions.is_empty() || !options.tools.is_empty() {
        let tools = if options.tools.is_empty() { None } else { Some(tools_section(&options.tools)?) };
        out.message(
            MessageHeader::from_author("developer"),
            &developer_text(&instructions, tools.as_deref()),
            tokens.end,
        )?;
    }
    let last_final = turns.iter().rposition(is_final);
    for (i, message) in turns.iter().enumerate() {
        match message.role {
            Role::System | Role::Developer => out.message(
                MessageHeader::from_author("developer"),
                &developer_text(&message.content, None),
                tokens.end,
            )?,
            Role::User => {
                out.message(MessageHeader::from_author(&author("user", message)), &message.content, tokens.end)?
            }
            Role::Assistant => {
                let keeps_reasoning = last_final.is_none_or(|last| i > last);
                out.assistant(message, keeps_reasoning)?;
            }
            Role::Tool => {
                let author = tool_author(&turns[..i], message)?;
                let header = MessageHeader::from_author(&author).to("assistant").on("commentary");
                out.message(header, &message.content, tokens.end)?;
            }
        }
    }
    if options.add_generation_prompt {
        out.control(tokens.start, "<|start|>");
        out.plain("assistant")?;
    }
    Ok(Rendered { ids: out.ids, text: out.text })
}

/// Returns the text of the system message that harmony requires.
/// The user's system prompt goes into the developer message.
fn system_text(options: &RenderOptions) -> String {
    let mut text = format!(
        "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: {}\n\n\
         Reasoning: {}\n\n\
         # Valid channels: analysis, commentary, final. Channel must be included for every message.",
        options.date, options.reasoning_effort
    );
    if !options.tools.is_empty() {
        text.push_str("\nCalls to these tools must go to the commentary channel: 'functions'.");
    }
    text
}

/// Returns the text of a developer message, which contains the instructions and the tools, if any.
fn developer_text(instructions: &str, tools: Option<&str>) -> String {
    let instructions = (!instructions.is_empty()).then(|| format!("# Instructions\n\n{instructions}"));
    let sections: Vec<&str> = instructions.as_deref().into_iter().chain(tools).collect();
    sections.join("\n\n")
}

/// Splits off the system and developer messages at the start. Returns their joined text and the remaining messages.
fn split_instructions(messages: &[Message]) -> (String, &[Message]) {
    let is_turn = |message: &Message| !matches!(message.role, Role::System | Role::Developer);
    let (opening, turns) = messages.split_at(messages.iter().position(is_turn).unwrap_or(messages.len()));
    let texts: Vec<&str> =
        opening.iter().map(|message| message.content.as_str()).filter(|text| !text.is_empty()).collect();
    (texts.join("\n\n"), turns)
}

/// Returns whether a message is the final answer of an assistant turn.
///
/// Returns false for a message with tool calls, and for a message that contains only reasoning.
fn is_final(message: &Message) -> bool {
    message.role == Role::Assistant
        && message.tool_calls.is_empty()
        && (!message.content.is_empty() || message.reasoning.is_none())
}

/// Returns the author of a message in harmony: `role`, or `role:name` if the message has a name.
fn author(role: &str, message: &Message) -> String {
    match &message.name {
        Some(name) => format!("{role}:{name}"),
        None => role.to_string(),
    }
}

/// Returns the recipient of a call of the function `name`, such as `functions.f`. It is also the author of the result.
/// A name with a dot, such as `browser.search`, already has a namespace and stays unchanged.
pub fn harmony_recipient(name: &str) -> String {
    if name.contains('.') { name.to_string() } else { format!("functions.{name}") }
}

/// Returns the error for a tool call in a conversation if the vocabulary lacks a control token that calls need.
fn missing(token: &str) -> anyhow::Error {
    Error::invalid_request(format!("cannot render a tool call: the vocabulary has no {token}"))
}

/// Returns the author of a tool message: the function that produced it, in the form of [`harmony_recipient`].
///
/// Uses the name in the message, or else the name in the earlier tool call that the message answers.
/// If no call has the id in `tool_call_id`, uses the name in the last earlier call. Fails if there is no earlier call.
fn tool_author(earlier: &[Message], message: &Message) -> Result<String> {
    if let Some(name) = &message.name {
        return Ok(harmony_recipient(name));
    }
    let calls: Vec<&ToolCall> = earlier.iter().flat_map(|message| &message.tool_calls).collect();
    let answered = |call: &&&ToolCall| call.id.is_some() && call.id == message.tool_call_id;
    match calls.iter().rev().find(answered).or(calls.last()) {
        Some(call) => Ok(harmony_recipient(&call.name)),
        None => {
            let problem = "cannot render a tool message: it has no name, and no earlier message calls a tool";
            Err(Error::invalid_request(problem))
        }
    }
}

/// The header of a message, between `<|start|>` and `<|message|>`.
#[derive(Clone, Copy)]
struct MessageHeader<'a> {
    author: &'a str,
    recipient: Option<&'a str>,
    channel: Option<&'a str>,
    content_type: Option<&'a str>,
}

impl<'a> MessageHeader<'a> {
    fn from_author(author: &'a str) -> Self {
        Self { author, recipient: None, channel: None, content_type: None }
    }

    fn to(self, recipient: &'a str) -> Self {
        Self { recipient: Some(recipient), ..self }
    }

    fn on(self, channel: &'a str) -> Self {
        Self { channel: Some(channel), ..self }
    }
}

/// The messages written so far, as token ids and as text.
struct HarmonyWriter<'a> {
    tokens: &'a HarmonyTokens,
    tokenizer: &'a Tokenizer,
    ids: Vec<u32>,
    text: String,
}

impl HarmonyWriter<'_> {
    fn control(&mut self, id: u32, name: &str) {
        self.ids.push(id);
        self.text.push_str(name);
    }

    /// Writes a part of a header or the text of a message. Control tokens in `text` are encoded as ordinary text.
    fn plain(&mut self, text: &str) -> Result<()> {
        self.ids.extend(self.tokenizer.encode(text, ControlTokens::Text)?);
        self.text.push_str(text);
        Ok(())
    }

    fn message(&mut self, header: MessageHeader, content: &str, end: u32) -> Result<()> {
        self.control(self.tokens.start, "<|start|>");
        self.plain(header.author)?;
        if let Some(recipient) = header.recipient {
            self.plain(&format!(" to={recipient}"))?;
        }
        if let Some(channel) = header.channel {
            self.control(self.tokens.channel, "<|channel|>");
            self.plain(channel)?;
        }
        if let Some(content_type) = header.content_type {
            self.plain(" ")?;
            let id = self.tokens.constrain.ok_or_else(|| missing("<|constrain|>"))?;
            self.control(id, "<|constrain|>");
            self.plain(content_type)?;
        }
        self.control(self.tokens.message, "<|message|>");
        self.plain(content)?;
        let name = if Some(end) == self.tokens.call { "<|call|>" } else { "<|end|>" };
        self.control(end, name);
        Ok(())
    }

    /// Writes an assistant message in the order of generation: reasoning (if kept), text, tool calls.
    fn assistant(&mut self, message: &Message, keeps_reasoning: bool) -> Result<()> {
        let author = author("assistant", message);
        let header = MessageHeader::from_author(&author);
        let end = self.tokens.end;
        if let Some(reasoning) = message.reasoning.as_deref().filter(|text| keeps_reasoning && !text.is_empty()) {
            self.message(header.on("analysis"), reasoning, end)?;
        }
        if is_final(message) {
            self.message(header.on("final"), &message.content, end)?;
        } else if !message.content.is_empty() {
            self.message(header.on("commentary"), &message.content, end)?;
        }
        for call in &message.tool_calls {
            let call_end = self.tokens.call.ok_or_else(|| missing("<|call|>"))?;
            let recipient = harmony_recipient(&call.name);
            let header = MessageHeader { content_type: Some("json"), ..header.to(&recipient).on("commentary") };
            self.message(header, &call.arguments, call_end)?;
        }
        Ok(())
    }
}
