//! Reads the body of a request to `/v1/responses` or `/v1/responses/input_tokens`.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::input::{self, Input};
use super::item::Item;
use super::messages::messages;
use super::object::{ReasoningSettings, Settings};
use super::output::ResponseParts;
use super::store::TenantStore;
use super::tools::{self, Tools};
use crate::chat::{Message, RenderOptions, today};
use crate::engine::{EngineHandle, GenerateOptions, Grammar, MAX_LOGPROBS};
use crate::server::generation::constraint::read_text_format;
use crate::server::generation::generate_options;
use crate::server::http::body::{Fields, IgnoredField, RefusedField};
use crate::server::http::error::ApiError;
use crate::server::openai::chat::read_reasoning;
use crate::server::state::ServerState;

/// The maximum number of entries in `metadata`, as in OpenAI's API.
const MAX_METADATA: usize = 16;

/// The unsupported fields of a response request.
const REFUSED: &[RefusedField] = &[
    RefusedField { name: "background", neutral: &["false"], hint: "send 'stream' instead" },
    RefusedField { name: "context_management", neutral: &["[]"], hint: "" },
    RefusedField { name: "conversation", neutral: &[], hint: "use 'previous_response_id'" },
    RefusedField { name: "functions", neutral: &["[]"], hint: "use 'tools'" },
    RefusedField { name: "max_completion_tokens", neutral: &[], hint: "use 'max_output_tokens'" },
    RefusedField { name: "max_tokens", neutral: &[], hint: "use 'max_output_tokens'" },
    RefusedField { name: "messages", neutral: &[], hint: "use 'input'" },
    RefusedField { name: "n", neutral: &["1"], hint: "" },
    RefusedField { name: "prompt", neutral: &[], hint: "use 'instructions' and 'input'" },
    RefusedField { name: "response_format", neutral: &[r#"{"type":"text"}"#], hint: "use 'text.format'" },
    RefusedField { name: "truncation", neutral: &[r#""disabled""#], hint: "inferno never shortens a conversation" },
];

/// A parsed request: the prompt and the options for the engine, and how to build the response.
pub struct ResponseRequest {
    pub messages: Vec<Message>,
    pub render: RenderOptions,
    pub options: GenerateOptions,
    pub settings: Settings,
    /// The items of the field `input`, without the conversation of the previous response.
    pub input: Vec<Arc<Item>>,
    pub parts: ResponseParts,
    pub is_stream: bool,
    /// The request fields that have no effect, or not their full effect.
    pub ignored: Vec<IgnoredField>,
}

impl ResponseRequest {
    /// Reads a request. Fails if a field has an invalid or unsupported value.
    pub fn read(
        mut fields: Fields,
        server: &ServerState,
        engine: &EngineHandle,
        store: &TenantStore,
    ) -> Result<Self, ApiError> {
        generate_options::check_model(&mut fields, server)?;
        fields.refuse_all(REFUSED)?;
        let (Input { earlier, items }, previous_response_id) = input::read(&mut fields, store)?;
        let instructions = fields.take_string("instructions")?;
        let Tools { functions, served, choice } = tools::read(&mut fields, engine)?;
        let (text, format) = read_text(&mut fields)?;
        let mut parts = read_include(&mut fields)?;
        let (effort, shows_reasoning) = read_reasoning(&mut fields)?;
        parts.shows_reasoning = shows_reasoning;
        let mut options = generate_options::read(&mut fields, server, engine)?;
        let max_tokens = fields.take_integer("max_output_tokens", 1..=i64::from(u32::MAX))?;
        options.max_tokens = max_tokens.map(|tokens| tokens as usize);
        let top_logprobs = fields.take_integer("top_logprobs", 0..=MAX_LOGPROBS as i64)?.unwrap_or(0) as usize;
        parts.has_logprobs |= top_logprobs > 0;
        options.logprobs = parts.has_logprobs.then_some(top_logprobs);
        let stream = generate_options::read_stream(&mut fields)?;
        let parallel_tool_calls = fields.take_bool("parallel_tool_calls")?.unwrap_or(true);
        let structured = options.constraint.take().and_then(|constraint| constraint.answer);
        if format.is_some() && structured.is_some() {
            return Err(fields.invalid("structured_outputs", "cannot be combined with 'text.format'"));
        }
        options.constraint = functions.constraint(format.or(structured), parallel_tool_calls);
        let date = today();
        let settings = Settings {
            model: server.options.model.clone(),
            previous_response_id,
            tools: served,
            tool_choice: choice,
            parallel_tool_calls,
            max_tool_calls: read_max_tool_calls(&mut fields)?,
            max_output_tokens: options.max_tokens,
            truncation: "disabled",
            text,
            reasoning: ReasoningSettings { effort: effort.to_string(), summary: None },
            temperature: options.sampling.temperature,
            top_p: options.sampling.top_p,
            presence_penalty: options.sampling.presence_penalty,
            frequency_penalty: options.sampling.frequency_penalty,
            top_logprobs,
            store: fields.take_bool("store")?.unwrap_or(true),
            background: false,
            metadata: read_metadata(&mut fields)?,
            service_tier: "default",
            user: repeated(&mut fields, "user")?,
            safety_identifier: repeated(&mut fields, "safety_identifier")?,
            prompt_cache_key: repeated(&mut fields, "prompt_cache_key")?,
            instructions,
        };
        let conversation = earlier.iter().chain(&items).map(Arc::as_ref);
        Ok(Self {
            messages: messages(settings.instructions.as_deref(), conversation),
            render: RenderOptions {
                tools: functions.shown,
                reasoning_effort: effort,
                date,
                add_generation_prompt: true,
                template_variables: serde_json::Map::new(),
            },
            options,
            settings,
            input: items,
            parts,
            is_stream: stream.is_stream,
            ignored: fields.finish()?,
        })
    }
}

/// Reads the field `text`. Returns the value that the response repeats, and the grammar of the answer, if any.
fn read_text(fields: &mut Fields) -> Result<(Value, Option<Grammar>), ApiError> {
    let plain = json!({ "type": "text" });
    let Some(mut text) = fields.take_object("text")? else { return Ok((json!({ "format": plain }), None)) };
    let format = text.take("format").unwrap_or(plain);
    let grammar = read_text_format(&mut text, format.clone())?;
    fields.ignore_rest(text);
    Ok((json!({ "format": format }), grammar))
}

/// Reads the field `include`, which lists the optional parts that the response must contain.
fn read_include(fields: &mut Fields) -> Result<ResponseParts, ApiError> {
    let mut parts = ResponseParts::default();
    for value in fields.take_array("include")?.unwrap_or_default() {
        match value.as_str() {
            Some("message.output_text.logprobs") => parts.has_logprobs = true,
            Some("reasoning.encrypted_content") => parts.has_encoded_reasoning = true,
            // All other `include` values are unknown, or belong to features that inferno does not support.
            Some(other) => fields.ignore_with_note("include", other),
            None => return Err(fields.invalid("include", "expected an array of strings")),
        }
    }
    Ok(parts)
}

/// Reads `max_tool_calls`. The field has no effect, because it limits only calls of OpenAI's built-in tools.
fn read_max_tool_calls(fields: &mut Fields) -> Result<Option<i64>, ApiError> {
    let limit = fields.take_integer("max_tool_calls", 1..=i64::from(u32::MAX))?;
    if limit.is_some() {
        fields.ignore("max_tool_calls".to_string());
    }
    Ok(limit)
}

/// Reads a request field that has no effect except that the response repeats it.
fn repeated(fields: &mut Fields, name: &str) -> Result<Option<String>, ApiError> {
    let value = fields.take_string(name)?;
    if value.is_some() {
        fields.ignore(name.to_string());
    }
    Ok(value)
}

/// Reads `metadata`: up to [`MAX_METADATA`] strings, which the response repeats.
fn read_metadata(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    match fields.take("metadata") {
        None => Ok(Map::new()),
        Some(Value::Object(map)) if map.len() <= MAX_METADATA && map.values().all(Value::is_string) => Ok(map),
        Some(_) => Err(fields.invalid("metadata", format!("expected an object with at most {MAX_METADATA} strings"))),
    }
}
