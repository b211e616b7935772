//! Tests of invalid and abusive requests, which the server must reject without stopping.

use std::io::{BufReader, Read, Write};

use serde_json::json;

use super::client::{JSON, Response, Server, chat, request};

#[test]
fn malformed_bodies_are_errors() {
    let server = Server::start(&[]);
    let deep =
        |open: &str, close: &str| format!("{{\"messages\": {}{}}}", open.repeat(1_000_000), close.repeat(1_000_000));
    let values = format!("{{\"x\": [{}0]}}", "0,".repeat(1_000_000));
    let bodies: Vec<Vec<u8>> = vec![
        b"".to_vec(),
        b"null".to_vec(),
        b"[]".to_vec(),
        b"\"text\"".to_vec(),
        b"{".to_vec(),
        b"{\"messages\": NaN}".to_vec(),
        b"{\"temperature\": Infinity}".to_vec(),
        b"{\"temperature\": 1e999}".to_vec(),
        b"{\"a\": \"\\ud800\"}".to_vec(),
        b"{\"a\": \"\xff\xfe\"}".to_vec(),
        b"\xef\xbb\xbf{}".to_vec(),
        b"{} {}".to_vec(),
        deep("[", "]").into_bytes(),
        deep("{\"a\":", "}").into_bytes(),
        "[".repeat(1_000_000).into_bytes(),
        values.into_bytes(),
    ];
    for route in ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"] {
        for body in &bodies {
            let response = server.send("POST", route, &[JSON], body);
            let error = response.error(400);
            assert!(error["param"].is_null(), "{error}");
        }
    }
    server.chat(json!({ "max_tokens": 3 })).ok();
}

#[test]
fn extreme_values_are_never_a_server_error() {
    let server = Server::start(&[]);
    let numbers = ["-1", "0", "1e308", "-1e308", "9223372036854775807", "18446744073709551615", "1e-320", "0.5"];
    let others = ["true", "\"x\"", "[]", "{}", "[null]", "\"\\u0000\""];
    let names = [
        "model",
        "messages",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "n",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "response_format",
        "priority",
        "reasoning",
        "reasoning_effort",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "stream_options",
    ];
    for name in names {
        for value in numbers.iter().chain(&others) {
            let mut body = chat(json!({ "max_tokens": 2 }));
            body.as_object_mut().unwrap().shift_remove(name);
            let text = body.to_string();
            let text = format!("{},\"{name}\":{value}}}", text.strip_suffix('}').unwrap());
            // Skip large values of `max_tokens`: if the server accepted one, a long answer would slow the test down.
            // The condition also skips other values, such as `0.5` and `{}`.
            if name == "max_tokens" && (value.len() > 1 && !value.starts_with(['-', '"', '['])) {
                continue;
            }
            let status = server.send("POST", "/v1/chat/completions", &[JSON], text.as_bytes()).status;
            assert!(matches!(status, 200 | 400 | 404), "{name}={value}: {status}");
        }
    }
    server.wait_until_idle();
}

#[test]
fn requests_that_are_not_http_get_an_error_with_a_body() {
    let server = Server::start(&[]);
    let valid = b"GET /live HTTP/1.1\r\nHost: test\r\n\r\n";
    let many_headers: String = (0..200).map(|index| format!("x-{index}: 1\r\n")).collect();
    let (large, long, longer) = ("a".repeat(1_000_000), "a".repeat(65_534), "a".repeat(100_000));
    let requests: [(Vec<u8>, u16); 12] = [
        (b"no HTTP\r\n\r\n".to_vec(), 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n".to_vec(), 400),
        (b"GET / HTTP/3.7\r\n\r\n".to_vec(), 400),
        (b"\0\0\0\0\r\n\r\n".to_vec(), 400),
        // The first bytes of a TLS ClientHello, sent to a port without TLS.
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(), 400),
        (b"POST /tokenize HTTP/1.1\r\nContent-Length: -5\r\n\r\n".to_vec(), 400),
        (b"POST /tokenize HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n".to_vec(), 400),
        (format!("GET / HTTP/1.1\r\n{many_headers}\r\n").into_bytes(), 431),
        (format!("GET / HTTP/1.1\r\nx: {large}\r\n\r\n").into_bytes(), 431),
        (format!("GET /{long} HTTP/1.1\r\n\r\n").into_bytes(), 414),
        (format!("GET /{longer} HTTP/1.1\r\n\r\n").into_bytes(), 414),
        // The same connection carries a valid request and then an invalid one.
        ([&valid[..], b"\x00\x01\r\n\r\n"].concat(), 400),
    ];
    for (bytes, status) in &requests {
        let mut stream = server.connect();
        // Writing may fail, because the server may close the connection before it has read all bytes.
        let _ = stream.write_all(bytes);
        let mut reader = BufReader::new(stream);
        if bytes.starts_with(valid) {
            Response::read(&mut reader).ok();
        }
        let response = Response::read(&mut reader);
        let error = response.error(*status);
        assert_eq!(error["type"], "invalid_request_error", "{error}");
        assert_eq!(response.header("connection"), Some("close"));
        assert_eq!(response.header("content-type"), Some("application/json"));
        // After the error response, the server must send nothing else.
        let mut rest = Vec::new();
        let _ = reader.read_to_end(&mut rest);
        assert!(rest.is_empty(), "{rest:?}");
    }
    // The server sends no response to the connection preface of HTTP/2.
    let mut stream = server.connect();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.is_empty(), "{answer:?}");
    let text = server.get("/metrics").text();
    for (code, count) in [(400, 8), (414, 2), (431, 2)] {
        let line =
            format!("inferno_http_responses_total{{code=\"{code}\",engine=\"0\",model_name=\"demo\"}} {count}\n");
        assert!(text.contains(&line), "{line}{text}");
    }
}

#[test]
fn large_encoded_and_untyped_bodies_are_refused() {
    let server = Server::start(&[]);
    let path = "/v1/chat/completions";
    let large = vec![b' '; (8 << 20) + 1];
    server.send("POST", path, &[JSON], &large).error(413);
    // If a request has no content length, the server counts the bytes that it reads.
    let mut stream = server.connect();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    let chunk = [format!("{:x}\r\n", 1 << 20).into_bytes(), vec![b' '; 1 << 20], b"\r\n".to_vec()].concat();
    // Write the body until the server closes the connection.
    while stream.write_all(&chunk).is_ok() {}
    Response::read(&mut BufReader::new(stream)).error(413);

    let body = chat(json!({ "max_tokens": 2 })).to_string();
    for header in [("Content-Encoding", "gzip"), ("Content-Encoding", "br")] {
        server.send("POST", path, &[JSON, header], body.as_bytes()).error(415);
    }
    for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx"] {
        server.send("POST", path, &[("Content-Type", kind)], body.as_bytes()).error(415);
    }
    server.send("POST", path, &[], body.as_bytes()).error(415);
    server.send("POST", path, &[("Content-Type", "Application/JSON; charset=utf-8")], body.as_bytes()).ok();
}

#[test]
fn slow_clients_are_disconnected() {
    let server = Server::start(&["--header-timeout", "0.3", "--body-timeout", "0.3"]);
    // The server closes a connection if the headers are not complete after `--header-timeout`.
    for head in ["", "GET /health HT", "GET /health HTTP/1.1\r\nHost: x\r\n"] {
        let mut stream = server.connect();
        stream.write_all(head.as_bytes()).unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
    }
    let mut stream = server.connect();
    let bytes = request("POST", "/v1/chat/completions", &[JSON], &[b' '; 100]);
    stream.write_all(&bytes[..bytes.len() - 50]).unwrap();
    Response::read(&mut BufReader::new(stream)).error(408);
    assert_eq!(server.get("/health").status, 200);
}
