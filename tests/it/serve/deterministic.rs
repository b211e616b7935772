//! Tests of deterministic answers, which do not depend on other requests. With `--deterministic`, a server gives only
//! such answers. Without it, single requests can ask for them.

use std::io::BufReader;

use serde_json::{Value, json};

use super::client::{JSON, Response, Server, chat};

/// The suffix of `system_fingerprint` in deterministic answers.
const SUFFIX: &str = "-deterministic";

fn question(index: usize) -> Value {
    let topics =
        ["the KV cache", "prefill", "a token", "quantization", "a GPU", "the context", "sampling", "streaming"];
    let text =
        format!("{} What is {}?", "Explain it in one sentence. ".repeat(index % 4), topics[index % topics.len()]);
    chat(json!({
        "messages": [{ "role": "user", "content": text }],
        "max_tokens": 30,
        "ignore_eos": true,
        "logprobs": true,
        "seed": index,
        "temperature": index % 2,
    }))
}

/// Returns the message and the log probabilities of a response as one JSON value, and the fingerprint of the response.
fn answer(response: &Response) -> (Value, String) {
    let json = response.ok();
    let choice = json!([json["choices"][0]["message"], json["choices"][0]["logprobs"]]);
    (choice, json["system_fingerprint"].as_str().unwrap().to_string())
}

#[test]
fn single_requests_can_be_deterministic() {
    let server = Server::start(&[]);
    let ask = |index: usize| {
        let mut body = question(index);
        body["deterministic"] = json!(true);
        server.begin("/v1/chat/completions", &body)
    };
    let read = |connection| answer(&Response::read(&mut BufReader::new(connection)));
    let alone: Vec<_> = (0..8).map(|index| read(ask(index))).collect();
    assert!(alone.iter().all(|(_, fingerprint)| fingerprint.ends_with(SUFFIX)), "{alone:?}");
    let ordinary: Vec<_> = (0..8).map(|index| answer(&server.post("/v1/chat/completions", &question(index)))).collect();
    assert!(ordinary.iter().all(|(_, fingerprint)| !fingerprint.ends_with(SUFFIX)), "{ordinary:?}");
    for _ in 0..2 {
        let connections: Vec<_> = (0..8)
            .map(|index| {
                let other = server.begin("/v1/chat/completions", &question((index + 3) % 8));
                (other, ask(index))
            })
            .collect();
        for (index, (other, connection)) in connections.into_iter().enumerate() {
            assert_eq!(read(connection), alone[index], "request {index}");
            read(other);
        }
    }
    let by_header = server.send(
        "POST",
        "/v1/chat/completions",
        &[JSON, ("x-inferno-deterministic", "1")],
        question(5).to_string().as_bytes(),
    );
    assert_eq!(answer(&by_header), alone[5]);
    let stream = server.chat(json!({ "deterministic": true, "stream": true, "max_tokens": 2 })).events();
    assert!(stream.iter().all(|event| event["system_fingerprint"].as_str().unwrap().ends_with(SUFFIX)), "{stream:?}");
    let text = json!({ "prompt": "The", "deterministic": true });
    assert!(server.post("/v1/completions", &text).ok()["system_fingerprint"].as_str().unwrap().ends_with(SUFFIX));
    assert_eq!(server.chat(json!({ "deterministic": "yes" })).error(400)["param"], "deterministic");
    // The Messages API also honors the field `deterministic`, so it does not report the field as ignored.
    let messages = json!({ "max_tokens": 3, "messages": [{ "role": "user", "content": "Hi" }], "deterministic": true });
    let response = server.post("/v1/messages", &messages);
    assert_eq!((response.status, response.header("x-inferno-ignored")), (200, None));
}

/// Tests the header `x-inferno-deterministic` on four routes.
/// The responses of some of these routes have no fingerprint, so the test reads the records of the requests.
#[test]
fn the_header_works_on_all_routes() {
    let server = Server::start(&["--record-memory", "1"]);
    let messages = json!([{ "role": "user", "content": "What is the KV cache?" }]);
    for (path, body) in [
        ("/v1/messages", json!({ "model": "demo", "max_tokens": 8, "messages": messages })),
        ("/v1/responses", json!({ "max_output_tokens": 8, "input": "What is the KV cache?" })),
        ("/v1/completions", json!({ "max_tokens": 8, "prompt": "The KV cache" })),
        (
            "/api/chat",
            json!({ "model": "demo", "stream": false, "messages": messages, "options": { "num_predict": 8 } }),
        ),
    ] {
        for value in ["1", "0"] {
            let id = format!("{}-{value}", path.replace('/', "-"));
            let headers = [JSON, ("x-request-id", &id), ("x-inferno-deterministic", value)];
            assert_eq!(server.send("POST", path, &headers, body.to_string().as_bytes()).status, 200, "{path}");
            let record = server.get(&format!("/v1/records/{id}")).ok();
            assert_eq!(record["requests"][0]["request"]["deterministic"], value == "1", "{path}: {record}");
        }
    }
}

#[test]
fn a_plain_answer_of_a_deterministic_server_says_so() {
    let server = Server::start(&["--deterministic"]);
    let (ordinary, fingerprint) = answer(&server.post("/v1/chat/completions", &question(0)));
    assert!(fingerprint.ends_with(SUFFIX), "{fingerprint}");
    let mut body = question(0);
    body["deterministic"] = json!(true);
    assert_eq!(answer(&server.post("/v1/chat/completions", &body)).0, ordinary);
}

#[test]
fn engines_with_small_chunks_refuse_single_deterministic_requests() {
    let server = Server::start(&["--chunk", "63", "--max-sequences", "4"]);
    let error = server.chat(json!({ "deterministic": true })).error(400);
    assert_eq!(error["param"], "deterministic", "{error}");
}
