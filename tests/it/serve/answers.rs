//! Tests of chat and text completions, with and without streaming.

use serde_json::{Value, json};

use super::client::{Server, chat, merged};

/// Joins the deltas of one choice. Returns the content, the reasoning and the finish reason.
fn collect(events: &[Value], index: usize) -> (String, String, String) {
    let (mut content, mut reasoning, mut finish) = (String::new(), String::new(), String::new());
    let choices = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
    for choice in choices.filter(|choice| choice["index"] == index) {
        assert!(finish.is_empty(), "choice {index}: an event follows the finish reason");
        content.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        reasoning.push_str(choice["delta"]["reasoning"].as_str().unwrap_or_default());
        finish.push_str(choice["finish_reason"].as_str().unwrap_or_default());
    }
    (content, reasoning, finish)
}

#[test]
fn whole_answers_have_the_shape_of_openai() {
    let server = Server::start(&[]);
    let response = server.chat(json!({}));
    let json = response.ok();
    assert_eq!(response.header("content-type"), Some("application/json"));
    assert!(response.header("x-inferno-ignored").is_none() && response.header("x-request-id").is_some());
    assert!(json["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!((&json["object"], &json["model"]), (&json!("chat.completion"), &json!("demo")));
    assert!(json["created"].is_u64() && json["system_fingerprint"].is_string());
    let choice = &json["choices"][0];
    let message = &choice["message"];
    assert!(message["content"].as_str().unwrap().contains("keys and values"), "{message}");
    assert!(!message["reasoning"].as_str().unwrap().is_empty() && message.get("reasoning_content").is_none());
    assert_eq!(message["role"], "assistant");
    assert!(message["refusal"].is_null() && choice["logprobs"].is_null());
    assert_eq!(choice["finish_reason"], "stop");
    let usage = &json["usage"];
    let count = |name: &str| usage[name].as_u64().unwrap();
    assert_eq!(count("total_tokens"), count("prompt_tokens") + count("completion_tokens"));
    let reasoning_tokens = usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!((1..count("completion_tokens")).contains(&reasoning_tokens), "{usage}");
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);

    // A second, identical request reuses the cached blocks of the prompt.
    let second = server.chat(json!({})).ok();
    assert!(second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() >= 64, "{second}");
    let hidden = server.chat(json!({ "include_reasoning": false })).ok();
    assert!(hidden["choices"][0]["message"].get("reasoning").is_none());
    assert_eq!(hidden["usage"]["completion_tokens_details"]["reasoning_tokens"], reasoning_tokens);
}

#[test]
fn streams_add_up_to_whole_answers() {
    let server = Server::start(&[]);
    for fields in [
        json!({}),
        json!({ "stop": ["memory", "needs only"] }),
        json!({ "max_tokens": 9 }),
        json!({ "max_completion_tokens": 9, "max_tokens": 500 }),
        json!({ "include_reasoning": false }),
        json!({ "n": 3, "temperature": 1, "seed": 5, "logprobs": true, "top_logprobs": 2 }),
        json!({ "logprobs": true, "stop": [".#", " #", "e#"] }),
        json!({ "reasoning": { "effort": "high", "exclude": true } }),
        json!({ "messages": [{ "role": "user", "content": "Ünïcödé 🦀 你好?" }], "temperature": 2, "seed": 3, "max_tokens": 60 }),
    ] {
        let whole = server.chat(fields.clone()).ok();
        let mut streamed = chat(fields.clone());
        streamed["stream"] = json!(true);
        streamed["stream_options"] = json!({ "include_usage": true });
        let events = server.post("/v1/chat/completions", &streamed).events();
        for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
            let message = &choice["message"];
            let (content, reasoning, finish) = collect(&events, index);
            assert_eq!(content, message["content"].as_str().unwrap(), "{fields}");
            assert_eq!(reasoning, message["reasoning"].as_str().unwrap_or_default(), "{fields}");
            assert_eq!(finish, choice["finish_reason"], "{fields}");
            let logprobs = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
            let logprobs = logprobs.filter(|part| part["index"] == index && part["logprobs"].is_object());
            let logprobs: Vec<&Value> =
                logprobs.flat_map(|part| part["logprobs"]["content"].as_array().unwrap()).collect();
            let expected: Vec<&Value> = choice["logprobs"]["content"].as_array().into_iter().flatten().collect();
            assert_eq!(logprobs, expected, "{fields}");
        }
        // Only the last event of the stream contains usage numbers. That event has no choices.
        let (last, others) = events.split_last().unwrap();
        assert_eq!(last["choices"], json!([]));
        assert_eq!(last["usage"]["completion_tokens"], whole["usage"]["completion_tokens"], "{fields}");
        assert!(others.iter().all(|event| event["usage"].is_null() && event.get("usage").is_some()));
        assert!(events.iter().all(|event| event["id"] == last["id"] && event["object"] == "chat.completion.chunk"));
    }
}

#[test]
fn a_stream_begins_with_the_role_and_ends_with_the_finish_reason() {
    let server = Server::start(&[]);
    let events = server.chat(json!({ "stream": true })).events();
    assert_eq!(events[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    assert!(events[1]["choices"][0]["delta"]["reasoning"].is_string(), "{}", events[1]);
    let last = &events.last().unwrap()["choices"][0];
    assert_eq!((&last["delta"], &last["finish_reason"]), (&json!({}), &json!("stop")));
    assert!(events.iter().all(|event| event.get("usage").is_none()));
    let options = json!({ "include_usage": true, "continuous_usage_stats": true });
    let events = server.chat(json!({ "stream": true, "stream_options": options })).events();
    let counts: Vec<u64> = events.iter().map(|event| event["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert!(counts.is_sorted() && counts[0] > 0, "{counts:?}");
}

#[test]
fn choice_i_equals_the_answer_to_seed_plus_i() {
    let server = Server::start(&[]);
    let fields = |seed: u64, n: u64| json!({ "temperature": 1.5, "seed": seed, "n": n, "max_tokens": 30 });
    let all = server.chat(fields(40, 3)).ok();
    for index in 0..3 {
        let alone = server.chat(fields(40 + index, 1)).ok();
        assert_eq!(all["choices"][index as usize]["message"], alone["choices"][0]["message"], "{index}");
    }
}

#[test]
fn stop_strings_end_the_answer_and_never_the_reasoning() {
    let server = Server::start(&[]);
    let full = server.chat(json!({})).ok();
    let message = &full["choices"][0]["message"];
    let (content, reasoning) = (message["content"].as_str().unwrap(), message["reasoning"].as_str().unwrap());
    // The stop string must also occur in the reasoning, to show that it does not end the reasoning.
    assert!(content.contains("KV cache") && reasoning.contains("KV cache"), "{message}");
    let stopped = server.chat(json!({ "stop": "KV cache" })).ok();
    let message = &stopped["choices"][0]["message"];
    assert_eq!(message["content"], content.split("KV cache").next().unwrap());
    assert_eq!(message["reasoning"], reasoning);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    server.wait_until_idle();
    assert_eq!(server.metric("inferno_canceled_sequences_total"), 0.0);
}

#[test]
fn logprobs_cover_the_content_with_its_bytes() {
    let server = Server::start(&[]);
    let json = server.chat(json!({ "logprobs": true, "top_logprobs": 3 })).ok();
    let choice = &json["choices"][0];
    let entries = choice["logprobs"]["content"].as_array().unwrap();
    let bytes = |entry: &Value| -> Vec<u8> { serde_json::from_value(entry["bytes"].clone()).unwrap() };
    let text: Vec<u8> = entries.iter().flat_map(bytes).collect();
    assert_eq!(String::from_utf8(text).unwrap(), choice["message"]["content"].as_str().unwrap());
    for entry in entries {
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        // At temperature 0, the server chooses the most likely token.
        assert_eq!((&top[0]["token"], &top[0]["logprob"]), (&entry["token"], &entry["logprob"]));
        assert!(entry["logprob"].as_f64().unwrap() <= 0.0);
    }
    let json = server.chat(json!({ "logprobs": true, "max_tokens": 20 })).ok();
    assert_eq!(json["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
}

/// A stop string that begins like the end of the answer holds the end back until the answer ends.
#[test]
fn logprobs_cover_text_that_was_held_back() {
    let server = Server::start(&[]);
    // The first request puts the prompt into the KV cache. All later requests then compute the same part of the prompt,
    // so that their log probabilities are equal.
    server.chat(json!({})).ok();
    let plain = server.chat(json!({ "logprobs": true })).ok();
    let plain = &plain["choices"][0];
    let content = plain["message"]["content"].as_str().unwrap();
    for bytes in [1, 4, 15] {
        let start = content.floor_char_boundary(content.len() - bytes);
        let fields = json!({ "logprobs": true, "stop": format!("{}#", &content[start..]) });
        let held = server.chat(fields.clone()).ok();
        assert_eq!(held["choices"][0]["message"]["content"], *content);
        assert_eq!(held["choices"][0]["logprobs"], plain["logprobs"], "{fields}");
    }
}

#[test]
fn completions_continue_texts_and_token_ids() {
    let server = Server::start(&[]);
    let complete = |fields: Value| {
        let defaults = json!({ "temperature": 0, "max_tokens": 8 });
        server.post("/v1/completions", &merged(defaults, &fields)).ok()
    };
    let text = complete(json!({ "prompt": "To download a model" }));
    assert_eq!(text["object"], "text_completion");
    let tokens = server.post("/tokenize", &json!({ "prompt": "To download a model" })).ok();
    let ids = complete(json!({ "prompt": tokens["tokens"] }));
    assert_eq!(text["choices"][0]["text"], ids["choices"][0]["text"]);
    assert_eq!(text["usage"]["prompt_tokens"], tokens["count"]);

    let several = complete(json!({ "prompt": ["To download a model", "The KV cache"], "n": 2, "echo": true }));
    let choices = several["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    for (index, choice) in choices.iter().enumerate() {
        let prompt = ["To download a model", "The KV cache"][index / 2];
        assert!(choice["text"].as_str().unwrap().starts_with(prompt), "{choice}");
        assert_eq!(choice["index"], index);
    }
    assert_eq!(several["usage"]["completion_tokens"], 32);

    let scored = complete(json!({ "prompt": "The KV cache", "logprobs": 2 }));
    let logprobs = &scored["choices"][0]["logprobs"];
    let joined: String = logprobs["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(joined, scored["choices"][0]["text"].as_str().unwrap());
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[name].as_array().unwrap().len(), 8, "{name}");
    }

    // A stop string that begins like the end of a token holds this end back, but does not move any token.
    let tokens = logprobs["tokens"].as_array().unwrap();
    let tokens: Vec<&str> = tokens.iter().map(|token| token.as_str().unwrap()).collect();
    let long = tokens[..7].iter().find(|token| token.chars().count() > 1).unwrap();
    let stop = format!("{}#", long.chars().last().unwrap());
    let held = complete(json!({ "prompt": "The KV cache", "logprobs": 2, "stop": stop }));
    assert_eq!(held["choices"][0]["logprobs"]["text_offset"], logprobs["text_offset"], "{tokens:?}");
    let mut characters = 0;
    for (token, offset) in tokens.iter().zip(logprobs["text_offset"].as_array().unwrap()) {
        assert_eq!(*offset, characters, "{tokens:?}");
        characters += token.chars().count();
    }

    let body = json!({ "prompt": "The KV cache", "temperature": 0, "max_tokens": 8, "echo": true, "stream": true });
    let events = server.post("/v1/completions", &body).events();
    let streamed: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(streamed, format!("The KV cache{}", scored["choices"][0]["text"].as_str().unwrap()));
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
    let echo = complete(json!({ "prompt": "Only this", "max_tokens": 0, "echo": true }));
    assert_eq!(echo["choices"][0]["text"], "Only this");
}

/// The first request for log probabilities has the form that lm-evaluation-harness uses to score continuations.
#[test]
fn echoed_prompts_have_log_probabilities() {
    let server = Server::start(&["--chunk", "16", "--max-sequences", "4"]);
    let complete = |fields: Value| {
        let defaults = json!({ "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": true });
        server.post("/v1/completions", &merged(defaults, &fields))
    };
    let text = "The KV cache stores the keys and values of all earlier tokens, café 🦀.";
    let ids = server.post("/tokenize", &json!({ "prompt": text })).ok()["tokens"].clone();
    let count = ids.as_array().unwrap().len();
    assert!(count > 20);
    let scored = complete(json!({ "prompt": [ids] })).ok();
    let logprobs = &scored["choices"][0]["logprobs"];
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[name].as_array().unwrap().len(), count + 1, "{name}");
    }
    assert!(logprobs["token_logprobs"][0].is_null() && logprobs["top_logprobs"][0].is_null());
    for index in 1..=count {
        let logprob = logprobs["token_logprobs"][index].as_f64().unwrap();
        let top = logprobs["top_logprobs"][index].as_object().unwrap();
        assert_eq!(top.len(), 1);
        let best = top.values().next().unwrap().as_f64().unwrap();
        assert!(
            logprob <= best && best <= 0.0,
            "token {index} has the log probability {logprob}, the best token {best}"
        );
    }
    // At temperature 0, the generated token is the most likely one.
    let last = logprobs["tokens"][count].as_str().unwrap();
    assert_eq!(logprobs["top_logprobs"][count][last], logprobs["token_logprobs"][count]);
    // The text of each prompt token starts at the token's offset, counted in characters.
    // Tokens that are only part of a character are not checked.
    let characters: Vec<char> = scored["choices"][0]["text"].as_str().unwrap().chars().collect();
    let offsets = logprobs["text_offset"].as_array().unwrap();
    for (token, offset) in logprobs["tokens"].as_array().unwrap()[..count].iter().zip(offsets) {
        let (token, offset) = (token.as_str().unwrap(), offset.as_u64().unwrap() as usize);
        let rest: String = characters[offset..].iter().collect();
        assert!(token.contains('\u{fffd}') || rest.starts_with(token), "{token:?} at {offset}");
    }

    // Greedy tokens get almost the same log probabilities when they are scored as part of a prompt.
    let start = "To download a model";
    let count = server.post("/tokenize", &json!({ "prompt": start })).ok()["count"].as_u64().unwrap() as usize;
    let answer = complete(json!({ "prompt": start, "max_tokens": 6, "echo": false })).ok();
    let whole = format!("{start}{}", answer["choices"][0]["text"].as_str().unwrap());
    let again = complete(json!({ "prompt": whole, "max_tokens": 0 })).ok();
    let (again, answer) = (&again["choices"][0], &answer["choices"][0]);
    assert_eq!((again["text"].as_str().unwrap(), &again["finish_reason"]), (whole.as_str(), &json!("length")));
    let array = |choice: &Value, name: &str| choice["logprobs"][name].as_array().unwrap().clone();
    assert_eq!(array(again, "tokens")[count..], array(answer, "tokens"));
    assert_eq!(array(answer, "tokens").len(), 6);
    for (got, expected) in array(again, "token_logprobs")[count..].iter().zip(array(answer, "token_logprobs")) {
        let error = (got.as_f64().unwrap() - expected.as_f64().unwrap()).abs();
        assert!(error < 1e-3, "the log probability is {got} in a prompt, but {expected} in an answer");
    }

    // Request several answers to several prompts, with and without streaming.
    let prompts = [text, "The KV cache"];
    let fields = json!({
        "prompt": prompts, "n": 2, "logprobs": 3, "max_tokens": 4, "min_tokens": 4, "temperature": 1
    });
    let scored = complete(fields.clone()).ok();
    let mut stream = fields;
    stream["stream"] = json!(true);
    let events = complete(stream).events();
    for (index, choice) in scored["choices"].as_array().unwrap().iter().enumerate() {
        let parts = events.iter().map(|event| &event["choices"][0]).filter(|part| part["index"] == index);
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let streamed: Vec<Value> = parts.clone().flat_map(|part| array(part, name)).collect();
            assert_eq!(streamed, array(choice, name), "choice {index}: `{name}` differs with streaming");
            assert_eq!(array(choice, name)[..3], array(&scored["choices"][index / 2 * 2], name)[..3]);
        }
        let streamed: String = parts.map(|part| part["text"].as_str().unwrap()).collect();
        assert_eq!(streamed, choice["text"].as_str().unwrap());
    }
    assert_eq!(scored["usage"]["completion_tokens"], 16);
    server.wait_until_idle();
}
