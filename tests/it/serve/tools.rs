//! Tests of models with a chat template: requests with tools, which the template ignores or lists in the prompt, and
//! requests that the template cannot render.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::client::{JSON, Response, Server};
use crate::support::program::copy_of_demo;

/// Starts a server with a copy of the demo model whose chat template is `template`.
/// The copy's tokenizer lacks harmony's token `<|channel|>`, so inferno uses the chat template instead of harmony.
/// `renamed` lists further texts to replace in tokenizer.json, as pairs (old, new).
fn start(template: &str, renamed: &[(&str, &str)]) -> (TempDir, Server) {
    let (folder, path) = copy_of_demo();
    let file = path.join("tokenizer.json");
    let mut tokenizer = fs::read_to_string(&file).unwrap().replace("<|channel|>", "<|other|>");
    renamed.iter().for_each(|(old, new)| tokenizer = tokenizer.replace(old, new));
    fs::write(file, tokenizer).unwrap();
    fs::write(path.join("chat_template.jinja"), template).unwrap();
    let server = Server::start_model(path.to_str().unwrap(), &[], &[]);
    (folder, server)
}

const WITHOUT_TOOLS: &str =
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}{% endfor %}<|start|>assistant";
const WITH_TOOLS: &str = "{{ tools | tojson }}<|start|>assistant";

/// Sends a request with a tool to each API that supports tools. Returns the path and the response of each request.
/// `choice` holds the tool choice in the format of chat completions, then in the format of Anthropic's API.
fn ask(server: &Server, choice: Option<(Value, Value)>) -> Vec<(&'static str, Response)> {
    let model = server.get("/v1/models").ok()["data"][0]["id"].clone();
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    let schema = json!({ "type": "object", "properties": { "city": { "enum": ["Paris"] } }, "required": ["city"],
        "additionalProperties": false });
    let function = json!({ "name": "get_weather", "parameters": schema });
    let chat_tools = json!([{ "type": "function", "function": function }]);
    let mut response_tool = function.clone();
    response_tool["type"] = json!("function");
    let bodies = [
        ("/v1/chat/completions", json!({ "messages": messages, "max_tokens": 100, "tools": chat_tools })),
        ("/v1/responses", json!({ "input": "Hi", "max_output_tokens": 100, "tools": [response_tool] })),
        (
            "/v1/messages",
            json!({ "messages": messages, "max_tokens": 100,
                "tools": [{ "name": "get_weather", "input_schema": schema }] }),
        ),
        (
            "/api/chat",
            json!({ "messages": messages, "stream": false, "options": { "num_predict": 100 }, "tools": chat_tools }),
        ),
    ];
    let send = |(path, mut body): (&'static str, Value)| {
        body["model"] = model.clone();
        if let Some((openai, anthropic)) = &choice {
            let choice = if path == "/v1/messages" { anthropic } else { openai };
            let named = json!({ "type": "function", "name": openai["function"]["name"] });
            let is_flat = path == "/v1/responses" && openai.is_object();
            body["tool_choice"] = if is_flat { named } else { choice.clone() };
        }
        (path, server.post(path, &body))
    };
    bodies.into_iter().map(send).collect()
}

/// Returns two tool choices, each in both formats of [`ask`].
/// The first requires a call of any tool, the second a call of `get_weather`.
fn demands() -> [(Value, Value); 2] {
    let named = json!({ "type": "function", "function": { "name": "get_weather" } });
    [(json!("required"), json!({ "type": "any" })), (named, json!({ "type": "tool", "name": "get_weather" }))]
}

#[test]
fn tools_that_the_template_does_not_read_are_named() {
    let (_folder, server) = start(WITHOUT_TOOLS, &[]);
    for (path, response) in ask(&server, None) {
        response.ok();
        assert_eq!(response.header("x-inferno-ignored"), Some("tools"), "{path}");
    }
    // With the tool choice `none`, the prompt never lists the tools, so no field is reported as ignored.
    for (path, response) in ask(&server, Some((json!("none"), json!({ "type": "none" })))) {
        response.ok();
        assert_eq!(response.header("x-inferno-ignored"), None, "{path}");
    }
    for (path, response) in demands().into_iter().flat_map(|choice| ask(&server, Some(choice))) {
        assert_eq!(response.status, 400, "{path}: {}", response.text());
        assert!(response.text().contains("tool_choice"), "{path}: {}", response.text());
        assert!(response.text().contains("this model does not support tools"), "{}", response.text());
    }
    let model = server.get("/v1/models").ok()["data"][0]["id"].clone();
    let body = json!({ "model": model, "messages": [{ "role": "user", "content": "Hi" }],
        "tools": [{ "type": "function", "function": { "name": "f" } }] });
    let headers = [JSON, ("x-inferno-strict", "1")];
    let strict = server.send("POST", "/v1/chat/completions", &headers, body.to_string().as_bytes());
    assert_eq!(strict.error(400)["param"], "tools");
    let tokens = server.post("/tokenize", &body);
    tokens.ok();
    assert_eq!(tokens.header("x-inferno-ignored"), Some("tools"));
}

/// A template that does not compile is no fault of the request, unlike a template that rejects the conversation or
/// cannot process it.
#[test]
fn only_a_template_that_does_not_compile_is_an_internal_error() {
    for (template, status) in [
        ("{{ raise_exception('Only users may speak!') }}", 400),
        ("{{ messages[0].content.name.first }}", 400),
        ("{% if %}", 500),
    ] {
        let (_folder, server) = start(template, &[]);
        let model = server.get("/v1/models").ok()["data"][0]["id"].clone();
        let error = server.chat(json!({ "model": model })).error(status);
        assert!(error["message"].as_str().unwrap().contains("chat_template.jinja"), "{template}: {error}");
    }
}

#[test]
fn tools_with_an_effect_are_not_named() {
    let (_folder, server) = start(WITH_TOOLS, &[]);
    for (path, response) in ask(&server, None) {
        response.ok();
        assert_eq!(response.header("x-inferno-ignored"), None, "{path}");
    }
    for (path, response) in demands().into_iter().flat_map(|choice| ask(&server, Some(choice))) {
        assert_eq!(response.status, 400, "{path}: {}", response.text());
        let reason = "the chat format of this model does not support required tool calls";
        assert!(response.text().contains(reason), "{path}: {}", response.text());
    }
    // With the control tokens `<tool_call>` and `</tool_call>` in the vocabulary, a call can be required even if the
    // template ignores the tools.
    let (_folder, server) = start(WITHOUT_TOOLS, &[("<|constrain|>", "<tool_call>"), ("<|call|>", "</tool_call>")]);
    for (path, response) in demands().into_iter().flat_map(|choice| ask(&server, Some(choice))) {
        response.ok();
        assert_eq!(response.header("x-inferno-ignored"), None, "{path}");
        assert!(response.text().contains("get_weather"), "{path}: {}", response.text());
    }
}

/// The request stops at a token that is not a control token. The parser then still holds back whitespace, because
/// `<think>` may follow.
#[test]
fn logprobs_lack_the_token_at_which_the_request_stops() {
    let (_folder, server) = start(WITHOUT_TOOLS, &[]);
    let id = |text: &str| {
        let tokens = server.post("/tokenize", &json!({ "prompt": text, "add_special_tokens": false })).ok();
        let tokens = tokens["tokens"].as_array().unwrap().clone();
        assert_eq!(tokens.len(), 1, "{text:?}");
        tokens[0].as_u64().unwrap()
    };
    let (space, stop) = (id(" "), id("x"));
    // `min_tokens` excludes the stop token from the first three tokens. After them, it has the larger bias.
    let body = json!({ "messages": [{ "role": "user", "content": "Hi" }], "temperature": 0, "logprobs": true,
        "logit_bias": { space.to_string(): 50, stop.to_string(): 100 }, "stop_token_ids": [stop], "min_tokens": 3 });
    let answer = server.post("/v1/chat/completions", &body).ok();
    let choice = &answer["choices"][0];
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!("   "), &json!("stop")));
    let entries = choice["logprobs"]["content"].as_array().unwrap();
    let tokens: Vec<&Value> = entries.iter().map(|entry| &entry["token"]).collect();
    assert_eq!(tokens, [" ", " ", " "], "{answer}");
}
