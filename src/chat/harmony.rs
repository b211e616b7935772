//! Harmony, the chat format of gpt-oss: conversations to token ids.
//!
//! Follows openai/harmony v0.0.8 (`src/encoding.rs`, `docs/format.md`) token for token: every piece of a header and
//! every text is encoded by itself, as there. One departure: reasoning is dropped from every turn up to the last final
//! answer, as `docs/format.md` and the model's own chat_template.jinja have it. The library drops it only up to the
//! first final answer, and not at all while a call is open.
//!
//! The chat_template.jinja that ships with gpt-oss is another dialect (`json` without `<|constrain|>`, tool results
//! quoted as JSON strings, a blank line after the instructions): it is not followed.

use anyhow::{Context, Result, bail};

use super::message::{Message, Role, ToolCall};
use super::typescript::tools_section;
use super::{RenderOptions, Rendered};
use crate::tokenizer::{ControlTokens, Tokenizer};

/// The ids of harmony's control tokens, by their names in this model's vocabulary.
#[derive(Clone, Copy, Debug)]
pub struct Harmony {
    pub(super) start: u32,
    pub(super) channel: u32,
    pub(super) message: u32,
    pub(super) end: u32,
    pub(super) end_of_turn: u32,
    pub(super) call: Option<u32>,
    pub(super) constrain: Option<u32>,
}

impl Harmony {
    /// None when the vocabulary has no harmony control tokens.
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

    /// Ids that end a generation: `<|return|>`, and `<|call|>` where the vocabulary has it.
    pub fn stop_ids(&self) -> Vec<u32> {
        [Some(self.end_of_turn), self.call].into_iter().flatten().collect()
    }

    pub fn render(&self, tokenizer: &Tokenizer, messages: &[Message], options: &RenderOptions) -> Result<Rendered> {
        let mut out = Writer { harmony: self, tokenizer, ids: Vec::new(), text: String::new() };
        out.message(Header::of("system"), &system_text(options), self.end)?;
        let (instructions, turns) = split_instructions(messages);
        if !instructions.is_empty() || !options.tools.is_empty() {
            let tools = if options.tools.is_empty() { None } else { Some(tools_section(&options.tools)?) };
            out.message(Header::of("developer"), &developer_text(&instructions, tools.as_deref()), self.end)?;
        }
        let last_final = turns.iter().rposition(is_final);
        for (i, message) in turns.iter().enumerate() {
            match message.role {
                Role::System | Role::Developer => {
                    out.message(Header::of("developer"), &developer_text(&message.content, None), self.end)?
                }
                Role::User => out.message(Header::of(&named("user", message)), &message.content, self.end)?,
                Role::Assistant => out.assistant(message, last_final.is_none_or(|last| i > last))?,
                Role::Tool => {
                    let function = function_name(&turns[..i], message)?;
                    let header = Header::of(&function).to("assistant").on("commentary");
                    out.message(header, &message.content, self.end)?;
                }
            }
        }
        if options.add_generation_prompt {
            out.control(self.start, "<|start|>");
            out.plain("assistant")?;
        }
        Ok(Rendered { ids: out.ids, text: out.text })
    }
}

/// The system message is the format's own; what people call a system prompt goes into the developer message.
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

fn developer_text(instructions: &str, tools: Option<&str>) -> String {
    let instructions = (!instructions.is_empty()).then(|| format!("# Instructions\n\n{instructions}"));
    let sections: Vec<&str> = instructions.as_deref().into_iter().chain(tools).collect();
    sections.join("\n\n")
}

/// The system and developer messages that open a conversation, as one text, and the rest.
fn split_instructions(messages: &[Message]) -> (String, &[Message]) {
    let is_turn = |message: &Message| !matches!(message.role, Role::System | Role::Developer);
    let (opening, turns) = messages.split_at(messages.iter().position(is_turn).unwrap_or(messages.len()));
    let texts: Vec<&str> =
        opening.iter().map(|message| message.content.as_str()).filter(|text| !text.is_empty()).collect();
    (texts.join("\n\n"), turns)
}

/// Whether a message closes its turn. One with tool calls does not, nor one that was stopped while it still reasoned.
fn is_final(message: &Message) -> bool {
    message.role == Role::Assistant
        && message.tool_calls.is_empty()
        && (!message.content.is_empty() || message.reasoning.is_none())
}

fn named(role: &str, message: &Message) -> String {
    match &message.name {
        Some(name) => format!("{role}:{name}"),
        None => role.to_string(),
    }
}

/// A function as harmony addresses it. Built-in tools (`browser.search`) carry their namespace already.
fn address(name: &str) -> String {
    if name.contains('.') { name.to_string() } else { format!("functions.{name}") }
}

/// Which function a tool message comes from: its own name, else the call it answers, else the last call.
fn function_name(before: &[Message], message: &Message) -> Result<String> {
    if let Some(name) = &message.name {
        return Ok(address(name));
    }
    let calls: Vec<&ToolCall> = before.iter().flat_map(|message| &message.tool_calls).collect();
    let answered = |call: &&&ToolCall| call.id.is_some() && call.id == message.tool_call_id;
    match calls.iter().rev().find(answered).or(calls.last()) {
        Some(call) => Ok(address(&call.name)),
        None => bail!("a tool message without a name, and without a tool call before it that it could answer"),
    }
}

/// What stands between `<|start|>` and `<|message|>`.
#[derive(Clone, Copy)]
struct Header<'a> {
    author: &'a str,
    recipient: Option<&'a str>,
    channel: Option<&'a str>,
    constrain: Option<&'a str>,
}

impl<'a> Header<'a> {
    fn of(author: &'a str) -> Self {
        Self { author, recipient: None, channel: None, constrain: None }
    }

    fn to(self, recipient: &'a str) -> Self {
        Self { recipient: Some(recipient), ..self }
    }

    fn on(self, channel: &'a str) -> Self {
        Self { channel: Some(channel), ..self }
    }
}

struct Writer<'a> {
    harmony: &'a Harmony,
    tokenizer: &'a Tokenizer,
    ids: Vec<u32>,
    text: String,
}

impl Writer<'_> {
    fn control(&mut self, id: u32, name: &str) {
        self.ids.push(id);
        self.text.push_str(name);
    }

    /// Text that never becomes a control token, whatever it spells.
    fn plain(&mut self, text: &str) -> Result<()> {
        self.ids.extend(self.tokenizer.encode(text, ControlTokens::Text)?);
        self.text.push_str(text);
        Ok(())
    }

    fn message(&mut self, header: Header, content: &str, end: u32) -> Result<()> {
        self.control(self.harmony.start, "<|start|>");
        self.plain(header.author)?;
        if let Some(recipient) = header.recipient {
            self.plain(&format!(" to={recipient}"))?;
        }
        if let Some(channel) = header.channel {
            self.control(self.harmony.channel, "<|channel|>");
            self.plain(channel)?;
        }
        if let Some(content_type) = header.constrain {
            self.plain(" ")?;
            let id = self.harmony.constrain.context("the vocabulary has no <|constrain|>, which a tool call needs")?;
            self.control(id, "<|constrain|>");
            self.plain(content_type)?;
        }
        self.control(self.harmony.message, "<|message|>");
        self.plain(content)?;
        let name = if Some(end) == self.harmony.call { "<|call|>" } else { "<|end|>" };
        self.control(end, name);
        Ok(())
    }

    /// Reasoning, what is said to the person, tool calls, in that order: the order in which they were generated.
    fn assistant(&mut self, message: &Message, keep_reasoning: bool) -> Result<()> {
        let author = named("assistant", message);
        let header = Header::of(&author);
        let end = self.harmony.end;
        if let Some(reasoning) = message.reasoning.as_deref().filter(|text| keep_reasoning && !text.is_empty()) {
            self.message(header.on("analysis"), reasoning, end)?;
        }
        if is_final(message) {
            self.message(header.on("final"), &message.content, end)?;
        } else if !message.content.is_empty() {
            self.message(header.on("commentary"), &message.content, end)?;
        }
        for call in &message.tool_calls {
            let call_end = self.harmony.call.context("the vocabulary has no <|call|>, which a tool call needs")?;
            let recipient = address(&call.name);
            let header = Header { constrain: Some("json"), ..header.to(&recipient).on("commentary") };
            self.message(header, &call.arguments, call_end)?;
        }
        Ok(())
    }
}
