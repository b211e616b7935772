//! Reads the tools of a request in the format of the Responses API.

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::engine::EngineHandle;
use crate::server::http::body::Fields;
use crate::server::http::error::ApiError;
use crate::server::openai::chat::{self, MAX_TOOLS, ToolChoice, check_function};

/// The keys of a function in `tools`, in the order in which the response repeats them.
const FUNCTION_KEYS: [&str; 4] = ["name", "description", "parameters", "strict"];

/// The tools of a request, for the prompt and for the response.
pub struct Tools {
    /// The functions that the model may or must call.
    pub functions: chat::Tools,
    /// The supported tools, in the form in which the response repeats them.
    pub served: Vec<Value>,
    /// The field `tool_choice`, in the form in which the response repeats it.
    pub choice: Value,
}

/// Reads the fields `tools` and `tool_choice`.
///
/// Skips tools whose type is not `function` and reports them as ignored.
/// An error would lock out clients such as Codex, which always send tools of other types.
pub fn read(fields: &mut Fields, engine: &EngineHandle) -> Result<Tools, ApiError> {
    let items = fields.take_array("tools")?.unwrap_or_default();
    if items.len() > MAX_TOOLS {
        return Err(fields.invalid("tools", format!("expected at most {MAX_TOOLS} tools")));
    }
    let (mut functions, mut served) = (Vec::new(), Vec::new());
    for (index, item) in items.into_iter().enumerate() {
        let mut tool = Fields::nested(&format!("tools[{index}]"), item.clone())?;
        let kind =
            tool.take_string("type")?.ok_or_else(|| tool.invalid("type", "expected a type such as 'function'"))?;
        if kind != "function" {
            fields.ignore_with_note("tools[]", kind);
            continue;
        }
        check_function(&mut tool)?;
        fields.ignore_rest(tool);
        functions.push(json!({ "type": "function", "function": pick(&item, &FUNCTION_KEYS) }));
        let mut echo = json!({ "type": kind });
        for key in FUNCTION_KEYS {
            echo[key] = item.get(key).cloned().unwrap_or_default();
        }
        served.push(echo);
    }
    let choice = fields.take("tool_choice").unwrap_or_else(|| json!("auto"));
    let kind = match choice.as_str() {
        Some("auto") => ToolChoice::Auto,
        Some("none") => ToolChoice::None,
        Some("required") => ToolChoice::Required,
        _ => {
            let (allowed, kind) = read_choice(fields, &choice)?;
            if let Some(allowed) = allowed {
                functions.retain(|tool| tool["function"]["name"].as_str().is_some_and(|name| allowed.contains(name)));
            }
            kind
        }
    };
    Ok(Tools { functions: chat::Tools::new(fields, engine, functions, kind)?, served, choice })
}

/// Returns an object with the entries of `item` whose keys are in `keys`. Skips null values.
fn pick(item: &Value, keys: &[&str]) -> Value {
    let entry = |key: &&str| Some((key.to_string(), item.get(*key).filter(|value| !value.is_null())?.clone()));
    Value::Object(keys.iter().filter_map(entry).collect())
}

/// Reads a `tool_choice` field that is not `auto`, `none` or `required`. Fails unless it is a supported object.
///
/// Returns the function names that `allowed_tools` lists, or `None` if the field names one function.
/// Also returns whether the model may call functions, must call at least one, or must call the named function.
fn read_choice<'c>(fields: &Fields, choice: &'c Value) -> Result<(Option<HashSet<&'c str>>, ToolChoice), ApiError> {
    let kind = match choice["mode"].as_str() {
        None | Some("auto") => Some(ToolChoice::Auto),
        Some("required") => Some(ToolChoice::Required),
        Some(_) => None,
    };
    match (choice["type"].as_str(), choice["tools"].as_array(), choice["name"].as_str(), kind) {
        (Some("function"), _, Some(name), _) => Ok((None, ToolChoice::Named(name.to_string()))),
        (Some("allowed_tools"), Some(tools), _, Some(kind)) => {
            let functions = tools.iter().filter(|tool| tool["type"] == "function");
            Ok((Some(functions.filter_map(|tool| tool["name"].as_str()).collect()), kind))
        }
        _ => Err(fields.invalid("tool_choice", "expected none, auto, required, a function or allowed_tools")),
    }
}
