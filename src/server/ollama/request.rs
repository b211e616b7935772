//! Reads the body of a request to `/api/chat` or `/api/generate`.

use serde_json::{Value, json};

use super::conversation;
use crate::chat::{Message, ReasoningEffort, RenderOptions, today};
use crate::engine::{EngineHandle, GenerateOptions, Grammar, GrammarKind, Request};
use crate::server::generation::constraint::named;
use crate::server::generation::generate_options;
use crate::server::http::body::{Fields, IgnoredField, RefusedField};
use crate::server::http::error::ApiError;
use crate::server::openai::chat::{Tools, read_tools};
use crate::server::state::ServerState;

/// Unsupported options that would change the output.
const REFUSED_OPTIONS: &[RefusedField] = &[
    RefusedField { name: "mirostat", neutral: &["0"], hint: "" },
    RefusedField { name: "typical_p", neutral: &["1", "1.0"], hint: "" },
    RefusedField { name: "tfs_z", neutral: &["1", "1.0"], hint: "" },
];

/// A request to `/api/chat` or `/api/generate`.
pub struct OllamaRequest {
    /// The engine request. `None` if the HTTP request has no prompt: in ollama, such a request only loads the model.
    pub request: Option<Request>,
    pub has_logprobs: bool,
    pub shows_thinking: bool,
    pub is_stream: bool,
    /// The request fields that have no effect, or not their full effect.
    pub ignored: Vec<IgnoredField>,
}

/// Fails unless the field `model`, or the field `name` if `model` is absent, names the served model.
/// As in ollama, the client may add the tag `:latest` to the name.
pub fn check_model(fields: &mut Fields, server: &ServerState) -> Result<(), ApiError> {
    let (model, name) = (fields.take_string("model")?, fields.take_string("name")?);
    let served = &server.options.model;
    let model = model.or(name).ok_or_else(|| fields.invalid("model", "expected the name of a model"))?;
    if model == *served || model.strip_suffix(":latest") == Some(served) {
        Ok(())
    } else {
        Err(ApiError::unknown_model(format!("model '{model}' not found: this server serves '{served}'")))
    }
}

impl OllamaRequest {
    /// Reads a request to `/api/chat`.
    pub fn read_chat(mut fields: Fields, server: &ServerState, engine: &EngineHandle) -> Result<Self, ApiError> {
        check_model(&mut fields, server)?;
        let messages = conversation::read(&mut fields)?;
        let tools = read_tools(&mut fields, engine)?;
        SharedFields::read(&mut fields, server, engine)?.finish(fields, messages.map(Prompt::Chat), tools)
    }

    /// Reads a request to `/api/generate`.
    pub fn read_generate(mut fields: Fields, server: &ServerState, engine: &EngineHandle) -> Result<Self, ApiError> {
        check_model(&mut fields, server)?;
        fields.refuse("images", &[json!([])], "only text is supported")?;
        fields.refuse("suffix", &[json!("")], "")?;
        fields.refuse("template", &[json!("")], "the chat format of the model cannot be replaced")?;
        fields.refuse("context", &[json!([])], "use /api/chat")?;
        let prompt = fields.take_string("prompt")?;
        let system = fields.take_string("system")?;
        let is_raw = fields.take_bool("raw")?.unwrap_or(false);
        let prompt = prompt.filter(|prompt| !prompt.is_empty()).map(|prompt| {
            if is_raw {
                Prompt::Text(prompt)
            } else {
                let system = system.filter(|text| !text.is_empty()).map(Message::system);
                Prompt::Chat(system.into_iter().chain([Message::user(prompt)]).collect())
            }
        });
        SharedFields::read(&mut fields, server, engine)?.finish(fields, prompt, Tools::default())
    }
}

enum Prompt {
    Chat(Vec<Message>),
    Text(String),
}

/// The request fields that `/api/chat` and `/api/generate` share.
struct SharedFields {
    options: GenerateOptions,
    format: Option<Grammar>,
    effort: ReasoningEffort,
    shows_thinking: bool,
    is_stream: bool,
}

impl SharedFields {
    fn read(fields: &mut Fields, server: &ServerState, engine: &EngineHandle) -> Result<Self, ApiError> {
        let (effort, shows_thinking) = read_think(fields)?;
        let format = read_format(fields)?;
        let is_stream = fields.take_bool("stream")?.unwrap_or(true);
        let mut nested = match fields.take_object("options")? {
            Some(options) => options,
            None => Fields::nested("options", json!({}))?,
        };
        nested.refuse_all(REFUSED_OPTIONS)?;
        // For `num_predict`, the values 0, -1 and -2 mean no limit.
        let limit = nested.take_integer("num_predict", -2..=i64::from(u32::MAX))?;
        if let Some(penalty) = nested.take("repeat_penalty") {
            nested.put("repetition_penalty", penalty);
        }
        // In ollama, the seed -1 asks for a random seed, like a missing seed.
        if let Some(seed) = nested.take("seed").filter(|seed| seed.as_i64() != Some(-1)) {
            nested.put("seed", seed);
        }
        let mut options = generate_options::read(&mut nested, server, engine)?;
        options.max_tokens = limit.and_then(|limit| usize::try_from(limit).ok()).filter(|&limit| limit > 0);
        fields.ignore_rest(nested);
        let has_logprobs = fields.take_bool("logprobs")?.unwrap_or(false);
        let top_logprobs = fields.take_integer("top_logprobs", 0..=20)?.unwrap_or(0) as usize;
        options.logprobs = (has_logprobs || top_logprobs > 0).then_some(top_logprobs);
        Ok(Self { options, format, effort, shows_thinking, is_stream })
    }

    fn finish(mut self, fields: Fields, prompt: Option<Prompt>, tools: Tools) -> Result<OllamaRequest, ApiError> {
        let structured = self.options.constraint.take().and_then(|constraint| constraint.answer);
        if self.format.is_some() && structured.is_some() {
            return Err(fields.invalid("options.structured_outputs", "cannot be combined with 'format'"));
        }
        // A request to ollama's API cannot forbid parallel tool calls.
        let can_call_in_parallel = true;
        self.options.constraint = tools.constraint(self.format.or(structured), can_call_in_parallel);
        let has_logprobs = self.options.logprobs.is_some();
        // In some chat templates, such as Qwen3's, setting `enable_thinking` to false turns thinking off.
        let without_thinking = (!self.shows_thinking).then(|| ("enable_thinking".to_string(), json!(false)));
        let template_variables = without_thinking.into_iter().collect();
        let render = RenderOptions {
            tools: tools.shown,
            reasoning_effort: self.effort,
            date: today(),
            add_generation_prompt: true,
            template_variables,
        };
        let request = prompt.map(|prompt| match prompt {
            Prompt::Chat(messages) => Request::chat(messages).render(render),
            Prompt::Text(text) => Request::text(text),
        });
        Ok(OllamaRequest {
            request: request.map(|request| request.options(self.options)),
            has_logprobs,
            shows_thinking: self.shows_thinking,
            is_stream: self.is_stream,
            ignored: fields.finish()?,
        })
    }
}

/// Reads the field `think`. Returns the reasoning effort, and whether the response contains the reasoning.
fn read_think(fields: &mut Fields) -> Result<(ReasoningEffort, bool), ApiError> {
    let think = fields.take("think");
    let effort = ReasoningEffort::default();
    match think.as_ref().map(|think| (think.as_bool(), think.as_str())) {
        None | Some((Some(true), _)) => Ok((effort, true)),
        // Models whose template reads `enable_thinking` do not reason then (see `finish`). Others, such as gpt-oss,
        // cannot stop: ask for the lowest effort, and leave the reasoning out of the response.
        Some((Some(false), _)) => {
            fields.ignore_with_note("think", "false hides the reasoning; some models still reason");
            Ok((ReasoningEffort::Low, false))
        }
        Some((_, Some("max"))) => {
            fields.ignore_with_note("think", "max is treated as high");
            Ok((ReasoningEffort::High, true))
        }
        Some((_, text)) => match text.unwrap_or_default().parse() {
            Ok(effort) => Ok((effort, true)),
            Err(_) => Err(fields.invalid("think", "expected true, false, low, medium, high or max")),
        },
    }
}

/// Reads the field `format`. Returns `None` if the field is absent or empty.
fn read_format(fields: &mut Fields) -> Result<Option<Grammar>, ApiError> {
    match fields.take("format") {
        None => Ok(None),
        Some(Value::String(format)) if format.is_empty() => Ok(None),
        Some(Value::String(format)) if format == "json" => Ok(Some(named("format", GrammarKind::JsonObject))),
        Some(schema @ Value::Object(_)) => Ok(Some(named("format", GrammarKind::JsonSchema(schema)))),
        Some(_) => Err(fields.invalid("format", "expected 'json' or a JSON schema")),
    }
}
