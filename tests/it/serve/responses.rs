//! Tests of the Responses API, with and without streaming.

use std::io::BufReader;

use serde_json::{Value, json};

use super::client::{Response, Server, merged, read_chunk};

/// The keys of a response. OpenAI's schema has all of them except `store`, `presence_penalty` and `frequency_penalty`,
/// which the compliance suite of Open Responses requires.
const REQUIRED: [&str; 32] = [
    "id",
    "object",
    "created_at",
    "completed_at",
    "status",
    "incomplete_details",
    "model",
    "previous_response_id",
    "instructions",
    "output",
    "error",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "temperature",
    "reasoning",
    "user",
    "usage",
    "max_output_tokens",
    "max_tool_calls",
    "store",
    "background",
    "service_tier",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
];

/// Returns the body of a request: the demo model, a question and temperature 0.
/// `fields` adds fields and replaces these defaults.
pub fn body(fields: Value) -> Value {
    merged(json!({ "model": "demo", "input": "What is the KV cache?", "temperature": 0 }), &fields)
}

pub fn respond(server: &Server, fields: Value) -> Response {
    server.post("/v1/responses", &body(fields))
}

/// Parses the events of a stream. Checks the event names, the sequence numbers and the end of the stream.
pub fn parse_events(text: &str) -> Vec<Value> {
    let mut blocks: Vec<&str> = text.split("\n\n").filter(|block| !block.is_empty()).collect();
    assert_eq!(blocks.pop(), Some("data: [DONE]"), "{text}");
    let parse = |(index, block): (usize, &str)| {
        let (name, data) = block.split_once('\n').unwrap();
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), event["type"].as_str(), "{block}");
        assert_eq!(event["sequence_number"], index, "{block}");
        event
    };
    blocks.into_iter().enumerate().map(parse).collect()
}

fn stream(server: &Server, mut fields: Value) -> Vec<Value> {
    fields["stream"] = json!(true);
    let response = respond(server, fields);
    assert_eq!(response.status, 200, "{}", response.text());
    parse_events(&response.text())
}

/// Combines the events of a stream into output items.
/// Checks that the events of an item come after the item is added and before it is done.
fn collect(events: &[Value]) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    for event in events {
        let kind = event["type"].as_str().unwrap();
        let index = event["output_index"].as_u64().map(|index| index as usize);
        if kind == "response.output_item.added" {
            assert_eq!(index, Some(items.len()), "{event}");
            assert_eq!(event["item"]["status"], "in_progress");
            items.push(json!({ "id": event["item"]["id"], "type": event["item"]["type"], "text": "" }));
        } else if let Some(item) = index.map(|index| &mut items[index]) {
            assert_eq!(item.get("done"), None, "{event}");
            assert_eq!(event.get("item_id").unwrap_or(&event["item"]["id"]), &item["id"], "{event}");
            if let Some(delta) = event["delta"].as_str() {
                item["text"] = json!(item["text"].as_str().unwrap().to_string() + delta);
            }
            if kind == "response.output_item.done" {
                item["done"] = event["item"].clone();
            }
        }
    }
    items
}

/// Sets the values that may differ between two responses to the same request to null.
fn comparable(response: &Value) -> Value {
    let mut response = response.clone();
    for key in ["id", "created_at", "completed_at", "usage"] {
        response[key] = json!(null);
    }
    response["output"].as_array_mut().unwrap().iter_mut().for_each(|item| item["id"] = json!(null));
    response
}

#[test]
fn whole_responses_have_all_keys() {
    let server = Server::start(&[]);
    let response = respond(&server, json!({ "metadata": { "a": "b" }, "instructions": "Be brief." }));
    let json = response.ok();
    let keys = json.as_object().unwrap();
    assert!(REQUIRED.iter().all(|key| keys.contains_key(*key)) && keys.len() == REQUIRED.len(), "{json}");
    assert!(response.header("x-inferno-ignored").is_none());
    for (key, value) in [
        ("object", json!("response")),
        ("status", json!("completed")),
        ("model", json!("demo")),
        ("error", json!(null)),
        ("incomplete_details", json!(null)),
        ("instructions", json!("Be brief.")),
        ("metadata", json!({ "a": "b" })),
        ("tools", json!([])),
        ("tool_choice", json!("auto")),
        ("truncation", json!("disabled")),
        ("text", json!({ "format": { "type": "text" } })),
        ("temperature", json!(0.0)),
        ("store", json!(true)),
        ("background", json!(false)),
        ("reasoning", json!({ "effort": "medium", "summary": null })),
    ] {
        assert_eq!(json[key], value, "{key}");
    }
    assert!(json["id"].as_str().unwrap().starts_with("resp_"));
    assert!(json["created_at"].as_u64() <= json["completed_at"].as_u64() && json["completed_at"].is_u64());
    let [reasoning, message] = &json["output"].as_array().unwrap()[..] else { panic!("{json}") };
    assert_eq!((&reasoning["type"], &reasoning["summary"]), (&json!("reasoning"), &json!([])));
    assert_eq!(reasoning["content"][0]["type"], "reasoning_text");
    assert!(!reasoning["content"][0]["text"].as_str().unwrap().is_empty());
    assert_eq!(
        (&message["type"], &message["role"], &message["status"]),
        (&json!("message"), &json!("assistant"), &json!("completed"))
    );
    let part = &message["content"][0];
    assert!(part["text"].as_str().unwrap().contains("keys and values"), "{part}");
    assert_eq!(
        (&part["type"], &part["annotations"], &part["logprobs"]),
        (&json!("output_text"), &json!([]), &json!([]))
    );
    let usage = &json["usage"];
    let count = |name: &str| usage[name].as_u64().unwrap();
    assert_eq!(count("total_tokens"), count("input_tokens") + count("output_tokens"));
    assert_eq!(usage["input_tokens_details"]["cached_tokens"], 0);
    let reasoning_tokens = usage["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!((1..count("output_tokens")).contains(&reasoning_tokens), "{usage}");
}

#[test]
fn responses_equal_chat_completions() {
    let server = Server::start(&[]);
    for fields in [json!({}), json!({ "reasoning_effort": "high" }), json!({ "temperature": 1.5, "seed": 7 })] {
        let chat = server.chat(fields.clone()).ok();
        let json = respond(&server, fields.clone()).ok();
        let message = &chat["choices"][0]["message"];
        let [reasoning, answer] = &json["output"].as_array().unwrap()[..] else { panic!("{json}") };
        assert_eq!(reasoning["content"][0]["text"], message["reasoning"], "{fields}");
        assert_eq!(answer["content"][0]["text"], message["content"], "{fields}");
        assert_eq!(json["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
        assert_eq!(json["usage"]["output_tokens"], chat["usage"]["completion_tokens"]);
    }
}

#[test]
fn streams_add_up_to_whole_responses() {
    let server = Server::start(&[]);
    let logprobs = json!({ "include": ["message.output_text.logprobs"], "top_logprobs": 2 });
    for fields in [
        json!({}),
        json!({ "max_output_tokens": 3 }),
        json!({ "max_output_tokens": 12 }),
        json!({ "stop": "memory", "instructions": "Be brief." }),
        json!({ "include_reasoning": false }),
        json!({ "include": ["reasoning.encrypted_content"], "store": false }),
        json!({ "input": "Ünïcödé 🦀 你好?", "temperature": 2, "seed": 3, "max_output_tokens": 60 }),
        logprobs,
    ] {
        let whole = respond(&server, fields.clone()).ok();
        let events = stream(&server, fields.clone());
        let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        assert_eq!(kinds[..2], ["response.created", "response.in_progress"]);
        let last = events.last().unwrap();
        let is_cut = fields["max_output_tokens"] == whole["usage"]["output_tokens"];
        let status = if is_cut { "incomplete" } else { "completed" };
        assert_eq!(last["type"], format!("response.{status}"), "{fields}");
        assert_eq!(last["response"]["status"], status, "{fields}");
        for event in &events[..2] {
            let response = &event["response"];
            assert_eq!((&response["status"], &response["output"]), (&json!("in_progress"), &json!([])));
            assert!(response["usage"].is_null() && response["completed_at"].is_null());
            assert_eq!(response["id"], last["response"]["id"]);
        }
        assert_eq!(comparable(&last["response"]), comparable(&whole), "{fields}");
        assert_eq!(last["response"]["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
        let items = collect(&events);
        assert_eq!(items.len(), whole["output"].as_array().unwrap().len());
        for (item, whole) in items.iter().zip(last["response"]["output"].as_array().unwrap()) {
            assert_eq!((&item["done"], &item["text"]), (whole, &whole["content"][0]["text"]));
        }
        let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
        let tokens: Vec<&Value> = deltas.flat_map(|event| event["logprobs"].as_array().unwrap()).collect();
        let message = whole["output"].as_array().unwrap().iter().find(|item| item["type"] == "message");
        let expected =
            message.map_or(Vec::new(), |item| item["content"][0]["logprobs"].as_array().unwrap().iter().collect());
        assert_eq!(tokens, expected, "{fields}");
        assert_eq!(tokens.is_empty(), fields.get("top_logprobs").is_none(), "{fields}");
    }
}

#[test]
fn cut_responses_say_why() {
    let server = Server::start(&[]);
    let json = respond(&server, json!({ "max_output_tokens": 12 })).ok();
    assert_eq!((&json["status"], &json["max_output_tokens"]), (&json!("incomplete"), &json!(12)));
    assert_eq!(json["incomplete_details"], json!({ "reason": "max_output_tokens" }));
    assert!(json["completed_at"].is_null());
    let last = json["output"].as_array().unwrap().last().unwrap();
    assert_eq!(last["status"], "incomplete");
}

#[test]
fn waiting_streams_repeat_their_state_and_fail_with_a_delay() {
    let server =
        Server::start(&["--max-sequences", "1", "--ping-interval", "0.05", "--queue-timeout", "0.5", "--queue", "1"]);
    let endless = body(json!({ "stream": true, "ignore_eos": true, "max_output_tokens": 3000 }));
    let _first = server.begin("/v1/responses", &endless);
    server.wait("the first request is running", |server| server.metric("inferno_num_requests_running") == 1.0);
    let mut waiting = BufReader::new(server.begin("/v1/responses", &endless));
    assert_eq!(Response::read_head(&mut waiting).status, 200);
    // The queue is full, so the server refuses another request.
    let error = respond(&server, json!({ "stream": true })).error(429);
    assert_eq!(error["code"], "rate_limit_exceeded");
    assert!(error["message"].as_str().unwrap().contains("try again in "), "{error}");
    let mut text = Vec::new();
    while let Some(chunk) = read_chunk(&mut waiting) {
        text.extend(chunk);
    }
    let events = parse_events(&String::from_utf8(text).unwrap());
    let (failed, states) = events.split_last().unwrap();
    assert!(states.len() >= 4, "{states:?}");
    assert!(states[1..].iter().all(|event| event["type"] == "response.in_progress"), "{states:?}");
    assert_eq!((&failed["type"], &failed["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    let error = &failed["response"]["error"];
    assert_eq!(error["code"], "rate_limit_exceeded");
    // The error message contains the retry delay, because Codex reads the delay from the message.
    let delay = error["message"].as_str().unwrap().split_once("try again in ").unwrap().1;
    assert!(delay.strip_suffix('s').unwrap().parse::<u64>().unwrap() >= 1, "{error}");
}
