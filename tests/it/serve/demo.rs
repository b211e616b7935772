//! Tests that the demo model calls tools and writes JSON as the README and `docs/api.md` describe.

use serde_json::{Value, json};

use super::client::{Server, merged};

fn user(text: &str) -> Value {
    json!({ "role": "user", "content": text })
}

/// Adds a weather tool to the fields of a request, and returns all fields.
fn with_weather(fields: Value) -> Value {
    let parameters = json!({ "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"] });
    let function = json!({ "name": "get_weather", "description": "Returns the weather.", "parameters": parameters });
    merged(json!({ "tools": [{ "type": "function", "function": function }] }), &fields)
}

#[test]
fn the_demo_calls_a_tool_and_answers_from_its_result() {
    let server = Server::start(&[]);
    for choice in ["auto", "required"] {
        for (city, degrees) in [("Paris", 18), ("Oslo", -4)] {
            let mut messages = vec![user(&format!("What is the weather in {city}?"))];
            let first = server.chat(with_weather(json!({ "messages": messages, "tool_choice": choice }))).ok();
            let message = first["choices"][0]["message"].clone();
            let [call] = &message["tool_calls"].as_array().unwrap()[..] else { panic!("{first}") };
            assert_eq!(call["function"]["name"], "get_weather");
            let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
            assert_eq!(arguments, json!({ "city": city }));

            let result = json!({ "temperature": degrees, "condition": "sunny" }).to_string();
            let id = call["id"].clone();
            messages.extend([message, json!({ "role": "tool", "tool_call_id": id, "content": result })]);
            let second = server.chat(with_weather(json!({ "messages": messages }))).ok();
            let choice = &second["choices"][0];
            let text = choice["message"]["content"].as_str().unwrap();
            assert!(text.contains(&degrees.to_string()) && text.contains("sunny"), "{text}");
            assert_eq!(choice["finish_reason"], "stop");
        }
    }
    // A question that needs no tool gets the same answer whether or not the request offers a tool.
    let answer = server.chat(with_weather(json!({}))).ok();
    assert_eq!(answer["choices"][0]["message"], server.chat(json!({})).ok()["choices"][0]["message"]);
}

#[test]
fn the_demo_fills_a_schema_with_values_from_the_question() {
    let server = Server::start(&[]);
    let properties =
        json!({ "name": { "type": "string" }, "age": { "type": "integer" }, "city": { "type": "string" } });
    let schema = json!({ "type": "object", "properties": properties, "required": ["name", "age", "city"] });
    let messages = [user("Ada is 36 years old and lives in London.")];
    for format in [
        json!({ "type": "json_schema", "json_schema": { "name": "person", "schema": schema } }),
        json!({ "type": "json_object" }),
    ] {
        let answer = server.chat(json!({ "messages": messages, "response_format": format })).ok();
        let choice = &answer["choices"][0];
        let person: Value = serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap();
        assert_eq!(person, json!({ "name": "Ada", "age": 36, "city": "London" }));
        assert_eq!(choice["finish_reason"], "stop");
    }
}
