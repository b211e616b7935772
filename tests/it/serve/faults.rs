//! Tests of faults in the engine while a server answers requests. Two tests run their servers in the test process
//! ([`Local`]). The test of a failed rank starts a server process, because this failure must end the process.

use std::io::{BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use inferno::Engine;
use inferno::device::DeviceChoice;
use inferno::engine::Fault;
use inferno::server::{self, ServerOptions, ServerState};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use super::client::{self, HANG, JSON, Response, chat, endless, read_chunk, request};
use super::loading::options;
use crate::harness::TestCase;
use crate::support::{demo_dir, named_cases};

/// A server with the demo model that runs in the test process.
struct Local {
    runtime: Runtime,
    engine: Engine,
    address: SocketAddr,
    serving: JoinHandle<anyhow::Result<()>>,
}

impl Local {
    /// Starts a server that runs at most two requests at once. Port 0 selects a free port.
    fn start(port: u16) -> Self {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(server::bind("127.0.0.1", port)).unwrap();
        let address = listener.local_addr().unwrap();
        let server: Arc<ServerState> = ServerState::new(ServerOptions { max_sequences: 2, ..options() }).unwrap();
        let serving = runtime.spawn(server::serve(server.clone(), listener, std::future::pending()));
        let engine = Engine::builder(demo_dir()).device(DeviceChoice::Cpu).max_sequences(2).load().unwrap();
        server.set_engine(engine.handle());
        Self { runtime, engine, address, serving }
    }

    fn begin(&self, method: &str, path: &str, body: &Value) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(HANG)).unwrap();
        stream.write_all(&request(method, path, &[JSON], body.to_string().as_bytes())).unwrap();
        BufReader::new(stream)
    }

    fn chat(&self, body: &Value) -> BufReader<TcpStream> {
        self.begin("POST", "/v1/chat/completions", body)
    }

    /// Waits until exactly `running` requests are running and `waiting` requests are waiting.
    fn wait(&self, running: u64, waiting: u64) {
        let started = Instant::now();
        while (self.engine.stats().running, self.engine.stats().waiting) != (running, waiting) {
            assert!(started.elapsed() < HANG, "{:?}", self.engine.stats());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Starts two long answers, one with and one without streaming.
    /// Then sends a third request, which waits until one of the two answers ends.
    fn load(&self) -> [BufReader<TcpStream>; 3] {
        let mut stream = self.chat(&endless(true));
        assert_eq!(Response::read_head(&mut stream).status, 200);
        let whole = self.chat(&endless(false));
        self.wait(2, 0);
        let waiting = self.chat(&chat(json!({ "max_tokens": 2 })));
        self.wait(2, 1);
        [stream, whole, waiting]
    }
}

/// Reads the rest of a stream, which must end with an error and `[DONE]`. Returns the message of the error.
fn stream_error(mut stream: BufReader<TcpStream>) -> String {
    let mut text = Vec::new();
    while let Some(chunk) = read_chunk(&mut stream) {
        text.extend(chunk);
    }
    let text = String::from_utf8(text).unwrap();
    let events: Vec<&str> = text.split("\n\n").filter(|event| event.starts_with("data: ")).collect();
    let [.., last, "data: [DONE]"] = events[..] else { panic!("{text}") };
    let json: Value = serde_json::from_str(&last[6..]).unwrap();
    json["error"]["message"].as_str().unwrap_or_else(|| panic!("{last}")).to_string()
}

/// Reads a response, which must be an error with status 500. Returns the message of the error.
fn whole_error(mut response: BufReader<TcpStream>) -> String {
    Response::read(&mut response).error(500)["message"].as_str().unwrap().to_string()
}

#[test]
fn a_failed_step_fails_its_requests_only() {
    let local = Local::start(0);
    let [stream, whole, mut waiting] = local.load();
    local.engine.inject_fault(Fault::Step).unwrap();
    for message in [stream_error(stream), whole_error(whole)] {
        assert!(message.contains("injected fault of a step"), "{message}");
    }
    Response::read(&mut waiting).ok();
    assert_eq!(Response::read(&mut local.begin("GET", "/health", &json!({}))).status, 200);
    Response::read(&mut local.chat(&chat(json!({ "max_tokens": 2 })))).ok();
    let stats = local.engine.stats();
    assert_eq!((stats.failed, stats.ended, stats.used_blocks, local.engine.has_stopped()), (2, 4, 0, false));
    assert!(!local.serving.is_finished());
}

fn engine_faults() -> Vec<TestCase<Fault>> {
    named_cases([("device", Fault::Device), ("panic", Fault::Panic)])
}

/// After a device fault or a panic of the engine, all requests fail and the server ends.
/// Another server can then use the same port.
#[test(each = engine_faults)]
fn a_server_with_a_broken_engine_ends_so_that_it_can_restart(fault: Fault) {
    let local = Local::start(0);
    let [stream, whole, waiting] = local.load();
    local.engine.inject_fault(fault).unwrap();
    for message in [stream_error(stream), whole_error(whole), whole_error(waiting)] {
        assert!(
            message.contains("injected fault of the device") || message.contains("the engine stopped"),
            "{message}"
        );
    }
    let Local { runtime, engine, address, serving } = local;
    let served = runtime.block_on(async { tokio::time::timeout(HANG, serving).await });
    let served = served.expect("timed out: the server did not end").unwrap();
    assert!(served.unwrap_err().to_string().contains("the engine stopped"));
    assert!(engine.has_stopped());
    let next = Local::start(address.port());
    assert_eq!(Response::read(&mut next.begin("GET", "/health", &json!({}))).status, 200);
    Response::read(&mut next.chat(&chat(json!({ "max_tokens": 2 })))).ok();
}

/// Returns values of `INFERNO_FAULT` for the second of three ranks, each with a text of the error message.
fn rank_faults() -> Vec<TestCase<(&'static str, &'static str)>> {
    named_cases([("hang", ("1:hang:60", "GPU 2 of 3 does not answer")), ("panic", ("1:panic:60", "GPU 2 of 3 failed"))])
}

/// One rank hangs or panics while 8 clients wait for answers. All requests fail, and the process exits.
#[test(each = rank_faults)]
fn a_rank_that_fails_under_load_ends_all_requests_and_the_process((fault, reason): (&'static str, &'static str)) {
    let variables = [("INFERNO_FAULT", fault)];
    let mut server = client::Server::start_with(&["--device", "cpu,cpu,cpu", "--context", "512"], &variables);
    let errors = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..8)
            .map(|index| {
                let is_stream = index % 2 == 0;
                let body = chat(json!({ "stream": is_stream, "ignore_eos": true, "max_tokens": 400 }));
                let mut response = BufReader::new(server.begin("/v1/chat/completions", &body));
                scope.spawn(move || {
                    if !is_stream {
                        return whole_error(response);
                    }
                    assert_eq!(Response::read_head(&mut response).status, 200);
                    stream_error(response)
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect::<Vec<_>>()
    });
    for message in errors {
        assert!(message.contains(reason) && message.contains("the other GPUs were stopped"), "{message}");
    }
    // Until the process exits, `/health` returns status 503 or the connection fails.
    if let Ok(mut stream) = TcpStream::connect(&server.address) {
        let _ = stream.write_all(&request("GET", "/health", &[], b""));
        let mut status = String::new();
        let _ = std::io::BufRead::read_line(&mut BufReader::new(stream), &mut status);
        assert!(status.is_empty() || status.contains(" 503 "), "{status}");
    }
    assert_eq!(server.exit_code(), Some(7));
}
