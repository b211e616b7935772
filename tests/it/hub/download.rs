//! Tests of downloads: the layout of the cache, resumed and shared files, and models that are already present.

use std::fs;
use std::path::Path;
use std::time::Duration;

use inferno::hub::{FileFilter, Hub, HubConfig, Limits, Snapshot, SnapshotSource};

use super::{Machine, Recorder, fast_limits, file_names, include_only, message_and_code};
use crate::harness::TestCase;
use crate::support::fake_hub::{COMMIT, FakeHub, Fault, INDEX, REPO, SHARDS, etag, pattern};
use crate::support::named_cases;

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
    let first = machine.download().unwrap();
    fake.take_lines();
    let events = Recorder::default();
    assert_eq!(machine.hub().download(REPO, None, &FileFilter::default(), &events).unwrap(), first);
    assert_eq!(fake.take_lines(), [format!("GET /api/models/{REPO}/revision/main?blobs=true")]);
    assert_eq!(events.all(), ["already present: Inferno"]);
}

#[test]
fn unchanged_files_are_shared_between_commits() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    machine.download().unwrap();
    fake.take_lines();
    let newer = "f".repeat(40);
    fake.change(|state| {
        state.commit = newer.clone();
        state.files.insert("config.json".into(), b"{\"new\":1}".to_vec());
    });
    let snapshot = machine.download().unwrap();
    assert_eq!(snapshot.revision.as_deref(), Some(newer.as_str()));
    assert_eq!(fake.take_lines()[1..], [format!("GET /{REPO}/resolve/{newer}/config.json")]);
    assert_eq!(machine.hub().find(REPO, None).unwrap(), snapshot);
    let older = machine.hub().find(&format!("{REPO}@{COMMIT}"), None).unwrap();
    assert_eq!(older.revision.as_deref(), Some(COMMIT));
    assert_eq!(machine.hub().find(REPO, Some(&COMMIT[..8])).unwrap(), older);
}

/// The `.incomplete` file that an earlier download has left behind.
struct Leftover {
    bytes: Vec<u8>,
    /// Whether the hub honors range requests.
    supports_ranges: bool,
}

fn leftovers() -> Vec<TestCase<Leftover>> {
    let weights = pattern(50_000, 3);
    let begun = weights[..20_000].to_vec();
    named_cases([
        ("begun", Leftover { bytes: begun.clone(), supports_ranges: true }),
        ("begun_but_the_hub_ignores_ranges", Leftover { bytes: begun, supports_ranges: false }),
        ("complete", Leftover { bytes: weights, supports_ranges: true }),
        ("longer_than_the_file", Leftover { bytes: pattern(60_000, 9), supports_ranges: true }),
    ])
}

#[test(each = leftovers)]
fn interrupted_download_is_resumed(Leftover { bytes: leftover, supports_ranges }: Leftover) {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let weights = pattern(50_000, 3);
    let blobs = machine.repo().join("blobs");
    let partial = blobs.join(format!("{}.incomplete", etag("model.safetensors", &weights)));
    fs::create_dir_all(&blobs).unwrap();
    fs::write(&partial, &leftover).unwrap();
    fake.change(|state| state.supports_ranges = supports_ranges);
    let snapshot = machine.download().unwrap();
    let requests_rest = fake.take_heads().iter().any(|head| head.to_lowercase().contains("range: bytes=20000-"));
    assert_eq!(requests_rest, leftover.len() == 20_000);
    assert_eq!(fs::read(snapshot.path.join("model.safetensors")).unwrap(), weights);
    assert!(!partial.exists());
}

#[test]
fn broken_connection_is_resumed() {
    let fake = FakeHub::single();
    fake.change(|state| state.faults.push_back(Fault::Cut(30_000)));
    let machine = Machine::new(fake.endpoint());
    let snapshot = machine.download().unwrap();
    assert_eq!(fs::read(snapshot.path.join("model.safetensors")).unwrap(), pattern(50_000, 3));
    assert!(fake.take_heads().iter().any(|head| head.to_lowercase().contains("range: bytes=30000-")));
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
        fake.take_lines().iter().filter(|line| line.ends_with("model.safetensors")).count(),
        1,
        "expected one request for the weights"
    );
}

#[test]
fn head_requests_complete_a_listing_without_sizes() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|state| state.lists_sizes = false);
    let events = Recorder::default();
    let snapshot = machine.hub().download(REPO, None, &FileFilter::default(), &events).unwrap();
    assert_eq!(fs::read(snapshot.path.join("model.safetensors")).unwrap(), pattern(50_000, 3));
    assert_eq!(events.all()[0], "start 3 files, 50004 bytes");
    assert!(fake.take_lines().contains(&format!("HEAD /{REPO}/resolve/{COMMIT}/model.safetensors")));
}

/// The response that redirects a HEAD request contains the file size. The storage host does not answer.
#[test]
fn sizes_are_known_even_if_the_storage_host_does_not_answer() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|state| (state.lists_sizes, state.storage) = (false, Some("http://localhost:1".to_string())));
    let events = Recorder::default();
    assert_eq!(message_and_code(machine.hub().download(REPO, None, &FileFilter::default(), &events)).1, 5);
    assert_eq!(events.all()[0], "start 3 files, 50004 bytes");
    assert!(fake.take_lines().contains(&format!("HEAD /{REPO}/resolve/{COMMIT}/model.safetensors")));
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
    assert_eq!(fake.take_lines()[0], format!("GET /api/models/{REPO}/revision/refs%2Fpr%2F1?blobs=true"));
    assert_eq!(fs::read_to_string(machine.repo().join("refs/refs/pr/1")).unwrap(), COMMIT);
    // A snapshot is a complete model even if its only weights are a GGUF file.
    let file = snapshot.path.join("gguf/model.Q4.gguf");
    assert_eq!(machine.hub().find_tokenizer(REPO, None).unwrap().path, file);
    assert_eq!(machine.hub().find(REPO, None).unwrap().path, file);
    assert_eq!(machine.hub().list().unwrap().len(), 1);
    let nothing = machine.hub().download(REPO, None, &include_only("*.onnx"), &());
    assert!(message_and_code(nothing).0.contains("'org/tiny-model': no file matches --include"));
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
    assert_eq!(fake.take_lines().len(), 1, "expected only the request for the listing");

    // A file whose size differs from the size in the listing counts as missing.
    fs::write(expected.path.join("model.safetensors"), b"short").unwrap();
    assert_eq!(machine.download().unwrap().source, SnapshotSource::Inferno);
}

#[test]
fn offline_uses_the_cache_and_sends_no_request() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let (message, code) = message_and_code(machine.offline().download(REPO, None, &FileFilter::default(), &()));
    assert_eq!(code, 5);
    assert!(message.contains("HF_HUB_OFFLINE") && message.contains(REPO), "{message}");
    let snapshot = machine.download().unwrap();
    fake.take_lines();
    let events = Recorder::default();
    assert_eq!(machine.offline().download(REPO, None, &FileFilter::default(), &events).unwrap(), snapshot);
    assert_eq!(events.all(), ["already present: Inferno"]);
    assert!(fake.take_lines().is_empty());
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
        let snapshot = machine.download().unwrap();
        assert!(fs::read(snapshot.path.join(SHARDS[0])).unwrap() == pattern(90_000, first));
        assert!(fs::read(snapshot.path.join(SHARDS[1])).unwrap() == pattern(90_000, second));
    };
    // The listing has neither sizes nor hashes, and both shards have the same etag header.
    fake.change(|state| (state.lists_sizes, state.lists_hashes, state.etag_header) = (false, false, Some("\"5f-61\"")));
    fetch(1, 2);
    fake.change(|state| state.commit = "f".repeat(40));
    fetch(3, 4);
    // For each large file, the listing has the hash of the LFS pointer, but no hash of the contents.
    fake.change(|state| {
        state.commit = "e".repeat(40);
        (state.lists_sizes, state.etag_header) = (true, None);
    });
    fetch(5, 6);
    let checked = machine.hub().verify(Some(REPO), None, &()).unwrap();
    assert!(checked.iter().all(|checked| checked.damaged_files().count() == 0), "{checked:?}");
}

#[test]
fn weights_without_the_small_files_are_not_a_model() {
    let fake = FakeHub::sharded();
    // The client gives up on chat_template.jinja only after the stall timeout. Meanwhile, all other files arrive.
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
    fake.take_lines();
    hub.download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert!(hub.find(REPO, None).is_ok() && !fake.take_lines().iter().any(|line| line.ends_with(SHARDS[0])));
}

#[test]
fn interrupted_download_is_not_a_model() {
    let fake = FakeHub::sharded();
    // The listing names the second shard, but the hub cannot send it.
    fake.change(|state| state.lost = Some(SHARDS[1]));
    let machine = Machine::new(fake.endpoint());
    let (message, _) = message_and_code(machine.download());
    assert!(message.contains("does not have it"), "{message}");
    assert!(!machine.repo().join("refs").exists());
    let (message, code) = message_and_code(machine.hub().find(REPO, None));
    assert_eq!(code, 3);
    assert!(message.contains("the model is incomplete"), "{message}");
    fake.change(|state| state.lost = None);
    fake.take_lines();
    machine.download().unwrap();
    let fetched = fake.take_lines();
    assert!(fetched.contains(&format!("GET /{REPO}/resolve/{COMMIT}/{}", SHARDS[1])));
    assert!(!fetched.iter().any(|line| line.ends_with(INDEX)), "{fetched:?}");
}
