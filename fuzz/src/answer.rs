//! Fuzzes answers: a stream must add up to the whole answer.

use inferno::engine::scripted::Script;
use serde_json::{Value, json};

use super::MAX_BYTES;
use super::language::to_ids;
use super::server::{Harness, MODEL, check_error};

const ROUTES: [&str; 6] =
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"];

/// Answers one request as a whole and as a stream, with the same tokens, and compares both.
///
/// The first three bytes select the route and the options. The others are the tokens.
pub fn answer(data: &[u8]) {
    let [route, options, limit, tokens @ ..] = data else { return };
    if tokens.len() > MAX_BYTES / 8 {
        return;
    }
    let path = ROUTES[usize::from(*route) % ROUTES.len()];
    let mut body = body(path, *options, *limit);
    let has_usage = options & 32 != 0 && path.ends_with("completions");
    Harness::with(|harness| {
        harness.set_script(Script { tokens: to_ids(tokens), fails: options & 128 != 0 });
        let mut send = |is_stream: bool| {
            body["stream"] = json!(is_stream);
            if is_stream && has_usage {
                body["stream_options"] = json!({ "include_usage": true, "continuous_usage_stats": options & 64 != 0 });
            }
            harness.post(path, body.to_string().into_bytes())
        };
        let (whole, streamed) = (send(false), send(true));
        let text = String::from_utf8(streamed.body).expect("a stream is text");
        assert_eq!(streamed.status, 200, "{path}: {text}");
        let events = if path.starts_with("/api") { lines(&text) } else { events(&text) };
        let whole_body: Value = serde_json::from_slice(&whole.body).expect("a response is JSON");
        match whole.status {
            200 => {
                compare(path, &whole_body, &events);
                assert!(!has_usage || events[events.len() - 1]["usage"] == whole_body["usage"], "{path}: {text}");
            }
            500 => {
                check_error(path, &whole_body);
                check_failed(path, &events);
            }
            status => panic!("{path}: {status} {whole_body}"),
        }
    });
}

/// Returns the body of a request. Each bit of `options` is an option.
fn body(path: &str, options: u8, limit: u8) -> Value {
    let has = |bit: u8| options & (1 << bit) != 0;
    let messages = json!([{ "role": "user", "content": "Hello" }]);
    let tool = json!({ "name": "f", "parameters": { "type": "object" } });
    let mut body = json!({ "model": MODEL });
    let mut set = |name: &str, value: Value| body[name] = value;
    let stop = has(0).then(|| json!(["e", "the answer"]));
    let max_tokens = if limit == 0 { 4096 } else { u64::from(limit) };
    match path {
        "/v1/chat/completions" => {
            set("messages", messages);
            set("max_tokens", json!(max_tokens));
            set("n", json!(1 + u8::from(has(2))));
            set("include_reasoning", json!(!has(3)));
            set("logprobs", json!(has(1)));
            set("parallel_tool_calls", json!(!has(4)));
            stop.map(|stop| set("stop", stop));
        }
        "/v1/completions" => {
            set("prompt", json!("Hello"));
            set("max_tokens", json!(max_tokens));
            set("n", json!(1 + u8::from(has(2))));
            has(1).then(|| set("logprobs", json!(1)));
            set("echo", json!(has(3) && !has(1)));
            stop.map(|stop| set("stop", stop));
        }
        "/v1/responses" => {
            set("input", json!("Hello"));
            set("store", json!(false));
            set("max_output_tokens", json!(max_tokens));
            set("parallel_tool_calls", json!(!has(4)));
            has(1).then(|| set("include", json!(["message.output_text.logprobs", "reasoning.encrypted_content"])));
            stop.map(|stop| set("stop", stop));
        }
        "/v1/messages" => {
            set("messages", messages);
            set("max_tokens", json!(max_tokens));
            has(3).then(|| set("thinking", json!({ "type": "enabled", "budget_tokens": 2048 })));
            stop.map(|stop| set("stop_sequences", stop));
            let mut choice = json!({ "type": "auto" });
            choice["disable_parallel_tool_use"] = json!(has(4));
            set("tools", json!([{ "name": "f", "input_schema": { "type": "object" } }]));
            set("tool_choice", choice);
        }
        _ => {
            let is_chat = path == "/api/chat";
            if is_chat {
                set("messages", messages);
                has(4).then(|| set("tools", json!([{ "type": "function", "function": tool }])));
            } else {
                set("prompt", json!("Hello"));
            }
            set("think", json!(!has(3)));
            set("logprobs", json!(has(1)));
            let mut options = json!({ "num_predict": max_tokens });
            stop.map(|stop| options["stop"] = stop);
            set("options", options);
        }
    }
    body
}

/// Splits a stream into the JSON of its events. Checks that each event is complete.
pub fn events(text: &str) -> Vec<Value> {
    assert!(text.ends_with("\n\n"), "the last event has no end: {text:?}");
    let mut events = Vec::new();
    let mut is_done = false;
    for event in text[..text.len() - 2].split("\n\n") {
        assert!(!is_done, "an event follows [DONE]: {event:?}");
        let (name, data) = match event.strip_prefix("event: ").and_then(|rest| rest.split_once('\n')) {
            Some((name, data)) => (Some(name), data),
            None => (None, event),
        };
        if data == ": ping" {
            continue;
        }
        let data = data.strip_prefix("data: ").unwrap_or_else(|| panic!("an event without data: {event:?}"));
        assert!(!data.contains(['\n', '\r']), "an event with several lines: {event:?}");
        if data == "[DONE]" {
            is_done = true;
            continue;
        }
        let json: Value = serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {event:?}"));
        assert!(json.is_object(), "{event:?}");
        assert!(name.is_none_or(|name| json["type"] == name), "{event:?}");
        events.push(json);
    }
    events
}

/// Splits a stream into its lines of JSON.
pub fn lines(text: &str) -> Vec<Value> {
    assert!(text.ends_with('\n'), "the last line has no end: {text:?}");
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line:?}"))).collect()
}

/// Checks that the stream of a failed answer ends with an error.
fn check_failed(path: &str, events: &[Value]) {
    let last = events.last().expect("an event");
    if path == "/v1/responses" {
        assert_eq!(
            (&last["type"], &last["response"]["status"]),
            (&json!("response.failed"), &json!("failed")),
            "{last}"
        );
    } else {
        check_error(path, last);
    }
}

/// Compares a whole answer with the events of a stream.
fn compare(path: &str, whole: &Value, events: &[Value]) {
    let (expected, found) = match path {
        "/v1/chat/completions" => (whole_chat(whole), streamed_chat(events)),
        "/v1/completions" => (json!(whole["choices"]), streamed_completion(whole, events)),
        "/v1/responses" => (whole_response(whole), streamed_response(events)),
        "/v1/messages" => (whole_message(whole), streamed_message(events)),
        _ => (ollama(std::slice::from_ref(whole)), ollama(events)),
    };
    assert_eq!(expected, found, "{path}: the stream differs from the whole answer");
}

/// Appends the string in `from` to the string in `to`.
fn append(to: &mut Value, from: &Value) {
    if let Some(text) = from.as_str() {
        *to = json!(format!("{}{text}", to.as_str().unwrap_or_default()));
    }
}

/// Appends the array in `from` to the array in `to`.
fn extend(to: &mut Value, from: &Value) {
    if let Some(items) = from.as_array() {
        let mut all = to.as_array().cloned().unwrap_or_default();
        all.extend(items.iter().cloned());
        *to = json!(all);
    }
}

fn empty_choice() -> Value {
    json!({ "content": "", "reasoning": "", "calls": [], "finish": null, "logprobs": [] })
}

fn whole_chat(whole: &Value) -> Value {
    let choice = |choice: &Value| {
        let message = &choice["message"];
        let mut out = empty_choice();
        append(&mut out["content"], &message["content"]);
        append(&mut out["reasoning"], &message["reasoning"]);
        let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
        out["calls"] =
            calls.iter().map(|call| json!([call["function"]["name"], call["function"]["arguments"]])).collect();
        out["finish"] = choice["finish_reason"].clone();
        extend(&mut out["logprobs"], &choice["logprobs"]["content"]);
        out
    };
    whole["choices"].as_array().unwrap().iter().map(choice).collect()
}

fn streamed_chat(events: &[Value]) -> Value {
    let mut choices: Vec<Value> = Vec::new();
    for event in events {
        assert_eq!((&event["id"], &event["object"]), (&events[0]["id"], &json!("chat.completion.chunk")), "{event}");
        for part in event["choices"].as_array().unwrap() {
            let index = part["index"].as_u64().unwrap() as usize;
            choices.resize(choices.len().max(index + 1), empty_choice());
            let (out, delta) = (&mut choices[index], &part["delta"]);
            assert!(out["finish"].is_null(), "a chunk follows the finish reason: {event}");
            append(&mut out["content"], &delta["content"]);
            append(&mut out["reasoning"], &delta["reasoning"]);
            extend(&mut out["logprobs"], &part["logprobs"]["content"]);
            out["finish"] = part["finish_reason"].clone();
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                let place = call["index"].as_u64().unwrap() as usize;
                let calls = out["calls"].as_array_mut().unwrap();
                if call.get("id").is_some() {
                    assert_eq!(place, calls.len(), "{event}");
                    calls.push(json!([call["function"]["name"], ""]));
                }
                append(&mut calls[place][1], &call["function"]["arguments"]);
            }
        }
    }
    json!(choices)
}

fn streamed_completion(whole: &Value, events: &[Value]) -> Value {
    // Starts from the whole answer without its contents, so that the fields are the same.
    let mut choices = whole["choices"].clone();
    for choice in choices.as_array_mut().unwrap() {
        choice["text"] = json!("");
        choice["finish_reason"] = Value::Null;
        if let Some(logprobs) = choice["logprobs"].as_object_mut() {
            logprobs.values_mut().for_each(|values| *values = json!([]));
        }
    }
    for part in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        let out = &mut choices[part["index"].as_u64().unwrap() as usize];
        assert!(out["finish_reason"].is_null(), "a chunk follows the finish reason: {part}");
        append(&mut out["text"], &part["text"]);
        out["finish_reason"] = part["finish_reason"].clone();
        for (name, values) in part["logprobs"].as_object().into_iter().flatten() {
            extend(&mut out["logprobs"][name], values);
        }
    }
    choices
}

/// Returns the items of a response without their ids, its status and its usage.
fn whole_response(response: &Value) -> Value {
    let mut items = response["output"].clone();
    for item in items.as_array_mut().unwrap() {
        let item = item.as_object_mut().unwrap();
        item.shift_remove("id");
        item.shift_remove("call_id");
    }
    json!([items, response["status"], response["incomplete_details"], response["usage"]])
}

fn streamed_response(events: &[Value]) -> Value {
    let mut texts: Vec<String> = Vec::new();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number, "{event}");
        let index = || event["output_index"].as_u64().unwrap() as usize;
        match event["type"].as_str().unwrap() {
            "response.output_item.added" => {
                assert_eq!(index(), texts.len(), "{event}");
                texts.push(String::new());
            }
            kind if kind.ends_with(".delta") => {
                assert_eq!(index() + 1, texts.len(), "a delta of an item that has ended: {event}");
                texts[index()].push_str(event["delta"].as_str().unwrap());
            }
            _ => {}
        }
    }
    let response = &events.last().expect("an event")["response"];
    let items = response["output"].as_array().unwrap();
    assert_eq!(items.len(), texts.len(), "{response}");
    for (item, text) in items.iter().zip(texts) {
        let whole = item["content"][0]["text"].as_str().or(item["arguments"].as_str());
        assert_eq!(whole, Some(text.as_str()), "{item}");
    }
    whole_response(response)
}

fn whole_message(whole: &Value) -> Value {
    let mut content = whole["content"].clone();
    for block in content.as_array_mut().unwrap() {
        block.as_object_mut().unwrap().shift_remove("id");
    }
    json!([content, whole["stop_reason"], whole["stop_sequence"], whole["usage"]])
}

fn streamed_message(events: &[Value]) -> Value {
    let (mut blocks, mut input, mut end) = (Vec::<Value>::new(), String::new(), json!([]));
    let mut is_open = false;
    for event in events {
        if let Some(index) = event["index"].as_u64() {
            let is_start = event["type"] == "content_block_start";
            assert_eq!(index as usize, blocks.len() - usize::from(!is_start), "{event}");
            assert_eq!(is_open, !is_start, "{event}");
        }
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                let mut block = event["content_block"].clone();
                block.as_object_mut().unwrap().shift_remove("id");
                blocks.push(block);
                is_open = true;
            }
            "content_block_delta" => {
                let (block, delta) = (blocks.last_mut().unwrap(), &event["delta"]);
                for name in ["text", "thinking", "signature"] {
                    append(&mut block[name], &delta[name]);
                    if block[name].is_null() {
                        block.as_object_mut().unwrap().shift_remove(name);
                    }
                }
                input.push_str(delta["partial_json"].as_str().unwrap_or_default());
            }
            "content_block_stop" => {
                let block = blocks.last_mut().unwrap();
                if block["type"] == "tool_use" {
                    // Arguments that are no object become its only field, as in the whole answer.
                    let text = std::mem::take(&mut input);
                    block["input"] = match serde_json::from_str(&text) {
                        Ok(Value::Object(map)) => Value::Object(map),
                        _ if text.trim().is_empty() => json!({}),
                        _ => json!({ "arguments": text }),
                    };
                }
                is_open = false;
            }
            "message_delta" => {
                let delta = &event["delta"];
                end = json!([delta["stop_reason"], delta["stop_sequence"], event["usage"]]);
            }
            _ => {}
        }
    }
    assert_eq!(events.last().expect("an event")["type"], "message_stop");
    json!([blocks, end[0], end[1], end[2]])
}

/// Adds up the parts of an answer in ollama's API.
fn ollama(parts: &[Value]) -> Value {
    let mut out = json!({ "content": "", "thinking": "", "calls": [], "logprobs": [] });
    for (index, part) in parts.iter().enumerate() {
        assert_eq!(part["done"], index + 1 == parts.len(), "{part}");
        let message = if part["message"].is_object() { &part["message"] } else { part };
        append(&mut out["content"], &message["content"]);
        append(&mut out["content"], &message["response"]);
        append(&mut out["thinking"], &message["thinking"]);
        extend(&mut out["calls"], &message["tool_calls"]);
        extend(&mut out["logprobs"], &part["logprobs"]);
        out["end"] = json!([part["done_reason"], part["prompt_eval_count"], part["eval_count"]]);
    }
    out
}
