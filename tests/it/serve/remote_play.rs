//! Tests of `inferno play --url` with `inferno serve`, and with a mock server that imitates other servers.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Output;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::client::Server;
use crate::support::program::{assert_fails, inferno, text};
use crate::support::session::{expect, play_url};

/// Asks a server one question with `inferno play --url`.
/// Sets an unreachable proxy, so that the request fails if inferno uses the proxy for a server on this machine.
fn ask(url: &str, args: &[&str]) -> Output {
    let home = TempDir::new().unwrap();
    let mut command = inferno(&home);
    command.env("http_proxy", "http://127.0.0.1:1");
    command.args(["play", "--url", url, "--prompt", "What is the KV cache?"]).args(args).output().unwrap()
}

fn answer(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn answers_of_a_server_equal_those_of_a_local_model() {
    let server = Server::start(&["--api-key", "right"]);
    let url = format!("http://{}", server.address);
    let flags = ["--temperature", "0", "--json"];
    let remote = answer(&ask(&url, &[&flags[..], &["--api-key", "right"]].concat()));
    let home = TempDir::new().unwrap();
    let local = inferno(&home)
        .args(["play", "demo", "--device", "cpu", "--prompt", "What is the KV cache?"])
        .args(flags)
        .output();
    let local = answer(&local.unwrap());
    for field in ["text", "reasoning", "finish_reason", "usage", "model"] {
        assert_eq!(remote[field], local[field], "{field}");
    }
    assert!(remote["tokens"].is_null() && remote["seed"].is_null() && remote["stats"]["load_s"].is_null(), "{remote}");
    // A unique part of the model name is enough, and the URL may end in /v1.
    let output =
        ask(&format!("{url}/v1/"), &["dem", "--max-tokens", "3", "--json", "--seed", "4", "--api-key", "right"]);
    let cut = answer(&output);
    assert_eq!((&cut["finish_reason"], &cut["usage"]["completion_tokens"]), (&json!("length"), &json!(3)));
    assert_eq!(cut["seed"], 4);
    let lines = ask(&url, &["--jsonl", "--temperature", "0", "--api-key", "right"]);
    assert!(text(&lines.stdout).lines().count() > 5);
    let plain = ask(&url, &["--temperature", "0", "--api-key", "right"]);
    assert_eq!(text(&plain.stdout).trim_end(), local["text"].as_str().unwrap());

    assert_fails(&ask(&url, &[]), 4, &["no API key", "INFERNO_API_KEY"]);
    assert_fails(&ask(&url, &["--api-key", "wrong"]), 4, &["wrong API key"]);
    assert_fails(&ask(&url, &["other", "--api-key", "right"]), 3, &["'other'", "it serves 'demo'"]);
    let wrong_route = ask(&format!("{url}/v2"), &["--api-key", "right"]);
    assert_fails(&wrong_route, 3, &["/v2", "ends in /v1"]);
}

#[test]
fn commands_work_on_a_server_or_say_why_not() {
    let server = Server::start(&[]);
    let home = TempDir::new().unwrap();
    let url = format!("http://{}", server.address);
    let mut chat = play_url(&home, &url, &["--temperature", "0"]);
    let banner = expect(&mut chat, ">>> ");
    assert!(banner.contains("demo at http://") && banner.contains("context 4096 tokens"), "{banner}");
    let mut say = |line: &str| {
        chat.send_line(line).unwrap();
        expect(&mut chat, ">>> ")
    };
    let first = say("My name is Ada");
    assert!(first.contains("Ada") && first.contains("tok/s") && first.contains("of 4096"), "{first}");
    assert!(first.contains("\u{1b}[2m"), "the reasoning is not dim: {first}");
    assert!(say("What is my name?").contains("Ada"));
    assert!(say("/regen").contains("Ada"));
    let stats = say("/stats");
    for word in ["server", "owned by", "inferno", "last prompt", "reasoning)", "first token", "speed", "messages"] {
        assert!(stats.contains(word), "{word}: {stats}");
    }
    let context = say("/context");
    assert!(context.contains("of 4096 tokens (") && context.contains("cached"), "{context}");
    let settings = say("/set");
    assert!(settings.contains("top-p") && settings.contains("chosen by the server"), "{settings}");
    assert!(say("/set temperature 0.5").contains("temperature is 0.5"));
    assert!(say("/set overflow drop-oldest").contains("overflow is drop-oldest"));
    assert!(say("Who am I?").contains("context"));
    assert!(say("/model").contains("demo (current)"));
    assert!(say("/model other").contains("does not serve it"));
    assert!(say("/model demo").contains("switched to demo"));
    let notes = home.path().join("notes.txt");
    std::fs::write(&notes, "My name is Ada\n").unwrap();
    let attached = say(&format!("/file {}", notes.display()));
    assert!(attached.contains("notes.txt (") && attached.contains("tokens)"), "{attached}");
    assert!(say("/save talk --cache").contains("the model runs on a server"));
    assert!(say("/save talk").contains("--resume talk"));
    chat.send_line("/exit").unwrap();
    chat.exp_eof().unwrap();

    // The saved conversation contains the URL of its server, so no --url is needed.
    let output = inferno(&home).args(["play", "--resume", "talk", "--json", "--prompt", "What is my name?"]).output();
    let json = answer(&output.unwrap());
    assert!(json["text"].as_str().unwrap().contains("Ada") && json["stats"]["load_s"].is_null(), "{json}");

    // If the server lacks the model that the user names, the model of the saved conversation does not replace it.
    let output =
        inferno(&home).args(["play", "dmo", "--url", &url, "--resume", "talk", "--prompt", "Hello"]).output().unwrap();
    assert_fails(&output, 3, &["dmo", "does not serve it"]);
}

#[test]
fn ctrl_c_closes_the_connection_and_frees_the_server() {
    let server = Server::start(&[]);
    let home = TempDir::new().unwrap();
    let mut chat = play_url(&home, &format!("http://{}", server.address), &["--ignore-eos"]);
    expect(&mut chat, ">>> ");
    chat.send_line("How do I download a model?").unwrap();
    expect(&mut chat, "inferno download");
    chat.send_control('c').unwrap();
    expect(&mut chat, "stopped");
    expect(&mut chat, ">>> ");
    server.wait_until_idle();
    assert_eq!(server.metric("inferno_tokens_after_cancel_total"), 0.0);
    // After Ctrl-C, the chat still accepts commands and questions.
    chat.send_line("/set max-tokens 5").unwrap();
    expect(&mut chat, "max-tokens is 5");
    expect(&mut chat, ">>> ");
    chat.send_line("And?").unwrap();
    expect(&mut chat, "5 tokens");
    expect(&mut chat, ">>> ");
    chat.send_line("/exit").unwrap();
    chat.exp_eof().unwrap();
}

/// A mock server that sends the same response to every completion request, and closes each connection afterward.
struct Mock {
    url: String,
    /// The bodies of the received completion requests.
    bodies: Arc<Mutex<Vec<Value>>>,
}

const MODELS: &str = r#"{"object":"list","data":[{"id":"org/a"},{"id":"org/b","max_model_len":100}]}"#;

const HTML: &str = "<!doctype html>\n<title>It works</title>\n";

impl Mock {
    /// Starts a server that sends `answer` to each completion request: a status line, headers and a body.
    fn start(answer: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let bodies = Arc::new(Mutex::new(Vec::new()));
        let (answer, seen) = (answer.to_string(), bodies.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (answer, seen) = (answer.clone(), seen.clone());
                std::thread::spawn(move || reply(stream.unwrap(), &answer, &seen));
            }
        });
        Self { url, bodies }
    }

    /// Starts a server that answers each completion request with a stream of `events`.
    fn streaming(events: &[&str]) -> Self {
        let events: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
        Self::start(&format!("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n{events}"))
    }
}

fn reply(mut stream: TcpStream, answer: &str, bodies: &Mutex<Vec<Value>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let (mut head, mut line) = (String::new(), String::new());
    while reader.read_line(&mut line).unwrap_or(0) > 2 {
        head.push_str(&line.to_lowercase());
        line.clear();
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.trim().parse().unwrap())];
    reader.read_exact(&mut body).unwrap();
    let whole = |status: &str, body: &str| {
        format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    };
    let response = if head.starts_with("get /v1/models") {
        whole("200 OK", MODELS)
    } else if head.starts_with("get /html/models") {
        whole("200 OK", HTML)
    } else if head.starts_with("get /empty/models") {
        whole("200 OK", "")
    } else if head.starts_with("post /v1/chat/completions") {
        bodies.lock().unwrap().push(serde_json::from_slice(&body).unwrap());
        answer.to_string()
    } else {
        whole("404 Not Found", r#"{"detail":"Not Found"}"#)
    };
    stream.write_all(response.as_bytes()).unwrap();
}

#[test]
fn a_server_without_usage_and_token_counts_is_enough() {
    let mock = Mock::streaming(&[
        r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#,
        r#"{"choices":[{"index":0,"delta":{"reasoning":"Hmm. "}}]}"#,
        r#"{"choices":[{"index":0,"delta":{"content":"Forty"}}]}"#,
        r#"{"choices":[{"index":0,"delta":{"content":"-two\u001b[31m"}}]}"#,
        r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#,
        "[DONE]",
    ]);
    let json = answer(&ask(&mock.url, &["org/a", "--json", "--top-k", "3", "--reasoning", "high", "--stop", "x"]));
    assert_eq!((&json["reasoning"], &json["text"]), (&json!("Hmm. "), &json!("Forty-two\u{1b}[31m")));
    assert_eq!(json["usage"], json!({ "prompt_tokens": null, "completion_tokens": null }));
    let expected = json!({
        "model": "org/a", "messages": [{ "role": "user", "content": "What is the KV cache?" }],
        "stream": true, "stream_options": { "include_usage": true },
        "top_k": 3, "reasoning_effort": "high", "stop": ["x"],
    });
    // Apart from the model, the messages and the fields for streaming, the request contains only the settings that the
    // user chose.
    assert_eq!(mock.bodies.lock().unwrap()[0], expected);
    assert_fails(&ask(&mock.url, &[]), 2, &["org/a, org/b"]);
    let hint = ["does not count tokens", "\n  keep all messages: --overflow stop"];
    assert_fails(&ask(&mock.url, &["org/a", "--overflow", "drop-oldest"]), 1, &hint);
    assert_fails(&ask(&mock.url, &["org"]), 3, &["it serves 'org/a', 'org/b'"]);

    let home = TempDir::new().unwrap();
    let mut chat = play_url(&home, &mock.url, &[]);
    expect(&mut chat, "which model? [1-2] ");
    chat.send_line("2").unwrap();
    expect(&mut chat, ">>> ");
    for question in ["One?", "Two?"] {
        chat.send_line(question).unwrap();
        let turn = expect(&mut chat, ">>> ");
        assert!(turn.contains("Forty") && turn.contains("first token after") && !turn.contains("\u{1b}[31m"), "{turn}");
    }
    chat.send_line("/context").unwrap();
    let context = expect(&mut chat, ">>> ");
    assert!(context.contains("unknown; the limit is 100 tokens"), "{context}");
    chat.send_line("/set overflow drop-oldest").unwrap();
    expect(&mut chat, ">>> ");
    chat.send_line("Three?").unwrap();
    let refused = expect(&mut chat, ">>> ");
    assert!(refused.contains("does not count tokens") && refused.contains("/set overflow stop"), "{refused}");
    chat.send_line("/exit").unwrap();
    chat.exp_eof().unwrap();
    // The chat does not send the reasoning of earlier turns to the server.
    let messages = mock.bodies.lock().unwrap().last().unwrap()["messages"].clone();
    assert_eq!(messages.as_array().unwrap().len(), 3);
    assert_eq!(messages[1], json!({ "role": "assistant", "content": "Forty-two\u{1b}[31m" }));
}

#[test]
fn reasoning_that_fills_the_context_of_a_server_is_explained() {
    let mock = Mock::streaming(&[
        r#"{"choices":[{"index":0,"delta":{"reasoning":"Hmm. "}}]}"#,
        r#"{"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}"#,
        r#"{"choices":[],"usage":{"prompt_tokens":90,"completion_tokens":10}}"#,
        "[DONE]",
    ]);
    let warning = |model: &str| text(&ask(&mock.url, &[model]).stderr);
    // The server reports a context length only for org/b, so inferno cannot know that the context of org/a is full.
    // inferno does not suggest --context, which cannot be combined with --url.
    assert!(warning("org/b").contains("used all 10 tokens for reasoning; shorten the prompt"), "{}", warning("org/b"));
    assert!(warning("org/a").contains("used all 10 tokens for reasoning; raise --max-tokens"), "{}", warning("org/a"));
}

#[test]
fn failures_of_a_server_are_explained() {
    let start = r#"{"choices":[{"index":0,"delta":{"content":"Forty"}}]}"#;
    let mock = Mock::streaming(&[start, r#"{"error":{"message":"CUDA is out of memory","code":500}}"#]);
    assert_fails(
        &ask(&mock.url, &["org/a"]),
        1,
        &["cannot complete the answer: the server reported an error: CUDA is out of memory"],
    );
    let mock = Mock::streaming(&[start]);
    assert_fails(&ask(&mock.url, &["org/a"]), 1, &["cannot complete the answer", "ended the response too early"]);
    let mock = Mock::streaming(&[start, "<html>"]);
    assert_fails(&ask(&mock.url, &["org/a"]), 1, &["invalid JSON"]);
    // The response body is shorter than its `Content-Length`.
    let mock = Mock::start("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\ndata: ");
    assert_fails(&ask(&mock.url, &["org/a"]), 5, &["cannot read the response of the server at"]);

    let refusal = |status: &str, headers: &str, body: &str| {
        Mock::start(&format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\n\r\n{body}", body.len()))
    };
    let busy = refusal("429 Too Many Requests", "Retry-After: 7\r\n", r#"{"error":{"message":"queue is full"}}"#);
    assert_fails(&ask(&busy.url, &["org/a"]), 1, &["too many requests: queue is full", "try again in 7 s"]);
    let loading = refusal("503 Service Unavailable", "", r#"{"error":{"message":"Loading model"}}"#);
    assert_fails(&ask(&loading.url, &["org/a"]), 1, &["not ready: Loading model"]);
    let redirect = refusal("307 Temporary Redirect", "Location: http://127.0.0.1:1/v1\r\n", "");
    assert_fails(&ask(&redirect.url, &["org/a"]), 1, &["redirects to 'http://127.0.0.1:1/v1'"]);
    let nowhere = refusal("307 Temporary Redirect", "", "");
    let words = ["status 307 Temporary Redirect, without a valid header 'Location'", "\n  check the URL"];
    assert_fails(&ask(&nowhere.url, &["org/a"]), 1, &words);
    let long = r#"{"object":"error","message":"This model's maximum context length is 100 tokens."}"#;
    let long = refusal("400 Bad Request", "", long);
    assert_fails(&ask(&long.url, &["org/b"]), 10, &["maximum context length is 100", "shorten the prompt"]);
    let unknown = refusal("404 Not Found", "", r#"{"detail":"no such route"}"#);
    assert_fails(&ask(&unknown.url, &["org/b"]), 3, &["no such route"]);

    let html = refusal("200 OK", "Content-Type: text/html\r\n", HTML);
    let words = ["it responded with '<!doctype html>\\n<title>It works</title>' instead of JSON", "\n  check the URL"];
    assert_fails(&ask(&html.url, &["org/a"]), 5, &words);
    assert_fails(&ask(&format!("{}/html", html.url), &["org/a"]), 5, &words);
    let words = ["it responded with an empty body instead of JSON", "\n  check the URL"];
    assert_fails(&ask(&format!("{}/empty", html.url), &["org/a"]), 5, &words);

    assert_fails(&ask("http://127.0.0.1:1", &[]), 5, &["cannot reach a server at http://127.0.0.1:1/v1"]);
    assert_fails(&ask("127.0.0.1:1", &[]), 2, &["http://"]);
    for flag in ["--device=cpu", "--context=9", "--raw", "--quantize=q8_0", "--revision=x"] {
        assert_fails(&ask("http://127.0.0.1:1", &[flag]), 2, &["--url", "cannot be used with"]);
    }
}
