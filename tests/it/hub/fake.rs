//! A hub in miniature: the listing, the files, redirects, ranges and refusals, as huggingface.co gives them.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

pub const REPO: &str = "org/tiny-model";
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const INDEX: &str = "model.safetensors.index.json";
pub const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// How the fake hub answers. Tests change it between downloads.
#[derive(Clone)]
pub struct World {
    pub commit: String,
    pub files: BTreeMap<String, Vec<u8>>,
    /// Whether the listing tells sizes and hashes (`?blobs=true`); mirrors may not.
    pub tells_sizes: bool,
    pub does_ranges: bool,
    /// Status, x-error-code and body instead of the listing.
    pub listing_refused: Option<(u16, &'static str, &'static str)>,
    /// Status and x-error-code instead of any file.
    pub files_refused: Option<(u16, &'static str)>,
    /// The connection closes after so many bytes of the next body with more.
    pub cut_once: Option<usize>,
    /// Files are redirected to this host.
    pub storage: Option<String>,
    /// A size to claim for model.safetensors.
    pub claimed_bytes: Option<u64>,
    /// An etag to claim for every file.
    pub claimed_etag: Option<&'static str>,
    /// A file that is listed and not there.
    pub lost: Option<&'static str>,
    /// Bytes of file contents that have left.
    pub sent_bytes: usize,
}

pub struct FakeHub {
    pub port: u16,
    pub world: Arc<Mutex<World>>,
    /// The head of every request, as it came.
    pub requests: Arc<Mutex<Vec<String>>>,
}

impl FakeHub {
    pub fn start(files: &[(&str, &[u8])]) -> Self {
        let files = files.iter().map(|(name, bytes)| (name.to_string(), bytes.to_vec())).collect();
        let world = World {
            commit: COMMIT.to_string(),
            files,
            tells_sizes: true,
            does_ranges: true,
            listing_refused: None,
            files_refused: None,
            cut_once: None,
            storage: None,
            claimed_bytes: None,
            claimed_etag: None,
            lost: None,
            sent_bytes: 0,
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let hub = Self { port, world: Arc::new(Mutex::new(world)), requests: Arc::default() };
        let (world, requests) = (hub.world.clone(), hub.requests.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // A client that hangs up early is part of some tests.
                let _ = answer(stream.unwrap(), &world, &requests);
            }
        });
        hub
    }

    /// A repository with an index, two shards, and things that nobody needs.
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

    pub fn change(&self, change: impl FnOnce(&mut World)) {
        change(&mut self.world.lock().unwrap());
    }

    /// Request lines since the last call, as `GET /path`.
    pub fn lines(&self) -> Vec<String> {
        let line = |head: String| head.lines().next().unwrap().trim_end_matches(" HTTP/1.1").to_string();
        self.requests.lock().unwrap().drain(..).map(line).collect()
    }

    pub fn heads(&self) -> Vec<String> {
        self.requests.lock().unwrap().drain(..).collect()
    }
}

pub fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|i| ((i * 31 + seed * 7 + i / 251) % 256) as u8).collect()
}

/// Stands in for the hash: 40 hex digits that depend on every byte.
pub fn etag(bytes: &[u8]) -> String {
    let hash = bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:040x}")
}

/// Reads one request and answers it; every answer closes its connection.
fn answer(mut stream: TcpStream, world: &Mutex<World>, requests: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let mut head = String::new();
    let mut reader = BufReader::new(stream.try_clone()?);
    while reader.read_line(&mut head)? > 2 {}
    requests.lock().unwrap().push(head.clone());
    let mut first = head.split(' ');
    let (method, path) = (first.next().unwrap_or_default(), first.next().unwrap_or_default());
    let mut world = world.lock().unwrap();
    if path.starts_with(&format!("/api/models/{REPO}/revision/")) {
        if let Some((status, code, body)) = world.listing_refused {
            return send(&mut stream, &format!("{status} No\r\nx-error-code: {code}"), body.as_bytes());
        }
        return send(&mut stream, "200 OK", listing(&world).as_bytes());
    }
    if path == "/api/whoami-v2" {
        let known = head.to_lowercase().contains("authorization: bearer hf_secret");
        return send(&mut stream, if known { "200 OK" } else { "401 Unauthorized" }, b"{}");
    }
    let name = path.strip_prefix(&format!("/{REPO}/resolve/{}/", world.commit)).or(path.strip_prefix("/storage/"));
    let Some(name) = name.map(|name| name.replace("%20", " ")) else {
        return send(&mut stream, "404 Not Found\r\nx-error-code: RepoNotFound", b"");
    };
    if let Some((status, code)) = world.files_refused {
        return send(&mut stream, &format!("{status} No\r\nx-error-code: {code}"), b"");
    }
    let Some(bytes) = world.files.get(&name).filter(|_| world.lost != Some(&name)).cloned() else {
        return send(&mut stream, "404 Not Found\r\nx-error-code: EntryNotFound", b"");
    };
    let about = format!(
        "x-repo-commit: {}\r\nx-linked-etag: \"{}\"\r\nx-linked-size: {}",
        world.commit,
        etag(&bytes),
        bytes.len()
    );
    if let (Some(storage), true) = (&world.storage, path.contains("/resolve/")) {
        return send(&mut stream, &format!("302 Found\r\n{about}\r\nlocation: {storage}/storage/{name}"), b"");
    }
    let range = head.lines().find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(str::to_string));
    let (first, last) = range.as_deref().and_then(|range| range.split_once('-')).unwrap_or(("0", ""));
    let start: usize = first.parse().unwrap_or(0);
    let end = last.parse().map_or(bytes.len(), |last: usize| bytes.len().min(last + 1));
    let (status, body) = if (start > 0 || end < bytes.len()) && world.does_ranges {
        let range = format!("content-range: bytes {start}-{}/{}", end - 1, bytes.len());
        (format!("206 Partial Content\r\n{about}\r\n{range}"), &bytes[start..end])
    } else {
        (format!("200 OK\r\n{about}"), &bytes[..])
    };
    write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len())?;
    if method == "HEAD" {
        return Ok(());
    }
    match world.cut_once {
        Some(limit) if limit < body.len() => {
            world.cut_once = None;
            stream.write_all(&body[..limit])
        }
        _ => {
            for piece in body.chunks(64 << 10) {
                stream.write_all(piece)?;
                world.sent_bytes += piece.len();
            }
            Ok(())
        }
    }
}

fn send(stream: &mut TcpStream, status: &str, body: &[u8]) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len())?;
    stream.write_all(body)
}

fn listing(world: &World) -> String {
    let file = |(name, bytes): (&String, &Vec<u8>)| {
        let etag = world.claimed_etag.map_or_else(|| etag(bytes), str::to_string);
        let size = world.claimed_bytes.filter(|_| name == "model.safetensors").unwrap_or(bytes.len() as u64);
        let name = serde_json::to_string(name).unwrap();
        match (world.tells_sizes, name.contains("safetensors\"")) {
            (false, _) => format!(r#"{{"rfilename":{name}}}"#),
            (true, false) => format!(r#"{{"rfilename":{name},"size":{size},"blobId":"{etag}"}}"#),
            (true, true) => format!(
                r#"{{"rfilename":{name},"size":{size},"blobId":"pointer","lfs":{{"sha256":"{etag}","size":{size}}}}}"#
            ),
        }
    };
    let files: Vec<String> = world.files.iter().map(file).collect();
    format!(r#"{{"id":"{REPO}","sha":"{}","siblings":[{}]}}"#, world.commit, files.join(","))
}
