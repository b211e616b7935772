//! Reads the body of a chat completion request.

use serde_json::{Map, Value, json};

use super::{messages, tools};
use crate::chat::{ChatFormat, RESERVED_VARIABLES, ReasoningEffort, RenderOptions, today};
use crate::engine::{EngineHandle, MAX_LOGPROBS, Request};
use crate::server::generation::constraint;
use crate::server::generation::generate_options::{self, StreamOptions};
use crate::server::http::body::{Fields, IgnoredField};
use crate::server::http::error::ApiError;
use crate::server::state::ServerState;

/// The engine request of a chat completion, and how to format the response.
pub struct ChatRequest {
    pub request: Request,
    pub answers_per_prompt: usize,
    pub stream: StreamOptions,
    pub shows_reasoning: bool,
    pub can_call_in_parallel: bool,
    /// Whether the client named the tool that the model must call.
    pub must_call_named: bool,
    /// The request fields that have no effect, or not their full effect.
    pub ignored: Vec<IgnoredField>,
}

impl ChatRequest {
    /// Reads a request. Fails if a field has an invalid or unsupported value.
    pub fn read(mut fields: Fields, server: &ServerState, engine: &EngineHandle) -> Result<Self, ApiError> {
        generate_options::check_model(&mut fields, server)?;
        let messages = messages::read(&mut fields)?;
        let tools = tools::read(&mut fields, engine)?;
        let format = constraint::read_response_format(&mut fields)?;
        fields.refuse("prediction", &[], "")?;
        fields.refuse("audio", &[], "")?;
        fields.refuse("modalities", &[json!(["text"])], "only text is supported")?;
        fields.refuse("web_search_options", &[], "")?;
        fields.refuse("echo", &[json!(false)], "")?;
        fields.refuse("add_generation_prompt", &[json!(true)], "")?;
        let template_variables = read_template_variables(&mut fields, engine)?;
        let (reasoning_effort, shows_reasoning) = read_reasoning(&mut fields)?;
        let mut options = generate_options::read(&mut fields, server, engine)?;
        let limit = i64::from(u32::MAX);
        let max_tokens = fields.take_integer("max_tokens", 1..=limit)?;
        let max_completion_tokens = fields.take_integer("max_completion_tokens", 1..=limit)?;
        options.max_tokens = max_completion_tokens.or(max_tokens).map(|tokens| tokens as usize);
        options.logprobs = read_logprobs(&mut fields)?;
        let answers_per_prompt = generate_options::read_answers_per_prompt(&mut fields)?;
        let stream = generate_options::read_stream(&mut fields)?;
        let can_call_in_parallel = fields.take_bool("parallel_tool_calls")?.unwrap_or(true);
        let structured = options.constraint.take().and_then(|constraint| constraint.answer);
        if format.is_some() && structured.is_some() {
            return Err(fields.invalid("structured_outputs", "cannot be combined with 'response_format'"));
        }
        options.constraint = tools.constraint(format.or(structured), can_call_in_parallel);
        let must_call_named = tools.is_named();
        let date = today();
        let render = RenderOptions {
            tools: tools.shown,
            reasoning_effort,
            date,
            add_generation_prompt: true,
            template_variables,
        };
        let request = Request::chat(messages).render(render).options(options);
        let ignored = fields.finish()?;
        Ok(Self {
            request,
            answers_per_prompt,
            stream,
            shows_reasoning,
            can_call_in_parallel,
            must_call_named,
            ignored,
        })
    }
}

/// Reads `chat_template_kwargs`: additional variables for the chat template, such as `enable_thinking`.
/// Fails if the field contains one of the `RESERVED_VARIABLES`.
///
/// Harmony has no template variables. With harmony, moves the entry `reasoning_effort` to the request field
/// of this name, unless the request has that field, and reports all other entries as ignored.
pub fn read_template_variables(fields: &mut Fields, engine: &EngineHandle) -> Result<Map<String, Value>, ApiError> {
    const FIELD: &str = "chat_template_kwargs";
    let mut variables = match fields.take(FIELD) {
        None => return Ok(Map::new()),
        Some(Value::Object(variables)) => variables,
        Some(_) => return Err(fields.invalid(FIELD, "expected an object")),
    };
    if let Some(name) = variables.keys().find(|name| RESERVED_VARIABLES.contains(&name.as_str())) {
        return Err(fields.invalid(FIELD, format!("'{name}' cannot be set: the server sets it")));
    }
    if !matches!(engine.language().chat, Some(ChatFormat::Harmony(_))) {
        return Ok(variables);
    }
    if let Some(effort) = variables.remove("reasoning_effort").filter(|_| !fields.has("reasoning_effort")) {
        fields.put("reasoning_effort", effort);
    }
    variables.keys().for_each(|name| fields.ignore(format!("{FIELD}.{name}")));
    Ok(Map::new())
}

/// Reads `logprobs` and `top_logprobs`. Returns the number of alternatives to list for each token,
/// or `None` if the request asks for no log probabilities. Fails if it asks for alternatives without `logprobs`.
fn read_logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let has_logprobs = fields.take_bool("logprobs")?.unwrap_or(false);
    match fields.take_integer("top_logprobs", 0..=MAX_LOGPROBS as i64)? {
        Some(count) if has_logprobs => Ok(Some(count as usize)),
        None | Some(0) => Ok(has_logprobs.then_some(0)),
        Some(_) => Err(fields.invalid("top_logprobs", "expected 'logprobs' to be true")),
    }
}

/// Reads the reasoning effort, and whether the client wants the reasoning in the response.
pub fn read_reasoning(fields: &mut Fields) -> Result<(ReasoningEffort, bool), ApiError> {
    let mut shows_reasoning = fields.take_bool("include_reasoning")?.unwrap_or(true);
    let mut nested = fields.take_object("reasoning")?;
    if let Some(nested) = &mut nested {
        shows_reasoning &= !nested.take_bool("exclude")?.unwrap_or(false);
    }
    Ok((read_effort_from(fields, nested)?, shows_reasoning))
}

/// Reads only the reasoning effort, for routes without a response that could contain reasoning.
pub fn read_effort(fields: &mut Fields) -> Result<ReasoningEffort, ApiError> {
    let nested = fields.take_object("reasoning")?;
    read_effort_from(fields, nested)
}

/// Reads the reasoning effort from `fields` or from `nested`, the object `reasoning`.
/// Reports all other fields of `nested` as ignored.
fn read_effort_from(fields: &mut Fields, nested: Option<Fields>) -> Result<ReasoningEffort, ApiError> {
    let mut effort = fields.take_string("reasoning_effort")?.map(|effort| ("reasoning_effort".to_string(), effort));
    if let Some(mut nested) = nested {
        let nested_effort = nested.take_string("effort")?;
        effort = nested_effort.map(|effort| ("reasoning.effort".to_string(), effort)).or(effort);
        fields.ignore_rest(nested);
    }
    let Some((field, effort)) = effort else { return Ok(ReasoningEffort::default()) };
    let served = match effort.as_str() {
        "low" | "minimal" => ReasoningEffort::Low,
        "medium" => ReasoningEffort::Medium,
        "high" | "xhigh" | "max" => ReasoningEffort::High,
        "none" => return Err(ApiError::invalid(field, "'none' is not supported; use low")),
        _ => return Err(ApiError::invalid(field, "expected minimal, low, medium, high, xhigh or max")),
    };
    if served.to_string() != effort {
        fields.ignore_with_note(&field, format!("{effort} is treated as {served}"));
    }
    Ok(served)
}
