//! Tests which fields of the Responses API are honored, which are refused, and which are reported as ignored.

use serde_json::{Value, json};

use super::client::{JSON, Server};
use super::responses::{body, respond};

#[test]
fn invalid_fields_are_errors_that_name_the_field() {
    let server = Server::start(&["--context", "256"]);
    let input = |item: Value| json!({ "input": [item] });
    let function = json!({ "type": "function", "name": "f" });
    for (fields, param) in [
        (json!({ "input": null }), "input"),
        (json!({ "input": 5 }), "input"),
        (json!({ "input": [] }), "input"),
        (input(json!("hi")), "input[0]"),
        (input(json!({ "role": "tool", "content": "x" })), "input[0].role"),
        (input(json!({ "role": "user" })), "input[0].content"),
        (input(json!({ "role": "user", "content": [{ "type": "input_image" }] })), "input[0].content[0].type"),
        (input(json!({ "type": "web_search_call" })), "input[0].type"),
        (input(json!({ "type": "item_reference" })), "input[0].id"),
        (input(json!({ "role": "user", "content": "x", "id": "x".repeat(200) })), "input[0].id"),
        (input(json!({ "type": "function_call", "name": "f", "arguments": "{}" })), "input[0].call_id"),
        (input(json!({ "type": "function_call_output", "call_id": "a", "output": "" })), "input[0].call_id"),
        (json!({ "background": true }), "background"),
        (json!({ "truncation": "auto" }), "truncation"),
        (json!({ "conversation": "conv_1" }), "conversation"),
        (json!({ "prompt": { "id": "p" } }), "prompt"),
        (json!({ "max_tokens": 5 }), "max_tokens"),
        (json!({ "max_output_tokens": 0 }), "max_output_tokens"),
        (json!({ "top_logprobs": 21 }), "top_logprobs"),
        (json!({ "metadata": { "a": 1 } }), "metadata"),
        (json!({ "include": [1] }), "include"),
        (json!({ "text": { "format": { "type": "json_schema", "name": "x" } } }), "text.format.schema"),
        (json!({ "text": { "format": { "type": "json_schema", "schema": { "type": 5 } } } }), "text.format.schema"),
        (json!({ "text": { "format": { "type": "yaml" } } }), "text.format.type"),
        (json!({ "reasoning": { "effort": "none" } }), "reasoning.effort"),
        (json!({ "tools": [{ "name": "f" }] }), "tools[0].type"),
        (json!({ "tools": [{ "type": "function", "name": "a b" }] }), "tools[0].name"),
        (json!({ "tool_choice": "required" }), "tool_choice"),
        (json!({ "tools": [function], "tool_choice": { "type": "function", "name": "g" } }), "tool_choice"),
        (json!({ "tool_choice": { "type": "web_search" } }), "tool_choice"),
        (json!({ "n": 2 }), "n"),
        (json!({ "temperature": -1 }), "temperature"),
    ] {
        let error = respond(&server, fields.clone()).error(400);
        assert_eq!(error["param"], param, "{fields}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    for kind in ["input_image", "input_file"] {
        let error = respond(&server, input(json!({ "role": "user", "content": [{ "type": kind }] }))).error(400);
        assert_eq!(error["code"], "unsupported_parameter", "{error}");
    }
    let error = respond(&server, input(json!({ "type": "web_search_call" }))).error(400);
    let message = error["message"].as_str().unwrap();
    assert!(message.ends_with("accepted, not items of type 'web_search_call'"), "{message}");
    assert_eq!(message.matches("supported").count(), 1, "{message}");
    let error = respond(&server, json!({ "input": "model ".repeat(300), "stream": true })).error(400);
    assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!("input")));
    assert_eq!(respond(&server, json!({ "model": "gpt-4" })).error(404)["code"], "model_not_found");
}

#[test]
fn formats_and_required_tools_are_enforced() {
    let server = Server::start(&[]);
    let schema = json!({
        "type": "object",
        "properties": { "answer": { "type": "string", "maxLength": 20 }, "count": { "enum": [1, 2] } },
        "required": ["answer", "count"],
        "additionalProperties": false,
    });
    let format = json!({ "type": "json_schema", "name": "answer", "strict": true, "schema": schema });
    let response = respond(&server, json!({ "text": { "format": format } })).ok();
    assert_eq!(response["text"]["format"], format);
    let message = response["output"].as_array().unwrap().iter().find(|item| item["type"] == "message").unwrap();
    let answer: Value = serde_json::from_str(message["content"][0]["text"].as_str().unwrap()).unwrap();
    assert!(answer["answer"].is_string() && [1, 2].map(Value::from).contains(&answer["count"]), "{answer}");

    let properties = json!({ "id": { "enum": [7] } });
    let parameters =
        json!({ "type": "object", "properties": properties, "required": ["id"], "additionalProperties": false });
    let tool = |name| json!({ "type": "function", "name": name, "parameters": parameters });
    let tools = json!([tool("find"), tool("list")]);
    for (choice, names) in
        [(json!("required"), vec!["find", "list"]), (json!({ "type": "function", "name": "list" }), vec!["list"])]
    {
        let response = respond(&server, json!({ "tools": tools, "tool_choice": choice })).ok();
        let call = response["output"].as_array().unwrap().iter().find(|item| item["type"] == "function_call").unwrap();
        assert!(names.contains(&call["name"].as_str().unwrap()), "{call}");
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(arguments["id"], 7);
    }
}

#[test]
fn tools_that_cannot_be_served_are_skipped_and_named() {
    let server = Server::start(&[]);
    let parameters = json!({ "type": "object", "properties": { "q": { "type": "string" } } });
    let function = json!({ "type": "function", "name": "find", "description": "Finds.", "parameters": parameters, "strict": true });
    let tools = json!([
        function,
        { "type": "web_search" },
        { "type": "namespace", "name": "n", "tools": [function] },
        { "type": "function", "name": "list" },
    ]);
    let fields = json!({ "tools": tools, "user": "ada", "reasoning": { "summary": "auto" }, "max_output_tokens": 5 });
    let response = respond(&server, fields.clone());
    let json = response.ok();
    let empty = json!({ "type": "function", "name": "list", "description": null, "parameters": null, "strict": null });
    assert_eq!((&json["tools"], &json["user"]), (&json!([function, empty]), &json!("ada")));
    let ignored = response.header("x-inferno-ignored").unwrap();
    for name in ["tools[] (web_search)", "tools[] (namespace)", "user", "reasoning.summary"] {
        assert!(ignored.split(", ").any(|field| field == name), "{name}: {ignored}");
    }
    // The prompt lists only the functions that the model may call.
    let tokens = |choice: Value| {
        let mut fields = fields.clone();
        fields["tool_choice"] = choice;
        server.post("/v1/responses/input_tokens", &body(fields)).ok()["input_tokens"].as_u64().unwrap()
    };
    let allowed = json!({ "type": "allowed_tools", "mode": "auto", "tools": [{ "type": "function", "name": "list" }] });
    let (all, one, none) = (tokens(json!("auto")), tokens(allowed), tokens(json!("none")));
    assert!(all > one && one > none, "prompt tokens with all, one and no functions: {all}, {one}, {none}");
    assert_eq!(json["usage"]["input_tokens"], all);
    let headers = [JSON, ("x-inferno-strict", "1")];
    let body = body(json!({ "tools": [{ "type": "web_search" }] })).to_string();
    let error = server.send("POST", "/v1/responses", &headers, body.as_bytes()).error(400);
    assert_eq!(error["param"], "tools[]", "{error}");
}
