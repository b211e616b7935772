//! Tests of ollama's API: answers, streams, models and errors.

use serde_json::{Value, json};

use super::client::{Response, Server, merged};

/// Returns the body of a request to `/api/chat`: the demo model, a question and temperature 0, without streaming.
/// The fields in `fields` are added to the body, or replace these defaults.
fn chat(fields: Value) -> Value {
    let body = json!({
        "model": "demo",
        "messages": [{ "role": "user", "content": "What is the KV cache?" }],
        "options": { "temperature": 0 },
        "stream": false,
    });
    merged(body, &fields)
}

/// Asserts that the response is an error in ollama's format, and returns the error message.
fn error(response: &Response, status: u16) -> String {
    assert_eq!(response.status, status, "{}", response.text());
    let json = response.json();
    assert_eq!(json.as_object().unwrap().len(), 1, "{json}");
    json["error"].as_str().unwrap().to_string()
}

/// Returns the JSON values of a stream, which has one value per line.
fn lines(response: &Response) -> Vec<Value> {
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.header("content-type"), Some("application/x-ndjson"));
    response.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn weather() -> Value {
    let parameters = json!({ "type": "object", "properties": { "city": { "enum": ["Paris"] } }, "required": ["city"],
        "additionalProperties": false });
    json!([{ "type": "function", "function": { "name": "get_weather", "description": "d", "parameters": parameters } }])
}

#[test]
fn chats_are_chat_completions_in_another_shape() {
    let server = Server::start(&[]);
    let expected = server.chat(json!({})).ok();
    let answer = &expected["choices"][0]["message"];
    let whole = server.post("/api/chat", &chat(json!({}))).ok();
    assert_eq!(
        (&whole["model"], &whole["done"], &whole["done_reason"]),
        (&json!("demo"), &json!(true), &json!("stop"))
    );
    let message = json!({ "role": "assistant", "content": answer["content"], "thinking": answer["reasoning"] });
    assert_eq!(whole["message"], message);
    assert!(whole["created_at"].as_str().unwrap().ends_with('Z'));
    let count = |name: &str| whole[name].as_u64().unwrap();
    assert_eq!(whole["prompt_eval_count"], expected["usage"]["prompt_tokens"]);
    assert_eq!(whole["eval_count"], expected["usage"]["completion_tokens"]);
    assert!(count("eval_duration") > 0 && count("total_duration") >= count("eval_duration"), "{whole}");
    assert!(count("prompt_eval_duration") > 0 && whole["load_duration"] == 0);

    // If a request has no `stream` field, the answer is streamed.
    let mut body = chat(json!({ "model": "demo:latest" }));
    body.as_object_mut().unwrap().remove("stream");
    let parts = lines(&server.post("/api/chat", &body));
    let (last, parts) = parts.split_last().unwrap();
    let text = |name: &str| parts.iter().filter_map(|part| part["message"][name].as_str()).collect::<String>();
    assert_eq!(
        (json!(text("content")), json!(text("thinking"))),
        (answer["content"].clone(), answer["reasoning"].clone())
    );
    assert!(parts.len() > 5 && parts.iter().all(|part| part["done"] == false && part.get("done_reason").is_none()));
    assert_eq!(
        (&last["done"], &last["eval_count"], &last["message"]["content"]),
        (&json!(true), &whole["eval_count"], &json!(""))
    );

    let hidden = server.post("/api/chat", &chat(json!({ "think": false })));
    assert!(hidden.ok()["message"].get("thinking").is_none());
    assert_eq!(hidden.header("x-inferno-ignored"), Some("think (false hides the reasoning; some models still reason)"));
    let cut = server.post("/api/chat", &chat(json!({ "options": { "temperature": 0, "num_predict": 3 } }))).ok();
    assert_eq!((&cut["done_reason"], &cut["eval_count"]), (&json!("length"), &json!(3)));
    let stopped =
        server.post("/api/chat", &chat(json!({ "options": { "temperature": 0, "stop": ["KV cache"] } }))).ok();
    let content = answer["content"].as_str().unwrap();
    assert_eq!(stopped["message"]["content"], content.split("KV cache").next().unwrap());
    let scored = server.post("/api/chat", &chat(json!({ "logprobs": true, "top_logprobs": 2 }))).ok();
    let tokens: String =
        scored["logprobs"].as_array().unwrap().iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!((tokens.as_str(), scored["logprobs"][0]["top_logprobs"].as_array().unwrap().len()), (content, 2));
}

#[test]
fn prompts_are_questions_or_plain_text() {
    let server = Server::start(&[]);
    let expected = server.chat(json!({})).ok();
    let answer = &expected["choices"][0]["message"];
    let body = |fields: Value| {
        let mut body = chat(fields);
        body.as_object_mut().unwrap().remove("messages");
        body
    };
    let generate = |fields| server.post("/api/generate", &body(fields)).ok();
    let whole = generate(json!({ "prompt": "What is the KV cache?" }));
    assert_eq!((&whole["response"], &whole["thinking"]), (&answer["content"], &answer["reasoning"]));
    assert_eq!(whole["done_reason"], "stop");
    let stream = body(json!({ "prompt": "What is the KV cache?", "stream": true }));
    let parts = lines(&server.post("/api/generate", &stream));
    let text: String = parts.iter().map(|part| part["response"].as_str().unwrap()).collect();
    assert_eq!(json!(text), answer["content"]);
    let system =
        generate(json!({ "prompt": "What is the KV cache?", "system": "Be kind.", "options": { "num_predict": 1 } }));
    assert!(system["prompt_eval_count"].as_u64() > whole["prompt_eval_count"].as_u64());

    // If `num_predict` is 0, the answer has no token limit. If `seed` is -1, the server chooses a random seed.
    let unlimited = generate(json!({ "prompt": "What is the KV cache?", "options": { "num_predict": 0 } }));
    assert_eq!(unlimited["response"], whole["response"]);
    let random = json!({ "prompt": "Hi", "raw": true, "options": { "temperature": 2, "seed": -1, "num_predict": 16 } });
    let texts = [(); 3].map(|()| generate(random.clone())["response"].clone());
    assert!(texts.iter().any(|text| *text != texts[0]), "{texts:?}");

    let options = json!({ "temperature": 0, "num_predict": 8 });
    let raw = generate(json!({ "prompt": "To download a model", "raw": true, "options": options }));
    let text =
        server.post("/v1/completions", &json!({ "prompt": "To download a model", "temperature": 0, "max_tokens": 8 }));
    assert_eq!(raw["response"], text.ok()["choices"][0]["text"]);
    for (path, body) in [("/api/generate", body(json!({}))), ("/api/chat", chat(json!({ "messages": [] })))] {
        let loaded = server.post(path, &body).ok();
        assert_eq!((&loaded["done"], &loaded["done_reason"]), (&json!(true), &json!("load")), "{path}");
        assert!(loaded.get("eval_count").is_none());
    }
}

#[test]
fn tools_and_schemas_work_like_those_of_openai() {
    let server = Server::start(&[]);
    let schema = json!({
        "type": "object", "properties": { "ok": { "type": "boolean" } }, "required": ["ok"], "additionalProperties": false,
    });
    for (format, is_object) in [(schema, true), (json!("json"), false)] {
        let answer = server.post("/api/chat", &chat(json!({ "format": format, "options": { "num_predict": 200 } })));
        let answer = answer.ok();
        if is_object {
            let json: Value = serde_json::from_str(answer["message"]["content"].as_str().unwrap()).unwrap();
            assert!(json["ok"].is_boolean(), "{json}");
        }
    }
    // ollama's API has no `tool_choice` field, but inferno accepts it. The value `required` forces a tool call.
    let fields = json!({ "tools": weather(), "tool_choice": "required", "stream": true,
                         "messages": [{ "role": "user", "content": "What is the weather in Paris?" }] });
    let parts = lines(&server.post("/api/chat", &chat(fields.clone())));
    let calls: Vec<&Value> = parts.iter().filter(|part| part["message"]["tool_calls"].is_array()).collect();
    assert_eq!(calls.len(), 1, "{parts:?}");
    let calls = &calls[0]["message"]["tool_calls"];
    assert!(
        calls[0]["function"]["name"] == "get_weather" && calls[0]["function"]["arguments"]["city"] == "Paris",
        "{calls}"
    );
    assert_eq!(parts.last().unwrap()["done_reason"], "stop");
    let mut whole = fields.clone();
    whole["stream"] = json!(false);
    assert_eq!(server.post("/api/chat", &chat(whole)).ok()["message"]["tool_calls"], *calls);

    // Send the tool call back with its result. It has no id, because inferno's tool calls have none in this API.
    let assistant = json!({ "role": "assistant", "content": "", "thinking": "Hmm.", "tool_calls": calls });
    for result in [
        json!({ "role": "tool", "content": "sunny", "tool_name": "get_weather" }),
        json!({ "role": "tool", "content": "sunny" }),
    ] {
        let messages = json!([fields["messages"][0], assistant, result]);
        let second = chat(json!({ "messages": messages, "tools": weather(), "options": { "num_predict": 5 } }));
        assert_eq!(server.post("/api/chat", &second).ok()["eval_count"], 5);
    }
}

#[test]
fn the_served_model_is_listed_shown_and_pulled() {
    let server = Server::start(&[]);
    let tags = server.get("/api/tags").ok();
    let model = &tags["models"][0];
    assert_eq!((&model["name"], &model["model"]), (&json!("demo"), &json!("demo")));
    assert_eq!(model["digest"].as_str().unwrap().len(), 64);
    assert!(model["size"].as_u64().unwrap() > 0 && model["modified_at"].is_string());
    assert_eq!(model["details"]["family"], "gpt_oss");
    let running = server.get("/api/ps").ok();
    let running = &running["models"][0];
    assert_eq!((&running["context_length"], &running["size_vram"]), (&json!(4096), &json!(0)));
    assert!(running["expires_at"].is_string());
    let show = server.post("/api/show", &json!({ "model": "demo" })).ok();
    assert_eq!(show["capabilities"], json!(["completion", "tools", "thinking"]));
    assert_eq!(show["model_info"]["gpt_oss.context_length"], 4096);
    assert!(server.get("/api/version").ok()["version"].as_str().unwrap().contains("+inferno."));
    let statuses = lines(&server.post("/api/pull", &json!({ "name": "demo:latest" })));
    assert_eq!(statuses.last().unwrap(), &json!({ "status": "success" }));
    assert_eq!(
        server.post("/api/pull", &json!({ "model": "demo", "stream": false })).ok(),
        json!({ "status": "success" })
    );
    for path in ["/api/pull", "/api/show", "/api/chat", "/api/generate"] {
        let message = error(&server.post(path, &json!({ "model": "gpt-oss:20b" })), 404);
        assert!(message.contains("'gpt-oss:20b' not found") && message.contains("'demo'"), "{path}: {message}");
    }
}

#[test]
fn fields_are_honored_refused_or_named() {
    let server = Server::start(&[]);
    let options = json!({ "num_ctx": 8192, "num_gpu": 1, "mirostat": 0, "typical_p": 1.0, "num_predict": 2, "top_k": 5,
                          "min_p": 0.1, "repeat_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "seed": 3 });
    let response = server.post("/api/chat", &chat(json!({ "options": options, "keep_alive": "5m", "think": "low" })));
    response.ok();
    assert_eq!(response.header("x-inferno-ignored"), Some("options.num_ctx, options.num_gpu, keep_alive"));
    for (path, fields, word) in [
        ("/api/chat", json!({ "model": null }), "model"),
        ("/api/chat", json!({ "options": { "mirostat": 2 } }), "options.mirostat"),
        ("/api/chat", json!({ "options": { "temperature": "hot" } }), "options.temperature"),
        ("/api/chat", json!({ "options": { "num_predict": -3 } }), "options.num_predict"),
        ("/api/chat", json!({ "think": "maybe" }), "think"),
        ("/api/chat", json!({ "format": "xml" }), "format"),
        (
            "/api/chat",
            json!({ "messages": [{ "role": "user", "content": "x", "images": ["aGk="] }] }),
            "messages[0].images",
        ),
        ("/api/chat", json!({ "messages": [{ "role": "robot", "content": "x" }] }), "messages[0].role"),
        ("/api/generate", json!({ "prompt": "x", "suffix": "y" }), "suffix"),
        ("/api/generate", json!({ "prompt": "x", "images": ["aGk="] }), "images"),
        ("/api/generate", json!({ "prompt": "x", "template": "{{ .Prompt }}" }), "template"),
        ("/api/generate", json!({ "prompt": "x", "context": [1] }), "context"),
    ] {
        let message = error(&server.post(path, &chat(fields.clone())), 400);
        assert!(message.contains(word), "{fields}: {message}");
    }
    error(&server.post("/api/embed", &json!({ "model": "demo" })), 404);
    error(&server.post("/api/create", &json!({})), 404);
    let server = Server::start(&["--api-key", "right"]);
    for path in ["/api/tags", "/api/ps", "/api/version"] {
        assert!(error(&server.get(path), 401).contains("API key"), "{path}");
    }
    for path in ["/api/chat", "/api/generate", "/api/show", "/api/pull"] {
        assert!(error(&server.post(path, &chat(json!({}))), 401).contains("API key"), "{path}");
    }
}

#[test]
fn silent_streams_have_empty_parts_and_failed_ones_an_error() {
    let arguments = ["--max-sequences", "1", "--ping-interval", "0.05", "--queue-timeout", "0.5"];
    let server = Server::start(&arguments);
    let endless = json!({ "options": { "num_predict": 3000, "ignore_eos": true } });
    let long = server.begin("/api/chat", &chat(endless));
    server.wait("the request is running", |server| server.metric("inferno_num_requests_running") == 1.0);
    let parts = lines(&server.post("/api/chat", &chat(json!({ "stream": true }))));
    let (last, parts) = parts.split_last().unwrap();
    assert!(parts.len() > 2 && parts.iter().all(|part| part["message"]["content"] == "" && part["done"] == false));
    assert!(last["error"].as_str().unwrap().contains("waited"), "{last}");
    drop(long);
    server.wait_until_idle();
}
