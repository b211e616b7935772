//! Describes function tools for harmony, as TypeScript types in a `functions` namespace.
//!
//! The output matches openai/harmony v0.0.8 byte for byte, because gpt-oss was trained on prompts in this format.
//! The code follows `template_tools_section` and `json_schema_to_typescript` in that library's `src/encoding.rs`, and
//! repeats the library's bugs. For example, only the first line of a property description starts with `//`.

use anyhow::{Result, anyhow};
use serde_json::Value;

/// Returns the `# Tools` section of harmony's developer message.
///
/// Each tool is `{"type": "function", "function": {"name", "description", "parameters"}}`, or only the inner object.
/// Fails if a tool has no name.
pub fn tools_section(tools: &[Value]) -> Result<String> {
    let mut out = String::from("# Tools\n\n## functions\n\nnamespace functions {\n");
    for tool in tools {
        let function = tool.get("function").unwrap_or(tool);
        let name = text(function, "name").ok_or_else(|| anyhow!("cannot render a tool: no function name in {tool}"))?;
        for line in text(function, "description").unwrap_or_default().lines() {
            out.push_str(&format!("\n// {line}"));
        }
        match function.get("parameters").filter(|parameters| !parameters.is_null()) {
            Some(parameters) => out.push_str(&format!("\ntype {name} = (_: {}) => any;\n", type_of(parameters, ""))),
            None => out.push_str(&format!("\ntype {name} = () => any;\n")),
        }
    }
    out.push_str("\n} // namespace functions");
    Ok(out)
}

fn text<'v>(schema: &'v Value, key: &str) -> Option<&'v str> {
    schema.get(key).and_then(Value::as_str)
}

fn list<'v>(schema: &'v Value, key: &str) -> Option<&'v Vec<Value>> {
    schema.get(key).and_then(Value::as_array)
}

fn is_enum(schema: &Value) -> bool {
    list(schema, "enum").is_some_and(|values| !values.is_empty())
}

/// Returns a schema's default value for a comment, if the schema has one. Quotes strings, unless the schema is an enum.
fn default_text(schema: &Value) -> Option<String> {
    schema.get("default").map(|default| match default.as_str() {
        Some(text) if is_enum(schema) => text.to_string(),
        Some(text) => format!("\"{text}\""),
        None => default.to_string(),
    })
}

/// Returns the TypeScript type of a JSON schema. Ignores `nullable` in the schema itself.
fn type_of(schema: &Value, indent: &str) -> String {
    if let Some(variants) = list(schema, "oneOf") {
        return one_of(variants, indent);
    }
    if let Some(types) = list(schema, "type") {
        let names = types.iter().filter_map(Value::as_str);
        let names: Vec<_> = names.map(|name| if name == "integer" { "number" } else { name }).collect();
        if !names.is_empty() {
            return names.join(" | ");
        }
    }
    match text(schema, "type") {
        Some("object") => object(schema, indent),
        Some("string") => {
            let values = list(schema, "enum").into_iter().flatten().filter_map(Value::as_str);
            let values: Vec<_> = values.map(|value| format!("\"{value}\"")).collect();
            if values.is_empty() { "string".into() } else { values.join(" | ") }
        }
        Some("number" | "integer") => "number".into(),
        Some("boolean") => "boolean".into(),
        Some("array") => match schema.get("items") {
            Some(items) => format!("{}[]", type_of(items, indent)),
            None => "Array<any>".into(),
        },
        _ => "any".into(),
    }
}

/// Like [`type_of`], but adds `| null` if `nullable` is true in the schema and the type does not contain `null`.
fn nullable_type_of(schema: &Value, indent: &str) -> String {
    let name = type_of(schema, indent);
    let nullable = schema.get("nullable").and_then(Value::as_bool).unwrap_or(false);
    if nullable && !name.contains("null") { name + " | null" } else { name }
}

/// Returns the type of a `oneOf` schema, for example of array items. For properties, `choice` writes the type instead.
fn one_of(variants: &[Value], indent: &str) -> String {
    let mut out = String::new();
    for variant in variants {
        out.push_str(&format!("\n{indent} | {}", nullable_type_of(variant, &format!("{indent}   "))));
        let mut comments: Vec<String> = text(variant, "description").map(str::to_string).into_iter().collect();
        if let Some(default) = variant.get("default") {
            // Here, openai/harmony writes an enum's default as JSON, but elsewhere without quotes (see `default_text`).
            // It always writes other string defaults in quotes and without escapes.
            let default = default.as_str().filter(|_| !is_enum(variant)).map(|text| format!("\"{text}\""));
            comments.push(format!("default: {}", default.unwrap_or_else(|| variant["default"].to_string())));
        }
        push_comments(&mut out, &comments);
    }
    out
}

fn push_comments(out: &mut String, comments: &[String]) {
    if !comments.is_empty() {
        out.push_str(&format!(" // {}", comments.join(" ")));
    }
}

fn object(schema: &Value, indent: &str) -> String {
    let mut out = String::new();
    if let Some(description) = text(schema, "description") {
        out.push_str(&format!("{indent}// {description}\n"));
    }
    out.push_str("{\n");
    let required: Vec<&str> = list(schema, "required").into_iter().flatten().filter_map(Value::as_str).collect();
    for (key, property) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
        let key = if required.contains(&key.as_str()) { key.clone() } else { format!("{key}?") };
        property_of(&mut out, &key, property, indent);
    }
    out.push_str(&format!("{indent}}}"));
    out
}

/// Writes the comments and the type of a property. `key` ends with `?` if the property is optional.
fn property_of(out: &mut String, key: &str, property: &Value, indent: &str) {
    if let Some(title) = text(property, "title") {
        out.push_str(&format!("{indent}// {title}\n{indent}//\n"));
    }
    let is_choice = property.get("oneOf").is_some();
    if let Some(description) = text(property, "description").filter(|_| !is_choice) {
        out.push_str(&format!("{indent}// {description}\n"));
    }
    if let Some(examples) = list(property, "examples").filter(|examples| !examples.is_empty()) {
        out.push_str(&format!("{indent}// Examples:\n"));
        for example in examples.iter().filter_map(Value::as_str) {
            out.push_str(&format!("{indent}// - \"{example}\"\n"));
        }
    }
    if let Some(variants) = list(property, "oneOf") {
        return choice(out, key, property, variants, indent);
    }
    out.push_str(&format!("{indent}{key}: {},", nullable_type_of(property, &format!("{indent}    "))));
    if let Some(default) = default_text(property).filter(|_| !is_choice) {
        out.push_str(&format!(" // default: {default}"));
    }
    out.push('\n');
}

/// Writes the description, the default, the key and the variants of a property with a `oneOf` schema.
fn choice(out: &mut String, key: &str, property: &Value, variants: &[Value], indent: &str) {
    let description = text(property, "description");
    let first_description = variants.first().and_then(|variant| text(variant, "description"));
    let above = description.filter(|_| description != first_description);
    if let Some(description) = above {
        out.push_str(&format!("{indent}// {description}\n"));
    }
    if let Some(default) = default_text(property) {
        out.push_str(&format!("{indent}// default: {default}\n"));
    }
    out.push_str(&format!("{indent}{key}:\n"));
    for (i, variant) in variants.iter().enumerate() {
        out.push_str(&format!("{indent} | {}", nullable_type_of(variant, &format!("{indent}   "))));
        // As in openai/harmony, omit the first variant's description if the property's own was written above.
        let own = text(variant, "description").filter(|_| i > 0 || above.is_none());
        let mut comments: Vec<String> =
            own.filter(|own| Some(*own) != description).map(str::to_string).into_iter().collect();
        comments.extend(default_text(variant).map(|default| format!("default: {default}")));
        push_comments(out, &comments);
        out.push('\n');
    }
    out.push_str(&format!("{indent},\n"));
}
