//! A small fake hub that behaves like huggingface.co: listing, files, redirects, ranges and refusals.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};

pub const REPO: &str = "org/tiny-model";
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const INDEX: &str = "model.safetensors.index.json";
pub const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// The files and faults of the fake hub. Tests change this state between downloads.
#[derive(Clone)]
pub struct HubState {
    pub commit: String,
    pub files: BTreeMap<String, Vec<u8>>,
    /// If true, the listing contains the size and the blob id of each file, as requested with `?blobs=true`.
    /// Mirrors of huggingface.co may omit sizes and blob ids.
    pub lists_sizes: bool,
    pub supports_ranges: bool,
    /// The status, `x-error-code` header and body to send instead of the listing.
    pub listing_refused: Option<(u16, &'static str, &'static str)>,
    /// The status and `x-error-code` header to send instead of any file.
    pub files_refused: Option<(u16, &'static str)>,
    /// Faults for the next GET requests for files that `faulty` selects. Each request consumes one fault.
    pub faults: VecDeque<Fault>,
    /// Returns whether the faults apply to the file with the given name. By default, faults apply only to the weights.
    pub faulty: fn(&str) -> bool,
    /// Status lines, with optional headers, to send instead of the next listings, one per request.
    pub listing_faults: VecDeque<&'static str>,
    /// If set, the body to send instead of the listing.
    pub raw_listing: Option<Arc<Vec<u8>>>,
    /// If set, the listing is sent in pieces of the given number of bytes, with the given pause after each piece.
    pub listing_pace: Option<(usize, Duration)>,
    /// If set, files are sent in pieces of the given number of bytes, with the given pause after each piece.
    pub pace: Option<(usize, Duration)>,
    /// If set, the hub redirects requests for files to this base URL.
    pub storage: Option<String>,
    /// If true, a listing with sizes also contains the SHA-256 of each large file,
    /// and file responses have an `x-linked-etag` header.
    pub lists_hashes: bool,
    /// If set, the value of the `etag` header of every file. Otherwise, each file's hash is its etag.
    pub etag_header: Option<&'static str>,
    /// If set, the listing claims that model.safetensors has this size.
    pub claimed_bytes: Option<u64>,
    /// If set, the listing claims that every file has this hash.
    pub claimed_etag: Option<&'static str>,
    /// If set, the name of a file that is in the listing, but whose requests get status 404.
    pub lost: Option<&'static str>,
    /// The number of bytes of file contents that the hub has sent since it started, except with [`Fault::NoLength`].
    pub sent_bytes: usize,
}

/// A fault that the fake hub injects into a response.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// No fault. The request gets a correct response, so that the next fault applies to a later request.
    None,
    /// The server closes the connection after this many bytes of the response body.
    Cut(usize),
    /// The server stops sending after this many bytes of the response body, but keeps the connection open for up to
    /// 20 s.
    Stall(usize),
    /// One bit is flipped in the byte at this index of the response body, modulo the length of the body.
    Flip(usize),
    /// The server sends this status line, which may include headers, and an empty response body.
    Status(&'static str),
    /// The server sends the login page of a captive portal.
    Portal,
    /// The response body starts at a byte other than requested, but `content-range` states the requested range.
    OtherRange,
    /// The `content-range` header differs from the range that the client requested.
    WrongRange,
    /// The response body contains the requested bytes twice.
    BodyTwice,
    /// The server sends the whole file and ignores the requested range.
    WholeFile,
    /// The response body is one HTTP chunk, without a content length or a final chunk.
    /// The connection stays open for up to 20 s.
    NoLength,
}

pub struct FakeHub {
    pub port: u16,
    pub state: Arc<Mutex<HubState>>,
    /// The request line and headers of every request since the last call of `take_lines` or `take_heads`.
    pub requests: Arc<Mutex<Vec<String>>>,
}

impl FakeHub {
    pub fn start(files: &[(&str, &[u8])]) -> Self {
        let files = files.iter().map(|(name, bytes)| (name.to_string(), bytes.to_vec())).collect();
        let state = HubState {
            commit: COMMIT.to_string(),
            files,
            lists_sizes: true,
            lists_hashes: true,
            supports_ranges: true,
            listing_refused: None,
            files_refused: None,
            faults: VecDeque::new(),
            faulty: is_large,
            listing_faults: VecDeque::new(),
            raw_listing: None,
            listing_pace: None,
            pace: None,
            storage: None,
            etag_header: None,
            claimed_bytes: None,
            claimed_etag: None,
            lost: None,
            sent_bytes: 0,
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let hub = Self { port, state: Arc::new(Mutex::new(state)), requests: Arc::default() };
        let (state, requests) = (hub.state.clone(), hub.requests.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (state, requests) = (state.clone(), requests.clone());
                // Ignore errors, because clients may close the connection early.
                std::thread::spawn(move || answer(stream.unwrap(), &state, &requests));
            }
        });
        hub
    }

    /// Starts a hub that has a sharded model: an index, two shards, small files, and files that inferno does not need.
    pub fn sharded() -> Self {
        let index = format!(r#"{{"weight_map":{{"a":"{}","b":"{}","c":"{}"}}}}"#, SHARDS[0], SHARDS[1], SHARDS[0]);
        Self::start(&[
            ("README.md", b"read me"),
            ("chat_template.jinja", b"{{ messages }}"),
            ("config.json", b"{}"),
            ("generation_config.json", b""),
            (INDEX, index.as_bytes()),
            (SHARDS[0], &pattern(200_000, 1)),
            (SHARDS[1], &pattern(100_000, 2)),
            ("original/consolidated.safetensors", b"copy"),
            ("pytorch_model.bin", b"pickle"),
            ("tokenizer.json", b"{\"tokens\":0}"),
        ])
    }

    pub fn single() -> Self {
        Self::start(&[
            ("config.json", b"{}"),
            ("tokenizer.json", b"{}"),
            ("model.safetensors", &pattern(50_000, 3)),
            ("gguf/model.Q4.gguf", b"GGUF"),
        ])
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn change(&self, change: impl FnOnce(&mut HubState)) {
        change(&mut self.state.lock().unwrap());
    }

    /// Removes and returns the recorded request lines, each in the form `GET /path`.
    pub fn take_lines(&self) -> Vec<String> {
        let line = |head: String| head.lines().next().unwrap().trim_end_matches(" HTTP/1.1").to_string();
        self.requests.lock().unwrap().drain(..).map(line).collect()
    }

    /// Removes and returns the heads of the recorded requests: their request lines and headers.
    pub fn take_heads(&self) -> Vec<String> {
        self.requests.lock().unwrap().drain(..).collect()
    }
}

pub fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|i| ((i * 31 + seed * 7 + i / 251) % 256) as u8).collect()
}

/// Returns the etag of a file on huggingface.co: SHA-256 for large files, git's blob hash for small files.
pub fn etag(name: &str, bytes: &[u8]) -> String {
    let hash = if is_large(name) {
        digest(&SHA256, bytes)
    } else {
        digest(&SHA1_FOR_LEGACY_USE_ONLY, &[format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat())
    };
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_large(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".gguf")
}

/// Reads one request and answers it. Reads a second request from the connection only after `CONNECT`.
fn answer(mut stream: TcpStream, shared: &Mutex<HubState>, requests: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let mut head = String::new();
    let mut reader = BufReader::new(stream.try_clone()?);
    while reader.read_line(&mut head)? > 2 {}
    requests.lock().unwrap().push(head.clone());
    if head.starts_with("CONNECT ") {
        // The fake hub is also a proxy. It answers the proxied requests itself.
        stream.write_all(b"HTTP/1.1 200 Connected\r\n\r\n")?;
        return answer(stream, shared, requests);
    }
    let mut first = head.split(' ');
    let (method, path) = (first.next().unwrap_or_default(), first.next().unwrap_or_default());
    let mut guard = shared.lock().unwrap();
    let state = &mut *guard;
    if path.starts_with(&format!("/api/models/{REPO}/revision/")) {
        if let Some(status) = state.listing_faults.pop_front() {
            return send(&mut stream, status, b"");
        }
        if let Some((status, code, body)) = state.listing_refused {
            return send(&mut stream, &format!("{status} No\r\nx-error-code: {code}"), body.as_bytes());
        }
        let body = state.raw_listing.clone().unwrap_or_else(|| Arc::new(listing(state).into_bytes()));
        let (piece_bytes, pause) = state.listing_pace.unwrap_or((body.len().max(1), Duration::ZERO));
        drop(guard);
        write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len())?;
        for piece in body.chunks(piece_bytes) {
            stream.write_all(piece)?;
            std::thread::sleep(pause);
        }
        return Ok(());
    }
    if path == "/api/whoami-v2" {
        let known = head.to_lowercase().contains("authorization: bearer hf_secret");
        return send(&mut stream, if known { "200 OK" } else { "401 Unauthorized" }, b"{}");
    }
    let path = path.split('?').next().unwrap_or_default();
    let name = path.strip_prefix(&format!("/{REPO}/resolve/{}/", state.commit)).or(path.strip_prefix("/storage/"));
    let Some(name) = name.map(|name| name.replace("%20", " ")) else {
        return send(&mut stream, "404 Not Found\r\nx-error-code: RepoNotFound", b"");
    };
    if let Some((status, code)) = state.files_refused {
        return send(&mut stream, &format!("{status} No\r\nx-error-code: {code}"), b"");
    }
    let Some(bytes) = state.files.get(&name).filter(|_| state.lost != Some(&name)).cloned() else {
        return send(&mut stream, "404 Not Found\r\nx-error-code: EntryNotFound", b"");
    };
    let hash = etag(&name, &bytes);
    let etag_header = state.etag_header.unwrap_or(&hash);
    let linked = format!("x-linked-etag: \"{hash}\"\r\nx-linked-size: {}\r\n", bytes.len());
    let linked = if state.lists_hashes { linked } else { String::new() };
    let metadata = format!("x-repo-commit: {}\r\n{linked}etag: {etag_header}", state.commit);
    if let (Some(storage), true) = (&state.storage, path.contains("/resolve/")) {
        return send(&mut stream, &format!("302 Found\r\n{metadata}\r\nlocation: {storage}/storage/{name}"), b"");
    }
    let fault = if method == "GET" && (state.faulty)(&name) {
        state.faults.pop_front().unwrap_or(Fault::None)
    } else {
        Fault::None
    };
    let range = head.lines().find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(str::to_string));
    let range = range.filter(|_| !matches!(fault, Fault::WholeFile));
    let (first, last) = range.as_deref().and_then(|range| range.split_once('-')).unwrap_or(("0", ""));
    let mut start: usize = first.parse().unwrap_or(0);
    let mut end = last.parse().map_or(bytes.len(), |last: usize| bytes.len().min(last + 1));
    let (mut named_start, named_end) = (start, end);
    match fault {
        Fault::Status(status) => return send(&mut stream, status, b""),
        Fault::Portal => {
            return send(&mut stream, "200 OK\r\ncontent-type: text/html; charset=utf-8", b"<html>log in</html>");
        }
        Fault::OtherRange if bytes.len() > 1 => {
            (start, end) = ((start + 1) % bytes.len(), end.min(bytes.len() - 1) + 1)
        }
        Fault::WrongRange => named_start += 1,
        _ => {}
    }
    let (status, body) = if (start > 0 || end < bytes.len()) && state.supports_ranges {
        let range = format!("content-range: bytes {named_start}-{}/{}", named_end - 1, bytes.len());
        (format!("206 Partial Content\r\n{metadata}\r\n{range}"), &bytes[start..end.min(bytes.len())])
    } else {
        (format!("200 OK\r\n{metadata}"), &bytes[..])
    };
    let mut body = body.to_vec();
    if let (Fault::Flip(at), false) = (fault, body.is_empty()) {
        let at = at % body.len();
        body[at] ^= 1;
    }
    if matches!(fault, Fault::BodyTwice) {
        body.extend_from_slice(&body.clone());
    }
    let pace = state.pace;
    drop(guard);
    if let Fault::NoLength = fault {
        write!(stream, "HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n", body.len())?;
        stream.write_all(&body)?;
        stream.write_all(b"\r\n")?;
        return wait_for_hangup(&mut stream);
    }
    write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len())?;
    if method == "HEAD" {
        return Ok(());
    }
    let (piece_bytes, pause) = pace.unwrap_or((64 << 10, Duration::ZERO));
    let sent = match fault {
        Fault::Cut(limit) | Fault::Stall(limit) => &body[..limit.min(body.len())],
        _ => &body,
    };
    for piece in sent.chunks(piece_bytes) {
        stream.write_all(piece)?;
        shared.lock().unwrap().sent_bytes += piece.len();
        std::thread::sleep(pause);
    }
    if let Fault::Stall(_) = fault {
        return wait_for_hangup(&mut stream);
    }
    Ok(())
}

fn wait_for_hangup(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    let _ = stream.read(&mut [0]);
    Ok(())
}

fn send(stream: &mut TcpStream, status: &str, body: &[u8]) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len())?;
    stream.write_all(body)
}

fn listing(state: &HubState) -> String {
    let file = |(name, bytes): (&String, &Vec<u8>)| {
        let etag = state.claimed_etag.map_or_else(|| etag(name, bytes), str::to_string);
        let size = state.claimed_bytes.filter(|_| name == "model.safetensors").unwrap_or(bytes.len() as u64);
        let name = serde_json::to_string(name).unwrap();
        match (state.lists_sizes, is_large(name.trim_matches('"'))) {
            (false, _) => format!(r#"{{"rfilename":{name}}}"#),
            (true, false) => format!(r#"{{"rfilename":{name},"size":{size},"blobId":"{etag}"}}"#),
            (true, true) if !state.lists_hashes => {
                format!(r#"{{"rfilename":{name},"size":{size},"blobId":"{}","lfs":{{"size":{size}}}}}"#, "5".repeat(40))
            }
            (true, true) => format!(
                r#"{{"rfilename":{name},"size":{size},"blobId":"pointer","lfs":{{"sha256":"{etag}","size":{size}}}}}"#
            ),
        }
    };
    let files: Vec<String> = state.files.iter().map(file).collect();
    format!(r#"{{"id":"{REPO}","sha":"{}","siblings":[{}]}}"#, state.commit, files.join(","))
}
