//! Tests of TLS.

use std::fs;
use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::client::{JSON, Response, Server, chat, endless, read_chunk, request};
use crate::support::program::{assert_fails, inferno, run};

/// Returns the path of a file in tests/certificates. `make.sh` in that folder explains the files.
fn path(name: &str) -> String {
    format!("{}/tests/certificates/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Starts a server with a certificate for `localhost`.
fn start(args: &[&str]) -> Server {
    let (certificate, key) = (path("localhost.pem"), path("localhost-key.pem"));
    Server::start(&[&["--tls-cert", &certificate, "--tls-key", &key], args].concat())
}

/// Opens a connection that trusts only the server's certificate.
fn connect(server: &Server) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(path("localhost.pem")).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap();
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let name = ServerName::try_from("localhost").unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), server.connect())
}

#[test]
fn answers_and_streams_are_encrypted() {
    let server = start(&[]);
    assert!(server.url.starts_with("https://127.0.0.1:"), "{}", server.url);
    let mut stream = connect(&server);
    stream.write_all(&request("GET", "/health", &[], b"")).unwrap();
    assert_eq!(Response::read(&mut BufReader::new(&mut stream)).status, 200);
    assert_eq!(stream.conn.alpn_protocol(), Some(&b"http/1.1"[..]));

    let mut stream = connect(&server);
    let body = chat(json!({ "stream": true, "max_tokens": 20 })).to_string();
    stream.write_all(&request("POST", "/v1/chat/completions", &[JSON], body.as_bytes())).unwrap();
    assert!(Response::read(&mut BufReader::new(stream)).events().len() > 5);

    // Closing the connection cancels the answer, as without TLS.
    let mut stream = connect(&server);
    let body = endless(true).to_string();
    stream.write_all(&request("POST", "/v1/chat/completions", &[JSON], body.as_bytes())).unwrap();
    let mut reader = BufReader::new(stream);
    Response::read_head(&mut reader);
    read_chunk(&mut reader).unwrap();
    drop(reader);
    let idle = || {
        let mut stream = connect(&server);
        stream.write_all(&request("GET", "/metrics", &[], b"")).unwrap();
        let text = Response::read(&mut BufReader::new(stream)).text();
        text.lines().any(|line| line.starts_with("inferno_num_requests_running{") && line.ends_with(" 0"))
    };
    server.wait("the answer is canceled", |_| idle());
}

#[test]
fn health_checks_use_https() {
    let server = start(&[]);
    let port = server.address.rsplit(':').next().unwrap();
    assert!(run(&["health", "--url", &server.url]).status.success());
    assert!(run(&["health", "--port", port, "--tls-cert", &path("localhost.pem")]).status.success());
    let home = TempDir::new().unwrap();
    let mut command = inferno(&home);
    command.args(["health", "--port", port]).env("INFERNO_TLS_CERT", path("localhost.pem"));
    assert!(command.output().unwrap().status.success());
    // The server does not accept plain HTTP on a TLS port.
    assert_fails(&run(&["health", "--port", port]), 1, &["cannot reach"]);
}

#[test]
fn connections_without_a_handshake_are_closed() {
    let server = start(&["--header-timeout", "0.5"]);
    let mut silent = server.connect();
    let mut plain = server.connect();
    plain.write_all(&request("GET", "/health", &[], b"")).unwrap();
    let mut received = Vec::new();
    let started = Instant::now();
    // The server closes the connection. It may send a TLS alert first.
    let _ = plain.read_to_end(&mut received);
    assert!(!received.starts_with(b"HTTP"), "{received:?}");
    let mut byte = [0];
    assert_eq!(silent.read(&mut byte).unwrap_or(0), 0);
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    // A failed TLS handshake does not affect other connections.
    let mut stream = connect(&server);
    stream.write_all(&request("GET", "/health", &[], b"")).unwrap();
    assert_eq!(Response::read(&mut BufReader::new(stream)).status, 200);
}

#[test]
fn certificates_that_cannot_be_used_are_errors() {
    let (certificate, key) = (path("localhost.pem"), path("localhost-key.pem"));
    let folder = TempDir::new().unwrap();
    let text = folder.path().join("text.pem");
    fs::write(&text, "secret-text").unwrap();
    let text = text.to_str().unwrap().to_string();
    let serve = |certificate: &str, key: &str| run(&["serve", "demo", "--tls-cert", certificate, "--tls-key", key]);
    assert_fails(&run(&["serve", "demo", "--tls-cert", &certificate]), 2, &["--tls-key"]);
    assert_fails(&run(&["serve", "demo", "--tls-key", &key]), 2, &["--tls-cert"]);
    assert_fails(&serve("/nowhere", &key), 1, &["/nowhere"]);
    assert_fails(&serve(&certificate, &path("other-key.pem")), 1, &["cannot use the certificate", "other-key.pem"]);
    for (certificate, key) in [(&text, &key), (&certificate, &text), (&key, &certificate)] {
        let output = serve(certificate, key);
        assert_fails(&output, 1, &["cannot read the", "BEGIN"]);
        assert!(!String::from_utf8_lossy(&output.stderr).contains("secret-text"));
    }
}

#[test]
fn play_trusts_the_certificates_of_a_file() {
    let server = start(&[]);
    let port = server.address.rsplit(':').next().unwrap();
    let url = format!("https://localhost:{port}");
    let ask = |variable: Option<&str>, args: &[&str]| {
        let home = TempDir::new().unwrap();
        let mut command = inferno(&home);
        command.env_remove("SSL_CERT_FILE").envs(variable.map(|file| ("SSL_CERT_FILE", file)));
        command.args(["play", "--url", &url, "--prompt", "Hi", "--max-tokens", "3"]).args(args).output().unwrap()
    };
    let certificate = path("localhost.pem");
    assert_fails(&ask(None, &[]), 5, &["cannot reach", "certificate"]);
    let output = ask(None, &["--ca-cert", &certificate]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(ask(Some(&certificate), &[]).status.success());
    assert_fails(
        &ask(None, &["--ca-cert", &path("other-key.pem")]),
        2,
        &["other-key.pem", "no certificate in PEM format"],
    );
    assert_fails(&ask(None, &["--ca-cert", "/nowhere"]), 2, &["/nowhere"]);
}
