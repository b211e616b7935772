//! Tests of retries after a connection was lost.

use std::io::{Read, Write};
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
/// Waits until the server has canceled the answer, or keeps it for a retry. Returns the time of the loss.
fn lose(server: &Server, headers: &[(&str, &str)], body: &Value) -> Instant {
    let mut stream = server.connect();
    let request_headers = [&[JSON], headers].concat();
    stream.write_all(&request("POST", PATH, &request_headers, body.to_string().as_bytes())).unwrap();
    server.wait("the request is running", |server| server.metric_with(headers, "inferno_num_requests_running") == 1.0);
    if body["stream"] == true {
        // The server cancels the answer only if its stream has begun, so wait for the first byte.
        stream.read_exact(&mut [0]).unwrap();
    }
    let lost = Instant::now();
    // The server closes its side of the connection as soon as it notices that the client has closed the other side.
    stream.shutdown(Shutdown::Write).unwrap();
    stream.read_to_end(&mut Vec::new()).unwrap();
    // The server counts the connection as open until it has canceled the answer or kept it for a retry.
    // The connection of the metrics request is then the only open one.
    let open = |server: &Server| server.metric_with(headers, "inferno_open_connections");
    server.wait("the server has dropped the connection", |server| open(server) == 1.0);
    lost
}

fn send(server: &Server, headers: &[(&str, &str)], body: &Value) -> Response {
    server.send("POST", PATH, &[&[JSON], headers].concat(), body.to_string().as_bytes())
}

#[test]
fn a_retry_gets_the_answer_to_the_lost_request() {
    let server = Server::start(&["--api-key", "one", "--api-key", "two"]);
    let (one, two) = (("Authorization", "Bearer one"), ("Authorization", "Bearer two"));
    let count = |count| ("x-stainless-retry-count", count);
    let metric = |name: &str| server.metric_with(&[one], name);
    let lose =
        |headers: &[(&str, &str)]| lose(&server, &[&[one, ("x-request-id", "first")], headers].concat(), &long());
    for headers in [[count("1"), ("x-a", "b")], [("Idempotency-Key", "abc"), ("x-a", "b")]] {
        let before = metric("inferno_generation_tokens_total");
        lose(&headers);
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
    lose(&[count("1")]);
    let mut other = long();
    other["max_tokens"] = json!(3);
    for (headers, body) in [([two, count("2")], long()), ([one, count("2")], other), ([one, count("0")], long())] {
        assert_eq!(send(&server, &headers, &body).header("x-inferno-joined"), None, "{headers:?}");
    }
}

#[test]
fn a_client_that_does_not_come_back_costs_nothing_after_a_short_time() {
    let server = Server::start(&[]);
    let lost = lose(&server, &[("x-stainless-retry-count", "1")], &endless(false));
    assert_eq!(server.metric("inferno_num_requests_running"), 1.0, "the server must keep generating for a retry");
    server.wait_until_idle();
    let elapsed = lost.elapsed();
    assert!(
        (Duration::from_secs(2)..Duration::from_secs(20)).contains(&elapsed),
        "the server must stop 2 to 20 s after the loss, but stopped after {elapsed:?}"
    );
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
        let metrics = || {
            let names = ["inferno_canceled_sequences_total", "inferno_generation_tokens_total"];
            names.map(|name| server.metric(name))
        };
        let [canceled, _] = metrics();
        lose(&server, headers, &endless(is_stream));
        let [_, tokens] = metrics();
        server.wait_until_idle();
        let [canceled_at_end, tokens_at_end] = metrics();
        assert_eq!(canceled_at_end, canceled + 1.0, "{headers:?}, stream: {is_stream}: not canceled");
        // The step in progress and one queued step may still add a token each.
        // An answer that waits for a retry would run for 2 more seconds.
        let late = tokens_at_end - tokens;
        assert!(late <= 2.0, "{headers:?}, stream: {is_stream}: {late} tokens were generated after the loss");
    }
    // Requests with a retry count must also have a valid content type and body.
    let headers = [("Content-Type", "text/plain"), ("x-stainless-retry-count", "0")];
    server.send("POST", PATH, &headers, b"{}").error(415);
    send(&server, &[("x-stainless-retry-count", "2")], &json!({ "messages": 5 })).error(400);
}
