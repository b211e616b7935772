//! A test of a server in the test process, while the model is loading and after the engine has stopped.

use std::io::{BufReader, Write};
use std::net::{SocketAddr, TcpStream};

use inferno::Engine;
use inferno::device::DeviceChoice;
use inferno::server::{self, RecordOptions, ServerOptions, ServerState, Timeouts};
use serde_json::json;
use tokio::runtime::Runtime;

use super::client::{HANG, JSON, Response, chat, request};
use crate::support::demo_dir;

pub fn options() -> ServerOptions {
    ServerOptions {
        model: "demo".to_string(),
        api_keys: Vec::new(),
        cors_origins: Vec::new(),
        no_auth: false,
        max_sequences: 4,
        max_waiting: 4,
        max_connections: 100,
        timeouts: Timeouts::default(),
        tls: None,
        record: RecordOptions::default(),
        has_vllm_metrics: false,
    }
}

fn send(address: SocketAddr, method: &str, path: &str) -> Response {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    let body = chat(json!({ "max_tokens": 3 })).to_string();
    stream.write_all(&request(method, path, &[JSON], body.as_bytes())).unwrap();
    Response::read(&mut BufReader::new(stream))
}

#[test]
fn the_port_is_open_while_the_model_loads() {
    let runtime = Runtime::new().unwrap();
    let listener = runtime.block_on(server::bind("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let server = ServerState::new(options()).unwrap();
    let serving = runtime.spawn(server::serve(server.clone(), listener, std::future::pending()));

    let alive = |value: u8| format!("\ninferno_engine_alive{{engine=\"0\",model_name=\"demo\"}} {value}\n");
    assert_eq!(send(address, "GET", "/live").status, 200);
    assert!(send(address, "GET", "/metrics").text().contains(&alive(1)));
    for (method, path) in [
        ("GET", "/health"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/demo"),
        ("GET", "/v1/loads"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    ] {
        let response = send(address, method, path);
        assert_eq!(response.error(503)["code"], "unavailable", "{path}");
        assert!(response.header("retry-after").is_some(), "{path}");
    }

    let engine = Engine::builder(demo_dir()).device(DeviceChoice::Cpu).load().unwrap();
    server.set_engine(engine.handle());
    assert_eq!(send(address, "GET", "/health").status, 200);
    assert!(send(address, "GET", "/metrics").text().contains(&alive(1)));
    send(address, "POST", "/v1/chat/completions").ok();

    // A server whose engine has stopped ends with an error.
    drop(engine);
    let served = runtime.block_on(serving).unwrap();
    assert!(served.unwrap_err().to_string().contains("the engine stopped"));
    assert!(TcpStream::connect(address).is_err());
}
