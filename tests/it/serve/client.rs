//! A server process for tests, and a plain HTTP client that can also send invalid requests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::program::inferno;

/// The time limit for a server to respond, to meet a condition or to exit. It is long, because it only detects hangs.
pub const HANG: Duration = Duration::from_secs(60);

/// A running `inferno serve` process. Dropping it kills the process.
pub struct Server {
    pub child: Child,
    /// The scheme and the address of the server, such as `http://127.0.0.1:8000`.
    pub url: String,
    pub address: String,
    log: Option<JoinHandle<String>>,
    _home: TempDir,
}

impl Server {
    /// Starts `inferno serve demo` and waits until it is ready. Runs it on the CPU unless `args` choose a device.
    pub fn start(args: &[&str]) -> Self {
        Self::start_with(args, &[])
    }

    /// Like [`start`](Self::start), with additional environment variables.
    pub fn start_with(args: &[&str], variables: &[(&str, &str)]) -> Self {
        Self::start_model("demo", args, variables)
    }

    /// Like [`start_with`](Self::start_with), but serves the model `model`, which is a name or the path of a folder.
    pub fn start_model(model: &str, args: &[&str], variables: &[(&str, &str)]) -> Self {
        let home = TempDir::new().unwrap();
        let mut command = inferno(&home);
        command.args(["serve", model, "--port", "0"]).args(args);
        if !args.contains(&"--device") {
            command.args(["--device", "cpu"]);
        }
        command.envs(variables.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stderr = child.stderr.take().unwrap();
        // Read the log on a thread, because the server cannot write more lines while the pipe is full.
        let log = std::thread::spawn(move || {
            let mut log = String::new();
            stderr.read_to_string(&mut log).unwrap();
            log
        });
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let Some((_, url)) = line.split_once("ready at ") else {
            panic!("expected a ready line, found {line:?}; log: {}", log.join().unwrap());
        };
        let url = url.trim().trim_end_matches("/v1").to_string();
        let address = url.split_once("://").unwrap().1.to_string();
        Self { child, url, address, log: Some(log), _home: home }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(HANG)).unwrap();
        stream.set_write_timeout(Some(HANG)).unwrap();
        stream
    }

    /// Sends a request and reads the response, including its body.
    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        let mut stream = self.connect();
        // Writing may fail, because the server may reject a request before it has read the whole body.
        let _ = stream.write_all(&request(method, path, headers, body));
        Response::read(&mut BufReader::new(stream))
    }

    pub fn get(&self, path: &str) -> Response {
        self.send("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Response {
        self.send("POST", path, &[JSON], body.to_string().as_bytes())
    }

    /// Sends a chat completion request with the body that [`chat`] returns.
    pub fn chat(&self, fields: Value) -> Response {
        self.post("/v1/chat/completions", &chat(fields))
    }

    /// Sends a POST request, and returns the connection without reading the response.
    pub fn begin(&self, path: &str, body: &Value) -> TcpStream {
        let mut stream = self.connect();
        stream.write_all(&request("POST", path, &[JSON], body.to_string().as_bytes())).unwrap();
        stream
    }

    /// Returns the value in the first line of the metric `name`.
    pub fn metric(&self, name: &str) -> f64 {
        self.metric_with(&[], name)
    }

    /// Like [`metric`](Self::metric), with request headers, such as an API key.
    pub fn metric_with(&self, headers: &[(&str, &str)], name: &str) -> f64 {
        let text = self.send("GET", "/metrics", headers, b"").text();
        let line = text.lines().find(|line| line.starts_with(name) && line[name.len()..].starts_with('{'));
        let line = line.unwrap_or_else(|| panic!("the metrics do not contain {name}: {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Waits until `condition` returns true. `what` describes the condition in the error message of a timeout.
    pub fn wait(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let started = Instant::now();
        while !condition(self) {
            assert!(started.elapsed() < HANG, "timed out waiting until {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until no request is running or waiting, and no block of the KV cache is in use.
    pub fn wait_until_idle(&self) {
        let names = ["inferno_num_requests_running", "inferno_num_requests_waiting", "inferno_kv_cache_usage_perc"];
        self.wait("the server is idle", |server| names.iter().all(|name| server.metric(name) == 0.0));
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// Waits until the process has ended. Returns its exit code, or `None` if a signal ended the process.
    pub fn exit_code(&mut self) -> Option<i32> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(started.elapsed() < HANG, "timed out: the server did not exit");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Stops the server with SIGTERM, asserts that its exit code is 0, and returns its log.
    pub fn log(mut self) -> String {
        self.signal(Signal::SIGTERM);
        assert_eq!(self.exit_code(), Some(0));
        self.log.take().unwrap().join().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub const JSON: (&str, &str) = ("Content-Type", "application/json");

/// Returns the body of a chat completion request: the demo model, a question and temperature 0.
/// The fields in `fields` are added to the body, or replace these defaults.
pub fn chat(fields: Value) -> Value {
    let body = json!({
        "model": "demo",
        "messages": [{ "role": "user", "content": "What is the KV cache?" }],
        "temperature": 0,
    });
    merged(body, &fields)
}

/// Returns an object with the entries of both objects. An entry of `fields` replaces the entry of the same name.
pub fn merged(mut object: Value, fields: &Value) -> Value {
    object.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    object
}

/// Returns the body of a chat completion request with a long answer, of up to 3000 tokens.
pub fn endless(is_stream: bool) -> Value {
    chat(json!({ "stream": is_stream, "ignore_eos": true, "max_tokens": 3000 }))
}

/// Returns the bytes of an HTTP request that asks the server to close the connection after the response.
pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut text = format!("{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n");
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    let mut bytes = format!("{text}Content-Length: {}\r\n\r\n", body.len()).into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

pub struct Response {
    pub status: u16,
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Response {
    /// Reads a response and its body. A body that is not chunked and has no `content-length` counts as empty.
    pub fn read(stream: &mut impl BufRead) -> Self {
        let mut response = Self::read_head(stream);
        if response.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = read_chunk(stream) {
                response.body.extend(chunk);
            }
        } else if let Some(length) = response.header("content-length") {
            response.body = vec![0; length.parse().unwrap()];
            stream.read_exact(&mut response.body).unwrap();
        }
        response
    }

    /// Reads the status and the headers. The returned response has no body yet.
    pub fn read_head(stream: &mut impl BufRead) -> Self {
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("no status: {line:?}")).parse().unwrap();
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            headers.push((name.to_lowercase(), value.to_string()));
        }
        Self { status, headers, body: Vec::new() }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(header, _)| header == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// Asserts that the status is 200, and returns the JSON of the body.
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }

    /// Asserts that the response is an error with this status, in OpenAI's format, with a body of at most 4096 bytes.
    /// Returns the error object.
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        let json = self.json();
        let error = json["error"].as_object().unwrap_or_else(|| panic!("{json}"));
        let keys: Vec<_> = error.keys().map(String::as_str).collect();
        assert_eq!(keys, ["message", "type", "param", "code"], "{json}");
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{json}");
        assert!(self.body.len() <= 4096, "{json}");
        json["error"].clone()
    }

    /// Returns the events of a stream, without comments and without the last event, which must be `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("text/event-stream; charset=utf-8"));
        let text = self.text();
        let mut events: Vec<&str> = text.split("\n\n").filter(|event| !event.is_empty()).collect();
        events.retain(|event| !event.starts_with(':'));
        assert_eq!(events.pop(), Some("data: [DONE]"), "{text}");
        events.iter().map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap()).collect()
    }
}

/// Reads one HTTP chunk of a response body. Returns `None` at the end.
pub fn read_chunk(stream: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    let size =
        usize::from_str_radix(line.trim(), 16).unwrap_or_else(|_| panic!("expected a chunk size, found {line:?}"));
    let mut chunk = vec![0; size + 2];
    stream.read_exact(&mut chunk).unwrap();
    chunk.truncate(size);
    (size > 0).then_some(chunk)
}
