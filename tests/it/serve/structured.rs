//! Tests of structured outputs: `response_format`, `structured_outputs`, required and named tools, and strict tools.

use serde_json::{Value, json};

use super::client::{Response, Server};

/// Returns the schema of an object with a short string and a small integer.
fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 12 },
            "gb": { "type": "integer", "minimum": 1, "maximum": 99 },
        },
        "required": ["name", "gb"],
        "additionalProperties": false,
    })
}

fn response_format(schema: Value) -> Value {
    json!({ "type": "json_schema", "json_schema": { "name": "model", "strict": true, "schema": schema } })
}

fn tool(name: &str, strict: bool) -> Value {
    json!({ "type": "function", "function": { "name": name, "strict": strict, "parameters": schema() } })
}

/// Asserts that a text is JSON that matches [`schema`].
fn check(text: &str) {
    let json: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let fields = json.as_object().unwrap();
    assert_eq!(fields.keys().collect::<Vec<_>>(), ["name", "gb"], "{text}");
    assert!(json["name"].as_str().unwrap().chars().count() <= 12, "{text}");
    assert!((1..=99).contains(&json["gb"].as_i64().unwrap()), "{text}");
}

/// Returns the text of a stream, the names and arguments of its tool calls, and its finish reason.
fn streamed(response: &Response) -> (String, Vec<(String, String)>, String) {
    let (mut text, mut calls, mut finish) = (String::new(), Vec::new(), String::new());
    for event in response.events() {
        let choice = &event["choices"][0];
        text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let arguments = call["function"]["arguments"].as_str().unwrap_or_default();
            match call["function"]["name"].as_str() {
                Some(name) => calls.push((name.to_string(), arguments.to_string())),
                None => calls[call["index"].as_u64().unwrap() as usize].1.push_str(arguments),
            }
        }
        finish.push_str(choice["finish_reason"].as_str().unwrap_or_default());
    }
    (text, calls, finish)
}

#[test]
fn response_formats_are_enforced_whole_and_streamed() {
    let server = Server::start(&[]);
    for seed in 0..3 {
        let fields = json!({ "response_format": response_format(schema()), "temperature": 1, "seed": seed, "n": 2 });
        let whole = server.chat(fields).ok();
        for choice in whole["choices"].as_array().unwrap() {
            check(choice["message"]["content"].as_str().unwrap());
            assert_eq!(choice["finish_reason"], "stop");
        }
        let mut fields = json!({ "response_format": response_format(schema()), "temperature": 1, "seed": seed });
        fields["stream"] = json!(true);
        let (text, calls, finish) = streamed(&server.chat(fields));
        assert_eq!(whole["choices"][0]["message"]["content"], *text);
        assert_eq!((calls.len(), finish.as_str()), (0, "stop"));
    }
    let mut loose = response_format(schema());
    loose["json_schema"].as_object_mut().unwrap().remove("strict");
    check(server.chat(json!({ "response_format": loose })).ok()["choices"][0]["message"]["content"].as_str().unwrap());
    // The model may still call a tool, but a text answer must match the schema.
    let fields = json!({ "response_format": response_format(schema()), "tools": [tool("f", false)] });
    let json = server.chat(fields).ok();
    if let Some(text) = json["choices"][0]["message"]["content"].as_str() {
        check(text);
    }
}

#[test]
fn any_json_object_is_an_object() {
    let server = Server::start(&[]);
    let fields = json!({ "response_format": { "type": "json_object" }, "max_tokens": 400 });
    let choice = server.chat(fields).ok()["choices"][0].clone();
    let text = choice["message"]["content"].as_str().unwrap();
    assert!(text.starts_with('{'), "{text}");
    if choice["finish_reason"] == "stop" {
        assert!(serde_json::from_str::<Value>(text).unwrap().is_object(), "{text}");
    }
}

#[test]
fn structured_outputs_constrain_both_routes() {
    let server = Server::start(&[]);
    let chat = |outputs: Value| {
        let json = server.chat(json!({ "structured_outputs": outputs, "temperature": 1 })).ok();
        json["choices"][0]["message"]["content"].as_str().unwrap().to_string()
    };
    check(&chat(json!({ "json": schema() })));
    check(&chat(json!({ "json": schema().to_string() })));
    assert!(["yes", "no"].contains(&chat(json!({ "choice": ["yes", "no"] })).as_str()));
    let text = chat(json!({ "regex": "[a-z]{3}-[0-9]{2}" }));
    assert!(regex::Regex::new("^[a-z]{3}-[0-9]{2}$").unwrap().is_match(&text), "{text}");
    assert_eq!(chat(json!({ "grammar": "start: \"a\" \"b\"" })), "ab");
    let body = json!({ "prompt": "A color: ", "structured_outputs": { "choice": ["red", "blue"] }, "max_tokens": 50 });
    let json = server.post("/v1/completions", &body).ok();
    assert!(["red", "blue"].contains(&json["choices"][0]["text"].as_str().unwrap()), "{json}");
    assert_eq!(json["choices"][0]["finish_reason"], "stop");
    server.chat(json!({ "structured_outputs": {}, "max_tokens": 3 })).ok();
}

#[test]
fn required_and_named_tools_are_called() {
    let server = Server::start(&[]);
    let tools = json!([tool("list_models", false), tool("delete_model", true)]);
    for seed in 0..3 {
        let mut fields = json!({ "tools": tools, "tool_choice": "required", "temperature": 1, "seed": seed });
        let choice = server.chat(fields.clone()).ok()["choices"][0].clone();
        assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &Value::Null));
        let [call] = &choice["message"]["tool_calls"].as_array().unwrap()[..] else { panic!("{choice}") };
        assert!(["list_models", "delete_model"].contains(&call["function"]["name"].as_str().unwrap()), "{call}");
        check(call["function"]["arguments"].as_str().unwrap());
        fields["stream"] = json!(true);
        let (text, calls, finish) = streamed(&server.chat(fields.clone()));
        assert_eq!((text.as_str(), finish.as_str()), ("", "tool_calls"));
        assert_eq!(calls[0].0, call["function"]["name"]);
        assert_eq!(calls[0].1, call["function"]["arguments"]);

        fields["tool_choice"] = json!({ "type": "function", "function": { "name": "delete_model" } });
        let (_, calls, finish) = streamed(&server.chat(fields));
        assert_eq!((calls.len(), calls[0].0.as_str(), finish.as_str()), (1, "delete_model", "stop"));
        check(&calls[0].1);
    }
    let without =
        json!({ "tools": [{ "type": "function", "function": { "name": "now" } }], "tool_choice": "required" });
    let json = server.chat(without).ok();
    let arguments = &json["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"];
    assert_eq!(serde_json::from_str::<Value>(arguments.as_str().unwrap()).unwrap(), json!({}));
    // A strict tool need not be called. Its schema is enforced, so no field is reported as ignored.
    let response = server.chat(json!({ "tools": [tool("list_models", true)] }));
    assert!(response.header("x-inferno-ignored").is_none());
    response.ok();
}

#[test]
fn what_cannot_be_enforced_is_an_error_that_names_the_field() {
    let server = Server::start(&[]);
    let unsupported = json!({ "type": "array", "uniqueItems": true });
    let strict = |parameters: Value| json!([tool("f", false), { "type": "function", "function": { "name": "g", "strict": true, "parameters": parameters } }]);
    for (fields, param) in [
        (json!({ "response_format": response_format(unsupported.clone()) }), "response_format.json_schema.schema"),
        (json!({ "response_format": response_format(json!("text")) }), "response_format.json_schema.schema"),
        (json!({ "response_format": { "type": "json_schema" } }), "response_format.json_schema"),
        (
            json!({ "response_format": { "type": "json_object" }, "structured_outputs": { "regex": "a" } }),
            "structured_outputs",
        ),
        (json!({ "response_format": { "type": "json_object" }, "ignore_eos": true }), "ignore_eos"),
        (json!({ "structured_outputs": { "regex": "(" } }), "structured_outputs.regex"),
        (json!({ "structured_outputs": { "regex": "a", "json": {} } }), "structured_outputs"),
        (json!({ "structured_outputs": { "structural_tag": "a" } }), "structured_outputs.structural_tag"),
        (json!({ "structured_outputs": { "choice": [] } }), "structured_outputs.choice"),
        (json!({ "structured_outputs": { "grammar": "start: x" } }), "structured_outputs.grammar"),
        (json!({ "tools": strict(unsupported.clone()) }), "tools[1].function.parameters"),
        (json!({ "tools": strict(unsupported), "tool_choice": "required" }), "tools[1].function.parameters"),
        (json!({ "tool_choice": "required" }), "tool_choice"),
        (
            json!({ "tools": strict(json!({})), "tool_choice": { "type": "function", "function": { "name": "x" } } }),
            "tool_choice",
        ),
    ] {
        let error = server.chat(fields.clone()).error(400);
        assert_eq!(error["param"], param, "{fields}: {error}");
        assert!(error["message"].as_str().unwrap().len() < 1200, "{error}");
    }
    // A tool that is neither strict nor required may have any schema.
    let fields = json!({ "tools": [{ "type": "function", "function": { "name": "f", "parameters": { "type": "object", "not": {} } } }], "max_tokens": 5 });
    server.chat(fields).ok();
}

/// If enforcing a grammar becomes too expensive, the request fails, with and without streaming.
#[test]
fn spent_fuel_is_an_error_of_the_request() {
    let server = Server::start(&[]);
    let grammar = "start: e{600} \"z\"\ne: \"x\" | e e | e e e | e e e e";
    let mut fields = json!({ "structured_outputs": { "grammar": grammar } });
    assert_eq!(server.chat(fields.clone()).error(400)["param"], "structured_outputs.grammar");
    fields["stream"] = json!(true);
    let response = server.chat(fields);
    let error = response.events().into_iter().find(|event| !event["error"].is_null()).expect("an error event");
    assert_eq!(error["error"]["param"], "structured_outputs.grammar");
    server.wait_until_idle();
    server.chat(json!({ "max_tokens": 5 })).ok();
}

#[test]
fn a_grammar_that_was_compiled_before_gives_the_same_answers() {
    let server = Server::start(&[]);
    let ask = |seed: usize| {
        let fields = json!({ "response_format": response_format(schema()), "temperature": 1, "seed": seed });
        server.chat(fields).ok()["choices"][0]["message"]["content"].clone()
    };
    let first: Vec<Value> = (0..4).map(ask).collect();
    first.iter().for_each(|text| check(text.as_str().unwrap()));
    assert_eq!((0..4).map(ask).collect::<Vec<_>>(), first);
    // If a grammar is too expensive, every request with it fails, not only the first.
    let hostile = "start: e{600} \"z\"\ne: \"x\" | e e | e e e | e e e e";
    for _ in 0..2 {
        let fields = json!({ "structured_outputs": { "grammar": hostile } });
        assert_eq!(server.chat(fields).error(400)["param"], "structured_outputs.grammar");
    }
}
