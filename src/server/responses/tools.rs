//! Reads the tools of a request.

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::server::body::Fields;
use crate::server::chat::{MAX_TOOLS, check_function, constrained};
use crate::server::error::ApiError;

/// The tools of a request.
pub struct Tools {
    /// The functions that the model may call, in the format of chat completions.
    pub functions: Vec<Value>,
    /// The served tools as the response repeats them.
    pub served: Vec<Value>,
    /// `tool_choice` as the response repeats it.
    pub choice: Value,
}

/// Reads `tools` and `tool_choice`.
///
/// Tools of other types than `function` are left out and named as ignored, because clients such as Codex always send some.
pub fn read(fields: &mut Fields) -> Result<Tools, ApiError> {
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
            fields.ignore(format!("tools[] ({kind})"));
            continue;
        }
        check_function(&mut tool)?;
        if tool.take_bool("strict")? == Some(true) {
            // Many clients always send this. The model sees the schema, but nothing enforces it.
            fields.ignore("tools[].strict".to_string());
        }
        tool.ignored().into_iter().for_each(|name| fields.ignore(name));
        functions
            .push(json!({ "type": "function", "function": function(&item, &["name", "description", "parameters"]) }));
        let mut echo = function(&item, &[]);
        for key in ["type", "name", "description", "parameters", "strict"] {
            echo[key] = item.get(key).cloned().unwrap_or_default();
        }
        served.push(echo);
    }
    let choice = fields.take("tool_choice").unwrap_or_else(|| json!("auto"));
    match choice.as_str() {
        Some("auto") => {}
        Some("none") => functions.clear(),
        Some("required") => return Err(constrained("tool_choice")),
        _ => {
            let allowed = read_choice(fields, &choice)?;
            functions.retain(|tool| tool["function"]["name"].as_str().is_some_and(|name| allowed.contains(name)));
        }
    }
    Ok(Tools { functions, served, choice })
}

/// Returns an object with those of the keys that `item` has.
fn function(item: &Value, keys: &[&str]) -> Value {
    let entry = |key: &&str| Some((key.to_string(), item.get(*key).filter(|value| !value.is_null())?.clone()));
    Value::Object(keys.iter().filter_map(entry).collect())
}

/// Reads a `tool_choice` that is an object. Returns the names of the functions that the model may call.
fn read_choice<'c>(fields: &Fields, choice: &'c Value) -> Result<HashSet<&'c str>, ApiError> {
    let is_automatic = choice["mode"].is_null() || choice["mode"] == "auto";
    match (choice["type"].as_str(), choice["tools"].as_array()) {
        (Some("function"), _) if choice["name"].is_string() => Err(constrained("tool_choice")),
        (Some("allowed_tools"), Some(tools)) if is_automatic => Ok(tools
            .iter()
            .filter(|tool| tool["type"] == "function")
            .filter_map(|tool| tool["name"].as_str())
            .collect()),
        (Some("allowed_tools"), Some(_)) if choice["mode"] == "required" => Err(constrained("tool_choice")),
        _ => Err(fields.invalid("tool_choice", "expected none, auto, required, a function or allowed_tools")),
    }
}
