//! Tests of the limit on open connections.

use std::io::{BufReader, Write};
use std::net::TcpStream;

use nix::sys::signal::Signal;
use serde_json::json;

use super::client::{JSON, Response, Server};

/// Sends a request on a new connection, which the client leaves open. Returns the connection and the response.
fn keep_alive(server: &Server, path: &str) -> (TcpStream, Response) {
    let mut stream = server.connect();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes()).unwrap();
    let response = Response::read(&mut BufReader::new(&stream));
    (stream, response)
}

/// Opens a connection that the server keeps open after the first response.
fn open(server: &Server) -> TcpStream {
    let (stream, response) = keep_alive(server, "/live");
    assert_eq!((response.status, response.header("connection")), (200, None));
    stream
}

#[test]
fn connections_above_the_limit_only_answer_health_checks() {
    let mut server = Server::start(&["--max-connections", "2"]);
    let (first, second) = (open(&server), open(&server));
    let refused = server.metric("inferno_refused_connections_total");

    // On connections above the limit, the server refuses requests to most routes without reading their bodies,
    // so a request with an invalid body gets the same error as a valid request.
    for (method, path, body) in
        [("GET", "/v1/models", json!(null)), ("POST", "/v1/chat/completions", json!({ "messages": [] }))]
    {
        let response = server.send(method, path, &[JSON], body.to_string().as_bytes());
        let error = response.error(503);
        assert!(error["message"].as_str().unwrap().contains("all connections that the server allows (2)"), "{error}");
        assert_eq!(response.header("retry-after"), Some("1"));
        assert!(response.header("x-request-id").is_some());
    }
    for path in ["/health", "/live", "/metrics"] {
        let (_, response) = keep_alive(&server, path);
        assert_eq!((response.status, response.header("connection")), (200, Some("close")), "{path}");
    }
    assert!(server.metric("inferno_refused_connections_total") >= refused + 5.0);
    assert!(server.metric("inferno_open_connections") >= 3.0);

    drop(first);
    server.wait("a connection is allowed again", |server| server.get("/v1/models").status == 200);
    drop(second);
    // The server exits cleanly, even after it has refused connections.
    server.signal(Signal::SIGTERM);
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn the_limit_can_come_from_the_environment() {
    let server = Server::start_with(&[], &[("INFERNO_MAX_CONNECTIONS", "1")]);
    let first = open(&server);
    server.get("/v1/models").error(503);
    drop(first);
    server.wait("a connection is allowed again", |server| server.get("/v1/models").status == 200);
}
