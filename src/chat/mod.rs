//! Chat formats: messages to token ids, and generated ids back to channels of text.
//!
//! gpt-oss has harmony, which is native here; every other model brings a Jinja template. For both holds: text that a
//! person or a tool wrote never becomes a control token, and what a model generates is told apart by token id first,
//! never lost, and never fails to parse.

use std::path::Path;

use anyhow::Result;

use crate::tokenizer::Tokenizer;

mod harmony;
mod harmony_header;
mod harmony_parser;
mod injection;
mod message;
mod python;
mod tagged_parser;
mod template;
mod template_functions;
mod typescript;

pub use message::{Message, ReasoningEffort, Role, ToolCall};

use harmony::Harmony;
use harmony_parser::HarmonyParser;
use tagged_parser::TaggedParser;
use template::Template;

/// What a conversation is rendered with, beside its messages.
#[derive(Clone, Debug)]
pub struct RenderOptions {
    /// OpenAI's tool objects: `{"type": "function", "function": {"name", "description", "parameters"}}`.
    pub tools: Vec<serde_json::Value>,
    pub reasoning_effort: ReasoningEffort,
    /// Today, `YYYY-MM-DD`. Pinned for a session by the caller: a date that changes at midnight would change the first
    /// tokens of every prompt, and nothing cached would be a prefix any more.
    pub date: String,
    /// Whether the assistant's turn is opened at the end.
    pub add_generation_prompt: bool,
}

/// A conversation as a model reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    pub ids: Vec<u32>,
    /// The same as text, control tokens spelled out.
    pub text: String,
}

/// How a model wants its conversations.
pub enum ChatFormat {
    Harmony(HarmonyFormat),
    Template(TemplateFormat),
}

/// Harmony, spoken by gpt-oss.
pub struct HarmonyFormat(Harmony);

/// A Jinja template that came with the model.
pub struct TemplateFormat(Box<Template>);

impl ChatFormat {
    /// The chat format of the snapshot in `dir`: harmony when the vocabulary has its control tokens, else
    /// chat_template.jinja, else tokenizer_config.json's `chat_template`. None for a base model, which has none.
    pub fn load(dir: &Path, tokenizer: &Tokenizer) -> Result<Option<ChatFormat>> {
        if let Some(harmony) = Harmony::find(tokenizer) {
            return Ok(Some(ChatFormat::Harmony(HarmonyFormat(harmony))));
        }
        Ok(Template::load(dir)?.map(|template| ChatFormat::Template(TemplateFormat(Box::new(template)))))
    }

    /// The same where the template is at hand: it stands in `file`, and names special tokens such as `bos_token`.
    pub fn from_template(
        tokenizer: &Tokenizer,
        file: &str,
        template: Option<&str>,
        special_tokens: Vec<(String, String)>,
    ) -> Option<ChatFormat> {
        if let Some(harmony) = Harmony::find(tokenizer) {
            return Some(ChatFormat::Harmony(HarmonyFormat(harmony)));
        }
        let template = Template::new(file, template.filter(|template| !template.is_empty())?.into(), special_tokens);
        Some(ChatFormat::Template(TemplateFormat(Box::new(template))))
    }

    /// `harmony`, or the file that the template stands in.
    pub fn name(&self) -> &str {
        match self {
            ChatFormat::Harmony(_) => "harmony",
            ChatFormat::Template(format) => format.0.name(),
        }
    }

    /// Token ids of a conversation. Fails when the template refuses it or is broken, or when a tool message answers no
    /// call.
    pub fn render(&self, tokenizer: &Tokenizer, messages: &[Message], options: &RenderOptions) -> Result<Rendered> {
        match self {
            ChatFormat::Harmony(format) => format.0.render(tokenizer, messages, options),
            ChatFormat::Template(format) => format.0.render(tokenizer, messages, options),
        }
    }

    /// Ids at which the format itself ends a generation, beside those of the model's config.
    pub fn stop_ids(&self) -> Vec<u32> {
        match self {
            ChatFormat::Harmony(format) => format.0.stop_ids(),
            ChatFormat::Template(_) => Vec::new(),
        }
    }

    /// A parser for what is generated after `prompt`.
    pub fn parser(&self, prompt: &Rendered) -> Parser {
        Parser(match self {
            ChatFormat::Harmony(format) => ParserKind::Harmony(Box::new(HarmonyParser::new(format.0))),
            ChatFormat::Template(_) => ParserKind::Tagged(Box::new(TaggedParser::new(&prompt.text))),
        })
    }
}

/// What a piece of generated text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// The model thinking: set apart from the answer, or hidden.
    Reasoning,
    /// What the person should read, including what a model says before it calls a tool.
    Answer,
    /// The arguments of a tool call, as they come; `Parser::tool_calls` has them whole.
    ToolCall,
}

/// A piece of generated text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    pub channel: Channel,
    pub text: String,
}

/// Tells the channels of generated tokens apart, as they come. The tokenizer is passed to each call, so that a parser
/// can be kept beside it.
pub struct Parser(ParserKind);

enum ParserKind {
    Harmony(Box<HarmonyParser>),
    Tagged(Box<TaggedParser>),
}

impl Parser {
    /// Text that became certain with `id`: none, one, or several pieces.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<Vec<Delta>> {
        match &mut self.0 {
            ParserKind::Harmony(parser) => parser.push(tokenizer, id),
            ParserKind::Tagged(parser) => parser.push(tokenizer, id),
        }
    }

    /// What was held back, at the end of a generation. Whether the stop token was pushed does not matter.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<Vec<Delta>> {
        match &mut self.0 {
            ParserKind::Harmony(parser) => parser.finish(tokenizer),
            ParserKind::Tagged(parser) => parser.finish(tokenizer),
        }
    }

    /// The tools that the model asked for so far; the last one's arguments may still grow.
    pub fn tool_calls(&self) -> &[ToolCall] {
        match &self.0 {
            ParserKind::Harmony(parser) => parser.tool_calls(),
            ParserKind::Tagged(parser) => parser.tool_calls(),
        }
    }

    /// How often the model broke its own format and the parser had to guess.
    pub fn malformed(&self) -> usize {
        match &self.0 {
            ParserKind::Harmony(parser) => parser.malformed(),
            ParserKind::Tagged(parser) => parser.malformed(),
        }
    }
}
