//! Compares whole answers with streams, for each API.

use serde_json::{Value, json};

/// Asserts that the events of a stream add up to the whole answer.
pub fn compare(path: &str, whole: &Value, events: &[Value]) {
    let (expected, found) = match path {
        "/v1/chat/completions" => (whole_chat(whole), streamed_chat(events)),
        "/v1/completions" => (json!(whole["choices"]), streamed_completion(whole, events)),
        "/v1/responses" => (whole_response(whole), streamed_response(events)),
        "/v1/messages" => (whole_message(whole), streamed_message(events)),
        _ => (ollama(std::slice::from_ref(whole)), ollama(events)),
    };
    assert_eq!(expected, found, "{path}: the stream differs from the whole answer");
}

/// Appends the string in `from` to the string in `to`. Does nothing if `from` is not a string.
fn append(to: &mut Value, from: &Value) {
    if let Some(text) = from.as_str() {
        *to = json!(format!("{}{text}", to.as_str().unwrap_or_default()));
    }
}

/// Appends the array in `from` to the array in `to`. Does nothing if `from` is not an array.
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

/// Returns the items of a response (without their ids), its status, the reason why it is incomplete, and its usage.
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
                    // As in a whole answer, blank text becomes an empty input.
                    // Other text that is not a JSON object becomes the field `arguments` of the input.
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
