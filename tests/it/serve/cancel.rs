//! Tests that requests end and free their KV cache blocks if clients disconnect or stop reading.
//! Also tests keep-alive pings.

use std::io::{BufReader, Read};
use std::net::Shutdown;

use serde_json::json;

use super::client::{Response, Server, endless, read_chunk};

#[test]
fn a_client_that_vanishes_cancels_its_request() {
    let server = Server::start(&["--max-sequences", "1"]);
    let running = |count: f64| move |server: &Server| server.metric("inferno_num_requests_running") == count;
    let waiting = |count: f64| move |server: &Server| server.metric("inferno_num_requests_waiting") == count;
    for (canceled, is_stream) in [(0.0, true), (2.0, false)] {
        let first = server.begin("/v1/chat/completions", &endless(is_stream));
        server.wait("the first request is running", running(1.0));
        let second = server.begin("/v1/chat/completions", &endless(is_stream));
        server.wait("the second request is waiting", waiting(1.0));
        // Cancel the request in the queue, then the running request.
        second.shutdown(Shutdown::Both).unwrap();
        server.wait("the second request has left the queue", waiting(0.0));
        assert_eq!(server.metric("inferno_num_requests_running"), 1.0, "the first request must still be running");
        drop(first);
        server.wait_until_idle();
        assert_eq!(server.metric("inferno_canceled_sequences_total"), canceled + 2.0);
    }
    // Cancel a request during a long prefill.
    let mut prefill = endless(true);
    prefill["messages"][0]["content"] = json!("model ".repeat(3500));
    let stream = server.begin("/v1/chat/completions", &prefill);
    server.wait("the prefill is running", running(1.0));
    drop(stream);
    server.wait_until_idle();
    assert_eq!(server.metric("inferno_tokens_after_cancel_total"), 0.0);
    assert_eq!(server.metric("inferno_cancel_latency_seconds_count"), 5.0);
    let sum_s = server.metric("inferno_cancel_latency_seconds_sum");
    assert!(sum_s > 0.0 && sum_s < 30.0, "5 cancellations took {sum_s} s");
    server.chat(json!({ "max_tokens": 3 })).ok();
    let log = server.log();
    let canceled = log.lines().filter(|line| line.contains("finish=\"canceled\""));
    assert_eq!(canceled.count(), 5, "{log}");
}

#[test]
fn all_choices_of_a_request_are_canceled() {
    let server = Server::start(&[]);
    let mut body = endless(true);
    body["n"] = json!(4);
    let mut stream = BufReader::new(server.begin("/v1/chat/completions", &body));
    assert_eq!(Response::read_head(&mut stream).status, 200);
    read_chunk(&mut stream).unwrap();
    server.wait("all answers are running", |server| server.metric("inferno_num_requests_running") == 4.0);
    drop(stream);
    server.wait_until_idle();
    assert_eq!(server.metric("inferno_canceled_sequences_total"), 4.0);
}

#[test]
fn a_client_that_does_not_read_is_disconnected() {
    let server = Server::start(&["--write-timeout", "0.5"]);
    // Large events soon fill the buffers of the connection, so that the server cannot write more.
    let mut body = endless(true);
    (body["logprobs"], body["top_logprobs"], body["n"]) = (json!(true), json!(20), json!(8));
    let mut stream = server.begin("/v1/chat/completions", &body);
    server.wait("all answers are running", |server| server.metric("inferno_num_requests_running") == 8.0);
    server.wait_until_idle();
    assert!(server.metric("inferno_canceled_sequences_total") > 0.0);
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"));
}

#[test]
fn streams_without_events_are_kept_alive() {
    let server = Server::start(&["--max-sequences", "1", "--ping-interval", "0.05"]);
    let first = server.begin("/v1/chat/completions", &endless(true));
    server.wait("the first request is running", |server| server.metric("inferno_num_requests_running") == 1.0);
    let mut waiting = BufReader::new(server.begin("/v1/chat/completions", &endless(true)));
    assert_eq!(Response::read_head(&mut waiting).status, 200);
    for _ in 0..3 {
        assert_eq!(read_chunk(&mut waiting).unwrap(), b": ping\n\n");
    }
    drop(first);
    while !String::from_utf8(read_chunk(&mut waiting).unwrap()).unwrap().contains("assistant") {}
}
