//! JSON output, with aliases for keys that earlier versions spelled in British English.

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

/// Renamed JSON keys and their old spellings. The output has both, because scripts may still read the old keys.
const OLD_KEYS: &[(&str, &str)] = &[
    ("quantization", "quantisation"),
    ("license", "licence"),
    ("unquantized_weight_bytes", "unquantised_weight_bytes"),
];

/// Serializes `value` as indented JSON, with both the new and the old keys.
pub fn pretty(value: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string_pretty(&with_old_keys(serde_json::to_value(value)?))?)
}

/// Adds the old key next to each renamed key, at every level.
pub fn with_old_keys(mut value: Value) -> Value {
    add_old_keys(&mut value);
    value
}

fn add_old_keys(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (key, old_key) in OLD_KEYS {
                if let Some(field) = fields.get(*key).cloned() {
                    fields.entry(*old_key).or_insert(field);
                }
            }
            fields.values_mut().for_each(add_old_keys);
        }
        Value::Array(items) => items.iter_mut().for_each(add_old_keys),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn renamed_keys_are_printed_under_both_names() {
        let report = json!([{"license": null, "model": {"quantization": "mxfp4"}}]);
        let expected = json!([{
            "license": null, "licence": null, "model": {"quantization": "mxfp4", "quantisation": "mxfp4"}
        }]);
        assert_eq!(with_old_keys(report), expected);
        assert_eq!(with_old_keys(json!({"kl": 1})), json!({"kl": 1}));
    }
}
