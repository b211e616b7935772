//! Reads tools, and the fields that constrain the form of an answer.

use serde_json::{Value, json};

use crate::server::body::Fields;
use crate::server::error::ApiError;

/// The most tools in a request.
pub const MAX_TOOLS: usize = 512;

/// The maximum length of a function name.
const MAX_NAME: usize = 128;

/// Reads `tools` and `tool_choice`. Returns no tools if the model must not call any.
pub fn read(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    fields.refuse("functions", &[json!([])], "use 'tools'")?;
    fields.refuse("function_call", &[json!("none"), json!("auto")], "use 'tool_choice'")?;
    let items = fields.take_array("tools")?.unwrap_or_default();
    if items.len() > MAX_TOOLS {
        return Err(fields.invalid("tools", format!("expected at most {MAX_TOOLS} tools")));
    }
    let mut tools = Vec::with_capacity(items.len());
    for (index, item) in items.into_iter().enumerate() {
        let path = format!("tools[{index}]");
        check_tool(&path, item.clone())?;
        if item["function"]["strict"] == true {
            // Many clients always send this. The model sees the schema, but nothing enforces it.
            fields.ignore("tools[].function.strict".to_string());
        }
        tools.push(item);
    }
    Ok(if read_choice(fields)? { tools } else { Vec::new() })
}

fn check_tool(path: &str, item: Value) -> Result<(), ApiError> {
    let mut tool = Fields::nested(path, item)?;
    if tool.take_string("type")?.as_deref() != Some("function") {
        return Err(tool.invalid("type", "expected 'function'"));
    }
    let function = tool.take_object("function")?;
    check_function(&mut function.ok_or_else(|| tool.invalid("function", "expected an object"))?)
}

/// Checks the name, the description and the parameters of a function.
pub fn check_function(function: &mut Fields) -> Result<(), ApiError> {
    let is_name_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let is_name = |name: &String| (1..=MAX_NAME).contains(&name.len()) && name.chars().all(is_name_char);
    if !function.take_string("name")?.is_some_and(|name| is_name(&name)) {
        let expected = format!("expected 1 to {MAX_NAME} letters, digits, underscores, dashes or dots");
        return Err(function.invalid("name", expected));
    }
    function.take_string("description")?;
    match function.take("parameters") {
        None | Some(Value::Object(_)) => Ok(()),
        Some(_) => Err(function.invalid("parameters", "expected a JSON schema")),
    }
}

/// Reads `tool_choice`. Returns whether the model may call tools.
fn read_choice(fields: &mut Fields) -> Result<bool, ApiError> {
    match fields.take("tool_choice") {
        None => Ok(true),
        Some(Value::String(choice)) if choice == "auto" => Ok(true),
        Some(Value::String(choice)) if choice == "none" => Ok(false),
        Some(Value::String(choice)) if choice == "required" => Err(constrained("tool_choice")),
        Some(choice) if choice["type"] == "function" && choice["function"]["name"].is_string() => {
            Err(constrained("tool_choice"))
        }
        Some(_) => Err(fields.invalid("tool_choice", "expected none, auto, required or a function")),
    }
}

/// Reads `response_format`.
pub fn read_response_format(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(mut format) = fields.take_object("response_format")? else { return Ok(()) };
    read_format(&mut format, "response_format")
}

/// Reads the form of an answer, which is in the field `name`.
pub fn read_format(format: &mut Fields, name: &str) -> Result<(), ApiError> {
    match format.take_string("type")?.as_deref() {
        Some("text") => Ok(()),
        Some("json_object" | "json_schema") => Err(constrained(name)),
        _ => Err(format.invalid("type", "expected text, json_object or json_schema")),
    }
}

/// Returns the error for a field that constrains which tokens the model can generate.
pub fn constrained(field: &str) -> ApiError {
    ApiError::unsupported(field, "this version of inferno cannot constrain the form of an answer yet")
}
