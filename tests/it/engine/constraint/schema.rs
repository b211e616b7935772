//! A JSON schema validator that supports only a few keywords, and panics if a schema contains another one.

use serde_json::Value;

/// Returns the reason why `value` does not match `schema`, or `None` if it matches. `$ref`s point into `root`.
pub fn problem(value: &Value, schema: &Value, root: &Value) -> Option<String> {
    let known = [
        "$defs",
        "$ref",
        "additionalProperties",
        "anyOf",
        "const",
        "description",
        "enum",
        "items",
        "maxItems",
        "maxLength",
        "maximum",
        "minItems",
        "minimum",
        "pattern",
        "properties",
        "required",
        "type",
    ];
    let keywords = schema.as_object().unwrap();
    assert!(keywords.keys().all(|keyword| known.contains(&keyword.as_str())), "{schema}");
    let fail = |why: &str| Some(format!("{value} {why}: {schema}"));
    if let Some(reference) = schema["$ref"].as_str() {
        return problem(value, root.pointer(reference.strip_prefix('#').unwrap()).unwrap(), root);
    }
    if let Some(options) = schema["anyOf"].as_array()
        && options.iter().all(|option| problem(value, option, root).is_some())
    {
        return fail("matches no option");
    }
    let has_type = |name: &str| match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        _ => panic!("{name}"),
    };
    let types: Vec<&str> = match &schema["type"] {
        Value::Null => Vec::new(),
        Value::Array(types) => types.iter().map(|name| name.as_str().unwrap()).collect(),
        name => vec![name.as_str().unwrap()],
    };
    if !types.is_empty() && !types.iter().any(|name| has_type(name)) {
        return fail("has the wrong type");
    }
    if keywords.get("const").is_some_and(|expected| expected != value)
        || schema["enum"].as_array().is_some_and(|values| !values.contains(value))
    {
        return fail("is not an allowed value");
    }
    if let Some(number) = value.as_f64()
        && (schema["minimum"].as_f64().is_some_and(|minimum| number < minimum)
            || schema["maximum"].as_f64().is_some_and(|maximum| number > maximum))
    {
        return fail("is out of range");
    }
    if let Some(text) = value.as_str() {
        let is_match = |pattern: &str| regex::Regex::new(pattern).unwrap().is_match(text);
        if schema["pattern"].as_str().is_some_and(|pattern| !is_match(pattern))
            || schema["maxLength"].as_u64().is_some_and(|limit| text.chars().count() as u64 > limit)
        {
            return fail("is not a valid string");
        }
    }
    if let Some(items) = value.as_array() {
        let count = items.len() as u64;
        if schema["minItems"].as_u64().is_some_and(|minimum| count < minimum)
            || schema["maxItems"].as_u64().is_some_and(|maximum| count > maximum)
        {
            return fail("has the wrong length");
        }
        if keywords.contains_key("items") {
            return items.iter().find_map(|item| problem(item, &schema["items"], root));
        }
    }
    if let Some(fields) = value.as_object() {
        let required = schema["required"].as_array().into_iter().flatten();
        if required.into_iter().any(|name| !fields.contains_key(name.as_str().unwrap())) {
            return fail("lacks a field");
        }
        return fields.iter().find_map(|(name, field)| match schema["properties"].get(name) {
            Some(schema) => problem(field, schema, root),
            None if schema["additionalProperties"] == false => Some(format!("{name} is not a field of {schema}")),
            None => None,
        });
    }
    None
}
