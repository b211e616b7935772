//! Tests of Anthropic's Messages API: responses, events, tools, thinking and errors.

use serde_json::{Value, json};

use super::client::{JSON, Response, Server, merged};

/// Returns the body of a request: the demo model, a limit of 300 tokens, a question and temperature 0.
/// The fields in `fields` are added to the body, or replace these defaults.
fn body(fields: Value) -> Value {
    let body = json!({
        "model": "demo",
        "max_tokens": 300,
        "messages": [{ "role": "user", "content": "What is the KV cache?" }],
        "temperature": 0,
    });
    merged(body, &fields)
}

fn send(server: &Server, fields: Value) -> Response {
    server.post("/v1/messages", &body(fields))
}

/// Asserts that the response is an error of type `kind` in Anthropic's format, and returns the error message.
fn error(response: &Response, status: u16, kind: &str) -> String {
    assert_eq!(response.status, status, "{}", response.text());
    let json = response.json();
    assert_eq!((&json["type"], &json["error"]["type"]), (&json!("error"), &json!(kind)), "{json}");
    assert_eq!(json["request_id"], response.header("x-request-id").unwrap(), "{json}");
    assert_eq!(json["request_id"], response.header("request-id").unwrap());
    json["error"]["message"].as_str().unwrap().to_string()
}

/// Returns the data of the events in a stream. Asserts that each event's name equals the `type` in its data.
fn events(response: &Response) -> Vec<Value> {
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let text = response.text();
    let event = |event: &str| {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        data
    };
    text.split_terminator("\n\n").map(event).collect()
}

/// Combines the events of a stream into one message.
fn collect(events: &[Value]) -> Value {
    let mut message = events[0]["message"].clone();
    let mut open = None;
    for event in &events[1..] {
        let index = event["index"].as_u64().map(|index| index as usize);
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!((open, index), (None, message["content"].as_array().map(Vec::len)));
                message["content"].as_array_mut().unwrap().push(event["content_block"].clone());
                open = index;
            }
            "content_block_delta" => {
                assert_eq!(open, index);
                let block = &mut message["content"][index.unwrap()];
                let (from, to) = match event["delta"]["type"].as_str().unwrap() {
                    "thinking_delta" => ("thinking", "thinking"),
                    "signature_delta" => ("signature", "signature"),
                    "text_delta" => ("text", "text"),
                    "input_json_delta" => ("partial_json", "partial"),
                    other => panic!("{other}"),
                };
                let text = block[to].as_str().unwrap_or_default().to_string();
                block[to] = json!(text + event["delta"][from].as_str().unwrap());
            }
            "content_block_stop" => {
                assert_eq!(open.take(), index);
                let block = &mut message["content"][index.unwrap()];
                if let Some(partial) = block.as_object_mut().unwrap().remove("partial") {
                    block["input"] = serde_json::from_str(partial.as_str().unwrap()).unwrap();
                }
            }
            "message_delta" => {
                for (name, value) in event["delta"].as_object().unwrap() {
                    message[name] = value.clone();
                }
                message["usage"] = event["usage"].clone();
            }
            "message_stop" | "ping" => {}
            other => panic!("{other}"),
        }
    }
    assert_eq!(open, None);
    message
}

/// Makes responses to equal requests comparable: removes ids and counts cached tokens as input tokens.
fn comparable(mut message: Value) -> Value {
    message["id"] = Value::Null;
    let usage = &mut message["usage"];
    let cached = usage["cache_read_input_tokens"].as_u64().unwrap();
    usage["input_tokens"] = json!(usage["input_tokens"].as_u64().unwrap() + cached);
    usage["cache_read_input_tokens"] = Value::Null;
    for block in message["content"].as_array_mut().unwrap() {
        block["id"] = Value::Null;
    }
    message
}

fn weather() -> Value {
    json!([{
        "name": "get_weather", "description": "Get the weather",
        "input_schema": { "type": "object", "properties": { "city": { "enum": ["Paris"] } }, "required": ["city"],
        "additionalProperties": false },
    }])
}

#[test]
fn answers_are_those_of_chat_completions_in_another_shape() {
    let server = Server::start(&[]);
    let chat = server.chat(json!({})).ok();
    let message = send(&server, json!({ "thinking": { "type": "adaptive" } })).ok();
    assert!(message["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!((&message["type"], &message["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!((&message["model"], &message["stop_reason"]), (&json!("demo"), &json!("end_turn")));
    assert!(message["stop_sequence"].is_null());
    let answer = &chat["choices"][0]["message"];
    let expected = json!([
        { "type": "thinking", "thinking": answer["reasoning"], "signature": "inferno" },
        { "type": "text", "text": answer["content"], "citations": null },
    ]);
    assert_eq!(message["content"], expected);
    let (usage, chat_usage) = (&message["usage"], &chat["usage"]);
    let count = |name: &str| usage[name].as_u64().unwrap();
    assert!(count("cache_read_input_tokens") >= 64, "{usage}");
    assert_eq!(count("input_tokens") + count("cache_read_input_tokens"), chat_usage["prompt_tokens"]);
    assert_eq!(usage["output_tokens"], chat_usage["completion_tokens"]);
    let reasoning = &chat_usage["completion_tokens_details"]["reasoning_tokens"];
    assert_eq!(usage["output_tokens_details"]["thinking_tokens"], *reasoning);
    // If a request has no `thinking` field, the model still reasons, but the response does not contain the reasoning.
    let hidden = send(&server, json!({})).ok();
    assert_eq!(hidden["content"], json!([{ "type": "text", "text": answer["content"], "citations": null }]));
    assert_eq!(hidden["usage"]["output_tokens"], usage["output_tokens"]);
    let mut counted = body(json!({}));
    counted.as_object_mut().unwrap().remove("max_tokens");
    let counted = server.post("/v1/messages/count_tokens", &counted).ok();
    assert_eq!(counted, json!({ "input_tokens": chat_usage["prompt_tokens"] }));
}

#[test]
fn streams_add_up_to_whole_messages() {
    let server = Server::start(&[]);
    let choice = json!({ "type": "tool", "name": "get_weather" });
    for fields in [
        json!({ "thinking": { "type": "enabled", "budget_tokens": 2000 } }),
        json!({}),
        json!({ "max_tokens": 9, "thinking": { "type": "adaptive" } }),
        json!({ "max_tokens": 1 }),
        json!({ "stop_sequences": ["never", "KV cache"] }),
        json!({ "tools": weather(), "tool_choice": choice, "thinking": { "type": "adaptive" } }),
    ] {
        let whole = send(&server, fields.clone()).ok();
        let mut streamed = fields.clone();
        streamed["stream"] = json!(true);
        let events = events(&send(&server, streamed));
        assert_eq!(comparable(collect(&events)), comparable(whole), "{fields}");
        let names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        assert_eq!(names[..2], ["message_start", "ping"]);
        assert_eq!(names[names.len() - 2..], ["message_delta", "message_stop"]);
        let start = &events[0]["message"];
        assert!(start["stop_reason"].is_null() && start["content"] == json!([]), "{start}");
        assert!(start["usage"]["input_tokens"].as_u64().unwrap() > 0 && start["usage"]["output_tokens"] == 0);
    }
}

#[test]
fn stop_reasons_tell_why_the_answer_ended() {
    let server = Server::start(&["--context", "256"]);
    let stop = |fields| {
        let message = send(&server, fields).ok();
        (message["stop_reason"].as_str().unwrap().to_string(), message["stop_sequence"].clone())
    };
    assert_eq!(stop(json!({ "max_tokens": 9 })), ("max_tokens".into(), Value::Null));
    assert_eq!(stop(json!({ "stop_sequences": ["never", "KV cache"] })), ("stop_sequence".into(), json!("KV cache")));
    let full = json!({ "max_tokens": 9999, "ignore_eos": true });
    assert_eq!(stop(full), ("model_context_window_exceeded".into(), Value::Null));
    let calls = json!({ "tools": weather(), "tool_choice": { "type": "any", "disable_parallel_tool_use": true } });
    assert_eq!(stop(calls), ("tool_use".into(), Value::Null));
}

#[test]
fn tools_and_their_results_make_a_conversation() {
    let server = Server::start(&[]);
    let question = json!({ "role": "user", "content": [{ "type": "text", "text": "What is the weather in Paris?" }] });
    let fields = json!({
        "messages": [question], "tools": weather(), "tool_choice": { "type": "any", "disable_parallel_tool_use": true },
        "thinking": { "type": "adaptive" },
    });
    let message = send(&server, fields).ok();
    let call = message["content"].as_array().unwrap().iter().find(|block| block["type"] == "tool_use").unwrap();
    assert!(call["id"].as_str().unwrap().starts_with("toolu_") && call["name"] == "get_weather", "{call}");
    assert!(call["input"]["city"] == "Paris", "{call}");

    // Send all content blocks of the answer back, with the result of the tool call.
    let result = |more: Value| {
        let result = json!({ "type": "tool_result", "tool_use_id": call["id"], "content": "sunny" });
        let result = merged(result, &more);
        let content = json!([result, { "type": "text", "text": "Be brief." }]);
        let turns = json!([question, { "role": "assistant", "content": message["content"] },
                           { "role": "user", "content": content }]);
        json!({ "messages": turns, "tools": weather(), "max_tokens": 5 })
    };
    let second = send(&server, result(json!({})));
    second.ok();
    assert!(second.header("x-inferno-ignored").is_none());
    let count = |fields| server.post("/v1/messages/count_tokens", &body(fields)).ok()["input_tokens"].as_u64().unwrap();
    let plain = count(result(json!({})));
    let parts = json!([{ "type": "text", "text": "sun" }, { "type": "text", "text": "ny" }]);
    assert_eq!(count(result(json!({ "content": parts, "is_error": false }))), plain);
    // If `is_error` is true, the prompt also tells the model that the call failed.
    assert!(count(result(json!({ "is_error": true }))) > plain);
    // If `tool_choice` is `none`, the prompt does not list the tools.
    let none = json!({ "tools": weather(), "tool_choice": { "type": "none" } });
    assert_eq!(count(none), count(json!({})));
    let system =
        json!({ "system": [{ "type": "text", "text": "Be kind.", "cache_control": { "type": "ephemeral" } }] });
    assert!(count(system) > count(json!({})));
}

#[test]
fn answers_match_a_schema() {
    let server = Server::start(&[]);
    let schema = json!({
        "type": "object", "properties": { "ok": { "type": "boolean" } }, "required": ["ok"], "additionalProperties": false,
    });
    let message =
        send(&server, json!({ "output_config": { "format": { "type": "json_schema", "schema": schema } } })).ok();
    let text = message["content"][0]["text"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(text).unwrap()["ok"].is_boolean(), "{text}");
}

#[test]
fn fields_without_effect_are_named_and_refused_in_strict_mode() {
    let server = Server::start(&[]);
    let ignored = json!({
        "metadata": { "user_id": "a" }, "service_tier": "auto", "cache_control": { "type": "ephemeral" }, "max_tokens": 3,
        "thinking": { "type": "enabled", "budget_tokens": 5000 }, "output_config": { "effort": "max" },
        "tools": [{ "type": "web_search_20250305", "name": "web_search" }],
        "messages": [
            { "role": "user", "content": [{ "type": "text", "text": "Hi", "cache_control": { "type": "ephemeral" } }] },
            { "role": "assistant", "content": [{ "type": "redacted_thinking", "data": "x" }, { "type": "text", "text": "Yes?" }] },
            { "role": "system", "content": "Be brief." },
            { "role": "user", "content": "What is the KV cache?" },
        ],
    });
    let response = send(&server, ignored.clone());
    response.ok();
    let named = response.header("x-inferno-ignored").unwrap();
    for name in [
        "metadata",
        "service_tier",
        "cache_control",
        "thinking.budget_tokens (5000 is treated as medium effort)",
        "output_config.effort (max is treated as high)",
        "tools[] (web_search_20250305)",
        "messages[].content[].cache_control",
        "messages[].content[] (redacted_thinking)",
    ] {
        assert!(named.split(", ").any(|field| field == name), "{name}: {named}");
    }
    let strict = [JSON, ("x-inferno-strict", "1")];
    let refused = server.send("POST", "/v1/messages", &strict, body(ignored).to_string().as_bytes());
    error(&refused, 400, "invalid_request_error");
}

#[test]
fn invalid_fields_are_refused_by_name() {
    let server = Server::start(&[]);
    let image = json!({ "type": "image", "source": { "type": "url", "url": "http://x" } });
    let user = |content: Value| json!({ "messages": [{ "role": "user", "content": content }] });
    for (fields, word) in [
        (json!({ "max_tokens": null }), "max_tokens"),
        (json!({ "max_tokens": 0 }), "max_tokens"),
        (json!({ "messages": [] }), "messages"),
        (json!({ "messages": [{ "role": "tool", "content": "x" }] }), "messages[0].role"),
        (json!({ "messages": [{ "role": "user" }] }), "messages[0].content"),
        (
            json!({ "messages": [{ "role": "assistant", "content": "The answer is" }] }),
            "invalid 'messages': inferno cannot continue an answer",
        ),
        (user(json!([image])), "messages[0].content[0].type"),
        (user(json!([{ "type": "tool_use", "id": "a", "name": "f", "input": {} }])), "messages[0].content[0].type"),
        (user(json!([{ "type": "tool_result", "content": "x" }])), "tool_use_id"),
        (
            user(json!([{ "type": "tool_result", "tool_use_id": "a", "content": [image] }])),
            "content[0].content[0].type",
        ),
        (json!({ "tools": [{ "name": "f" }] }), "input_schema"),
        (json!({ "tools": weather(), "tool_choice": { "type": "tool", "name": "other" } }), "tool_choice"),
        (json!({ "tools": weather(), "tool_choice": { "type": "tool" } }), "tool_choice.type"),
        (json!({ "thinking": { "type": "enabled" } }), "thinking.budget_tokens"),
        (json!({ "thinking": { "type": "maybe" } }), "thinking.type"),
        (json!({ "output_config": { "effort": "none" } }), "output_config.effort"),
        (json!({ "output_config": { "format": { "type": "json_object" } } }), "output_config.format.type"),
        (json!({ "stop_sequences": [""] }), "stop_sequences"),
        (json!({ "stop": ["x"] }), "use 'stop_sequences'"),
        (json!({ "mcp_servers": [{ "url": "x" }] }), "mcp_servers"),
        (json!({ "temperature": "hot" }), "temperature"),
    ] {
        let message = error(&send(&server, fields.clone()), 400, "invalid_request_error");
        assert!(message.contains(word), "{fields}: {message}");
    }
}

#[test]
fn requests_that_the_server_cannot_answer_are_refused() {
    let server = Server::start(&[]);
    let messages = json!([{ "role": "user", "content": "model ".repeat(5000) }]);
    let long = error(&send(&server, json!({ "messages": messages })), 400, "invalid_request_error");
    assert!(long.contains("maximum context length"), "{long}");
    let unknown = error(&send(&server, json!({ "model": "other" })), 404, "not_found_error");
    assert!(unknown.contains("'demo'"), "{unknown}");
    error(&server.get("/v1/messages"), 405, "invalid_request_error");
    error(&server.get("/v1/messages/batches"), 404, "not_found_error");
    let plain = server.send("POST", "/v1/messages", &[("Content-Type", "text/plain")], b"{}");
    error(&plain, 415, "invalid_request_error");
}

#[test]
fn the_key_can_come_in_the_header_of_anthropics_clients() {
    let server = Server::start(&["--api-key", "right"]);
    let body = body(json!({ "max_tokens": 3 })).to_string();
    let send =
        |headers: &[(&str, &str)]| server.send("POST", "/v1/messages", &[&[JSON], headers].concat(), body.as_bytes());
    send(&[("x-api-key", "right")]).ok();
    send(&[("Authorization", "Bearer right")]).ok();
    error(&send(&[("x-api-key", "wrong")]), 401, "authentication_error");
    error(&send(&[]), 401, "authentication_error");
}

#[test]
fn silent_streams_have_pings_and_failed_ones_an_error() {
    // While a long answer is running, the second request waits in the queue until the queue timeout.
    let arguments = ["--max-sequences", "1", "--ping-interval", "0.05", "--queue-timeout", "0.5"];
    let server = Server::start(&arguments);
    let long = server.begin("/v1/messages", &body(json!({ "max_tokens": 3000, "ignore_eos": true })));
    server.wait("the request is running", |server| server.metric("inferno_num_requests_running") == 1.0);
    let events = events(&send(&server, json!({ "stream": true })));
    let names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(names[0], "message_start");
    assert!(names[1..names.len() - 1].iter().all(|name| *name == "ping") && names.len() > 4, "{names:?}");
    let last = &events[events.len() - 1];
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("rate_limit_error")));
    drop(long);
    server.wait_until_idle();
}
