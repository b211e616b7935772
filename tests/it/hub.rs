//! The hub against a small fake one on 127.0.0.1. Nothing here touches the network or the caches of whoever runs it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use inferno::Error;
use inferno::hub::{Hub, Progress, Settings, Snapshot, Source};
use tempfile::TempDir;

const REPO: &str = "org/tiny-model";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const INDEX: &str = "model.safetensors.index.json";
const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// How the fake hub answers. Tests change it between downloads.
#[derive(Clone)]
struct World {
    commit: String,
    files: BTreeMap<String, Vec<u8>>,
    /// Whether the listing tells sizes and hashes (`?blobs=true`); mirrors may not.
    tells_sizes: bool,
    does_ranges: bool,
    /// Status, x-error-code and body instead of the listing.
    listing_refused: Option<(u16, &'static str, &'static str)>,
    /// Status and x-error-code instead of any file.
    files_refused: Option<(u16, &'static str)>,
    /// The connection closes after so many bytes of the next body with more.
    cut_once: Option<usize>,
    /// Files are redirected to this host.
    storage: Option<String>,
    /// A size to claim for model.safetensors.
    claimed_bytes: Option<u64>,
    /// An etag to claim for every file.
    claimed_etag: Option<&'static str>,
    /// A file that is listed and not there.
    lost: Option<&'static str>,
}

struct FakeHub {
    port: u16,
    world: Arc<Mutex<World>>,
    /// The head of every request, as it came.
    requests: Arc<Mutex<Vec<String>>>,
}

impl FakeHub {
    fn start(files: &[(&str, &[u8])]) -> Self {
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
    fn sharded() -> Self {
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

    fn single() -> Self {
        Self::start(&[
            ("config.json", b"{}"),
            ("tokenizer.json", b"{}"),
            ("model.safetensors", &pattern(50_000, 3)),
            ("gguf/model.Q4.gguf", b"GGUF"),
        ])
    }

    fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn change(&self, change: impl FnOnce(&mut World)) {
        change(&mut self.world.lock().unwrap());
    }

    /// Request lines since the last call, as `GET /path`.
    fn lines(&self) -> Vec<String> {
        let line = |head: String| head.lines().next().unwrap().trim_end_matches(" HTTP/1.1").to_string();
        self.requests.lock().unwrap().drain(..).map(line).collect()
    }

    fn heads(&self) -> Vec<String> {
        self.requests.lock().unwrap().drain(..).collect()
    }
}

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|i| ((i * 31 + seed * 7 + i / 251) % 256) as u8).collect()
}

/// Stands in for the hash: 40 hex digits that depend on every byte.
fn etag(bytes: &[u8]) -> String {
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
    let start: usize = range.and_then(|range| range.trim_end_matches('-').parse().ok()).unwrap_or(0);
    let (status, body) = if start > 0 && world.does_ranges {
        let range = format!("content-range: bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
        (format!("206 Partial Content\r\n{about}\r\n{range}"), &bytes[start..])
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
        _ => stream.write_all(body),
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

/// Two empty caches, and a hub that uses them.
struct Machine {
    dir: TempDir,
    endpoint: String,
}

impl Machine {
    fn new(endpoint: String) -> Self {
        Self { dir: TempDir::new().unwrap(), endpoint }
    }

    fn settings(&self) -> Settings {
        Settings {
            cache: self.dir.path().join("own"),
            shared_cache: self.dir.path().join("shared"),
            endpoint: self.endpoint.clone(),
            token: None,
            offline: false,
        }
    }

    fn hub(&self) -> Hub {
        Hub::new(self.settings())
    }

    fn with_token(&self) -> Hub {
        Hub::new(Settings { token: Some("hf_secret".to_string()), ..self.settings() })
    }

    fn offline(&self) -> Hub {
        Hub::new(Settings { offline: true, ..self.settings() })
    }

    fn repo(&self) -> PathBuf {
        self.dir.path().join("own/models--org--tiny-model")
    }

    /// Puts a snapshot into a cache by hand, as another tool would have.
    fn place(&self, cache: &str, repo: &str, commit: &str, files: &[(&str, &[u8])]) -> PathBuf {
        let repo = self.dir.path().join(cache).join(format!("models--{}", repo.replace('/', "--")));
        let snapshot = repo.join("snapshots").join(commit);
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(repo.join("refs")).unwrap();
        for (name, bytes) in files {
            fs::write(snapshot.join(name), bytes).unwrap();
        }
        fs::write(repo.join("refs/main"), commit).unwrap();
        snapshot
    }
}

const WHOLE: [(&str, &[u8]); 3] =
    [("config.json", b"{}"), ("tokenizer.json", b"{}"), ("model.safetensors", b"weights")];

/// Writes down what it hears.
#[derive(Default)]
struct Heard(Mutex<Vec<String>>);

impl Progress for Heard {
    fn already_there(&self, snapshot: &Snapshot) {
        self.0.lock().unwrap().push(format!("already there: {:?}", snapshot.source));
    }
    fn start(&self, files: &[(String, u64)]) {
        self.0.lock().unwrap().push(format!(
            "start {} files, {} bytes",
            files.len(),
            files.iter().map(|f| f.1).sum::<u64>()
        ));
    }
    fn file(&self, name: &str, done_bytes: u64) {
        self.0.lock().unwrap().push(format!("{name} {done_bytes}"));
    }
}

impl Heard {
    fn all(self) -> Vec<String> {
        self.0.into_inner().unwrap()
    }
}

fn failure(result: anyhow::Result<Snapshot>) -> (String, u8) {
    let error = result.unwrap_err();
    let code = error.downcast_ref::<Error>().map_or(1, Error::exit_code);
    (format!("{error:#}"), code)
}

fn names_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn downloads_what_a_model_needs_in_the_hugging_face_layout() {
    let fake = FakeHub::sharded();
    let machine = Machine::new(fake.endpoint());
    let heard = Heard::default();
    let snapshot = machine.hub().download(REPO, None, &[], &heard).unwrap();
    let path = machine.repo().join("snapshots").join(COMMIT);
    let expected =
        Snapshot { name: REPO.into(), revision: Some(COMMIT.into()), path: path.clone(), source: Source::Inferno };
    assert_eq!(snapshot, expected);

    let wanted =
        ["chat_template.jinja", "config.json", "generation_config.json", SHARDS[0], SHARDS[1], INDEX, "tokenizer.json"];
    assert_eq!(names_in(&path), wanted);
    let world = fake.world.lock().unwrap().clone();
    for name in wanted {
        let target = format!("../../blobs/{}", etag(&world.files[name]));
        assert_eq!(fs::read_link(path.join(name)).unwrap(), Path::new(&target), "{name}");
        assert_eq!(fs::read(path.join(name)).unwrap(), world.files[name], "{name}");
    }
    assert_eq!(fs::read_to_string(machine.repo().join("refs/main")).unwrap(), COMMIT);
    assert_eq!(names_in(&machine.repo().join("refs")), ["main"]);
    assert_eq!(names_in(&machine.repo().join("blobs")).len(), wanted.len());

    let heard = heard.all();
    let bytes: usize = wanted.iter().map(|name| world.files[*name].len()).sum();
    assert_eq!(heard[0], format!("start 7 files, {bytes} bytes"));
    assert_eq!(heard.last().unwrap(), &format!("{} 100000", SHARDS[1]));
    assert_eq!(machine.hub().find(REPO, None).unwrap(), expected);
    assert_eq!(machine.hub().list().unwrap(), [expected]);
}

#[test]
fn a_second_download_fetches_nothing() {
    let fake = FakeHub::sharded();
    let machine = Machine::new(fake.endpoint());
    let first = machine.hub().download(REPO, None, &[], &()).unwrap();
    fake.lines();
    let heard = Heard::default();
    assert_eq!(machine.hub().download(REPO, None, &[], &heard).unwrap(), first);
    assert_eq!(fake.lines(), [format!("GET /api/models/{REPO}/revision/main?blobs=true")]);
    assert_eq!(heard.all(), ["already there: Inferno"]);
}

#[test]
fn a_new_commit_shares_the_files_that_stayed() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    machine.hub().download(REPO, None, &[], &()).unwrap();
    fake.lines();
    let newer = "f".repeat(40);
    fake.change(|world| {
        world.commit = newer.clone();
        world.files.insert("config.json".into(), b"{\"new\":1}".to_vec());
    });
    let snapshot = machine.hub().download(REPO, None, &[], &()).unwrap();
    assert_eq!(snapshot.revision.as_deref(), Some(newer.as_str()));
    assert_eq!(fake.lines()[1..], [format!("GET /{REPO}/resolve/{newer}/config.json")]);
    assert_eq!(machine.hub().find(REPO, None).unwrap(), snapshot);
    let older = machine.hub().find(&format!("{REPO}@{COMMIT}"), None).unwrap();
    assert_eq!(older.revision.as_deref(), Some(COMMIT));
    assert_eq!(machine.hub().find(REPO, Some(&COMMIT[..8])).unwrap(), older);
}

#[test]
fn goes_on_where_an_earlier_attempt_stopped() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let weights = pattern(50_000, 3);
    let blobs = machine.repo().join("blobs");
    let partial = blobs.join(format!("{}.incomplete", etag(&weights)));
    for does_ranges in [true, false] {
        fs::create_dir_all(&blobs).unwrap();
        fs::write(&partial, &weights[..20_000]).unwrap();
        fake.change(|world| world.does_ranges = does_ranges);
        let snapshot = machine.hub().download(REPO, None, &[], &()).unwrap();
        assert!(fake.heads().iter().any(|head| head.to_lowercase().contains("range: bytes=20000-")));
        assert_eq!(fs::read(snapshot.path.join("model.safetensors")).unwrap(), weights, "ranges: {does_ranges}");
        assert!(!partial.exists());
        fs::remove_dir_all(machine.repo()).unwrap();
    }
    // All of it, or too much of it, but never renamed.
    for left in [weights.clone(), pattern(60_000, 9)] {
        fs::create_dir_all(&blobs).unwrap();
        fs::write(&partial, &left).unwrap();
        let snapshot = machine.hub().download(REPO, None, &[], &()).unwrap();
        assert_eq!(fs::read(snapshot.path.join("model.safetensors")).unwrap(), weights);
        fs::remove_dir_all(machine.repo()).unwrap();
    }
}

#[test]
fn a_broken_connection_is_resumed() {
    let fake = FakeHub::single();
    fake.change(|world| world.cut_once = Some(30_000));
    let machine = Machine::new(fake.endpoint());
    let snapshot = machine.hub().download(REPO, None, &[], &()).unwrap();
    assert_eq!(fs::read(snapshot.path.join("model.safetensors")).unwrap(), pattern(50_000, 3));
    assert!(fake.heads().iter().any(|head| head.to_lowercase().contains("range: bytes=30000-")));
}

#[test]
fn two_downloads_at_once_do_not_mix() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let hubs = [machine.hub(), machine.hub()];
    std::thread::scope(|scope| {
        for hub in &hubs {
            scope.spawn(|| hub.download(REPO, None, &[], &()).unwrap());
        }
    });
    let snapshot = machine.hub().find(REPO, None).unwrap();
    assert_eq!(fs::read(snapshot.path.join("model.safetensors")).unwrap(), pattern(50_000, 3));
}

#[test]
fn a_listing_without_sizes_is_completed_by_head_requests() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    for storage in [None, Some("http://localhost:1".to_string())] {
        let redirected = storage.is_some();
        fake.change(|world| (world.tells_sizes, world.storage) = (false, storage));
        let heard = Heard::default();
        if redirected {
            // Sizes come from the redirect itself; then nobody listens where the files are.
            fs::remove_dir_all(machine.repo()).unwrap();
            assert_eq!(failure(machine.hub().download(REPO, None, &[], &heard)).1, 5);
        } else {
            let snapshot = machine.hub().download(REPO, None, &[], &heard).unwrap();
            assert_eq!(fs::read(snapshot.path.join("model.safetensors")).unwrap(), pattern(50_000, 3));
        }
        assert_eq!(heard.all()[0], "start 3 files, 50004 bytes");
        assert!(fake.lines().contains(&format!("HEAD /{REPO}/resolve/{COMMIT}/model.safetensors")));
    }
}

#[test]
fn the_token_stays_with_the_endpoint() {
    let (fake, storage) = (FakeHub::single(), FakeHub::single());
    // Another host by name, though the same machine.
    fake.change(|world| world.storage = Some(format!("http://localhost:{}", storage.port)));
    let machine = Machine::new(fake.endpoint());
    machine.with_token().download(REPO, None, &[], &()).unwrap();
    assert!(fake.heads().iter().all(|head| head.to_lowercase().contains("authorization: bearer hf_secret")));
    let there = storage.heads();
    assert_eq!(there.len(), 2, "config.json and tokenizer.json are one blob here");
    assert!(there.iter().all(|head| !head.contains("hf_secret")), "{there:?}");
}

#[test]
fn refusals_of_the_hub() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let download = || failure(machine.hub().download(REPO, Some("v9"), &[], &()));
    for (status, code, body, exit_code, said) in [
        (401, "RepoNotFound", "", 3, "there is no repository"),
        (401, "", "", 3, "there is no repository"),
        (404, "", "{\"error\":\"Repository not found\"}", 3, "there is no repository"),
        (404, "RevisionNotFound", "", 3, "has no revision 'v9'"),
        (404, "", "{\"error\":\"Invalid rev id: v9\"}", 3, "has no revision 'v9'"),
        (401, "GatedRepo", "", 4, "accept its licence"),
        (403, "GatedRepo", "", 4, "accept its licence"),
        (429, "", "", 5, "HTTP 429"),
        (503, "", "", 5, "HTTP 503"),
    ] {
        fake.change(|world| world.listing_refused = Some((status, code, body)));
        let (message, code) = download();
        assert_eq!(code, exit_code, "{status} {message}");
        assert!(message.contains(said), "{status} {message}");
    }
    fake.change(|world| world.listing_refused = Some((200, "", "<html>log in</html>")));
    assert!(download().0.contains("did not answer as a model hub does"));
    // Gated repositories are listed for everyone; their files are what is kept.
    fake.change(|world| (world.listing_refused, world.files_refused) = (None, Some((403, "GatedRepo"))));
    assert_eq!(download().1, 4);
    fake.change(|world| world.files_refused = Some((401, "")));
    let (message, code) = failure(machine.with_token().download(REPO, None, &[], &()));
    assert_eq!(code, 4);
    assert!(!message.contains("hf_secret"));
    assert!(machine.hub().find(REPO, None).is_err(), "no ref or snapshot is left behind");
}

#[test]
fn no_network() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let machine = Machine::new(format!("http://127.0.0.1:{closed}"));
    let (message, code) = failure(machine.hub().download(REPO, None, &[], &()));
    assert_eq!(code, 5);
    assert!(message.contains(&format!("127.0.0.1:{closed}")), "{message}");
}

#[test]
fn offline_uses_what_is_here_and_asks_nobody() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let (message, code) = failure(machine.offline().download(REPO, None, &[], &()));
    assert_eq!(code, 5);
    assert!(message.contains("offline") && message.contains(REPO), "{message}");
    let here = machine.hub().download(REPO, None, &[], &()).unwrap();
    fake.lines();
    let heard = Heard::default();
    assert_eq!(machine.offline().download(REPO, None, &[], &heard).unwrap(), here);
    assert_eq!(heard.all(), ["already there: Inferno"]);
    assert!(fake.lines().is_empty());
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    let outside = |machine: &Machine| {
        let mut names = names_in(machine.dir.path());
        names.retain(|name| name != "own");
        names
    };
    for shard in ["../../../../escaped", "/tmp/inferno-escaped", "a\\\\..\\\\b"] {
        let index = format!(r#"{{"weight_map":{{"a":"{shard}"}}}}"#);
        let fake = FakeHub::start(&[("config.json", b"{}"), ("tokenizer.json", b"{}"), (INDEX, index.as_bytes())]);
        let machine = Machine::new(fake.endpoint());
        let (message, _) = failure(machine.hub().download(REPO, None, &[], &()));
        assert!(message.contains("refused"), "{message}");
        assert!(outside(&machine).is_empty());
        assert!(!Path::new("/tmp/inferno-escaped").exists());
    }
    for name in ["../config.json", "/tmp/inferno-escaped", "a/../../b", "a\\b", "a\u{0}b"] {
        let fake = FakeHub::single();
        fake.change(|world| drop(world.files.insert(name.to_string(), b"{}".to_vec())));
        let machine = Machine::new(fake.endpoint());
        let (message, _) = failure(machine.hub().download(REPO, None, &[], &()));
        assert!(message.contains("refused"), "{message}");
        assert!(names_in(machine.dir.path()).is_empty());
    }
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|world| world.claimed_etag = Some("../../etag"));
    assert!(failure(machine.hub().download(REPO, None, &[], &())).0.contains("refused"));
    fake.change(|world| (world.claimed_etag, world.commit) = (None, "../../../commit".to_string()));
    assert!(failure(machine.hub().download(REPO, None, &[], &())).0.contains("refused"));
    assert!(names_in(machine.dir.path()).is_empty());
}

#[test]
fn names_that_people_give_are_checked_first() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    for repo in ["", "a/b/c", "../x", "a b/c", "org/..", "https://huggingface.co/org/name"] {
        let (message, _) = failure(machine.hub().download(repo, None, &[], &()));
        assert!(message.contains("write org/name"), "{message}");
    }
    assert!(failure(machine.hub().download(REPO, Some("../x"), &[], &())).0.contains("is not a revision"));
    assert!(fake.lines().is_empty());
}

#[test]
fn include_replaces_the_weights() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let include = ["*.gguf".to_string()];
    let snapshot = machine.hub().download(REPO, Some("refs/pr/1"), &include, &()).unwrap();
    assert_eq!(names_in(&snapshot.path), ["config.json", "gguf", "tokenizer.json"]);
    assert_eq!(fs::read(snapshot.path.join("gguf/model.Q4.gguf")).unwrap(), b"GGUF");
    let link = fs::read_link(snapshot.path.join("gguf/model.Q4.gguf")).unwrap();
    assert!(link.starts_with("../../../blobs"), "{}", link.display());
    assert_eq!(fake.lines()[0], format!("GET /api/models/{REPO}/revision/refs%2Fpr%2F1?blobs=true"));
    assert_eq!(fs::read_to_string(machine.repo().join("refs/refs/pr/1")).unwrap(), COMMIT);
    // Text can be tokenized with it, but it is no model to run.
    assert_eq!(machine.hub().find_tokenizer(REPO, None).unwrap(), snapshot);
    let (message, _) = failure(machine.hub().find(REPO, None));
    assert!(message.contains("model.safetensors is missing"), "{message}");
    assert!(machine.hub().list().unwrap().is_empty());
    let nothing = machine.hub().download(REPO, None, &["*.onnx".to_string()], &());
    assert!(failure(nothing).0.contains("nothing in 'org/tiny-model' matches"));
}

#[test]
fn other_formats_are_named() {
    let fake = FakeHub::start(&[("config.json", b"{}"), ("a.gguf", b"GGUF"), ("pytorch_model.bin", b"pickle")]);
    let machine = Machine::new(fake.endpoint());
    let (message, _) = failure(machine.hub().download(REPO, None, &[], &()));
    assert!(message.contains("no safetensors") && message.contains(".gguf, .bin"), "{message}");
}

#[test]
fn a_full_disk_is_noticed_before_the_download() {
    let fake = FakeHub::single();
    fake.change(|world| world.claimed_bytes = Some(1 << 60));
    let machine = Machine::new(fake.endpoint());
    let (message, code) = failure(machine.hub().download(REPO, None, &[], &()));
    assert_eq!(code, 6, "{message}");
    assert_eq!(fake.lines().len(), 1, "only the listing was asked for");
}

#[test]
fn the_shared_cache_is_used_without_a_download() {
    let fake = FakeHub::single();
    let world = fake.world.lock().unwrap().clone();
    let machine = Machine::new(fake.endpoint());
    let files: Vec<(&str, &[u8])> =
        ["config.json", "tokenizer.json", "model.safetensors"].map(|name| (name, &world.files[name][..])).to_vec();
    let path = machine.place("shared", REPO, COMMIT, &files);
    let found = machine.hub().find(REPO, None).unwrap();
    let expected = Snapshot { name: REPO.into(), revision: Some(COMMIT.into()), path, source: Source::HuggingFace };
    assert_eq!(found, expected);
    assert_eq!(machine.hub().list().unwrap(), [expected.clone()]);
    let heard = Heard::default();
    assert_eq!(machine.hub().download(REPO, None, &[], &heard).unwrap(), expected);
    assert_eq!(heard.all(), ["already there: HuggingFace"]);
    assert_eq!(fake.lines().len(), 1, "only the listing was asked for");

    // In part, or cut short, is not there.
    fs::write(expected.path.join("model.safetensors"), b"short").unwrap();
    assert_eq!(machine.hub().download(REPO, None, &[], &()).unwrap().source, Source::Inferno);
}

#[test]
fn the_newest_commit_wins_in_whichever_cache_it_lies() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let old = "a".repeat(40);
    machine.place("own", REPO, &old, &WHOLE);
    let world = fake.world.lock().unwrap().clone();
    let files: Vec<(&str, &[u8])> =
        ["config.json", "tokenizer.json", "model.safetensors"].map(|name| (name, &world.files[name][..])).to_vec();
    machine.place("shared", REPO, COMMIT, &files);
    assert_eq!(machine.hub().find(REPO, None).unwrap().revision, Some(old.clone()));
    machine.hub().download(REPO, None, &[], &()).unwrap();
    assert_eq!(machine.hub().find(REPO, None).unwrap().revision.as_deref(), Some(COMMIT));
}

#[test]
fn directories_are_models_too() {
    let machine = Machine::new("http://127.0.0.1:1".to_string());
    let dir = machine.dir.path().join("some model");
    fs::create_dir(&dir).unwrap();
    let name = dir.to_str().unwrap();
    let (message, code) = failure(machine.hub().find(name, None));
    assert_eq!(code, 3);
    assert!(message.contains("no config.json"), "{message}");
    fs::write(dir.join("config.json"), "{}").unwrap();
    let found = machine.hub().find(name, None).unwrap();
    assert_eq!(found, Snapshot { name: name.into(), revision: None, path: dir.clone(), source: Source::Directory });
    assert!(machine.hub().find(name, Some("v1")).is_err());
}

#[test]
fn hints_for_a_model_that_is_not_here() {
    let machine = Machine::new("http://127.0.0.1:1".to_string());
    let hub = machine.hub();
    let missing = |model: &str, revision| {
        let (message, code) = failure(hub.find(model, revision));
        assert_eq!(code, 3, "{message}");
        message
    };
    assert!(missing("openai/gpt-oss-20b", None).ends_with("\n  inferno download openai/gpt-oss-20b"));
    assert!(missing("openai/gpt-oss-20b@v1", None).ends_with("inferno download openai/gpt-oss-20b --revision v1"));
    assert!(missing("", None).contains("write org/name"));
    assert!(hub.list().unwrap().is_empty());

    machine.place("own", "openai/gpt-oss-20b", COMMIT, &WHOLE);
    assert_eq!(hub.find("gpt-oss-20b", None).unwrap().name, "openai/gpt-oss-20b");
    assert_eq!(hub.find("OpenAI/GPT-OSS-20B", None).unwrap().name, "openai/gpt-oss-20b");
    assert!(missing("openai/gpt-os-20b", None).contains("or is it 'openai/gpt-oss-20b'"));
    assert!(missing("gpt-os-20b", None).contains("or is it 'openai/gpt-oss-20b'"));
    assert!(missing("meta-llama/Llama-3.2-1B", None).ends_with("inferno download meta-llama/Llama-3.2-1B"));
    assert!(missing("openai/gpt-oss-20b", Some("v2")).ends_with("--revision v2"));
    machine.place("shared", "unsloth/gpt-oss-20b", COMMIT, &WHOLE);
    assert!(missing("gpt-oss-20b", None).contains("openai/gpt-oss-20b, unsloth/gpt-oss-20b"));

    machine.place("shared", "org/part", COMMIT, &WHOLE[..2]);
    assert!(missing("org/part", None).contains("model.safetensors is missing"));
    let names: Vec<String> = hub.list().unwrap().into_iter().map(|snapshot| snapshot.name).collect();
    assert_eq!(names, ["openai/gpt-oss-20b", "unsloth/gpt-oss-20b"]);
    let index = format!(r#"{{"weight_map":{{"a":"{}","b":"{}"}}}}"#, SHARDS[0], SHARDS[1]);
    machine.place("own", "org/part", COMMIT, &[WHOLE[0], WHOLE[1], (INDEX, index.as_bytes()), (SHARDS[0], b"x")]);
    assert!(missing("org/part", None).contains(&format!("{} is missing", SHARDS[1])));
    machine.place("own", "org/part", COMMIT, &[(SHARDS[1], b"x")]);
    assert!(hub.find("org/part", None).is_ok());
}

#[test]
fn a_download_that_stopped_is_no_model_yet() {
    let fake = FakeHub::sharded();
    // The listing knows the second shard, the storage has lost it.
    fake.change(|world| world.lost = Some(SHARDS[1]));
    let machine = Machine::new(fake.endpoint());
    let (message, _) = failure(machine.hub().download(REPO, None, &[], &()));
    assert!(message.contains("does not have it"), "{message}");
    assert!(!machine.repo().join("refs").exists());
    let (message, code) = failure(machine.hub().find(REPO, None));
    assert_eq!(code, 3);
    assert!(message.contains("only a part of it is here") && message.contains(SHARDS[1]), "{message}");
    fake.change(|world| world.lost = None);
    fake.lines();
    machine.hub().download(REPO, None, &[], &()).unwrap();
    assert_eq!(fake.lines()[1..], [format!("GET /{REPO}/resolve/{COMMIT}/{}", SHARDS[1])]);
}
