//! Tests of `POST /v1/admission`, and of fairness between API keys.

use std::io::BufReader;
use std::net::TcpStream;

use serde_json::{Value, json};

use super::client::{JSON, Response, Server, chat, endless, request};

fn preview(server: &Server, fields: Value) -> Value {
    server.post("/v1/admission", &chat(fields)).ok()
}

#[test]
fn a_preview_equals_what_happens() {
    let server = Server::start(&["--max-sequences", "2", "--queue", "3"]);
    let before = preview(&server, json!({ "max_tokens": 8 }));
    assert_eq!(
        (&before["object"], &before["fits"], &before["accepted"], &before["starts_now"]),
        (&json!("admission"), &json!(true), &json!(true), &json!(true)),
        "{before}"
    );
    assert_eq!((&before["cached_tokens"], &before["expected_wait_s"]), (&json!(0), &json!(0.0)), "{before}");
    assert_eq!(before["max_tokens"], 8);
    let blocks = before["kv_cache"].clone();
    assert!(
        blocks["needed_blocks"].as_u64().unwrap() >= 1 && blocks["free_blocks"] == blocks["total_blocks"],
        "{before}"
    );
    // An admission preview runs no step, does not count as a prefix cache query, and does not change the next preview.
    assert_eq!(server.metric("inferno_engine_steps_total"), 0.0);
    assert_eq!(server.metric("inferno_prefix_cache_queries_total"), 0.0);
    assert_eq!(preview(&server, json!({ "max_tokens": 8 })), before);

    let usage = server.chat(json!({ "max_tokens": 8 })).ok()["usage"].clone();
    assert_eq!(usage["prompt_tokens"], before["prompt_tokens"]);
    let again = preview(&server, json!({ "max_tokens": 8 }));
    let usage = server.chat(json!({ "max_tokens": 8 })).ok()["usage"].clone();
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], again["cached_tokens"]);
    assert!(again["cached_tokens"].as_u64().unwrap() >= 64, "{again}");
    assert_eq!(preview(&server, json!({ "cache_salt": "x" }))["cached_tokens"], 0);

    // Start five requests, of which two run and three wait.
    let _streams: Vec<TcpStream> = (0..5)
        .map(|place| {
            let stream = server.begin("/v1/chat/completions", &endless(true));
            let admitted = |server: &Server| {
                let count = |name| server.metric(&format!("inferno_num_requests_{name}"));
                count("running") + count("waiting")
            };
            server.wait("the request is submitted", |server| admitted(server) == f64::from(place + 1));
            stream
        })
        .collect();
    server.wait("two requests are running", |server| server.metric("inferno_num_requests_running") == 2.0);
    let full = preview(&server, json!({}));
    assert_eq!(
        (&full["accepted"], &full["starts_now"], &full["requests_ahead"]),
        (&json!(false), &json!(false), &json!(3))
    );
    assert!(full["expected_wait_s"].as_f64().unwrap() > 0.0, "{full}");
    assert_eq!(preview(&server, json!({ "priority": -1000 }))["requests_ahead"], 0);
    server.chat(json!({})).error(429);
    // A request for more answers than the server admits at once can never run, so it gets status 400 instead of 429.
    assert_eq!(server.chat(json!({ "n": 6 })).error(400)["param"], "n");
    assert_eq!(server.post("/v1/admission", &chat(json!({ "n": 6 }))).error(400)["param"], "n");
}

#[test]
fn a_preview_checks_the_request() {
    let server = Server::start(&["--context", "200"]);
    let long = json!({ "messages": [{ "role": "user", "content": "word ".repeat(300) }] });
    let answer = preview(&server, long.clone());
    assert_eq!((&answer["fits"], &answer["accepted"]), (&json!(false), &json!(false)), "{answer}");
    assert!(answer["reason"].as_str().unwrap().contains("200 tokens"), "{answer}");
    assert_eq!(server.chat(long).error(400)["code"], "context_length_exceeded");
    let invalid = chat(json!({ "temperature": -1 }));
    assert_eq!(server.post("/v1/admission", &invalid).error(400)["param"], "temperature");
    let unknown = server.post("/v1/admission", &chat(json!({ "user": "u" })));
    assert_eq!(unknown.header("x-inferno-ignored"), Some("user"));
}

/// Sends a chat completion request with an API key. Returns the connection.
fn begin_as(server: &Server, key: &str, body: &Value) -> TcpStream {
    use std::io::Write;
    let mut stream = server.connect();
    let authorization = format!("Bearer {key}");
    let headers = [JSON, ("Authorization", authorization.as_str())];
    stream.write_all(&request("POST", "/v1/chat/completions", &headers, body.to_string().as_bytes())).unwrap();
    stream
}

/// Reads the value of a metric with the API key `b`.
fn metric(server: &Server, name: &str) -> f64 {
    let text = server.send("GET", "/metrics", &[("Authorization", "Bearer b")], b"").text();
    let line = text.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_key_with_many_requests_delays_other_keys_by_few_requests_each() {
    let server = Server::start(&["--max-sequences", "1", "--queue", "99", "--api-key", "a", "--api-key", "b"]);
    let body = chat(json!({ "ignore_eos": true, "max_tokens": 30 }));
    let flood: Vec<TcpStream> = (0..60).map(|_| begin_as(&server, "a", &body)).collect();
    server.wait("at least 55 requests are waiting", |server| metric(server, "inferno_num_requests_waiting") >= 55.0);
    for turn in 1..4 {
        Response::read(&mut BufReader::new(begin_as(&server, "b", &body))).ok();
        // Between two requests with key `b`, the server starts one or two requests with key `a`.
        // The assertion allows more, because further requests can start before the metric is read.
        let waiting = metric(&server, "inferno_num_requests_waiting");
        assert!(waiting >= f64::from(56 - 4 * turn), "{waiting} requests are waiting after turn {turn}");
    }
    drop(flood);
}

#[test]
fn a_key_cannot_fill_the_queue() {
    let server = Server::start(&["--max-sequences", "1", "--queue", "9", "--api-key", "a", "--api-key", "b"]);
    let mut flood: Vec<_> = (0..12).map(|_| BufReader::new(begin_as(&server, "a", &endless(true)))).collect();
    let statuses: Vec<u16> = flood.iter_mut().map(|stream| Response::read_head(stream).status).collect();
    assert_eq!(statuses.iter().filter(|&&status| status == 429).count(), 4, "{statuses:?}");
    let mut other = BufReader::new(begin_as(&server, "b", &endless(true)));
    assert_eq!(Response::read_head(&mut other).status, 200);
    drop((flood, other));
}
