//! The chat format of a model: harmony or a Jinja template.

use std::path::Path;

use anyhow::{Result, bail};

use super::harmony::parser::HarmonyParser;
use super::harmony::{self, HarmonyTokens};
use super::message::Message;
use super::parser::{AnswerParser, ParserKind};
use super::rendered::{RenderOptions, Rendered};
use super::tagged::parser::TaggedParser;
use super::template::{SpecialToken, Template};
use crate::tokenizer::Tokenizer;

/// A model's chat format. It renders conversations and creates the parser for answers.
pub enum ChatFormat {
    /// Harmony, the format of gpt-oss, with the ids of its control tokens in the model's vocabulary.
    Harmony(HarmonyTokens),
    Template(TemplateFormat),
}

/// A Jinja template from the model's files.
pub struct TemplateFormat {
    /// The name of the file that contains the template.
    name: String,
    reads_tools: bool,
    /// The template. `None` if another process renders it.
    template: Option<Box<Template>>,
}

impl TemplateFormat {
    fn new(template: Template) -> Self {
        let (name, reads_tools) = (template.name().to_string(), template.reads_tools());
        Self { name, reads_tools, template: Some(Box::new(template)) }
    }
}

impl ChatFormat {
    /// Loads the chat format of the model in `dir`.
    ///
    /// Uses the first of these that exists:
    ///
    /// 1. harmony, if the vocabulary contains its control tokens
    /// 2. the file `chat_template.jinja`
    /// 3. the key `chat_template` in `tokenizer_config.json`
    ///
    /// Returns `None` if none of them exists, as for most base models.
    pub fn load(dir: &Path, tokenizer: &Tokenizer) -> Result<Option<ChatFormat>> {
        if let Some(tokens) = HarmonyTokens::find(tokenizer) {
            return Ok(Some(ChatFormat::Harmony(tokens)));
        }
        Ok(Template::load(dir)?.map(|template| ChatFormat::Template(TemplateFormat::new(template))))
    }

    /// Creates the chat format of a model. `file` is the name of the file that contains the templates.
    ///
    /// `tool_use` is the model's separate template for conversations with tools, if any.
    /// If the vocabulary has harmony's control tokens, the format is harmony, and the templates are ignored.
    /// Otherwise, returns `None` if `template` is missing or empty.
    pub fn from_template(
        tokenizer: &Tokenizer,
        file: &str,
        template: Option<&str>,
        tool_use: Option<&str>,
        special_tokens: Vec<SpecialToken>,
    ) -> Option<ChatFormat> {
        if let Some(tokens) = HarmonyTokens::find(tokenizer) {
            return Some(ChatFormat::Harmony(tokens));
        }
        let template = Template::new(file, template.filter(|template| !template.is_empty())?.into(), special_tokens);
        let template = template.with_tool_use(file, tool_use.filter(|template| !template.is_empty()));
        Some(ChatFormat::Template(TemplateFormat::new(template)))
    }

    /// Creates a chat format whose template, from the file `name`, is rendered by another process.
    /// `reads_tools` is what [`reads_tools`](Self::reads_tools) returns in that process.
    ///
    /// If the vocabulary has harmony's control tokens, uses harmony instead of the template.
    pub fn rendered_elsewhere(tokenizer: &Tokenizer, name: String, reads_tools: bool) -> ChatFormat {
        match HarmonyTokens::find(tokenizer) {
            Some(tokens) => ChatFormat::Harmony(tokens),
            None => ChatFormat::Template(TemplateFormat { name, reads_tools, template: None }),
        }
    }

    /// Returns `harmony` or the name of the file that contains the template.
    pub fn name(&self) -> &str {
        match self {
            ChatFormat::Harmony(_) => "harmony",
            ChatFormat::Template(format) => &format.name,
        }
    }

    /// Returns whether rendered prompts contain the tools of a request. Some templates ignore tools.
    pub fn reads_tools(&self) -> bool {
        match self {
            ChatFormat::Harmony(_) => true,
            ChatFormat::Template(format) => format.reads_tools,
        }
    }

    /// Renders a conversation to token ids.
    ///
    /// Fails if the template is invalid, rejects the conversation, or runs in another process.
    /// With harmony, fails if a tool, a tool call or a tool result cannot be rendered.
    pub fn render(&self, tokenizer: &Tokenizer, messages: &[Message], options: &RenderOptions) -> Result<Rendered> {
        match self {
            ChatFormat::Harmony(tokens) => harmony::render(tokens, tokenizer, messages, options),
            ChatFormat::Template(format) => match &format.template {
                Some(template) => template.render(tokenizer, messages, options),
                None => bail!("cannot render the conversation: its chat template runs in another process"),
            },
        }
    }

    /// Returns the ids of the stop tokens that the chat format defines. A Jinja template defines none.
    pub fn stop_ids(&self) -> Vec<u32> {
        match self {
            ChatFormat::Harmony(tokens) => tokens.stop_ids(),
            ChatFormat::Template(_) => Vec::new(),
        }
    }

    /// Returns a parser for the text generated after `prompt`.
    pub fn parser(&self, prompt: &Rendered) -> AnswerParser {
        AnswerParser::new(match self {
            ChatFormat::Harmony(tokens) => ParserKind::Harmony(Box::new(HarmonyParser::new(*tokens))),
            ChatFormat::Template(_) => ParserKind::Tagged(Box::new(TaggedParser::new(&prompt.text))),
        })
    }
}
