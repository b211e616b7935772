//! Reads the tools of a request, and which of the tools the model may or must call.

use serde_json::{Value, json};

use crate::chat::ChatFormat;
use crate::engine::{Constraint, EngineHandle, Grammar, GrammarKind, ToolGrammar};
use crate::server::generation::constraint::named;
use crate::server::http::body::{Fields, IgnoredField};
use crate::server::http::error::ApiError;

/// The maximum number of tools in a request.
pub const MAX_TOOLS: usize = 512;

/// The maximum length of a function name, in bytes.
const MAX_NAME: usize = 128;

/// The tools of a request, and which of these tools the model may or must call.
#[derive(Debug, Default)]
pub struct Tools {
    /// The tools for the prompt, or no tools if the model must not call any.
    /// The prompt contains the tools only if the chat format supports tools.
    pub shown: Vec<Value>,
    choice: ToolChoice,
}

/// Whether the model may or must call tools, and which ones.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    #[default]
    Auto,
    None,
    Required,
    Named(String),
}

impl Tools {
    /// Creates the tools of a request from functions in the format of chat completions.
    /// Fails if `choice` requires a tool but there is none, or if it names a function that is not in `functions`.
    ///
    /// Reports `tools` as ignored if the prompt cannot contain tools, unless the model must call a tool.
    pub fn new(
        fields: &mut Fields,
        engine: &EngineHandle,
        functions: Vec<Value>,
        choice: ToolChoice,
    ) -> Result<Self, ApiError> {
        match &choice {
            ToolChoice::Required if functions.is_empty() => {
                return Err(fields.invalid("tool_choice", "a tool call is required, but there is no tool to call"));
            }
            ToolChoice::Named(name) if !functions.iter().any(|tool| tool["function"]["name"] == **name) => {
                return Err(fields.invalid("tool_choice", format!("no tool is named '{name}'")));
            }
            _ => {}
        }
        let shown = if choice == ToolChoice::None { Vec::new() } else { functions };
        let tools = Self { shown, choice };
        let is_shown = engine.language().chat.as_ref().is_none_or(ChatFormat::reads_tools);
        // If a call is required, the constraint uses the tools, so they have an effect even if the prompt lacks them.
        if !tools.shown.is_empty() && !is_shown && !tools.is_required() {
            fields.ignore("tools".to_string());
        }
        Ok(tools)
    }

    /// Returns whether the model must call a tool.
    fn is_required(&self) -> bool {
        self.is_named() || self.choice == ToolChoice::Required
    }

    /// Returns whether the client named the tool that the model must call.
    pub fn is_named(&self) -> bool {
        matches!(self.choice, ToolChoice::Named(_))
    }

    /// Returns the constraint on the text and the tool calls of an answer, or `None` if there is no constraint.
    /// If `answer` is set, the text must match it.
    pub fn constraint(&self, answer: Option<Grammar>, can_call_in_parallel: bool) -> Option<Constraint> {
        let requires_tool = self.is_required();
        let mut tools = Vec::with_capacity(self.shown.len());
        for (index, tool) in self.shown.iter().enumerate() {
            let function = &tool["function"];
            let name = function["name"].as_str().unwrap_or_default().to_string();
            if matches!(&self.choice, ToolChoice::Named(named) if *named != name) {
                continue;
            }
            let field = format!("tools[{index}].function.parameters");
            let arguments = || named(&field, GrammarKind::JsonSchema(arguments_schema(&function["parameters"])));
            let arguments = (requires_tool || function["strict"] == true).then(arguments);
            tools.push(ToolGrammar { name, arguments });
        }
        let is_any = answer.is_none() && tools.iter().all(|tool| tool.arguments.is_none());
        // A client that names a tool wants one call. With parallel calls, the model could call the tool repeatedly.
        let can_call_in_parallel = can_call_in_parallel && !self.is_named();
        (!is_any).then_some(Constraint { answer, tools, requires_tool, can_call_in_parallel })
    }
}

/// Returns the JSON schema of a function's arguments. Without `parameters`, only an empty object matches.
/// If `parameters` has no type, the type is `object`.
fn arguments_schema(parameters: &Value) -> Value {
    let Value::Object(parameters) = parameters else {
        return json!({ "type": "object", "properties": {}, "additionalProperties": false });
    };
    let mut schema = parameters.clone();
    schema.entry("type").or_insert_with(|| json!("object"));
    Value::Object(schema)
}

/// Reads the fields `tools` and `tool_choice`.
///
/// Reports the unknown fields of a tool as ignored, unless the model has a chat template, which receives whole tools.
pub fn read(fields: &mut Fields, engine: &EngineHandle) -> Result<Tools, ApiError> {
    fields.refuse("functions", &[json!([])], "use 'tools'")?;
    fields.refuse("function_call", &[json!("none"), json!("auto")], "use 'tool_choice'")?;
    let items = fields.take_array("tools")?.unwrap_or_default();
    if items.len() > MAX_TOOLS {
        return Err(fields.invalid("tools", format!("expected at most {MAX_TOOLS} tools")));
    }
    let mut tools = Vec::with_capacity(items.len());
    for (index, item) in items.into_iter().enumerate() {
        let unknown = check_tool(&format!("tools[{index}]"), item.clone())?;
        if !matches!(engine.language().chat, Some(ChatFormat::Template(_))) {
            unknown.into_iter().for_each(|field| fields.ignore(field));
        }
        tools.push(item);
    }
    let choice = read_choice(fields)?;
    Tools::new(fields, engine, tools, choice)
}

/// Checks a tool. Returns its unknown fields.
fn check_tool(path: &str, item: Value) -> Result<Vec<IgnoredField>, ApiError> {
    let mut tool = Fields::nested(path, item)?;
    if tool.take_string("type")?.as_deref() != Some("function") {
        return Err(tool.invalid("type", "expected 'function'"));
    }
    let function = tool.take_object("function")?;
    let mut function = function.ok_or_else(|| tool.invalid("function", "expected an object"))?;
    check_function(&mut function)?;
    let mut unknown = tool.ignored();
    unknown.extend(function.ignored());
    Ok(unknown)
}

/// Checks the name of a function, and the types of `description`, `strict` and `parameters`.
pub fn check_function(function: &mut Fields) -> Result<(), ApiError> {
    let is_name_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let is_name = |name: &String| (1..=MAX_NAME).contains(&name.len()) && name.chars().all(is_name_char);
    if !function.take_string("name")?.is_some_and(|name| is_name(&name)) {
        let expected = format!("expected 1 to {MAX_NAME} letters, digits, underscores, dashes or dots");
        return Err(function.invalid("name", expected));
    }
    function.take_string("description")?;
    function.take_bool("strict")?;
    match function.take("parameters") {
        None | Some(Value::Object(_)) => Ok(()),
        Some(_) => Err(function.invalid("parameters", "expected a JSON schema that is an object")),
    }
}

/// Reads the field `tool_choice`.
fn read_choice(fields: &mut Fields) -> Result<ToolChoice, ApiError> {
    Ok(match fields.take("tool_choice") {
        None => ToolChoice::Auto,
        Some(Value::String(choice)) if choice == "auto" => ToolChoice::Auto,
        Some(Value::String(choice)) if choice == "none" => ToolChoice::None,
        Some(Value::String(choice)) if choice == "required" => ToolChoice::Required,
        Some(choice) if choice["type"] == "function" && choice["function"]["name"].is_string() => {
            ToolChoice::Named(choice["function"]["name"].as_str().unwrap_or_default().to_string())
        }
        Some(_) => return Err(fields.invalid("tool_choice", "expected none, auto, required or a function")),
    })
}
