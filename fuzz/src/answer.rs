//! Fuzzes answers: a stream must add up to the whole answer.

use inferno::engine::scripted::Script;
use serde_json::{Value, json};

use super::MAX_BYTES;
use super::compare::compare;
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
    // Null counts as absent.
    let stop = json!(has(0).then_some(["e", "the answer"]));
    let max_tokens = if limit == 0 { 4096 } else { u64::from(limit) };
    match path {
        "/v1/chat/completions" => {
            set("messages", messages);
            set("max_tokens", json!(max_tokens));
            set("n", json!(1 + u8::from(has(2))));
            set("include_reasoning", json!(!has(3)));
            set("logprobs", json!(has(1)));
            set("parallel_tool_calls", json!(!has(4)));
            set("stop", stop);
        }
        "/v1/completions" => {
            set("prompt", json!("Hello"));
            set("max_tokens", json!(max_tokens));
            set("n", json!(1 + u8::from(has(2))));
            has(1).then(|| set("logprobs", json!(1)));
            set("echo", json!(has(3) && !has(1)));
            set("stop", stop);
        }
        "/v1/responses" => {
            set("input", json!("Hello"));
            set("store", json!(false));
            set("max_output_tokens", json!(max_tokens));
            set("parallel_tool_calls", json!(!has(4)));
            has(1).then(|| set("include", json!(["message.output_text.logprobs", "reasoning.encrypted_content"])));
            set("stop", stop);
        }
        "/v1/messages" => {
            set("messages", messages);
            set("max_tokens", json!(max_tokens));
            has(3).then(|| set("thinking", json!({ "type": "enabled", "budget_tokens": 2048 })));
            set("stop_sequences", stop);
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
            options["stop"] = stop;
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
