//! Reads the body of a request to `/v1/messages` or `/v1/messages/count_tokens`.

use serde_json::{Value, json};

use super::conversation;
use crate::chat::{Message, ReasoningEffort, RenderOptions, today};
use crate::engine::{EngineHandle, GenerateOptions, Grammar};
use crate::server::generation::constraint::read_output_format;
use crate::server::generation::generate_options::{self, MAX_STOP_BYTES, MAX_STOPS};
use crate::server::http::body::{Fields, IgnoredField, RefusedField};
use crate::server::http::error::ApiError;
use crate::server::openai::chat::{MAX_TOOLS, ToolChoice, Tools, check_function};
use crate::server::state::ServerState;

/// The largest thinking budget that counts as low reasoning effort, in tokens.
/// Anthropic's API does not define which budget equals which effort, so inferno chose this limit and [`MEDIUM_BUDGET`].
const LOW_BUDGET: i64 = 4096;
/// The largest thinking budget that counts as medium reasoning effort, in tokens.
const MEDIUM_BUDGET: i64 = 16384;

/// The unsupported fields of a request to the Messages API.
const REFUSED: &[RefusedField] = &[
    RefusedField { name: "container", neutral: &[], hint: "" },
    RefusedField { name: "context_management", neutral: &[], hint: "inferno never shortens a conversation" },
    RefusedField { name: "functions", neutral: &["[]"], hint: "use 'tools'" },
    RefusedField { name: "max_completion_tokens", neutral: &[], hint: "use 'max_tokens'" },
    RefusedField { name: "mcp_servers", neutral: &["[]"], hint: "" },
    RefusedField { name: "n", neutral: &["1"], hint: "" },
    RefusedField { name: "output_format", neutral: &[], hint: "use 'output_config.format'" },
    RefusedField { name: "reasoning_effort", neutral: &[], hint: "use 'output_config.effort'" },
    RefusedField { name: "response_format", neutral: &[r#"{"type":"text"}"#], hint: "use 'output_config.format'" },
    RefusedField { name: "stop", neutral: &[], hint: "use 'stop_sequences'" },
];

/// A request to `/v1/messages` or `/v1/messages/count_tokens`, without `max_tokens`, which only `/v1/messages` reads.
pub struct MessagesRequest {
    pub messages: Vec<Message>,
    pub render: RenderOptions,
    /// The options for generating the answer. `max_tokens` is not set yet.
    pub options: GenerateOptions,
    pub shows_thinking: bool,
    pub can_call_in_parallel: bool,
    pub is_stream: bool,
    /// The request fields that have no effect, or only part of their effect.
    pub ignored: Vec<IgnoredField>,
}

/// Reads the field `max_tokens`, which Anthropic's API requires.
pub fn read_max_tokens(fields: &mut Fields) -> Result<usize, ApiError> {
    let tokens = fields.take_integer("max_tokens", 1..=i64::from(u32::MAX))?;
    tokens.map(|tokens| tokens as usize).ok_or_else(|| fields.invalid("max_tokens", "the field is required"))
}

impl MessagesRequest {
    /// Reads a request. Fails if a required field is missing, or if a field has an invalid or unsupported value.
    pub fn read(mut fields: Fields, server: &ServerState, engine: &EngineHandle) -> Result<Self, ApiError> {
        generate_options::check_model(&mut fields, server)?;
        fields.refuse_all(REFUSED)?;
        let messages = conversation::read(&mut fields)?;
        let (tools, can_call_in_parallel) = read_tools(&mut fields, engine)?;
        let (thinking, shows_thinking) = read_thinking(&mut fields)?;
        let (effort, format) = read_output_config(&mut fields)?;
        let stop = read_stop(&mut fields)?;
        let is_stream = fields.take_bool("stream")?.unwrap_or(false);
        let mut options = generate_options::read(&mut fields, server, engine)?;
        options.stop = stop;
        let structured = options.constraint.take().and_then(|constraint| constraint.answer);
        if format.is_some() && structured.is_some() {
            return Err(fields.invalid("structured_outputs", "cannot be combined with 'output_config.format'"));
        }
        options.constraint = tools.constraint(format.or(structured), can_call_in_parallel);
        let render = RenderOptions {
            tools: tools.shown,
            reasoning_effort: effort.or(thinking).unwrap_or_default(),
            date: today(),
            add_generation_prompt: true,
            template_variables: serde_json::Map::new(),
        };
        let ignored = fields.finish()?;
        Ok(Self { messages, render, options, shows_thinking, can_call_in_parallel, is_stream, ignored })
    }
}

/// Reads the fields `tools` and `tool_choice`. Returns the tools, and whether the answer may have several tool calls.
///
/// Skips tools with a type other than `custom`, because only Anthropic's service runs them or knows their schema,
/// and reports them as ignored.
fn read_tools(fields: &mut Fields, engine: &EngineHandle) -> Result<(Tools, bool), ApiError> {
    let items = fields.take_array("tools")?.unwrap_or_default();
    if items.len() > MAX_TOOLS {
        return Err(fields.invalid("tools", format!("expected at most {MAX_TOOLS} tools")));
    }
    let mut functions = Vec::new();
    for (index, item) in items.into_iter().enumerate() {
        let mut tool = Fields::nested(&format!("tools[{index}]"), item.clone())?;
        if let Some(kind) = tool.take_string("type")?.filter(|kind| kind != "custom") {
            fields.ignore_with_note("tools[]", kind);
            continue;
        }
        let schema = tool.take("input_schema").filter(Value::is_object);
        let schema = schema.ok_or_else(|| tool.invalid("input_schema", "expected a JSON schema that is an object"))?;
        check_function(&mut tool)?;
        fields.ignore_rest(tool);
        let mut function = json!({ "name": item["name"] });
        for key in ["description", "strict"] {
            if !item[key].is_null() {
                function[key] = item[key].clone();
            }
        }
        function["parameters"] = schema;
        functions.push(json!({ "type": "function", "function": function }));
    }
    let (mut choice, mut can_call_in_parallel) = (ToolChoice::Auto, true);
    if let Some(mut nested) = fields.take_object("tool_choice")? {
        can_call_in_parallel = !nested.take_bool("disable_parallel_tool_use")?.unwrap_or(false);
        choice = match (nested.take_string("type")?.as_deref(), nested.take_string("name")?) {
            (Some("auto"), None) => ToolChoice::Auto,
            (Some("any"), None) => ToolChoice::Required,
            (Some("none"), None) => ToolChoice::None,
            (Some("tool"), Some(name)) => ToolChoice::Named(name),
            _ => return Err(nested.invalid("type", "expected auto, any or none without a name, or tool with a name")),
        };
        fields.ignore_rest(nested);
    }
    Ok((Tools::new(fields, engine, functions, choice)?, can_call_in_parallel))
}

/// Reads the field `thinking`. Returns the reasoning effort, and whether the response contains the reasoning.
/// The effort is `None` if the field is absent or its type is `adaptive`.
fn read_thinking(fields: &mut Fields) -> Result<(Option<ReasoningEffort>, bool), ApiError> {
    let Some(mut thinking) = fields.take_object("thinking")? else { return Ok((None, false)) };
    let kind = thinking.take_string("type")?;
    let budget = thinking.take_integer("budget_tokens", 1..=i64::from(u32::MAX))?;
    let display = thinking.take_string("display")?;
    let shows_thinking = match display.as_deref() {
        None | Some("summarized") => true,
        Some("omitted") => false,
        Some(_) => return Err(thinking.invalid("display", "expected summarized or omitted")),
    };
    fields.ignore_rest(thinking);
    let effort = budget.map(|budget| {
        if budget <= LOW_BUDGET {
            ReasoningEffort::Low
        } else if budget <= MEDIUM_BUDGET {
            ReasoningEffort::Medium
        } else {
            ReasoningEffort::High
        }
    });
    match (kind.as_deref(), budget, effort) {
        (Some("enabled"), Some(budget), Some(effort)) => {
            fields.ignore_with_note("thinking.budget_tokens", format!("{budget} is treated as {effort} effort"));
            Ok((Some(effort), shows_thinking))
        }
        (Some("enabled"), ..) => Err(fields.invalid("thinking.budget_tokens", "type 'enabled' requires this field")),
        (Some("adaptive"), ..) => Ok((None, shows_thinking)),
        // Not every model can answer without reasoning. Request low effort, unless `output_config.effort` is set,
        // and omit the reasoning from the response.
        (Some("disabled"), ..) => {
            fields.ignore_with_note("thinking", "disabled hides the reasoning but does not prevent it");
            Ok((Some(ReasoningEffort::Low), false))
        }
        _ => Err(fields.invalid("thinking.type", "expected enabled, adaptive or disabled")),
    }
}

/// Reads the field `output_config`. Returns the reasoning effort and the grammar of the answer, if set.
fn read_output_config(fields: &mut Fields) -> Result<(Option<ReasoningEffort>, Option<Grammar>), ApiError> {
    let Some(mut config) = fields.take_object("output_config")? else { return Ok((None, None)) };
    let effort = match config.take_string("effort")?.as_deref() {
        None => None,
        Some("low") => Some(ReasoningEffort::Low),
        Some("medium") => Some(ReasoningEffort::Medium),
        Some("high") => Some(ReasoningEffort::High),
        Some(effort @ ("xhigh" | "max")) => {
            fields.ignore_with_note("output_config.effort", format!("{effort} is treated as high"));
            Some(ReasoningEffort::High)
        }
        Some(_) => return Err(config.invalid("effort", "expected low, medium, high, xhigh or max")),
    };
    let format = read_output_format(&mut config)?;
    fields.ignore_rest(config);
    Ok((effort, format))
}

/// Reads `stop_sequences`: at most [`MAX_STOPS`] strings of 1 to [`MAX_STOP_BYTES`] bytes.
fn read_stop(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let items = fields.take_array("stop_sequences")?.unwrap_or_default();
    let stops: Option<Vec<String>> = items.iter().map(|item| item.as_str().map(str::to_string)).collect();
    let is_valid = |stop: &String| (1..=MAX_STOP_BYTES).contains(&stop.len());
    let stops = stops.filter(|stops| stops.len() <= MAX_STOPS && stops.iter().all(is_valid));
    stops.ok_or_else(|| {
        fields.invalid("stop_sequences", format!("expected at most {MAX_STOPS} strings of 1 to {MAX_STOP_BYTES} bytes"))
    })
}
