//! Tests of `hub` against a fake hub on 127.0.0.1. The tests use neither the network nor the user's caches.

mod answers;
mod demo;
mod hostile;
mod maintenance;
mod process;
mod schedules;

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use inferno::Error;
use inferno::hub::{FileFilter, Hub, HubConfig, Limits, Progress, Snapshot, SnapshotSource};
use tempfile::TempDir;

use crate::support::fake_hub::{COMMIT, FakeHub, Fault, HubState, INDEX, REPO, SHARDS, etag, pattern};

/// Returns limits for fast tests: few retries, short waits before retries, and progress that is saved at once.
fn fast_limits() -> Limits {
    let ms = Duration::from_millis;
    Limits { first_wait: ms(1), max_wait: ms(2_500), save_interval: ms(0), max_failures: 4, ..Limits::default() }
}

fn include_only(pattern: &str) -> FileFilter {
    FileFilter { include: vec![pattern.to_string()], ..FileFilter::default() }
}

/// A simulated machine with two empty caches: inferno's own cache and the shared cache.
struct Machine {
    dir: TempDir,
    endpoint: String,
}

impl Machine {
    fn new(endpoint: String) -> Self {
        Self { dir: TempDir::new().unwrap(), endpoint }
    }

    fn config(&self) -> HubConfig {
        HubConfig {
            cache: self.dir.path().join("own"),
            shared_cache: self.dir.path().join("shared"),
            endpoint: self.endpoint.clone(),
            token: None,
            offline: false,
            limits: fast_limits(),
        }
    }

    fn hub(&self) -> Hub {
        Hub::new(self.config())
    }

    fn with_token(&self) -> Hub {
        Hub::new(HubConfig { token: Some("hf_secret".to_string()), ..self.config() })
    }

    fn offline(&self) -> Hub {
        Hub::new(HubConfig { offline: true, ..self.config() })
    }

    fn repo(&self) -> PathBuf {
        self.dir.path().join("own/models--org--tiny-model")
    }

    /// Writes a snapshot and its ref into a cache. The snapshot has regular files instead of links to blobs.
    fn write_snapshot(&self, cache: &str, repo: &str, commit: &str, files: &[(&str, &[u8])]) -> PathBuf {
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

const COMPLETE: [(&str, &[u8]); 3] =
    [("config.json", b"{}"), ("tokenizer.json", b"{}"), ("model.safetensors", b"weights")];

/// Records every progress event as a line of text.
#[derive(Default)]
struct Recorder(Mutex<Vec<String>>);

impl Progress for Recorder {
    fn already_present(&self, snapshot: &Snapshot) {
        self.0.lock().unwrap().push(format!("already present: {:?}", snapshot.source));
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
    fn verifying(&self, name: &str) {
        self.0.lock().unwrap().push(format!("verifying {name}"));
    }
    fn retrying(&self, name: &str, cause: &str, wait: Duration) {
        self.0.lock().unwrap().push(format!("retrying {name} after {} ms: {cause}", wait.as_millis()));
    }
    fn waiting(&self, repo: &str) {
        self.0.lock().unwrap().push(format!("waiting for {repo}"));
    }
}

impl Recorder {
    fn all(self) -> Vec<String> {
        self.0.into_inner().unwrap()
    }
}

fn message_and_code(result: anyhow::Result<Snapshot>) -> (String, u8) {
    let error = result.unwrap_err();
    let code = error.downcast_ref::<Error>().map_or(1, Error::exit_code);
    (format!("{error:#}"), code)
}

fn file_names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn download_writes_the_hugging_face_cache_layout() {
    let fake = FakeHub::sharded();
    let machine = Machine::new(fake.endpoint());
    let events = Recorder::default();
    let snapshot = machine.hub().download(REPO, None, &FileFilter::default(), &events).unwrap();
    let path = machine.repo().join("snapshots").join(COMMIT);
    let expected = Snapshot {
        name: REPO.into(),
        revision: Some(COMMIT.into()),
        path: path.clone(),
        source: SnapshotSource::Inferno,
    };
    assert_eq!(snapshot, expected);

    let wanted =
        ["chat_template.jinja", "config.json", "generation_config.json", SHARDS[0], SHARDS[1], INDEX, "tokenizer.json"];
    assert_eq!(file_names(&path), wanted);
    let state = fake.state.lock().unwrap().clone();
    for name in wanted {
        let target = format!("../../blobs/{}", etag(name, &state.files[name]));
        assert_eq!(fs::read_link(path.join(name)).unwrap(), Path::new(&target), "{name}");
        assert_eq!(fs::read(path.join(name)).unwrap(), state.files[name], "{name}");
    }
    assert_eq!(fs::read_to_string(machine.repo().join("refs/main")).unwrap(), COMMIT);
    assert_eq!(file_names(&machine.repo().join("refs")), ["main"]);
    assert_eq!(file_names(&machine.repo().join("blobs")).len(), wanted.len());

    let events = events.all();
    let bytes: usize = wanted.iter().map(|name| state.files[*name].len()).sum();
    assert_eq!(events[0], format!("start 7 files, {bytes} bytes"));
    for name in wanted {
        let mut reported = events.iter().filter(|line| line.starts_with(&format!("{name} ")));
        assert_eq!(reported.next_back().unwrap(), &format!("{name} {}", state.files[name].len()));
    }
    assert!(events.contains(&format!("verifying {}", SHARDS[0])));
    assert_eq!(machine.hub().find(REPO, None).unwrap(), expected);
    assert_eq!(machine.hub().list().unwrap(), [expected]);
}

#[test]
fn second_download_fetches_nothing() {
    let fake = FakeHub::sharded();
    let machine = Machine::new(fake.endpoint());
    let first = machine.hub().download(REPO, None, &FileFilter::default(), &()).unwrap();
    fake.lines();
    let events = Recorder::default();
    assert_eq!(machine.hub().download(REPO, None, &FileFilter::default(), &events).unwrap(), first);
    assert_eq!(fake.lines(), [format!("GET /api/models/{REPO}/revision/main?blobs=true")]);
    assert_eq!(events.all(), ["already present: Inferno"]);
}

#[test]
fn unchanged_files_are_shared_between_commits() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    machine.hub().download(REPO, None, &FileFilter::default(), &()).unwrap();
    fake.lines();
    let newer = "f".repeat(40);
    fake.change(|state| {
        state.commit = newer.clone();
        state.files.insert("config.json".into(), b"{\"new\":1}".to_vec());
    });
    let snapshot = machine.hub().download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert_eq!(snapshot.revision.as_deref(), Some(newer.as_str()));
    assert_eq!(fake.lines()[1..], [format!("GET /{REPO}/resolve/{newer}/config.json")]);
    assert_eq!(machine.hub().find(REPO, None).unwrap(), snapshot);
    let older = machine.hub().find(&format!("{REPO}@{COMMIT}"), None).unwrap();
    assert_eq!(older.revision.as_deref(), Some(COMMIT));
    assert_eq!(machine.hub().find(REPO, Some(&COMMIT[..8])).unwrap(), older);
}

#[test]
fn interrupted_download_is_resumed() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let weights = pattern(50_000, 3);
    let blobs = machine.repo().join("blobs");
    let partial = blobs.join(format!("{}.incomplete", etag("model.safetensors", &weights)));
    for supports_ranges in [true, false] {
        fs::create_dir_all(&blobs).unwrap();
        fs::write(&partial, &weights[..20_000]).unwrap();
        fake.change(|state| state.supports_ranges = supports_ranges);
        let snapshot = machine.hub().download(REPO, None, &FileFilter::default(), &()).unwrap();
        assert!(fake.heads().iter().any(|head| head.to_lowercase().contains("range: bytes=20000-")));
        assert_eq!(fs::read(snapshot.path.join("model.safetensors")).unwrap(), weights, "ranges: {supports_ranges}");
        assert!(!partial.exists());
        fs::remove_dir_all(machine.repo()).unwrap();
    }
    // A leftover `.incomplete` file may contain the complete file, or even more bytes than the complete file.
    for leftover in [weights.clone(), pattern(60_000, 9)] {
        fs::create_dir_all(&blobs).unwrap();
        fs::write(&partial, &leftover).unwrap();
        let snapshot = machine.hub().download(REPO, None, &FileFilter::default(), &()).unwrap();
        assert_eq!(fs::read(snapshot.path.join("model.safetensors")).unwrap(), weights);
        fs::remove_dir_all(machine.repo()).unwrap();
    }
}

#[test]
fn broken_connection_is_resumed() {
    let fake = FakeHub::single();
    fake.change(|state| state.faults.push_back(Fault::Cut(30_000)));
    let machine = Machine::new(fake.endpoint());
    let snapshot = machine.hub().download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert_eq!(fs::read(snapshot.path.join("model.safetensors")).unwrap(), pattern(50_000, 3));
    assert!(fake.heads().iter().any(|head| head.to_lowercase().contains("range: bytes=30000-")));
}

#[test]
fn concurrent_downloads_fetch_each_file_once() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let hubs = [machine.hub(), machine.hub()];
    std::thread::scope(|scope| {
        for hub in &hubs {
            scope.spawn(|| hub.download(REPO, None, &FileFilter::default(), &()).unwrap());
        }
    });
    let snapshot = machine.hub().find(REPO, None).unwrap();
    assert_eq!(fs::read(snapshot.path.join("model.safetensors")).unwrap(), pattern(50_000, 3));
    assert_eq!(
        fake.lines().iter().filter(|line| line.ends_with("model.safetensors")).count(),
        1,
        "expected one request for the weights"
    );
}

#[test]
fn head_requests_complete_a_listing_without_sizes() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    for storage in [None, Some("http://localhost:1".to_string())] {
        let redirected = storage.is_some();
        fake.change(|state| (state.lists_sizes, state.storage) = (false, storage));
        let events = Recorder::default();
        if redirected {
            // The redirect response contains the file size, but the redirect target does not answer.
            fs::remove_dir_all(machine.repo()).unwrap();
            assert_eq!(message_and_code(machine.hub().download(REPO, None, &FileFilter::default(), &events)).1, 5);
        } else {
            let snapshot = machine.hub().download(REPO, None, &FileFilter::default(), &events).unwrap();
            assert_eq!(fs::read(snapshot.path.join("model.safetensors")).unwrap(), pattern(50_000, 3));
        }
        assert_eq!(events.all()[0], "start 3 files, 50004 bytes");
        assert!(fake.lines().contains(&format!("HEAD /{REPO}/resolve/{COMMIT}/model.safetensors")));
    }
}

#[test]
fn token_is_sent_to_the_endpoint_only() {
    let (fake, storage) = (FakeHub::single(), FakeHub::single());
    // inferno treats `localhost` and the endpoint's 127.0.0.1 as different hosts.
    fake.change(|state| state.storage = Some(format!("http://localhost:{}", storage.port)));
    let machine = Machine::new(fake.endpoint());
    machine.with_token().download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert!(fake.heads().iter().all(|head| head.to_lowercase().contains("authorization: bearer hf_secret")));
    let storage_requests = storage.heads();
    // config.json and tokenizer.json have the same contents, so one request fetches both.
    assert_eq!(storage_requests.len(), 2, "{storage_requests:?}");
    assert!(storage_requests.iter().all(|head| !head.contains("hf_secret")), "{storage_requests:?}");
}

#[test]
fn each_refusal_of_the_hub_has_its_error() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let download = || message_and_code(machine.hub().download(REPO, Some("v9"), &FileFilter::default(), &()));
    for (status, code, body, exit_code, expected) in [
        (401, "RepoNotFound", "", 3, "cannot find repository"),
        (401, "", "", 3, "cannot find repository"),
        (404, "", "<html>what you saw previously is gone</html>", 3, "cannot find repository"),
        (404, "", "{\"error\":\"Repository not found\"}", 3, "cannot find repository"),
        (404, "RevisionNotFound", "", 3, "has no revision 'v9'"),
        (404, "", "{\"error\":\"Invalid rev id: v9\"}", 3, "has no revision 'v9'"),
        (401, "GatedRepo", "", 4, "accept its license"),
        (403, "GatedRepo", "", 4, "accept its license"),
        (429, "", "", 5, "HTTP 429"),
        (503, "", "", 5, "HTTP 503"),
    ] {
        fake.change(|state| state.listing_refused = Some((status, code, body)));
        let (message, code) = download();
        assert_eq!(code, exit_code, "{status} {message}");
        assert!(message.contains(expected), "{status} {message}");
    }
    fake.change(|state| state.listing_refused = Some((200, "", "<html>log in</html>")));
    let (message, code) = download();
    assert!(code == 5 && message.contains("not from a model hub"), "{message}");
    fake.change(|state| state.listing_refused = Some((401, "", "")));
    let (message, code) = message_and_code(machine.with_token().download(REPO, None, &FileFilter::default(), &()));
    assert!(code == 4 && message.contains("rejects the token"), "{message}");
    // Anyone may list a gated repository. Only downloads of its files are restricted.
    fake.change(|state| (state.listing_refused, state.files_refused) = (None, Some((403, "GatedRepo"))));
    assert_eq!(download().1, 4);
    fake.change(|state| state.files_refused = Some((401, "")));
    let (message, code) = message_and_code(machine.with_token().download(REPO, None, &FileFilter::default(), &()));
    assert_eq!(code, 4);
    assert!(!message.contains("hf_secret"));
    assert!(machine.hub().find(REPO, None).is_err(), "the refused download left a ref or a snapshot behind");
}

#[test]
fn error_names_a_hub_that_does_not_answer() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let machine = Machine::new(format!("http://127.0.0.1:{closed}"));
    let (message, code) = message_and_code(machine.hub().download(REPO, None, &FileFilter::default(), &()));
    assert_eq!(code, 5);
    assert!(message.contains(&format!("127.0.0.1:{closed}")), "{message}");
}

#[test]
fn offline_uses_the_cache_and_sends_no_request() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let (message, code) = message_and_code(machine.offline().download(REPO, None, &FileFilter::default(), &()));
    assert_eq!(code, 5);
    assert!(message.contains("offline") && message.contains(REPO), "{message}");
    let snapshot = machine.hub().download(REPO, None, &FileFilter::default(), &()).unwrap();
    fake.lines();
    let events = Recorder::default();
    assert_eq!(machine.offline().download(REPO, None, &FileFilter::default(), &events).unwrap(), snapshot);
    assert_eq!(events.all(), ["already present: Inferno"]);
    assert!(fake.lines().is_empty());
}

#[test]
fn paths_outside_the_cache_are_refused() {
    let outside = |machine: &Machine| {
        let mut names = file_names(machine.dir.path());
        names.retain(|name| name != "own");
        names
    };
    for shard in ["../../../../escaped", "/tmp/inferno-escaped", "a\\\\..\\\\b"] {
        let index = format!(r#"{{"weight_map":{{"a":"{shard}"}}}}"#);
        let fake = FakeHub::start(&[("config.json", b"{}"), ("tokenizer.json", b"{}"), (INDEX, index.as_bytes())]);
        let machine = Machine::new(fake.endpoint());
        let (message, _) = message_and_code(machine.hub().download(REPO, None, &FileFilter::default(), &()));
        assert!(message.contains("not a plain file name"), "{message}");
        assert!(outside(&machine).is_empty());
        assert!(!Path::new("/tmp/inferno-escaped").exists());
    }
    for name in ["../config.json", "/tmp/inferno-escaped", "a/../../b", "a\\b", "a\u{0}b"] {
        let fake = FakeHub::single();
        fake.change(|state| drop(state.files.insert(name.to_string(), b"{}".to_vec())));
        let machine = Machine::new(fake.endpoint());
        let (message, _) = message_and_code(machine.hub().download(REPO, None, &FileFilter::default(), &()));
        assert!(message.contains("not a path inside the repository"), "{message}");
        assert!(file_names(machine.dir.path()).is_empty());
    }
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let message = || message_and_code(machine.hub().download(REPO, None, &FileFilter::default(), &())).0;
    fake.change(|state| state.claimed_etag = Some("../../etag"));
    assert!(message().contains("etag"), "{}", message());
    fake.change(|state| (state.claimed_etag, state.commit) = (None, "../../../commit".to_string()));
    assert!(message().contains("invalid commit hash"), "{}", message());
    assert!(file_names(machine.dir.path()).is_empty());
}

#[test]
fn invalid_names_are_rejected_before_any_request() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    for repo in ["", "a/b/c", "../x", "a b/c", "org/..", "https://huggingface.co/org/name"] {
        let (message, _) = message_and_code(machine.hub().download(repo, None, &FileFilter::default(), &()));
        assert!(message.contains("use org/name"), "{message}");
    }
    assert!(
        message_and_code(machine.hub().download(REPO, Some("../x"), &FileFilter::default(), &()))
            .0
            .contains("is not a valid revision")
    );
    assert!(fake.lines().is_empty());
}

#[test]
fn include_replaces_the_weights() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let include = include_only("*.gguf");
    let snapshot = machine.hub().download(REPO, Some("refs/pr/1"), &include, &()).unwrap();
    assert_eq!(file_names(&snapshot.path), ["config.json", "gguf", "tokenizer.json"]);
    assert_eq!(fs::read(snapshot.path.join("gguf/model.Q4.gguf")).unwrap(), b"GGUF");
    let link = fs::read_link(snapshot.path.join("gguf/model.Q4.gguf")).unwrap();
    assert!(link.starts_with("../../../blobs"), "{}", link.display());
    assert_eq!(fake.lines()[0], format!("GET /api/models/{REPO}/revision/refs%2Fpr%2F1?blobs=true"));
    assert_eq!(fs::read_to_string(machine.repo().join("refs/refs/pr/1")).unwrap(), COMMIT);
    // A snapshot is a complete model even if its only weights are a GGUF file.
    let file = snapshot.path.join("gguf/model.Q4.gguf");
    assert_eq!(machine.hub().find_tokenizer(REPO, None).unwrap().path, file);
    assert_eq!(machine.hub().find(REPO, None).unwrap().path, file);
    assert_eq!(machine.hub().list().unwrap().len(), 1);
    let nothing = machine.hub().download(REPO, None, &include_only("*.onnx"), &());
    assert!(message_and_code(nothing).0.contains("nothing in 'org/tiny-model' matches"));
}

#[test]
fn error_names_the_formats_of_the_repository() {
    let fake = FakeHub::start(&[("config.json", b"{}"), ("a.onnx", b"ONNX"), ("pytorch_model.bin", b"pickle")]);
    let machine = Machine::new(fake.endpoint());
    let (message, _) = message_and_code(machine.hub().download(REPO, None, &FileFilter::default(), &()));
    assert!(message.contains("needs safetensors or GGUF") && message.contains(".bin, .onnx"), "{message}");
}

#[test]
fn one_of_several_gguf_files_is_chosen_by_its_tag() {
    let fake = FakeHub::start(&[("a-Q4_K_M.gguf", b"GGUF"), ("a-Q8_0.gguf", b"GGUF!"), ("README.md", b"")]);
    let machine = Machine::new(fake.endpoint());
    let (message, code) = message_and_code(machine.hub().download(REPO, None, &FileFilter::default(), &()));
    assert_eq!(code, 2, "{message}");
    assert!(message.contains(&format!("inferno download {REPO}:Q4_K_M\n")), "{message}");
    assert!(message.contains("a-Q8_0.gguf"), "{message}");
    let snapshot = machine.hub().download(REPO, None, &include_only("*Q4_K_M*"), &()).unwrap();
    assert_eq!(file_names(&snapshot.path), ["a-Q4_K_M.gguf"]);
    assert_eq!(machine.hub().find(REPO, None).unwrap().path, snapshot.path.join("a-Q4_K_M.gguf"));
    machine.hub().download(REPO, None, &include_only("*Q8_0*"), &()).unwrap();
    assert_eq!(message_and_code(machine.hub().find(REPO, None)).1, 2);
    let found = machine.hub().find(&format!("{REPO}:q8_0"), None).unwrap();
    assert_eq!(found.path, snapshot.path.join("a-Q8_0.gguf"));
    let names: Vec<String> = machine.hub().list().unwrap().into_iter().map(|model| model.name).collect();
    assert_eq!(names, [format!("{REPO}:Q4_K_M"), format!("{REPO}:Q8_0")]);
}

#[test]
fn full_disk_is_an_error_before_the_download() {
    let fake = FakeHub::single();
    fake.change(|state| state.claimed_bytes = Some(1 << 49));
    let machine = Machine::new(fake.endpoint());
    let (message, code) = message_and_code(machine.hub().download(REPO, None, &FileFilter::default(), &()));
    assert_eq!(code, 11, "{message}");
    assert_eq!(fake.lines().len(), 1, "expected only the request for the listing");
}

#[test]
fn model_in_the_shared_cache_is_not_downloaded() {
    let fake = FakeHub::single();
    let state = fake.state.lock().unwrap().clone();
    let machine = Machine::new(fake.endpoint());
    let files: Vec<(&str, &[u8])> =
        ["config.json", "tokenizer.json", "model.safetensors"].map(|name| (name, &state.files[name][..])).to_vec();
    let path = machine.write_snapshot("shared", REPO, COMMIT, &files);
    let found = machine.hub().find(REPO, None).unwrap();
    let expected =
        Snapshot { name: REPO.into(), revision: Some(COMMIT.into()), path, source: SnapshotSource::HuggingFace };
    assert_eq!(found, expected);
    assert_eq!(machine.hub().list().unwrap(), std::slice::from_ref(&expected));
    let events = Recorder::default();
    assert_eq!(machine.hub().download(REPO, None, &FileFilter::default(), &events).unwrap(), expected);
    assert_eq!(events.all(), ["already present: HuggingFace"]);
    assert_eq!(fake.lines().len(), 1, "expected only the request for the listing");

    // A file whose size differs from the size in the listing counts as missing.
    fs::write(expected.path.join("model.safetensors"), b"short").unwrap();
    assert_eq!(
        machine.hub().download(REPO, None, &FileFilter::default(), &()).unwrap().source,
        SnapshotSource::Inferno
    );
}

#[test]
fn newest_commit_wins_in_either_cache() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let old = "a".repeat(40);
    machine.write_snapshot("own", REPO, &old, &COMPLETE);
    let state = fake.state.lock().unwrap().clone();
    let files: Vec<(&str, &[u8])> =
        ["config.json", "tokenizer.json", "model.safetensors"].map(|name| (name, &state.files[name][..])).to_vec();
    machine.write_snapshot("shared", REPO, COMMIT, &files);
    assert_eq!(machine.hub().find(REPO, None).unwrap().revision, Some(old.clone()));
    machine.hub().download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert_eq!(machine.hub().find(REPO, None).unwrap().revision.as_deref(), Some(COMMIT));
}

#[test]
fn directory_is_found_as_a_model() {
    let machine = Machine::new("http://127.0.0.1:1".to_string());
    let dir = machine.dir.path().join("some model");
    fs::create_dir(&dir).unwrap();
    let name = dir.to_str().unwrap();
    let (message, code) = message_and_code(machine.hub().find(name, None));
    assert_eq!(code, 3);
    assert!(message.contains("no config.json"), "{message}");
    fs::write(dir.join("config.json"), "{}").unwrap();
    let found = machine.hub().find(name, None).unwrap();
    assert_eq!(
        found,
        Snapshot { name: name.into(), revision: None, path: dir.clone(), source: SnapshotSource::Directory }
    );
    assert!(machine.hub().find(name, Some("v1")).is_err());
}

#[test]
fn error_for_a_missing_model_names_the_next_command() {
    let machine = Machine::new("http://127.0.0.1:1".to_string());
    let hub = machine.hub();
    let missing = |model: &str, revision| {
        let (message, code) = message_and_code(hub.find(model, revision));
        assert_eq!(code, 3, "{message}");
        message
    };
    assert!(missing("openai/gpt-oss-20b", None).ends_with("\n  inferno download openai/gpt-oss-20b"));
    assert!(missing("openai/gpt-oss-20b@v1", None).ends_with("inferno download openai/gpt-oss-20b --revision v1"));
    assert!(missing("", None).contains("use org/name"));
    assert!(hub.list().unwrap().is_empty());

    machine.write_snapshot("own", "openai/gpt-oss-20b", COMMIT, &COMPLETE);
    assert_eq!(hub.find("gpt-oss-20b", None).unwrap().name, "openai/gpt-oss-20b");
    assert_eq!(hub.find("OpenAI/GPT-OSS-20B", None).unwrap().name, "openai/gpt-oss-20b");
    assert!(missing("openai/gpt-os-20b", None).contains("did you mean 'openai/gpt-oss-20b'"));
    assert!(missing("gpt-os-20b", None).contains("did you mean 'openai/gpt-oss-20b'"));
    assert!(missing("meta-llama/Llama-3.2-1B", None).ends_with("inferno download meta-llama/Llama-3.2-1B"));
    assert!(missing("openai/gpt-oss-20b", Some("v2")).ends_with("--revision v2"));
    machine.write_snapshot("shared", "unsloth/gpt-oss-20b", COMMIT, &COMPLETE);
    assert!(missing("gpt-oss-20b", None).contains("openai/gpt-oss-20b, unsloth/gpt-oss-20b"));

    machine.write_snapshot("shared", "org/part", COMMIT, &COMPLETE[..2]);
    assert!(missing("org/part", None).contains("model.safetensors is missing"));
    let names: Vec<String> = hub.list().unwrap().into_iter().map(|snapshot| snapshot.name).collect();
    assert_eq!(names, ["openai/gpt-oss-20b", "unsloth/gpt-oss-20b"]);
    let index = format!(r#"{{"weight_map":{{"a":"{}","b":"{}"}}}}"#, SHARDS[0], SHARDS[1]);
    machine.write_snapshot(
        "own",
        "org/part",
        COMMIT,
        &[COMPLETE[0], COMPLETE[1], (INDEX, index.as_bytes()), (SHARDS[0], b"x")],
    );
    assert!(missing("org/part", None).contains(&format!("{} is missing", SHARDS[1])));
    machine.write_snapshot("own", "org/part", COMMIT, &[(SHARDS[1], b"x")]);
    assert!(hub.find("org/part", None).is_ok());
}

#[test]
fn weights_without_the_small_files_are_not_a_model() {
    let fake = FakeHub::sharded();
    // The files other than chat_template.jinja arrive before the client gives up on chat_template.jinja.
    fake.change(|state| {
        state.faulty = |name| name == "chat_template.jinja";
        state.faults.extend([Fault::Stall(0); 5]);
    });
    let machine = Machine::new(fake.endpoint());
    let limits = Limits { stall_timeout: Duration::from_millis(300), max_failures: 0, ..fast_limits() };
    let hub = Hub::new(HubConfig { limits, ..machine.config() });
    assert_eq!(message_and_code(hub.download(REPO, None, &FileFilter::default(), &())).1, 5);
    let blob = machine.repo().join("blobs").join(etag(SHARDS[0], &pattern(200_000, 1)));
    assert!(blob.exists(), "the first shard is not on disk");
    assert_eq!(message_and_code(hub.find(REPO, None)).1, 3);
    assert_eq!(message_and_code(machine.offline().download(REPO, None, &FileFilter::default(), &())).1, 5);
    fake.change(|state| state.faults.clear());
    fake.lines();
    hub.download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert!(hub.find(REPO, None).is_ok() && !fake.lines().iter().any(|line| line.ends_with(SHARDS[0])));
}

#[test]
fn another_commit_than_the_requested_one_is_refused() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let (message, code) =
        message_and_code(machine.hub().download(REPO, Some(&"a".repeat(40)), &FileFilter::default(), &()));
    assert!(code == 6 && message.contains("instead of commit"), "{message}");
    assert!(!machine.repo().exists());
    machine.hub().download(REPO, Some(COMMIT), &FileFilter::default(), &()).unwrap();
}

/// Some mirrors build etags from the modification time and the file size, which do not identify the contents.
#[test]
fn files_with_the_same_weak_etag_are_kept_apart() {
    let fake = FakeHub::sharded();
    let machine = Machine::new(fake.endpoint());
    let fetch = |first: usize, second: usize| {
        fake.change(|state| {
            state.files.insert(SHARDS[0].into(), pattern(90_000, first));
            state.files.insert(SHARDS[1].into(), pattern(90_000, second));
        });
        let snapshot = machine.hub().download(REPO, None, &FileFilter::default(), &()).unwrap();
        assert!(fs::read(snapshot.path.join(SHARDS[0])).unwrap() == pattern(90_000, first));
        assert!(fs::read(snapshot.path.join(SHARDS[1])).unwrap() == pattern(90_000, second));
    };
    // The listing has neither sizes nor hashes, and both shards have the same etag header.
    fake.change(|state| (state.lists_sizes, state.lists_hashes, state.etag_header) = (false, false, Some("\"5f-61\"")));
    fetch(1, 2);
    fake.change(|state| state.commit = "f".repeat(40));
    fetch(3, 4);
    // The listing has the hash of each LFS pointer, but no hash of a large file's contents.
    fake.change(|state| {
        state.commit = "e".repeat(40);
        (state.lists_sizes, state.etag_header) = (true, None);
    });
    fetch(5, 6);
    let checked = machine.hub().verify(Some(REPO), None, &()).unwrap();
    assert!(checked.iter().all(|checked| checked.damaged_files().count() == 0), "{checked:?}");
}

#[test]
fn impossible_listings_are_refused() {
    for (change, expected) in [
        ((|state| state.claimed_bytes = Some(u64::MAX)) as fn(&mut HubState), "impossible size"),
        (|state| drop(state.files.insert("config.json/x".into(), b"{}".into())), "as a file and as a folder"),
    ] {
        let fake = FakeHub::single();
        fake.change(change);
        let machine = Machine::new(fake.endpoint());
        for result in [
            machine.hub().download(REPO, None, &FileFilter::default(), &()).map(|_| ()),
            machine.hub().inspect(REPO, None).map(|_| ()),
        ] {
            let error = result.unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
        assert!(!machine.repo().exists());
    }
}

#[test]
fn interrupted_download_is_not_a_model() {
    let fake = FakeHub::sharded();
    // The listing names the second shard, but the hub cannot send it.
    fake.change(|state| state.lost = Some(SHARDS[1]));
    let machine = Machine::new(fake.endpoint());
    let (message, _) = message_and_code(machine.hub().download(REPO, None, &FileFilter::default(), &()));
    assert!(message.contains("does not have it"), "{message}");
    assert!(!machine.repo().join("refs").exists());
    let (message, code) = message_and_code(machine.hub().find(REPO, None));
    assert_eq!(code, 3);
    assert!(message.contains("the model is incomplete"), "{message}");
    fake.change(|state| state.lost = None);
    fake.lines();
    machine.hub().download(REPO, None, &FileFilter::default(), &()).unwrap();
    let fetched = fake.lines();
    assert!(fetched.contains(&format!("GET /{REPO}/resolve/{COMMIT}/{}", SHARDS[1])));
    assert!(!fetched.iter().any(|line| line.ends_with(INDEX)), "{fetched:?}");
}
