//! Tests of `/v1/models`, `/tokenize`, `/detokenize`, `/v1/loads`, `/metrics`, the web page and unknown routes.

use std::collections::BTreeSet;
use std::io::{BufReader, Write};

use serde_json::json;

use super::client::{JSON, Response, Server, chat, endless, merged};

#[test]
fn models_are_listed_and_unknown_ones_are_not_found() {
    let server = Server::start(&[]);
    let list = server.get("/v1/models").ok();
    let model = &list["data"][0];
    assert_eq!((&list["object"], &model["id"], &model["object"]), (&json!("list"), &json!("demo"), &json!("model")));
    assert_eq!((&model["owned_by"], &model["max_model_len"]), (&json!("inferno"), &json!(4096)));
    assert_eq!((&model["root"], &model["parent"]), (&json!("demo"), &json!(null)));
    assert_eq!(server.get("/v1/models/demo").ok(), *model);
    assert_eq!(server.get("/v1/models/org/other").error(404)["code"], "model_not_found");
    let error = server.chat(json!({ "model": "gpt-4" })).error(404);
    assert_eq!((&error["param"], &error["code"]), (&json!("model"), &json!("model_not_found")));
    assert!(error["message"].as_str().unwrap().contains("'demo'"), "{error}");
    // If a request names no model, the server uses its only model.
    server.chat(json!({ "model": null, "max_tokens": 3 })).ok();
}

#[test]
fn text_becomes_tokens_and_back() {
    let server = Server::start(&[]);
    let json = server.post("/tokenize", &json!({ "prompt": "The KV cache 🦀", "return_token_strs": true })).ok();
    let tokens = json["tokens"].as_array().unwrap();
    assert_eq!((json["count"].as_u64(), json["max_model_len"].as_u64()), (Some(tokens.len() as u64), Some(4096)));
    assert_eq!(json["token_strs"].as_array().unwrap().len(), tokens.len());
    let text = server.post("/detokenize", &json!({ "tokens": tokens })).ok();
    assert_eq!(text, json!({ "prompt": "The KV cache 🦀" }));
    let messages = json!([{ "role": "user", "content": "What is the KV cache?" }]);
    let rendered = server.post("/tokenize", &json!({ "messages": messages })).ok();
    assert_eq!(rendered["count"], server.chat(json!({ "max_tokens": 1 })).ok()["usage"]["prompt_tokens"]);
    assert!(rendered["token_strs"].is_null());
    // Every field that changes the prompt of a chat completion also changes the result of `/tokenize`.
    let tools = json!([{ "type": "function", "function": { "name": "f" } }]);
    for fields in [
        json!({ "reasoning_effort": "high" }),
        json!({ "reasoning": { "effort": "low" } }),
        json!({ "chat_template_kwargs": { "reasoning_effort": "high" }, "tools": tools }),
    ] {
        let used = server.chat(merged(json!({ "max_tokens": 1 }), &fields)).ok()["usage"]["prompt_tokens"].clone();
        let rendered = server.post("/tokenize", &merged(json!({ "messages": messages }), &fields)).ok();
        assert_eq!(rendered["count"], used, "{fields}");
    }
    let tokens = |effort: &str| {
        let body = json!({ "messages": messages, "reasoning_effort": effort });
        server.post("/tokenize", &body).ok()["tokens"].clone()
    };
    assert_ne!(tokens("low"), tokens("high"));
    // Fields of a chat completion that do not change its prompt have no effect.
    let without_effect = [
        (json!({ "include_reasoning": false }), "include_reasoning"),
        (json!({ "reasoning": { "effort": "low", "exclude": true } }), "reasoning.exclude"),
    ];
    for (fields, name) in without_effect {
        let body = merged(json!({ "messages": messages }), &fields);
        let response = server.post("/tokenize", &body);
        response.ok();
        assert_eq!(response.header("x-inferno-ignored"), Some(name));
        let headers = [JSON, ("x-inferno-strict", "1")];
        let strict = server.send("POST", "/tokenize", &headers, body.to_string().as_bytes());
        assert_eq!(strict.error(400)["param"], name);
    }
    server.post("/tokenize", &json!({})).error(400);
    assert_eq!(server.post("/detokenize", &json!({ "tokens": [999_999] })).error(400)["param"], "tokens");
}

#[test]
fn the_page_is_open_and_loads_nothing_from_elsewhere() {
    let server = Server::start(&["--api-key", "right"]);
    let page = server.get("/");
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'; script-src 'self'") && !policy.contains("unsafe"), "{policy}");
    let script = server.get("/app.js");
    assert_eq!((script.status, script.header("content-type")), (200, Some("text/javascript; charset=utf-8")));
    let version = script.header("etag").unwrap();
    assert_eq!(server.send("GET", "/app.js", &[("If-None-Match", version)], b"").status, 304);
    server.send("POST", "/app.js", &[], b"").error(405);
}

#[test]
fn unknown_routes_methods_and_embeddings_are_errors() {
    let server = Server::start(&[]);
    for path in ["/index.html", "/version", "/v1", "/v1/models/", "/V1/MODELS", "/v1/chat/completions/x", "/%00"] {
        server.get(path).error(404);
    }
    server.get("/v1/chat/completions").error(405);
    server.send("DELETE", "/v1/models", &[], b"").error(405);
    let error = server.post("/v1/embeddings", &json!({ "input": "x" })).error(404);
    assert!(error["message"].as_str().unwrap().contains("embeddings"), "{error}");
}

#[test]
fn a_connection_carries_several_requests() {
    let server = Server::start(&[]);
    let body = chat(json!({ "max_tokens": 3, "stream": true })).to_string();
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{}: {}\r\n", JSON.0, JSON.1);
    let head = format!("{head}Expect: 100-continue\r\nContent-Length: {}\r\n\r\n", body.len());
    let mut stream = BufReader::new(server.connect());
    for _ in 0..3 {
        stream.get_mut().write_all(head.as_bytes()).unwrap();
        assert_eq!(Response::read_head(&mut stream).status, 100);
        stream.get_mut().write_all(body.as_bytes()).unwrap();
        assert_eq!(Response::read(&mut stream).events().len(), 2);
    }
}

#[test]
fn request_ids_are_returned() {
    let server = Server::start(&[]);
    let id = |id: &str| {
        server.send("GET", "/v1/models", &[("X-Request-Id", id)], b"").header("x-request-id").unwrap().to_string()
    };
    assert_eq!(id("my-id-1"), "my-id-1");
    assert!(id("with space").starts_with("req-") && id(&"x".repeat(200)).starts_with("req-"));
    assert_ne!(server.get("/health").header("x-request-id"), server.get("/health").header("x-request-id"));
}

#[test]
fn loads_have_the_fields_that_routers_read() {
    let server = Server::start(&["--max-sequences", "7"]);
    let json = server.get("/v1/loads").ok();
    assert_eq!(json["dp_rank_count"], 1);
    json["timestamp"].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
    let load = &json["loads"][0];
    for name in ["num_running_reqs", "num_waiting_reqs", "token_usage", "num_used_tokens", "cache_hit_rate"] {
        assert_eq!(load[name].as_f64(), Some(0.0), "{name}");
    }
    assert_eq!((&load["max_running_requests"], &load["max_total_num_tokens"]), (&json!(7), &json!(4 * 4096)));
    assert_eq!(load["dp_rank"], 0);
    // The load report must not have the field `gen_throughput`.
    // With this field, the router SMG would send all requests to the replica with the highest throughput.
    assert!(load.get("gen_throughput").is_none());

    // While a request is running, /v1/loads and /metrics both report its load.
    let stream = server.begin("/v1/chat/completions", &endless(true));
    let busy = |server: &Server| {
        let load = server.get("/v1/loads").ok()["loads"][0].clone();
        load["num_running_reqs"] == 1 && load["num_used_tokens"].as_u64().unwrap() > 0
    };
    server.wait("the request is running and uses blocks", busy);
    assert_eq!(server.metric("inferno_num_requests_running"), 1.0);
    let usage = server.metric("inferno_kv_cache_usage_perc");
    assert!(usage > 0.0 && usage <= 1.0, "{usage}");
    let load = server.get("/v1/loads").ok()["loads"][0].clone();
    let token_usage = load["token_usage"].as_f64().unwrap();
    assert!(token_usage > 0.0 && token_usage <= 1.0, "{load}");
    drop(stream);
    server.wait_until_idle();
    server.chat(json!({ "max_tokens": 2 })).ok();
    server.chat(json!({ "max_tokens": 2 })).ok();
    assert!(server.get("/v1/loads").ok()["loads"][0]["cache_hit_rate"].as_f64().unwrap() > 0.0);
}

#[test]
fn the_tokens_of_steps_add_up() {
    let server = Server::start(&[]);
    let usage = server.chat(json!({ "max_tokens": 5, "ignore_eos": true })).ok()["usage"].clone();
    server.wait_until_idle();
    let (prompt, completion) = (usage["prompt_tokens"].as_f64().unwrap(), usage["completion_tokens"].as_f64().unwrap());
    assert_eq!(completion, 5.0);
    // The last token of an answer is not an input of any step, because no token follows it.
    assert_eq!(server.metric("inferno_iteration_tokens_sum"), prompt + completion - 1.0);
    let steps = server.metric("inferno_iteration_tokens_count");
    assert_eq!(steps, server.metric("inferno_engine_steps_total"));
    assert_eq!(server.metric("inferno_request_num_preemptions_count"), 1.0);
    assert_eq!(server.metric("inferno_request_num_preemptions_sum"), 0.0);
}

#[test]
fn counters_of_a_new_server_are_zero() {
    let server = Server::start(&[]);
    let text = server.get("/metrics").text();
    for series in [
        "inferno_request_success_total{finished_reason=\"stop\"",
        "inferno_request_success_total{finished_reason=\"length\"",
        "inferno_request_success_total{finished_reason=\"tool_calls\"",
        "inferno_admission_rejections_total{reason=\"queue\"",
        "inferno_http_responses_total{code=\"429\"",
        "inferno_http_responses_total{code=\"500\"",
        "inferno_joined_retries_total{",
        "inferno_canceled_sequences_total{",
        "inferno_chat_format_violations_total{kind=\"invalid_header\"",
        "inferno_prompt_tokens_by_source_total{source=\"local_cache_hit\"",
    ] {
        let (name, label) = series.split_once('{').unwrap();
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")) && line.contains(label));
        assert!(line.is_some_and(|line| line.ends_with(" 0")), "{series}: {text}");
    }
}

#[test]
fn metrics_count_requests_and_tokens() {
    let server = Server::start(&["--metrics-compat", "vllm"]);
    let usage = server.chat(json!({ "n": 2 })).ok()["usage"].clone();
    server.wait_until_idle();
    let text = server.get("/metrics").text();
    for (name, value) in [
        ("inferno_prompt_tokens_total", &usage["prompt_tokens"]),
        ("inferno_generation_tokens_total", &usage["completion_tokens"]),
        ("vllm:generation_tokens_total", &usage["completion_tokens"]),
        ("inferno_time_to_first_token_seconds_count", &json!(2)),
        ("inferno_e2e_request_latency_seconds_count", &json!(1)),
        ("inferno_tokens_after_cancel_total", &json!(0)),
        ("inferno_request_inference_time_seconds_count", &json!(2)),
        ("inferno_request_max_num_generation_tokens_count", &json!(1)),
        ("vllm:request_params_n_sum", &json!(2)),
        ("inferno_request_prefill_kv_computed_tokens_sum", &usage["prompt_tokens"]),
    ] {
        let line = format!("{name}{{engine=\"0\",model_name=\"demo\"}} {value}\n");
        assert!(text.contains(&line), "{line}{text}");
    }
    let part = "vllm:request_num_preemptions_bucket{engine=\"0\",model_name=\"demo\",le=\"0\"} 2";
    assert!(text.contains(part), "{part}: {text}");
}

#[test]
fn metrics_have_the_names_and_labels_that_dashboards_read() {
    let server = Server::start(&["--metrics-compat", "vllm"]);
    server.chat(json!({ "max_tokens": 2 })).ok();
    server.wait_until_idle();
    let text = server.get("/metrics").text();
    for part in [
        "inferno_cache_config_info{block_size=\"64\",engine=\"0\",model_name=\"demo\",num_gpu_blocks=\"271\"} 1",
        "inferno_request_success_total{engine=\"0\",finished_reason=\"stop\"",
        "inferno_inter_token_latency_seconds_bucket{engine=\"0\",model_name=\"demo\",le=\"0.0005\"}",
        "# TYPE inferno_num_requests_waiting gauge",
        "vllm:num_requests_waiting_by_reason{engine=\"0\",model_name=\"demo\",reason=\"capacity\"} 0",
        "vllm:engine_sleep_state{engine=\"0\",model_name=\"demo\",sleep_state=\"awake\"} 1",
        "vllm:iteration_tokens_total_bucket{engine=\"0\",model_name=\"demo\",le=\"+Inf\"}",
        "vllm:lora_requests_info{engine=\"0\",max_lora=\"0\",model_name=\"demo\",running_lora_adapters=\"\"",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // These three metrics add no information: a copy of `num_requests_waiting`, a constant and the current time.
    // Therefore, only `--metrics-compat vllm` publishes them, and only with the prefix `vllm:`.
    let plain = Server::start(&[]).get("/metrics").text();
    for name in ["waiting_by_reason", "engine_sleep_state", "lora_requests_info"] {
        assert!(text.contains(name) && !plain.contains(name), "{name}: {plain}");
        assert!(!text.lines().any(|line| line.starts_with("inferno_") && line.contains(name)), "{name}: {text}");
    }
    assert!(!plain.contains("vllm:"));
}

#[test]
fn metrics_have_no_duplicate_type_lines() {
    let server = Server::start(&["--metrics-compat", "vllm"]);
    let response = server.get("/metrics");
    assert_eq!(response.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let text = response.text();
    let types: Vec<&str> = text.lines().filter(|line| line.starts_with("# TYPE")).collect();
    let distinct: BTreeSet<&str> = types.iter().copied().collect();
    assert_eq!(types.len(), distinct.len(), "a TYPE line occurs twice");
    server.send("POST", "/metrics", &[JSON], b"{}").error(405);
}

#[test]
fn serving_page_lists_exactly_the_metrics() {
    let server = Server::start(&[]);
    server.chat(json!({ "max_tokens": 2 })).ok();
    let text = server.get("/metrics").text();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let published: BTreeSet<&str> = types.filter(|name| name.starts_with("inferno_")).collect();
    let page = include_str!("../../../docs/serving.md");
    let names = page.split('`').skip(1).step_by(2);
    let documented: BTreeSet<&str> = names.filter(|name| name.starts_with("inferno_")).collect();
    assert_eq!(documented, published);
}
