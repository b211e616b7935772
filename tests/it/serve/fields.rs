//! Tests which request fields are honored, which are refused, and which are reported as ignored.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use serde_json::{Value, json};

use super::client::{JSON, Response, Server, chat};
use crate::harness::TestCase;

/// A request that the server refuses, and the field that the error names.
struct Refused {
    path: &'static str,
    fields: Value,
    param: &'static str,
}

fn refused_requests() -> Vec<TestCase<Refused>> {
    let chats = refused_chats().into_iter().map(|(name, fields, param)| {
        let value = Refused { path: "/v1/chat/completions", fields: chat(fields), param };
        TestCase { name: format!("chat::{name}"), need: None, value }
    });
    let completions = refused_completions().into_iter().map(|(name, fields, param)| {
        let value = Refused { path: "/v1/completions", fields, param };
        TestCase { name: format!("completion::{name}"), need: None, value }
    });
    chats.chain(completions).collect()
}

/// Returns chat requests that the server must refuse,
/// as (name of the test case, fields for [`chat`], field that the error must name).
fn refused_chats() -> Vec<(&'static str, Value, &'static str)> {
    let message = |message: Value| json!({ "messages": [message] });
    let tool = |function: Value| json!({ "tools": [{ "type": "function", "function": function }] });
    vec![
        ("no_messages", json!({ "messages": [] }), "messages"),
        ("null_messages", json!({ "messages": null }), "messages"),
        ("text_instead_of_messages", json!({ "messages": "hi" }), "messages"),
        ("text_instead_of_a_message", json!({ "messages": ["hi"] }), "messages[0]"),
        ("unknown_role", message(json!({ "role": "robot", "content": "" })), "messages[0].role"),
        ("no_content", message(json!({ "role": "user" })), "messages[0].content"),
        ("content_is_a_number", message(json!({ "role": "user", "content": 5 })), "messages[0].content"),
        (
            "image_content",
            message(json!({ "role": "user", "content": [{ "type": "image_url" }] })),
            "messages[0].content[0].type",
        ),
        (
            "content_without_text",
            message(json!({ "role": "user", "content": [{ "type": "text" }] })),
            "messages[0].content[0].text",
        ),
        (
            "tool_call_without_function",
            message(json!({ "role": "assistant", "tool_calls": [{}] })),
            "messages[0].tool_calls[0].function",
        ),
        (
            "arguments_are_a_number",
            message(json!({
                "role": "assistant", "tool_calls": [{ "function": { "name": "f", "arguments": 5 } }]
            })),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            "function_call",
            message(json!({ "role": "assistant", "content": "a", "function_call": {} })),
            "messages[0].function_call",
        ),
        ("negative_temperature", json!({ "temperature": -1 }), "temperature"),
        ("temperature_is_text", json!({ "temperature": "hot" }), "temperature"),
        ("top_p_above_one", json!({ "top_p": 1.5 }), "top_p"),
        ("top_k_below_minus_one", json!({ "top_k": -2 }), "top_k"),
        ("fractional_seed", json!({ "seed": 1.5 }), "seed"),
        ("no_max_tokens", json!({ "max_tokens": 0 }), "max_tokens"),
        ("negative_max_completion_tokens", json!({ "max_completion_tokens": -1 }), "max_completion_tokens"),
        ("nine_answers", json!({ "n": 9 }), "n"),
        ("zero_answers", json!({ "n": 0 }), "n"),
        ("best_of", json!({ "best_of": 2 }), "best_of"),
        ("stop_is_a_number", json!({ "stop": [1] }), "stop"),
        ("many_stops", json!({ "stop": vec!["x"; 17] }), "stop"),
        ("stop_token_outside_vocabulary", json!({ "stop_token_ids": [999_999] }), "stop_token_ids"),
        ("bias_outside_vocabulary", json!({ "logit_bias": { "999999": 1 } }), "logit_bias"),
        ("bias_above_100", json!({ "logit_bias": { "5": 101 } }), "logit_bias"),
        ("bias_of_a_text", json!({ "logit_bias": { "x": 1 } }), "logit_bias"),
        ("logprobs_is_a_number", json!({ "logprobs": 3 }), "logprobs"),
        ("top_logprobs_without_logprobs", json!({ "top_logprobs": 3 }), "top_logprobs"),
        ("too_many_top_logprobs", json!({ "logprobs": true, "top_logprobs": 21 }), "top_logprobs"),
        ("stream_is_text", json!({ "stream": "yes" }), "stream"),
        ("stream_options_without_stream", json!({ "stream_options": { "include_usage": true } }), "stream_options"),
        ("no_reasoning_effort", json!({ "reasoning_effort": "none" }), "reasoning_effort"),
        ("unknown_reasoning_effort", json!({ "reasoning_effort": "huge" }), "reasoning_effort"),
        ("no_nested_reasoning_effort", json!({ "reasoning": { "effort": "none" } }), "reasoning.effort"),
        ("unknown_format", json!({ "response_format": { "type": "yaml" } }), "response_format.type"),
        (
            "schema_is_missing",
            json!({ "response_format": { "type": "json_schema", "json_schema": {} } }),
            "response_format.json_schema.schema",
        ),
        ("required_tool_without_tools", json!({ "tool_choice": "required" }), "tool_choice"),
        (
            "named_tool_without_tools",
            json!({ "tool_choice": { "type": "function", "function": { "name": "f" } } }),
            "tool_choice",
        ),
        ("unknown_tool_choice", json!({ "tool_choice": "sometimes" }), "tool_choice"),
        ("unknown_tool_type", json!({ "tools": [{ "type": "web" }] }), "tools[0].type"),
        ("tool_name_with_space", tool(json!({ "name": "two words" })), "tools[0].function.name"),
        ("tool_parameters_are_a_list", tool(json!({ "name": "f", "parameters": [] })), "tools[0].function.parameters"),
        ("functions", json!({ "functions": [{ "name": "f" }] }), "functions"),
        ("guided_json", json!({ "guided_json": {} }), "guided_json"),
        ("beam_search", json!({ "use_beam_search": true }), "use_beam_search"),
        ("prediction", json!({ "prediction": {} }), "prediction"),
        ("audio", json!({ "modalities": ["text", "audio"] }), "modalities"),
        ("template_variables_are_a_number", json!({ "chat_template_kwargs": 1 }), "chat_template_kwargs"),
        ("reserved_template_variable", json!({ "chat_template_kwargs": { "messages": [] } }), "chat_template_kwargs"),
        ("template", json!({ "chat_template": "{{ messages }}" }), "chat_template"),
        ("empty_salt", json!({ "cache_salt": "" }), "cache_salt"),
        ("salt_is_a_number", json!({ "cache_salt": 1 }), "cache_salt"),
        ("huge_priority", json!({ "priority": 1e10 }), "priority"),
    ]
}

/// Returns completion requests that the server must refuse,
/// as (name of the test case, body, field that the error must name).
fn refused_completions() -> Vec<(&'static str, Value, &'static str)> {
    vec![
        ("no_prompt", json!({}), "prompt"),
        ("empty_prompt", json!({ "prompt": "" }), "prompt"),
        ("empty_list", json!({ "prompt": [] }), "prompt"),
        ("empty_token_list", json!({ "prompt": [[]] }), "prompt"),
        ("mixed_list", json!({ "prompt": [1, "a"] }), "prompt"),
        ("negative_token", json!({ "prompt": [-1] }), "prompt"),
        ("suffix", json!({ "prompt": "a", "suffix": "b" }), "suffix"),
        ("too_many_logprobs", json!({ "prompt": "a", "echo": true, "logprobs": 21 }), "logprobs"),
        (
            "too_many_echoed_logprobs",
            json!({ "prompt": vec!["a ".repeat(1500); 20], "n": 6, "echo": true, "logprobs": 20 }),
            "logprobs",
        ),
        ("too_many_answers", json!({ "prompt": vec!["a"; 33], "n": 4 }), "prompt"),
    ]
}

/// Returns a server that the tests of refused requests share while they run at the same time.
/// The server stops as soon as no test uses it.
fn shared_server() -> Arc<Server> {
    static SERVER: Mutex<Weak<Server>> = Mutex::new(Weak::new());
    let mut shared = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    shared.upgrade().unwrap_or_else(|| {
        let server = Arc::new(Server::start(&[]));
        *shared = Arc::downgrade(&server);
        server
    })
}

#[test(each = refused_requests)]
fn invalid_fields_are_errors_that_name_the_field(Refused { path, fields, param }: Refused) {
    let error = shared_server().post(path, &fields).error(400);
    assert_eq!(error["param"], param, "{error}");
    assert_eq!(error["type"], "invalid_request_error");
}

#[test]
fn an_unknown_token_is_named() {
    let server = Server::start(&[]);
    let error = server.post("/v1/completions", &json!({ "prompt": [999_999] })).error(400);
    assert!(error["message"].as_str().unwrap().contains("999999"), "{error}");
}

#[test]
fn prefixes_are_reused_only_with_the_same_salt() {
    let server = Server::start(&[]);
    let cached = |salt: Value| {
        let usage = server.chat(json!({ "cache_salt": salt, "max_tokens": 2 })).ok()["usage"].clone();
        usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    for salt in [json!("one"), Value::Null, json!("two")] {
        assert_eq!(cached(salt.clone()), 0, "{salt}");
        assert!(cached(salt.clone()) >= 64, "{salt}");
    }
}

#[test]
fn honored_fields_change_the_answer() {
    let server = Server::start(&[]);
    let content = |fields: Value| server.chat(fields).ok()["choices"][0]["message"]["content"].clone();
    let plain = content(json!({}));
    let id = &server.post("/tokenize", &json!({ "prompt": "The" })).ok()["tokens"][0];
    // The server refuses a text that is far too long for the context, to avoid the cost of encoding the text.
    server.post("/tokenize", &json!({ "prompt": "a".repeat(4 << 20) })).error(400);
    let biased = content(json!({ "logit_bias": { id.to_string(): -100 } }));
    assert!(plain.as_str().unwrap().starts_with("The") && !biased.as_str().unwrap().starts_with("The"), "{biased}");
    // At temperature 20, sampled answers vary even if the model is almost certain of each token.
    let random = |seed: u64| {
        let json = server.chat(json!({ "temperature": 20, "seed": seed, "max_tokens": 30 })).ok();
        json["choices"][0]["message"].clone()
    };
    assert_ne!(random(1), random(2));
    assert_eq!(random(1), random(1));
    assert_eq!(content(json!({ "temperature": 20, "seed": 1, "top_k": 1 })), plain);
    assert_eq!(content(json!({ "top_k": -1, "min_p": 0.1, "seed": -5, "priority": -1 })), plain);

    let longer = server.chat(json!({ "min_tokens": 70 })).ok();
    assert!(longer["usage"]["completion_tokens"].as_u64().unwrap() >= 70, "{longer}");
    let endless = server.chat(json!({ "ignore_eos": true, "max_tokens": 80 })).ok();
    assert_eq!(
        (&endless["usage"]["completion_tokens"], &endless["choices"][0]["finish_reason"]),
        (&json!(80), &json!("length"))
    );
    let stopped = server.chat(json!({ "stop_token_ids": [id] })).ok();
    assert_eq!(stopped["choices"][0]["message"]["content"], "");
}

#[test]
fn all_roles_and_forms_of_content_are_accepted() {
    let server = Server::start(&[]);
    let messages = json!([
        { "role": "system", "content": "Be brief." },
        { "role": "developer", "content": [{ "type": "text", "text": "Be " }, { "type": "text", "text": "kind." }] },
        { "role": "user", "content": "Which models are there?", "name": "ada" },
        { "role": "assistant", "content": null, "reasoning": "I must call a tool.", "tool_calls": [
            { "id": "call_1", "type": "function", "function": { "name": "list", "arguments": "{}" } },
            { "id": "call_2", "type": "function", "function": { "name": "list", "arguments": {} } }] },
        { "role": "tool", "tool_call_id": "call_1", "content": "demo" },
        { "role": "assistant", "content": "One: demo.", "reasoning_content": "The tool told me." },
        { "role": "assistant", "content": null, "reasoning_content": "I was cut off." },
        { "role": "user", "content": [{ "type": "text", "text": "Thanks!" }] },
    ]);
    let function = json!({ "name": "list", "description": "Lists models.", "parameters": { "type": "object" } });
    let tools = json!([{ "type": "function", "function": function }]);
    let fields = json!({ "messages": messages, "tools": tools, "tool_choice": "auto", "parallel_tool_calls": false });
    let with_tools = server.chat(fields.clone()).ok()["usage"]["prompt_tokens"].as_u64().unwrap();
    // If `tool_choice` is `none`, the prompt does not list the tools.
    let mut none = fields;
    none["tool_choice"] = json!("none");
    let without = server.chat(none).ok()["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(with_tools > without, "expected fewer prompt tokens without tools: {without}, with tools: {with_tools}");
}

#[test]
fn fields_without_effect_are_named_and_can_be_refused() {
    let server = Server::start(&[]);
    let fields = json!({
        "user": "ada", "metadata": { "a": 1 }, "store": false, "made_up": 1, "absent": null, "max_tokens": 5,
        "messages": [{ "role": "user", "content": "Hi", "annotations": [] }], "reasoning_effort": "minimal",
        "tools": [{ "type": "function", "cache": 1, "function": { "name": "f", "returns": {} } }],
    });
    let response = server.chat(fields.clone());
    response.ok();
    let ignored = response.header("x-inferno-ignored").unwrap();
    for name in [
        "user",
        "metadata",
        "store",
        "made_up",
        "messages[].annotations",
        "tools[].cache",
        "tools[].function.returns",
        "reasoning_effort (minimal is treated as low)",
    ] {
        assert!(ignored.split(", ").any(|field| field == name), "{name}: {ignored}");
    }
    assert!(!ignored.contains("absent") && !ignored.contains("max_tokens"), "{ignored}");
    let headers = [JSON, ("x-inferno-strict", "1")];
    let send = |body: Value| server.send("POST", "/v1/chat/completions", &headers, body.to_string().as_bytes());
    assert_eq!(send(chat(json!({ "user": "ada" }))).error(400)["param"], "user");
    send(chat(json!({ "max_tokens": 5 }))).ok();
    // `param` is only the name of the field. The note in parentheses is in the message.
    let error = send(chat(json!({ "reasoning_effort": "minimal" }))).error(400);
    assert_eq!(error["param"], "reasoning_effort");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("'reasoning_effort' is not fully supported (minimal is treated as low)"), "{message}");
    // In the header, line breaks and commas in field names become question marks.
    let response = server.chat(json!({ "a\r\nb: c, d": 1, "max_tokens": 5 }));
    assert_eq!(response.header("x-inferno-ignored"), Some("a??b: c? d"));
}

/// With harmony, only `reasoning_effort` in `chat_template_kwargs` has an effect.
/// Other variables are reported as ignored.
#[test]
fn harmony_uses_only_the_effort_of_the_template_variables() {
    let server = Server::start(&[]);
    let ask = |variables: Value| server.chat(json!({ "max_tokens": 2, "chat_template_kwargs": variables }));
    let response = ask(json!({ "reasoning_effort": "high", "enable_thinking": false }));
    response.ok();
    assert_eq!(response.header("x-inferno-ignored"), Some("chat_template_kwargs.enable_thinking"));
    let error = ask(json!({ "reasoning_effort": "enormous" })).error(400);
    assert_eq!(error["param"], "reasoning_effort");
}

/// All fields in `added` except `max_tokens` are fields that routers add to requests:
/// SMG adds `logprobs` and `stream`, and vllm-router adds the others.
#[test]
fn fields_that_routers_add_do_not_change_the_answer() {
    let server = Server::start(&[]);
    let content = |response: Response| response.ok()["choices"][0]["message"]["content"].clone();
    let plain = content(server.chat(json!({ "max_tokens": 40 })));
    let added = json!({
        "max_tokens": 40, "logprobs": false, "stream": false, "no_stop_trim": false, "ignore_eos": false,
        "continue_final_message": false, "skip_special_tokens": true, "separate_reasoning": true,
        "stream_reasoning": true, "return_hidden_states": false,
    });
    assert_eq!(content(server.chat(added)), plain);
    let body = json!({ "prompt": "A", "max_tokens": 2, "temperature": 0, "made_up": 1, "skip_special_tokens": true });
    let response = server.post("/v1/completions", &body);
    response.ok();
    assert_eq!(response.header("x-inferno-ignored"), Some("made_up"));
}

#[test]
fn prompts_that_can_never_fit_are_refused_with_what_fits() {
    let server = Server::start(&["--context", "256"]);
    let long = "model ".repeat(300);
    let error = server.chat(json!({ "messages": [{ "role": "user", "content": long }] })).error(400);
    assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!("messages")));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("256 tokens") && message.contains("at most 255"), "{message}");
    let error = server.post("/v1/completions", &json!({ "prompt": vec![5; 256] })).error(400);
    assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!("prompt")));
    // A `max_tokens` larger than the context is not an error. The answer ends when the context is full, or earlier.
    let json = server.chat(json!({ "max_tokens": 32000, "ignore_eos": true })).ok();
    assert_eq!((&json["choices"][0]["finish_reason"], &json["usage"]["total_tokens"]), (&json!("length"), &json!(256)));
}

/// The error of `/tokenize` for a text that is too long names the field that contains the text.
#[test]
fn errors_of_tokenize_name_the_field_of_the_input() {
    let server = shared_server();
    let text = "x ".repeat(1 << 20);
    let messages = json!([{ "role": "user", "content": text }]);
    for (field, value) in [("prompt", json!(text)), ("messages", messages)] {
        let error = server.post("/tokenize", &json!({ field: value })).error(400);
        assert_eq!(error["param"], field, "{error}");
    }
}
