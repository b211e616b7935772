//! Tests of request records and `inferno replay`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::client::{JSON, Server, endless, merged, read_chunk};
use crate::support::program::{assert_fails, run, text};

fn replay(record: &str, args: &[&str]) -> Output {
    run(&[&["replay", record, "--device", "cpu"], args].concat())
}

/// Asserts that all replayed answers equal the recorded answers. Returns the number of answers.
fn assert_equal(output: &Output) -> usize {
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{printed} {}", text(&output.stderr));
    assert!(printed.lines().all(|line| line.contains(" tokens are equal ")), "{printed}");
    assert!(text(&output.stderr).is_empty(), "{}", text(&output.stderr));
    printed.lines().count()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Sends requests of several kinds, each with an id. Returns the id and the number of answers of each request.
fn send_all(server: &Server) -> Vec<(&'static str, usize)> {
    let send = |id: &'static str, path: &str, body: Value| {
        let response = server.send("POST", path, &[JSON, ("x-request-id", id)], body.to_string().as_bytes());
        assert_eq!((response.status, response.header("x-request-id")), (200, Some(id)), "{}", response.text());
    };
    let messages = json!([{ "role": "user", "content": "What is the weather in Paris?" }]);
    let chat = |fields: Value| merged(json!({ "messages": messages.clone(), "max_tokens": 40 }), &fields);
    let path = "/v1/chat/completions";
    // Without a seed in a request, the server chooses one.
    send("sampled", path, chat(json!({ "temperature": 1.0, "top_p": 0.9, "n": 3 })));
    send("streamed", path, chat(json!({ "temperature": 0.7, "stream": true, "frequency_penalty": 0.5 })));
    let options =
        json!({ "logprobs": true, "top_logprobs": 2, "logit_bias": { "5": 3 }, "stop": ["the"], "min_tokens": 5 });
    send("scored", path, chat(options));
    let schema = json!({ "type": "object", "properties": { "city": { "type": "string", "maxLength": 9 } }, "required": ["city"] });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
    send("schema", path, chat(json!({ "response_format": format, "seed": 7, "temperature": 1 })));
    let tool = json!({ "type": "function", "function": { "name": "get_weather", "parameters": schema } });
    send("tool", path, chat(json!({ "tools": [tool], "tool_choice": "required", "parallel_tool_calls": false })));
    send("texts", "/v1/completions", json!({ "prompt": ["The KV", "A token"], "n": 2, "temperature": 1 }));
    send("message", "/v1/messages", json!({ "messages": messages.clone(), "max_tokens": 20 }));
    vec![("sampled", 3), ("streamed", 1), ("scored", 1), ("schema", 1), ("tool", 1), ("texts", 4), ("message", 1)]
}

#[test]
fn recorded_answers_are_the_same_again() {
    for flags in [&["--deterministic"][..], &[]] {
        let folder = TempDir::new().unwrap();
        let records = folder.path().join("new/folder");
        let server = Server::start(&[&["--record", records.to_str().unwrap()], flags].concat());
        let sent = send_all(&server);
        let log = server.log();
        assert!(!log.contains("Paris") && !log.contains("get_weather"), "{log}");
        assert_eq!(files(&records).len(), sent.len());
        for (id, answers) in sent {
            let file = records.join(format!("{id}.json"));
            assert_eq!(assert_equal(&replay(file.to_str().unwrap(), &[])), answers, "{id}");
        }
    }
}

#[test]
fn replay_names_the_first_token_that_differs() {
    let folder = TempDir::new().unwrap();
    let server = Server::start(&["--record", folder.path().to_str().unwrap(), "--deterministic"]);
    server.chat(json!({ "logprobs": true, "max_tokens": 20 })).ok();
    drop(server.log());
    let file = files(folder.path()).remove(0);
    #[cfg(unix)]
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&file).unwrap().permissions()) & 0o777, 0o600);
    let mut record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let token = record["requests"][0]["answers"][0]["tokens"][7].as_u64().unwrap();
    let edited = folder.path().join("edited.json");
    let path = edited.to_str().unwrap();
    let write = |record: &Value| fs::write(&edited, record.to_string()).unwrap();
    record["requests"][0]["answers"][0]["tokens"][7] = json!(token + 1);
    write(&record);
    let output = replay(path, &[]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let expected = format!("answer 1: token 8 of 20 differs: expected {} ", token + 1);
    let printed = text(&output.stdout);
    assert!(printed.starts_with(&expected) && printed.contains(&format!("got {token} ")), "{printed}");
    assert_eq!(printed.matches("log probability").count(), 2, "{printed}");
    // A replay on a device other than the recorded one succeeds if it generates the same tokens.
    record["requests"][0]["answers"][0]["tokens"][7] = json!(token);
    record["engine"]["device"] = json!("another device");
    write(&record);
    let output = replay(path, &[]);
    assert!(output.status.success());
    record["version"] = json!(2);
    write(&record);
    assert_fails(&replay(path, &[]), 1, &["version 2"]);
    record["version"] = json!(1);
    record["requests"][0]["request"]["prompt"][0] = json!(1_000_000);
    write(&record);
    assert_fails(&replay(path, &[]), 1, &["1000000", "vocabulary"]);
    fs::write(&edited, "{}").unwrap();
    assert_fails(&replay(path, &[]), 1, &["edited.json"]);
    assert_fails(&replay("/nowhere/x.json", &[]), 2, &["no such file"]);
}

#[test]
fn a_server_gives_records_to_their_clients_only() {
    let server = Server::start(&["--api-key", "one", "--api-key", "two", "--deterministic"]);
    let one = ("Authorization", "Bearer one");
    let two = ("Authorization", "Bearer two");
    // A request id may contain any visible ASCII characters.
    let id = "trace/../1?a=%20#b";
    let body = super::client::chat(json!({ "max_tokens": 12, "temperature": 1 })).to_string();
    let path = "/v1/chat/completions";
    assert_eq!(server.send("POST", path, &[JSON, one, ("x-request-id", id)], body.as_bytes()).status, 200);
    let flags = ["--url", &server.url, "--api-key"];
    assert_eq!(assert_equal(&replay(id, &[&flags[..], &["one"]].concat())), 1);
    assert_fails(&replay(id, &[&flags[..], &["two"]].concat()), 3, &["no record"]);
    assert_fails(&replay(id, &[&flags[..], &["three"]].concat()), 4, &["wrong API key"]);
    assert_fails(&replay("other", &[&flags[..], &["one"]].concat()), 3, &["no record"]);
    // The record has the same finish reason as the response. If `tool_choice` names a tool, the reason is `stop`.
    let function = json!({ "name": "now", "parameters": { "type": "object", "properties": {} } });
    let tools = json!([{ "type": "function", "function": function }]);
    let named = json!({ "type": "function", "function": { "name": "now" } });
    for (id, choice, finish) in [("required", json!("required"), "tool_calls"), ("named", named, "stop")] {
        let body = super::client::chat(json!({ "tools": tools, "tool_choice": choice })).to_string();
        let response = server.send("POST", path, &[JSON, one, ("x-request-id", id)], body.as_bytes()).ok();
        let record = server.send("GET", &format!("/v1/records/{id}"), &[one], b"").ok();
        let recorded = &record["requests"][0]["answers"][0]["finish"];
        assert_eq!((&response["choices"][0]["finish_reason"], recorded), (&json!(finish), &json!(finish)), "{id}");
    }
    // If a client disconnects, the record contains the tokens generated before the disconnection.
    let mut stream = server.connect();
    let body = endless(true).to_string();
    let request = super::client::request("POST", path, &[JSON, two, ("x-request-id", "left")], body.as_bytes());
    std::io::Write::write_all(&mut stream, &request).unwrap();
    let mut reader = std::io::BufReader::new(stream);
    super::client::Response::read_head(&mut reader);
    for _ in 0..5 {
        read_chunk(&mut reader).unwrap();
    }
    drop(reader);
    let get = || server.send("GET", "/v1/records/left", &[two], b"");
    server.wait("the record is available", |_| get().status == 200);
    let answer = &get().json()["requests"][0]["answers"][0];
    assert!(answer["finish"] == "canceled" && answer["tokens"].as_array().unwrap().len() > 3, "{answer}");
    assert_eq!(assert_equal(&replay("left", &[&flags[..], &["two"]].concat())), 1);
}

#[test]
fn records_can_be_turned_off() {
    let server = Server::start(&["--record-memory", "0"]);
    let response = server.chat(json!({ "max_tokens": 3 }));
    response.ok();
    let id = response.header("x-request-id").unwrap().to_string();
    server.get(&format!("/v1/records/{id}")).error(404);
    // With `--no-auth`, all clients belong to one tenant and may be on other machines, so no client may read records.
    let server = Server::start(&["--no-auth"]);
    let response = server.chat(json!({ "max_tokens": 3 }));
    let id = response.header("x-request-id").unwrap().to_string();
    server.get(&format!("/v1/records/{id}")).error(403);
}
