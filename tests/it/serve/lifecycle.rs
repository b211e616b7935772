//! Tests of load limits, shutdown, logs and settings.

use std::fs;
use std::io::{BufReader, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::client::{Response, Server, chat, endless, read_chunk};
use crate::support::program::{assert_fails, run};

#[test]
fn exactly_the_excess_is_rejected_when_the_queue_is_full() {
    let server = Server::start(&["--max-sequences", "2", "--queue", "3"]);
    let streams: Vec<TcpStream> = (0..12).map(|_| server.begin("/v1/chat/completions", &endless(true))).collect();
    let mut readers: Vec<BufReader<TcpStream>> = streams.into_iter().map(BufReader::new).collect();
    let responses: Vec<Response> = readers.iter_mut().map(Response::read_head).collect();
    let rejected: Vec<&Response> = responses.iter().filter(|response| response.status == 429).collect();
    assert_eq!(rejected.len(), 7);
    for response in rejected {
        let seconds: f64 = response.header("retry-after").unwrap().parse().unwrap();
        let milliseconds: f64 = response.header("retry-after-ms").unwrap().parse().unwrap();
        assert!(
            seconds >= 1.0 && milliseconds / 1000.0 <= seconds,
            "retry-after: {seconds} s, retry-after-ms: {milliseconds}"
        );
    }
    assert!(
        server
            .get("/metrics")
            .text()
            .contains("inferno_admission_rejections_total{engine=\"0\",model_name=\"demo\",reason=\"queue\"")
    );
    // A busy server still counts as healthy.
    assert_eq!(server.get("/health").status, 200);
    let error = server.chat(json!({})).error(429);
    assert_eq!(error["code"], "rate_limit_exceeded");
    assert!(error["message"].as_str().unwrap().contains("try again in"), "{error}");
    drop(readers);
    server.wait_until_idle();
    // One request asks for more answers than can run and wait at the same time.
    let error = server.chat(json!({ "n": 6, "max_tokens": 2 })).error(400);
    assert!(error["param"] == "n" && error["message"].as_str().unwrap().contains("the limit is 5"), "{error}");
    server.chat(json!({ "n": 5, "max_tokens": 2 })).ok();
}

#[test]
fn requests_do_not_wait_forever() {
    let server = Server::start(&["--max-sequences", "1", "--queue-timeout", "0.2"]);
    let _first = server.begin("/v1/chat/completions", &endless(true));
    server.wait("the first request is running", |server| server.metric("inferno_num_requests_running") == 1.0);
    let response = server.chat(json!({}));
    let error = response.error(429);
    assert_eq!(error["code"], "rate_limit_exceeded");
    let seconds = response.header("retry-after").unwrap();
    assert!(error["message"].as_str().unwrap().ends_with(&format!("please try again in {seconds}s")), "{error}");
    // No answer has ended yet, so the suggested delay is the time since the first request was admitted.
    let milliseconds: u64 = response.header("retry-after-ms").unwrap().parse().unwrap();
    assert!((200..=60_000).contains(&milliseconds) && milliseconds != 5000, "{milliseconds}");
    let events = server.chat(json!({ "stream": true })).events();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0]["error"]["code"], "rate_limit_exceeded");
}

#[test]
fn streams_end_before_the_server_does() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut server = Server::start(&[]);
        let body = chat(json!({ "stream": true, "ignore_eos": true, "max_tokens": 600 }));
        let mut stream = BufReader::new(server.begin("/v1/chat/completions", &body));
        assert_eq!(Response::read_head(&mut stream).status, 200);
        let mut text = read_chunk(&mut stream).unwrap();
        server.signal(signal);
        server.wait("/health returns status 503", |server| server.get("/health").status == 503);
        assert_eq!(server.get("/live").status, 200);
        let response = server.chat(json!({}));
        assert_eq!(response.error(503)["code"], "unavailable");
        assert!(response.header("retry-after").is_some());
        while let Some(chunk) = read_chunk(&mut stream) {
            text.extend(chunk);
        }
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("\"length\"") && text.ends_with("data: [DONE]\n\n"), "{text}");
        assert_eq!(server.exit_code(), Some(0));
    }
}

#[test]
fn a_server_accepts_requests_during_the_drain_delay() {
    // Set a drain delay that cannot end during the test.
    let server = Server::start(&["--drain-delay", "3600"]);
    server.signal(Signal::SIGTERM);
    server.wait("/health returns status 503", |server| server.get("/health").status == 503);
    assert_eq!(server.get("/live").status, 200);
    server.chat(json!({ "max_tokens": 2 })).ok();
    let mut stream = BufReader::new(server.begin("/v1/chat/completions", &endless(true)));
    assert_eq!(Response::read_head(&mut stream).status, 200);
    assert!(read_chunk(&mut stream).is_some());
}

#[test]
fn a_server_rejects_requests_after_the_drain_delay_and_completes_the_rest() {
    let mut server = Server::start(&["--drain-delay", "1"]);
    let mut stream = BufReader::new(server.begin("/v1/chat/completions", &endless(true)));
    assert_eq!(Response::read_head(&mut stream).status, 200);
    let signaled = Instant::now();
    server.signal(Signal::SIGTERM);
    server.wait("the server is draining", |server| server.chat(json!({ "max_tokens": 2 })).status == 503);
    assert!(signaled.elapsed() >= Duration::from_secs(1));
    assert!(read_chunk(&mut stream).is_some());
    drop(stream);
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn streams_that_take_too_long_end_with_an_error() {
    let mut server = Server::start(&["--drain-timeout", "0"]);
    let mut stream = BufReader::new(server.begin("/v1/chat/completions", &endless(true)));
    let whole = server.begin("/v1/chat/completions", &endless(false));
    assert_eq!(Response::read_head(&mut stream).status, 200);
    let mut text = read_chunk(&mut stream).unwrap();
    server.wait("both requests are running", |server| server.metric("inferno_num_requests_running") == 2.0);
    server.signal(Signal::SIGTERM);
    while let Some(chunk) = read_chunk(&mut stream) {
        text.extend(chunk);
    }
    let text = String::from_utf8(text).unwrap();
    let events: Vec<&str> = text.trim_end().split("\n\n").collect();
    assert_eq!(events[events.len() - 1], "data: [DONE]");
    let error: Value = serde_json::from_str(events[events.len() - 2].strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "unavailable");
    Response::read(&mut BufReader::new(whole)).error(503);
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn a_second_signal_ends_the_server_at_once() {
    let mut server = Server::start(&[]);
    let _stream = server.begin("/v1/chat/completions", &endless(true));
    server.wait("the request is running", |server| server.metric("inferno_num_requests_running") == 1.0);
    server.signal(Signal::SIGTERM);
    server.wait("/health returns status 503", |server| server.get("/health").status == 503);
    server.signal(Signal::SIGTERM);
    assert_eq!(server.exit_code(), Some(130));
}

#[test]
fn idle_connections_do_not_keep_the_server_running() {
    let mut server = Server::start(&["--header-timeout", "1000"]);
    let _idle: Vec<TcpStream> = (0..20).map(|_| server.connect()).collect();
    server.signal(Signal::SIGTERM);
    assert_eq!(server.exit_code(), Some(0));
}

/// By default, the router SMG reuses connections that were idle for up to 3 s,
/// so the server must keep idle connections open for longer.
#[test]
fn an_idle_connection_stays_open_for_longer_than_routers_keep_it() {
    let server = Server::start(&[]);
    let mut stream = BufReader::new(server.connect());
    for pause in [0, 5] {
        thread::sleep(Duration::from_secs(pause));
        stream.get_mut().write_all(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        assert_eq!(Response::read(&mut stream).status, 200);
    }
}

const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[test]
fn the_log_shows_requests_but_not_their_content() {
    let server = Server::start(&["--log-format", "json"]);
    let messages = json!([{ "role": "user", "content": "secret-question" }]);
    server.chat(json!({ "messages": messages, "max_tokens": 9, "stream": true })).events();
    server.send("GET", "/v1/models?token=secret-query", &[("traceparent", TRACEPARENT)], b"").ok();
    server.get("/health").ok();
    let log = server.log();
    assert!(!log.contains("secret"), "{log}");
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2, "{log}");
    assert_eq!((&lines[0]["traceparent"], &lines[1]["traceparent"]), (&Value::Null, &json!(TRACEPARENT)));
    let line = &lines[0];
    assert_eq!(
        (&line["path"], &line["status"], &line["stream"]),
        (&json!("/v1/chat/completions"), &json!(200), &json!(true))
    );
    assert_eq!((&line["completion_tokens"], &line["finish"]), (&json!(9), &json!("length")));
    assert!(line["id"].as_str().unwrap().starts_with("req-") && line["timestamp"].is_string());
    for figure in ["duration_ms", "ttft_ms", "prompt_tokens"] {
        assert!(line[figure].as_f64().unwrap() > 0.0, "{figure}");
    }
}

#[test]
fn settings_come_from_the_configuration_file_and_the_environment() {
    let folder = TempDir::new().unwrap();
    let config = folder.path().join("config.toml");
    fs::write(
        &config,
        "context = 300\nmax-sequences = 9\ntemperature = 0.5\n[models.demo]\napi-key = [\"k\", \"l\"]\n",
    )
    .unwrap();
    let variables = [("INFERNO_CONFIG", config.to_str().unwrap()), ("INFERNO_CONTEXT", "200")];
    let server = Server::start_with(&["--max-sequences", "8"], &variables);
    let get = |path: &str| server.send("GET", path, &[("Authorization", "Bearer l")], b"").ok();
    assert_eq!(get("/v1/models")["data"][0]["max_model_len"], 200);
    assert_eq!(get("/v1/loads")["loads"][0]["max_running_requests"], 8);
    server.get("/v1/models").error(401);
}

#[test]
fn invalid_flags_are_usage_errors() {
    for (args, word) in [
        (["--max-sequences", "0"], "max-sequences"),
        (["--max-sequences", "257"], "max-sequences"),
        (["--max-connections", "0"], "max-connections"),
        (["--port", "70000"], "port"),
        (["--metrics-compat", "tgi"], "vllm"),
        (["--header-timeout", "0"], "seconds"),
        (["--log-format", "xml"], "json"),
    ] {
        assert_fails(&run(&[&["serve", "demo"], &args[..]].concat()), 2, &[word]);
    }
    assert_fails(&run(&["serve", "no-such-model"]), 3, &["no-such-model"]);
}
