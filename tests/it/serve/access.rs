//! Tests of API keys, CORS and listening addresses.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::json;
use tempfile::TempDir;

use super::client::{JSON, Server, chat};
use crate::support::program::{assert_fails, inferno, run};

/// Requests that need an API key, as (method, path).
/// The list has at least one request for each route in `server/router.rs`, except for `/health` and `/live`.
const ROUTES: &[(&str, &str)] = &[
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/resp_x"),
    ("DELETE", "/v1/responses/resp_x"),
    ("POST", "/v1/responses/resp_x/cancel"),
    ("GET", "/v1/responses/resp_x/input_items"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/records/x"),
    ("GET", "/v1/receipts/x"),
    ("GET", "/v1/receipts/key"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/api/embed"),
    ("POST", "/api/show"),
    ("POST", "/api/pull"),
    ("GET", "/api/tags"),
    ("GET", "/api/ps"),
    ("GET", "/api/version"),
    ("POST", "/v1/admission"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/demo"),
    ("GET", "/v1/loads"),
    ("GET", "/metrics"),
    ("DELETE", "/v1/models"),
    ("GET", "/unknown"),
    ("GET", "//metrics"),
    ("GET", "/health/../metrics"),
    ("GET", "/%6detrics"),
];

/// Returns whether a route matches a path, or the start of a longer path.
/// A part of the route in braces matches any part of the path.
fn matches(route: &str, path: &str) -> bool {
    let mut parts = path.split('/');
    let is_equal = |part: &str| parts.next().is_some_and(|other| part.starts_with('{') || part == other);
    route.split('/').all(is_equal)
}

#[test]
fn the_list_of_routes_is_complete() {
    let source = include_str!("../../../src/server/router.rs");
    let routes: Vec<&str> = source.split(".route(\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert!(routes.len() > 25, "{routes:?}");
    for route in routes.into_iter().filter(|route| !["/health", "/live"].contains(route)) {
        assert!(ROUTES.iter().any(|(_, path)| matches(route, path)), "{route} is not tested");
    }
}

#[test]
fn every_route_but_health_needs_the_key() {
    let server = Server::start(&["--api-key", "right", "--api-key", "other"]);
    let send = |method, path: &str, key: &[(&str, &str)]| server.send(method, path, &[&[JSON], key].concat(), b"{}");
    for (method, path) in ROUTES {
        for (wrong, url) in [
            (None, path.to_string()),
            (Some(("Authorization", "Bearer wrong")), path.to_string()),
            (Some(("Authorization", "Bearer ")), path.to_string()),
            (Some(("Authorization", "right")), path.to_string()),
            (Some(("Authorization", "Basic right")), path.to_string()),
            (None, format!("{path}?api_key=right&key=right")),
        ] {
            let response = send(method, &url, wrong.as_slice());
            assert_eq!(response.status, 401, "{method} {url}");
            // The Messages API and ollama's API have other JSON formats for errors.
            if !["/v1/messages", "/api/"].iter().any(|start| path.starts_with(start)) {
                assert_eq!(response.error(401)["code"], "invalid_api_key", "{method} {url}");
            }
            assert_eq!(response.header("www-authenticate"), Some("Bearer"));
        }
        for key in ["Bearer right", "bearer other"] {
            let status = send(method, path, &[("Authorization", key)]).status;
            assert!(status != 401, "{method} {path}: {status}");
        }
    }
    assert_eq!((server.get("/health").status, server.get("/live").status), (200, 200));
    let body = chat(json!({ "max_tokens": 3 })).to_string();
    let headers = [JSON, ("Authorization", "Bearer right")];
    server.send("POST", "/v1/chat/completions", &headers, body.as_bytes()).ok();
}

#[test]
fn keys_come_from_files_and_the_environment() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("keys");
    fs::write(&file, "one\n\n two \n").unwrap();
    let argument = format!("@{}", file.display());
    let status = |server: &Server, key: &str| server.send("GET", "/v1/models", &[("Authorization", key)], b"").status;
    for server in [Server::start(&["--api-key", &argument]), Server::start_with(&[], &[("INFERNO_API_KEY", &argument)])]
    {
        let statuses = ["Bearer one", "Bearer two", "Bearer three"].map(|key| status(&server, key));
        assert_eq!(statuses, [200, 200, 401]);
    }
    assert_fails(&run(&["serve", "demo", "--api-key", ""]), 2, &["API key"]);
    assert_fails(&run(&["serve", "demo", "--api-key", "@/nowhere"]), 1, &["/nowhere"]);
    let home = TempDir::new().unwrap();
    let output = inferno(&home).args(["serve", "demo", "--no-auth"]).env("INFERNO_API_KEY", "x").output().unwrap();
    assert_fails(&output, 2, &["--no-auth"]);
}

#[test]
fn a_server_on_all_addresses_prints_a_new_key() {
    // A server that listens on 0.0.0.0 may be reachable from other machines, so it must require a key.
    let home = TempDir::new().unwrap();
    let mut command = inferno(&home);
    command.args(["serve", "demo", "--device", "cpu", "--port", "0", "--host", "0.0.0.0"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let key = line.trim().rsplit(' ').next().unwrap();
    assert!(line.contains("API key") && key.starts_with("inferno-") && key.len() > 40, "{line}");
}

#[test]
fn cors_is_off_by_default() {
    let origin = ("Origin", "https://app.example");
    let preflight =
        [origin, ("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", "authorization")];
    let server = Server::start(&[]);
    assert_eq!(server.send("OPTIONS", "/v1/models", &preflight, b"").header("access-control-allow-origin"), None);
    // A server without API keys refuses requests from web pages that are neither local nor allowed by `--cors-origin`.
    let response = server.send("GET", "/v1/models", &[origin], b"");
    response.error(403);
    assert_eq!(response.header("access-control-allow-origin"), None);
    assert_eq!(server.send("GET", "/v1/models", &[("Origin", "http://localhost:5173")], b"").status, 200);

    let server = Server::start(&["--cors-origin", "https://app.example", "--api-key", "k"]);
    let response = server.send("OPTIONS", "/v1/models", &preflight, b"");
    assert_eq!((response.status, response.header("access-control-allow-origin")), (200, Some("https://app.example")));
    assert_eq!(response.header("access-control-allow-headers"), Some("authorization"));
    let other = server.send("OPTIONS", "/v1/models", &[("Origin", "https://evil.example"), preflight[1]], b"");
    assert_eq!(other.header("access-control-allow-origin"), None);
    let response = server.send("GET", "/v1/models", &[origin, ("Authorization", "Bearer k")], b"");
    assert_eq!((response.status, response.header("access-control-allow-origin")), (200, Some("https://app.example")));
    assert_eq!(response.header("access-control-allow-credentials"), None);
    let exposed = response.header("access-control-expose-headers").unwrap();
    assert_eq!(exposed, "x-request-id,request-id,x-inferno-ignored,x-inferno-joined,retry-after,retry-after-ms");
    server.send("GET", "/v1/models", &[origin], b"").error(401);
}

#[test]
fn a_port_in_use_is_an_error() {
    let server = Server::start(&[]);
    let port = server.address.rsplit(':').next().unwrap();
    let output = run(&["serve", "demo", "--device", "cpu", "--port", port]);
    assert_fails(
        &output,
        1,
        &["error: cannot listen on 127.0.0.1", "Address already in use", "\n  to listen", "--port"],
    );
}
