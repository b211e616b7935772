//! The Jinja chat template of a model.
//!
//! The template environment matches transformers 5 (`utils/chat_template_utils.py`): it enables `trim_blocks` and
//! `lstrip_blocks`, defines `tojson`, `raise_exception` and `strftime_now`, supports `{% generation %}`, and provides
//! the tokenizer's special tokens by name.
//!
//! Chat templates are untrusted code. They cannot read files. Their steps, recursion depth and output size are limited.
//! But minijinja limits neither memory nor the time of a single step, and not all recursion during compilation.
//! On Linux, programs that call `inferno::init` therefore run templates in a sandbox process (see `sandbox`).

mod dialect;
mod functions;
mod injection;

use std::io;
use std::path::Path;
use std::sync::OnceLock;

use anyhow::{Result, anyhow, bail};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use serde_json::{Map, Value as Json, json};

use crate::chat::message::{Message, ReasoningEffort};
use crate::chat::rendered::{RenderOptions, Rendered};
use crate::error;
use crate::files;
use crate::tokenizer::Tokenizer;
use dialect::{ArgumentForm, TemplateDialect, map_strings};
use injection::Marker;

/// The maximum number of steps of the template engine in one run of a template.
/// Rendering a long conversation takes far fewer steps, so this limit stops only runaway templates.
const FUEL: u64 = 20_000_000;
const MAX_DEPTH: usize = 200;
const MAX_OUTPUT_BYTES: usize = 64 << 20;
const NAME: &str = "chat_template";

/// The template variables that the request field `chat_template_kwargs` cannot set.
pub const RESERVED_VARIABLES: [&str; 5] = ["messages", "tools", "documents", "add_generation_prompt", "strftime_now"];

/// The chat template of a model. Some models have a separate template for conversations with tools.
pub struct Template {
    default: JinjaTemplate,
    /// The template named `tool_use`, which replaces `default` if the request has tools.
    tool_use: Option<JinjaTemplate>,
    special_tokens: Vec<SpecialToken>,
}

/// A special token that templates can use by name.
pub struct SpecialToken {
    /// The name of the template variable, such as `bos_token`.
    pub name: String,
    /// The text of the token, such as `<s>`.
    pub text: String,
}

/// One Jinja template.
struct JinjaTemplate {
    /// The name of the file that contains the template.
    file: String,
    text: String,
    /// The compiled template, or the compile error.
    ///
    /// The template is compiled on first use, because compilation can fail or crash, and not all commands need it.
    environment: OnceLock<std::result::Result<Environment<'static>, String>>,
    dialect: TemplateDialect,
}

impl Template {
    /// Loads the template from a model's directory. Returns `None` if the model has no template.
    /// Fails if one of the model's files cannot be read.
    pub fn load(dir: &Path) -> Result<Option<Self>> {
        let config = read_json(&dir.join("tokenizer_config.json"))?;
        let path = dir.join("chat_template.jinja");
        let special_map = read_json(&dir.join("special_tokens_map.json"))?;
        let special_tokens = special_tokens(&config, &special_map);
        if let Some(source) = files::read_text_if_present(&path, files::MAX_CHAT_TEMPLATE_BYTES)? {
            return Ok(Some(Self::new("chat_template.jinja", source, special_tokens)));
        }
        let Some((default, tool_use)) = config.get("chat_template").and_then(named_templates) else { return Ok(None) };
        let file = "tokenizer_config.json";
        Ok(Some(Self::new(file, default.to_string(), special_tokens).with_tool_use(file, tool_use)))
    }

    /// Creates a template from its `source`. `file` is the name of the file that contains it.
    pub fn new(file: &str, source: String, special_tokens: Vec<SpecialToken>) -> Self {
        Self { default: JinjaTemplate::new(file, source), tool_use: None, special_tokens }
    }

    /// Sets the separate template for conversations with tools, if the model has one.
    pub fn with_tool_use(self, file: &str, source: Option<&str>) -> Self {
        Self { tool_use: source.map(|source| JinjaTemplate::new(file, source.to_string())), ..self }
    }

    /// Returns the name of the file that contains the template.
    pub fn name(&self) -> &str {
        &self.default.file
    }

    /// Returns whether the template for conversations with tools reads the tools.
    pub fn reads_tools(&self) -> bool {
        self.tool_use.as_ref().unwrap_or(&self.default).dialect.reads_tools
    }

    /// As in transformers, returns `tool_use` if it exists and the request has tools, and otherwise `default`.
    fn template(&self, options: &RenderOptions) -> &JinjaTemplate {
        self.tool_use.as_ref().filter(|_| !options.tools.is_empty()).unwrap_or(&self.default)
    }

    /// Renders a conversation to token ids and text. Fails if the template does not compile, has a run-time error, or
    /// rejects the conversation, and if the conversation contains all possible marks (see [`Marker::new`]).
    pub fn render(&self, tokenizer: &Tokenizer, messages: &[Message], options: &RenderOptions) -> Result<Rendered> {
        let tools = Json::Array(options.tools.clone());
        // The JSON arguments of tool calls can contain escapes such as \ufdd0, which become characters when parsed.
        // The mark must differ from these characters too.
        let calls = messages.iter().flat_map(|message| &message.tool_calls);
        let arguments: Vec<Json> = calls.filter_map(|call| serde_json::from_str(&call.arguments).ok()).collect();
        let written = messages.iter().flat_map(Message::texts).chain(strings_of(&tools));
        let written = written.chain(options.template_variables.values().flat_map(strings_of));
        let written = written.chain(arguments.iter().flat_map(strings_of));
        let marker = Marker::new(tokenizer, written.collect::<Vec<_>>().into_iter())?;
        let mark = |value: &Json| map_strings(value, &|text| marker.mark(text));
        // The names of template variables are not rendered, so they need no marks.
        let variables = options.template_variables.iter().map(|(name, value)| Ok((name.clone(), mark(value)?)));
        let input =
            TemplateInput { messages, tools: mark(&tools)?, variables: variables.collect::<Result<_>>()?, options };

        // In OpenAI's format, the arguments of a tool call are a string that contains JSON.
        // Nearly every template expects an object instead, so try objects first.
        // If the template then fails, it may be one of the few that expect a string, so try strings next.
        let objects = self.run(&input, &marker, ArgumentForm::Objects);
        let has_calls = messages.iter().any(|message| !message.tool_calls.is_empty());
        let text = match objects {
            Err(error) if has_calls && error.is::<TemplateFailed>() => {
                self.run(&input, &marker, ArgumentForm::Strings).map_err(|_| error)
            }
            result => result,
        };
        // The request supplies the values that the template reads, so a run-time error is an error of the request.
        let text = text.map_err(|error| match error.downcast() {
            Ok(TemplateFailed(problem)) => error::Error::invalid_request(problem),
            Err(error) => error,
        })?;
        marker.encode(text)
    }

    /// Runs the template and returns the prompt as text, including the marks of `marker`.
    fn run(&self, input: &TemplateInput, marker: &Marker, arguments: ArgumentForm) -> Result<String> {
        let TemplateInput { messages, tools, variables, options } = input;
        let template = self.template(options);
        let messages = messages
            .iter()
            .map(|message| template.dialect.message(message, marker, arguments))
            .collect::<Result<_>>()?;
        let messages = Json::Array(messages);
        let tools = if options.tools.is_empty() { Value::from(()) } else { Value::from(Serde(tools)) };
        let mut context = vec![
            ("messages".to_string(), Value::from(Serde(&messages))),
            ("tools".to_string(), tools),
            ("documents".to_string(), Value::from(())),
            ("add_generation_prompt".to_string(), Value::from(options.add_generation_prompt)),
            ("strftime_now".to_string(), functions::strftime_now(options.date.clone())),
        ];
        context.extend(self.special_tokens.iter().map(|token| (token.name.clone(), Value::from(token.text.as_str()))));
        // Omit the default reasoning effort, because some templates reject efforts that they do not know.
        if options.reasoning_effort != ReasoningEffort::Medium {
            context.push(("reasoning_effort".into(), Value::from(options.reasoning_effort.to_string())));
        }
        let variables = variables.iter().filter(|(name, _)| !RESERVED_VARIABLES.contains(&name.as_str()));
        context.extend(variables.map(|(name, value)| (name.clone(), Value::from(Serde(value)))));
        template.render(Value::from_pairs(context))
    }
}

/// The input of a template. `tools` and `variables` already have marks.
struct TemplateInput<'r> {
    messages: &'r [Message],
    tools: Json,
    variables: Map<String, Json>,
    options: &'r RenderOptions,
}

impl JinjaTemplate {
    fn new(file: &str, text: String) -> Self {
        let dialect = TemplateDialect::of(&text);
        Self { file: file.to_string(), text, environment: OnceLock::new(), dialect }
    }

    /// Compiles and runs the template.
    ///
    /// A run-time error is [`TemplateFailed`], except a call of `raise_exception` or an exceeded step limit.
    fn render(&self, context: Value) -> Result<String> {
        let compile = || environment(&self.text).map_err(|error| explain(&self.file, &error));
        let environment = self.environment.get_or_init(compile).as_ref().map_err(|cause| anyhow!("{cause}"))?;
        let mut out = LimitedOutput(Vec::new());
        let template = environment.get_template(NAME)?;
        if let Err(error) = template.render_captured_to(context, &mut out) {
            return Err(match functions::raised(&error) {
                Some(message) => error::Error::invalid_request(format!(
                    "cannot render the conversation: the chat template ({}) rejects it: {message}",
                    self.file
                )),
                None if error.kind() == ErrorKind::OutOfFuel => error::Error::invalid_request(format!(
                    "{} (stopped after {FUEL} steps)",
                    explain(&self.file, &error)
                )),
                None => TemplateFailed(explain(&self.file, &error)).into(),
            });
        }
        Ok(String::from_utf8(out.0)?)
    }
}

/// An error of a running template, except a call of `raise_exception` or an exceeded step limit.
///
/// If the conversation has tool calls, [`Template::render`] tries again with their arguments as strings.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct TemplateFailed(String);

/// Creates an environment with the compiled template. Limits the template's steps and recursion depth.
fn environment(source: &str) -> std::result::Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(MAX_DEPTH);
    functions::install(&mut environment);
    environment.add_template_owned(NAME, functions::replace_generation_tags(source))?;
    Ok(environment)
}

/// Returns a template error as a message with the file name, the line (if known) and all causes.
fn explain(file: &str, error: &Error) -> String {
    let line = error.line().map(|line| format!(", line {line}")).unwrap_or_default();
    let mut text = format!("cannot render the conversation: the chat template ({file}{line}) failed: {}", error.kind());
    if let Some(detail) = error.detail() {
        text.push_str(&format!(": {detail}"));
    }
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

/// An output buffer that holds at most `MAX_OUTPUT_BYTES`.
struct LimitedOutput(Vec<u8>);

impl io::Write for LimitedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT_BYTES {
            return Err(io::Error::other(format!("the template wrote more than {MAX_OUTPUT_BYTES} bytes of output")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads a JSON object from a file. Returns an empty object if the file does not exist.
fn read_json(path: &Path) -> Result<Json> {
    let Some(value) = files::read_json_if_present::<Json>(path, files::MAX_TOKENIZER_CONFIG_BYTES)? else {
        return Ok(json!({}));
    };
    if !value.is_object() {
        bail!("cannot read {}: it is not a JSON object", path.display());
    }
    Ok(value)
}

/// Returns the default template in `value`, and the separate template for conversations with tools, if any.
/// Returns `None` if the default template is missing or empty.
///
/// `value` is a string, or a list of `{name, template}` objects.
/// From a list, the default is the template named `default`, or else the first template.
/// The template named `tool_use` is for conversations with tools.
fn named_templates(value: &Json) -> Option<(&str, Option<&str>)> {
    let Json::Array(list) = value else { return Some((source_text(value)?, None)) };
    let named = |name: &str| list.iter().find(|entry| entry["name"] == name).map(|entry| &entry["template"]);
    let default = named("default").or_else(|| Some(&list.first()?["template"])).and_then(source_text)?;
    Some((default, named("tool_use").and_then(source_text)))
}

fn source_text(value: &Json) -> Option<&str> {
    value.as_str().filter(|text| !text.is_empty())
}

/// Returns a tokenizer's special tokens.
///
/// `config` is tokenizer_config.json. `map` is special_tokens_map.json, which applies to names that `config` lacks.
/// In both files, each token is a string, or an object with the string in `content`.
fn special_tokens(config: &Json, map: &Json) -> Vec<SpecialToken> {
    let names = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
    let token = |name: &str| {
        let value = config.get(name).or_else(|| map.get(name))?;
        let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
        Some(SpecialToken { name: name.to_string(), text: text.to_string() })
    };
    names.into_iter().filter_map(token).collect()
}

/// Returns all strings in a JSON value, including keys.
fn strings_of(value: &Json) -> Vec<&str> {
    match value {
        Json::String(text) => vec![text],
        Json::Array(items) => items.iter().flat_map(strings_of).collect(),
        Json::Object(map) => {
            map.iter().flat_map(|(key, value)| std::iter::once(key.as_str()).chain(strings_of(value))).collect()
        }
        _ => Vec::new(),
    }
}
