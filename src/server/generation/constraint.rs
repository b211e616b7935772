//! Reads the request fields that constrain the format of an answer.

use serde_json::Value;

use crate::engine::{Grammar, GrammarKind};
use crate::server::http::body::Fields;
use crate::server::http::error::ApiError;

/// The maximum number of strings in `structured_outputs.choice`.
const MAX_TEXTS: usize = 1000;

/// Reads the request field `response_format`. Returns `None` if the answer may be any text.
pub fn read_response_format(fields: &mut Fields) -> Result<Option<Grammar>, ApiError> {
    let Some(mut format) = fields.take_object("response_format")? else { return Ok(None) };
    let grammar = match format.take_string("type")?.as_deref() {
        Some("text") => None,
        Some("json_object") => Some(named("response_format", GrammarKind::JsonObject)),
        Some("json_schema") => {
            let nested = format.take_object("json_schema")?;
            let mut nested = nested.ok_or_else(|| format.invalid("json_schema", "expected an object"))?;
            let grammar = read_schema(&mut nested)?;
            fields.ignore_rest(nested);
            Some(grammar)
        }
        _ => return Err(format.invalid("type", "expected text, json_object or json_schema")),
    };
    fields.ignore_rest(format);
    Ok(grammar)
}

/// Reads `text.format` of the Responses API. Returns `None` if the answer may be any text.
pub fn read_text_format(text: &mut Fields, format: Value) -> Result<Option<Grammar>, ApiError> {
    let mut format = Fields::nested(&text.path("format"), format)?;
    let grammar = match format.take_string("type")?.as_deref() {
        Some("text") => None,
        Some("json_object") => Some(named("text.format", GrammarKind::JsonObject)),
        Some("json_schema") => Some(read_schema(&mut format)?),
        _ => return Err(format.invalid("type", "expected text, json_object or json_schema")),
    };
    text.ignore_rest(format);
    Ok(grammar)
}

/// Reads `output_config.format` of Anthropic's API. Returns `None` if the answer may be any text.
pub fn read_output_format(config: &mut Fields) -> Result<Option<Grammar>, ApiError> {
    let Some(mut format) = config.take_object("format")? else { return Ok(None) };
    if format.take_string("type")?.as_deref() != Some("json_schema") {
        return Err(format.invalid("type", "expected json_schema"));
    }
    let grammar = read_schema(&mut format)?;
    config.ignore_rest(format);
    Ok(Some(grammar))
}

/// Reads the field `schema`, and checks the types of `name`, `description` and `strict`.
fn read_schema(fields: &mut Fields) -> Result<Grammar, ApiError> {
    fields.take_string("name")?;
    fields.take_string("description")?;
    // The whole JSON schema is enforced, whether `strict` is true or not.
    fields.take_bool("strict")?;
    let schema = fields.take("schema").filter(is_schema);
    let schema = schema.ok_or_else(|| fields.invalid("schema", "expected a JSON schema"))?;
    Ok(named(&fields.path("schema"), GrammarKind::JsonSchema(schema)))
}

/// Reads `structured_outputs`, a vLLM extension of OpenAI's API. Returns `None` if the answer may be any text.
pub fn read_structured_outputs(fields: &mut Fields) -> Result<Option<Grammar>, ApiError> {
    let Some(mut nested) = fields.take_object("structured_outputs")? else { return Ok(None) };
    let mut grammars = Vec::new();
    if let Some(schema) = nested.take("json") {
        // Some clients send the JSON schema as a string.
        let schema = schema.as_str().and_then(|text| serde_json::from_str(text).ok()).unwrap_or(schema);
        if !is_schema(&schema) {
            return Err(nested.invalid("json", "expected a JSON schema"));
        }
        grammars.push(named(&nested.path("json"), GrammarKind::JsonSchema(schema)));
    }
    if nested.take_bool("json_object")? == Some(true) {
        grammars.push(named(&nested.path("json_object"), GrammarKind::JsonObject));
    }
    if let Some(regex) = nested.take_string("regex")? {
        grammars.push(named(&nested.path("regex"), GrammarKind::Regex(regex)));
    }
    if let Some(lark) = nested.take_string("grammar")? {
        grammars.push(named(&nested.path("grammar"), GrammarKind::Lark(lark)));
    }
    if let Some(texts) = nested.take_array("choice")? {
        let texts: Option<Vec<String>> = texts.iter().map(|text| text.as_str().map(str::to_string)).collect();
        let texts = texts.filter(|texts| (1..=MAX_TEXTS).contains(&texts.len()));
        let expected = || nested.invalid("choice", format!("expected 1 to {MAX_TEXTS} strings"));
        let texts = texts.ok_or_else(expected)?;
        grammars.push(named(&nested.path("choice"), GrammarKind::Choice(texts)));
    }
    if let Some(field) = nested.ignored().into_iter().next() {
        return Err(ApiError::unsupported(field.name, "use json, json_object, regex, grammar or choice"));
    }
    match grammars.len() {
        0 | 1 => Ok(grammars.pop()),
        _ => {
            Err(fields
                .invalid("structured_outputs", "expected only one of json, json_object, regex, grammar and choice"))
        }
    }
}

/// Creates a grammar. `field` is the name of the request field that contains the grammar, for error messages.
pub fn named(field: &str, kind: GrammarKind) -> Grammar {
    Grammar { name: field.to_string(), kind }
}

fn is_schema(value: &Value) -> bool {
    value.is_object() || value.is_boolean()
}
