//! Tests the parsing of messages in OpenAI's JSON format.

use super::*;
use inferno::chat::Role;

#[test]
fn openai_messages_are_parsed() {
    let parsed = messages(json!([
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": null, "reasoning": "r", "refusal": null, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"b": 1.0, "a": [], "c": 1e30}}},
            {"name": "g", "arguments": "not json"}]},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "x"},
    ]));
    assert_eq!((parsed[0].role, parsed[0].content.as_str()), (Role::Developer, "ab"));
    assert_eq!((parsed[1].content.as_str(), parsed[1].reasoning.as_deref()), ("", Some("r")));
    assert_eq!(parsed[1].tool_calls[0].arguments, "{\"b\": 1.0, \"a\": [], \"c\": 1e+30}");
    assert_eq!(parsed[1].tool_calls[1].arguments, "not json");
    assert_eq!(parsed[2].tool_call_id.as_deref(), Some("1"));
    let again = messages(serde_json::to_value(&parsed).unwrap());
    assert_eq!(again, parsed);
}

#[test]
fn invalid_messages_are_errors() {
    let error = |value: Value| serde_json::from_value::<Message>(value).unwrap_err().to_string();
    assert!(error(json!({"role": "bash", "content": ""})).contains("unknown variant `bash`"));
    assert!(error(json!({"role": "user", "content": [{"type": "image_url"}]})).contains("image_url"));
    assert!(error(json!({"role": "user", "content": 3})).contains("content must be a string"));
    assert!(error(json!({"role": "assistant", "tool_calls": [{"id": "1"}]})).contains("function name"));
    assert!("off".parse::<ReasoningEffort>().unwrap_err().contains("low, medium or high"));
    assert_eq!("high".parse::<ReasoningEffort>().unwrap().to_string(), "high");
}
