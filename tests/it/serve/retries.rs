//! Tests of retries after a connection was lost.

use std::io::Write;
use std::net::Shutdown;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{JSON, Response, Server, chat, endless, request};

/// The number of tokens in the answer to [`long`].
const TOKENS: u32 = 1500;

const PATH: &str = "/v1/chat/completions";

/// Returns the body of a request with a long answer.
fn long() -> Value {
    chat(json!({ "ignore_eos": true, "max_tokens": TOKENS, "temperature": 1 }))
}

/// Sends a request, and closes the connection while the answer is being generated.
fn lose(server: &Server, headers: &[(&str, &str)], body: &Value) {
    let mut stream = server.connect();
    let headers = [&[JSON], headers].concat();
    stream.write_all(&request("POST", PATH, &headers, body.to_string().as_bytes())).unwrap();
    server.wait("the request is running", |server| server.metric("inferno_num_requests_running") == 1.0);
    stream.shutdown(Shutdown::Both).unwrap();
}

fn send(server: &Server, headers: &[(&str, &str)], body: &Value) -> Response {
    server.send("POST", PATH, &[&[JSON], headers].concat(), body.to_string().as_bytes())
}

#[test]
fn a_retry_gets_the_answer_to_the_lost_request() {
    let server = Server::start(&["--api-key", "one", "--api-key", "two"]);
    let (one, two) = (("Authorization", "Bearer one"), ("Authorization", "Bearer two"));
    let count = |count| ("x-stainless-retry-count", count);
    let metric = |name: &str| {
        let text = server.send("GET", "/metrics", &[one], b"").text();
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap().to_string();
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    let lose = |headers: &[(&str, &str)], body: &Value| {
        let mut stream = server.connect();
        let headers = [&[JSON, one, ("x-request-id", "first")], headers].concat();
        stream.write_all(&request("POST", PATH, &headers, body.to_string().as_bytes())).unwrap();
        server.wait("the request is running", |_| metric("inferno_num_requests_running") == 1.0);
        stream.shutdown(Shutdown::Both).unwrap();
        // Wait before the retry, as clients do, so that the server notices that the connection was lost.
        std::thread::sleep(Duration::from_millis(300));
    };
    for headers in [[count("1"), ("x-a", "b")], [("Idempotency-Key", "abc"), ("x-a", "b")]] {
        let before = metric("inferno_generation_tokens_total");
        lose(&headers, &long());
        let retry = if headers[0].0.starts_with('x') { count("2") } else { headers[0] };
        let response = send(&server, &[one, retry], &long());
        assert_eq!(response.ok()["usage"]["completion_tokens"], TOKENS);
        assert_eq!(response.header("x-inferno-joined"), Some("first"));
        assert_eq!(metric("inferno_generation_tokens_total") - before, f64::from(TOKENS));
        // Another retry generates a new answer, because the answer to the lost request was delivered.
        assert_eq!(send(&server, &[one, retry], &long()).header("x-inferno-joined"), None);
    }
    assert_eq!(metric("inferno_joined_retries_total"), 2.0);
    assert_eq!(metric("inferno_canceled_sequences_total"), 0.0);
    // A request with another API key, another body or a retry count of 0 generates its own answer.
    lose(&[count("1")], &long());
    let mut other = long();
    other["max_tokens"] = json!(3);
    for (headers, body) in [([two, count("2")], long()), ([one, count("2")], other), ([one, count("0")], long())] {
        assert_eq!(send(&server, &headers, &body).header("x-inferno-joined"), None, "{headers:?}");
    }
}

#[test]
fn a_client_that_does_not_come_back_costs_nothing_after_a_short_time() {
    let server = Server::start(&[]);
    let started = Instant::now();
    lose(&server, &[("x-stainless-retry-count", "1")], &endless(false));
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(server.metric("inferno_num_requests_running"), 1.0, "the server must keep generating for a retry");
    server.wait_until_idle();
    assert!((2..20).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
    assert_eq!(server.metric("inferno_canceled_sequences_total"), 1.0);
    assert_eq!(server.metric("inferno_tokens_after_cancel_total"), 0.0);
    let late = send(&server, &[("x-stainless-retry-count", "2")], &chat(json!({ "max_tokens": 2 })));
    assert_eq!((late.status, late.header("x-inferno-joined")), (200, None));
}

#[test]
fn streams_and_requests_of_other_clients_are_canceled_at_once() {
    let server = Server::start(&[]);
    let (first, retry) = ([("x-stainless-retry-count", "0")], [("x-stainless-retry-count", "1")]);
    for (headers, is_stream) in [(&first[..], false), (&first, true), (&retry, true), (&[], false)] {
        // After a lost connection, an answer that waits for a retry would run for 2 more seconds.
        // On a busy machine, even an immediate cancellation can take this long, so try up to five times.
        let is_canceled_at_once = || {
            lose(&server, headers, &endless(is_stream));
            let lost = Instant::now();
            server.wait_until_idle();
            lost.elapsed() < Duration::from_millis(1900)
        };
        assert!((0..5).any(|_| is_canceled_at_once()), "{headers:?}, stream: {is_stream}");
    }
    // Requests with a retry count must also have a valid content type and body.
    let headers = [("Content-Type", "text/plain"), ("x-stainless-retry-count", "0")];
    server.send("POST", PATH, &headers, b"{}").error(415);
    send(&server, &[("x-stainless-retry-count", "2")], &json!({ "messages": 5 })).error(400);
}
