//! Tests of cache maintenance: verify, repair, remove and prune. Also tests partial names and records of the last use.

use std::fs;
use std::path::PathBuf;

use inferno::hub::{FileFilter, FileState, Hub, HubConfig, SnapshotSource, VerifiedSnapshot};

use super::{COMPLETE, Machine, file_names};
use crate::support::fake_hub::{COMMIT, FakeHub, INDEX, REPO, SHARDS, etag, pattern};

fn faults(checked: &[VerifiedSnapshot]) -> Vec<(String, FileState)> {
    checked.iter().flat_map(|checked| checked.damaged_files().cloned()).collect()
}

fn verify(hub: &Hub) -> Vec<(String, FileState)> {
    faults(&hub.verify(Some(REPO), None, &()).unwrap())
}

/// Downloads a sharded model. Returns the hub, the machine and the paths of the two shards' blobs.
fn downloaded() -> (FakeHub, Machine, [PathBuf; 2]) {
    let fake = FakeHub::sharded();
    let machine = Machine::new(fake.endpoint());
    machine.download().unwrap();
    let blob = |name: &str, length, seed| machine.repo().join("blobs").join(etag(name, &pattern(length, seed)));
    let blobs = [blob(SHARDS[0], 200_000, 1), blob(SHARDS[1], 100_000, 2)];
    fake.take_lines();
    (fake, machine, blobs)
}

#[test]
fn repair_fetches_only_bad_and_missing_files() {
    let (fake, machine, blobs) = downloaded();
    assert!(verify(&machine.offline()).is_empty(), "offline verification found damaged files");
    let mut bytes = fs::read(&blobs[0]).unwrap();
    bytes[150_000] ^= 1;
    fs::write(&blobs[0], bytes).unwrap();
    fs::remove_file(&blobs[1]).unwrap();
    let found = verify(&machine.offline());
    assert_eq!(found, [(SHARDS[0].to_string(), FileState::Corrupt), (SHARDS[1].to_string(), FileState::Missing)]);

    let checked = machine.hub().verify(Some("tiny-m"), Some("main"), &()).unwrap();
    assert_eq!(checked[0].files.len(), 7);
    machine.hub().repair(&checked[0], &()).unwrap();
    let mut lines = fake.take_lines();
    lines.sort();
    let get = |name| format!("GET /{REPO}/resolve/{COMMIT}/{name}");
    let listing = format!("GET /api/models/{REPO}/revision/{COMMIT}?blobs=true");
    assert_eq!(lines, [listing, get(SHARDS[0]), get(SHARDS[1])]);
    assert!(verify(&machine.hub()).is_empty());
    assert!(machine.hub().find(REPO, None).is_ok());

    let snapshot = machine.repo().join("snapshots").join(COMMIT);
    fs::remove_file(snapshot.join(SHARDS[0])).unwrap();
    fs::remove_file(snapshot.join("config.json")).unwrap();
    fs::File::options().write(true).open(&blobs[1]).unwrap().set_len(5).unwrap();
    let checked = machine.hub().verify(None, None, &()).unwrap();
    let found: Vec<String> = faults(&checked).into_iter().map(|(name, _)| name).collect();
    assert_eq!(found, ["config.json", SHARDS[0], SHARDS[1]]);
    for checked in &checked {
        machine.hub().repair(checked, &()).unwrap();
    }
    assert!(verify(&machine.hub()).is_empty());
    assert_eq!(file_names(&snapshot).len(), 7);
}

#[test]
fn error_says_why_a_file_cannot_be_repaired() {
    let (fake, machine, blobs) = downloaded();
    assert!(machine.hub().verify(Some("org/other"), None, &()).is_err());
    fs::remove_file(&blobs[1]).unwrap();
    let checked = machine.hub().verify(Some(REPO), None, &()).unwrap();
    let error = machine.offline().repair(&checked[0], &()).unwrap_err();
    assert_eq!(error.downcast_ref::<inferno::Error>().unwrap().exit_code(), 5);
    // A damaged file is kept until its replacement arrives.
    fs::write(&blobs[0], "bad").unwrap();
    let both = machine.hub().verify(Some(REPO), None, &()).unwrap();
    fake.change(|state| state.lost = Some(SHARDS[0]));
    assert!(machine.hub().repair(&both[0], &()).is_err());
    assert_eq!(fs::read(&blobs[0]).unwrap(), b"bad");
    fake.change(|state| state.commit = "e".repeat(40));
    assert!(machine.hub().repair(&checked[0], &()).unwrap_err().to_string().contains("instead of commit"));

    // The hash of a file is the name of the blob to which the file links.
    // The files of this snapshot are not links, so they cannot be verified.
    machine.write_snapshot("shared", "org/other", COMMIT, &COMPLETE);
    let checked = machine.hub().verify(Some("org/other"), None, &()).unwrap();
    assert_eq!((checked[0].source, checked[0].files.len()), (SnapshotSource::HuggingFace, 3));
    assert!(checked[0].files.iter().all(|(_, state)| *state == FileState::Unknown));
    // inferno does not repair the shared Hugging Face cache.
    let bad = VerifiedSnapshot {
        files: vec![("config.json".into(), FileState::Corrupt)],
        ..checked.into_iter().next().unwrap()
    };
    assert!(machine.hub().repair(&bad, &()).unwrap_err().to_string().contains("hf download org/other"));
}

#[test]
fn demo_is_verified_and_repaired() {
    let machine = Machine::new("http://127.0.0.1:1".into());
    let demo = machine.hub().find("demo", None).unwrap();
    let state = || faults(&machine.hub().verify(Some("demo"), None, &()).unwrap());
    assert!(state().is_empty());
    let mut bytes = fs::read(demo.path.join("tokenizer.json")).unwrap();
    bytes[100] ^= 1;
    fs::write(demo.path.join("tokenizer.json"), bytes).unwrap();
    assert_eq!(state(), [("tokenizer.json".to_string(), FileState::Corrupt)]);
    machine.hub().repair(&machine.hub().verify(Some("demo"), None, &()).unwrap()[0], &()).unwrap();
    assert!(state().is_empty());
    assert!(machine.hub().remove("demo", None, &()).unwrap().freed_bytes > 1_000_000);
    assert!(!demo.path.exists());
}

#[test]
fn removing_a_revision_keeps_shared_files() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    machine.download().unwrap();
    let newer = "f".repeat(40);
    fake.change(|state| {
        state.commit = newer.clone();
        state.files.insert("config.json".into(), b"{\"new\":1}".to_vec());
    });
    machine.hub().download(REPO, Some("v2"), &FileFilter::default(), &()).unwrap();
    assert_eq!(machine.hub().find(REPO, Some("v2")).unwrap().revision, Some(newer.clone()));

    let removed = machine.hub().remove("tiny", Some("v2"), &()).unwrap();
    assert_eq!((removed.name.as_str(), &removed.changed_commits[..]), (REPO, &[newer][..]));
    // config.json has 9 bytes and the ref has 40. Both revisions share tokenizer.json and the weights.
    assert_eq!((removed.freed_bytes, removed.shared_bytes), (9 + 40, 50_002));
    assert!(machine.hub().find(REPO, Some("v2")).is_err());
    assert!(faults(&machine.hub().verify(Some(REPO), None, &()).unwrap()).is_empty());
    assert_eq!(machine.hub().find(REPO, None).unwrap().revision.as_deref(), Some(COMMIT));
    assert!(machine.hub().remove(REPO, Some("v2"), &()).is_err());

    let removed = machine.hub().remove(REPO, None, &()).unwrap();
    assert_eq!((removed.freed_bytes, removed.shared_bytes), (50_002 + 40, 0));
    assert!(!machine.repo().exists());
    assert!(machine.hub().list().unwrap().is_empty());
    let error = machine.hub().remove(REPO, None, &()).unwrap_err();
    assert_eq!(error.downcast_ref::<inferno::Error>().unwrap().exit_code(), 3);
    machine.write_snapshot("shared", REPO, COMMIT, &COMPLETE);
    for refs_only in [false, true] {
        if refs_only {
            fs::create_dir_all(machine.repo().join("refs")).unwrap();
            fs::write(machine.repo().join("refs/main"), COMMIT).unwrap();
        }
        let error = machine.hub().remove(REPO, None, &()).unwrap_err();
        assert!(error.to_string().contains("shared Hugging Face cache"), "{error}");
        assert_eq!(error.downcast_ref::<inferno::Error>().unwrap().exit_code(), 3);
    }
    assert!(machine.hub().find(REPO, None).is_ok());
}

#[test]
fn tag_removes_one_of_several_gguf_files() {
    let fake = FakeHub::start(&[("a-Q4_K_M.gguf", b"GGUF"), ("a-Q8_0.gguf", b"GGUF!"), ("README.md", b"")]);
    let machine = Machine::new(fake.endpoint());
    machine.hub().download(REPO, None, &super::include_only("*.gguf"), &()).unwrap();
    assert!(machine.hub().remove(&format!("{REPO}:Q2_K"), None, &()).is_err());
    let removed = machine.hub().remove("tiny:Q8_0", None, &()).unwrap();
    assert_eq!((removed.name, removed.freed_bytes), (format!("{REPO}:Q8_0"), 5));
    assert!(machine.hub().find(REPO, None).unwrap().path.ends_with("a-Q4_K_M.gguf"));
    machine.hub().remove(&format!("{REPO}:Q4_K_M"), None, &()).unwrap();
    assert!(!machine.repo().exists());
}

#[test]
fn leftovers_are_pruned() {
    let (_fake, machine, blobs) = downloaded();
    assert!(machine.hub().prune().unwrap().is_empty());
    let dir = machine.repo().join("blobs");
    for (name, bytes) in [("aa.parts", 10), ("aa.parts.json", 3), ("bb.incomplete", 20), ("unreferenced", 30)] {
        fs::write(dir.join(name), vec![0; bytes]).unwrap();
    }
    fs::write(machine.repo().join("refs/main.123-4.tmp"), "x").unwrap();
    // Simulate a download that was killed right after its start.
    let started = machine.dir.path().join("own/models--org--begun/blobs");
    fs::create_dir_all(&started).unwrap();
    fs::write(started.join("cc.parts"), "12345").unwrap();
    let pruned = machine.hub().prune().unwrap();
    let summary: Vec<_> =
        pruned.iter().map(|pruned| (pruned.name.as_str(), pruned.files, pruned.freed_bytes)).collect();
    assert_eq!(summary, [("org/begun", 1, 5), (REPO, 5, 64)]);
    assert!(!started.exists() && !machine.dir.path().join("own/models--org--begun").exists());
    assert!(blobs.iter().all(|blob| blob.exists()));
    assert!(verify(&machine.hub()).is_empty());
    assert!(file_names(&dir).iter().all(|name| !name.contains('.')));
    assert_eq!(file_names(&machine.repo().join("refs")), ["main"]);
}

/// A user may move a folder of the cache to another disk and leave a link in its place.
/// `prune` must then fail without deleting anything.
#[cfg(unix)]
#[test]
fn folders_behind_links_are_not_pruned() {
    for moved in ["blobs".to_string(), format!("snapshots/{COMMIT}")] {
        let (_fake, machine, blobs) = downloaded();
        let elsewhere = machine.dir.path().join("elsewhere");
        fs::rename(machine.repo().join(&moved), &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, machine.repo().join(&moved)).unwrap();
        let error = machine.hub().prune().unwrap_err();
        assert!(error.to_string().contains("nothing was deleted"), "{error}");
        assert!(blobs.iter().all(|blob| blob.exists()) && machine.repo().join(&moved).is_symlink());
    }
}

#[test]
fn partial_name_is_completed() {
    let (_fake, machine, _) = downloaded();
    assert_eq!(machine.hub().resolve_partial_name("tiny").as_deref(), Some(REPO));
    assert_eq!(machine.hub().resolve_partial_name("tiny:Q4_K_M").as_deref(), Some("org/tiny-model:Q4_K_M"));
    for whole in [REPO, "tiny-model", "ORG/Tiny-Model", "other", "demo"] {
        assert_eq!(machine.hub().resolve_partial_name(whole), None, "{whole}");
    }
    // `demo` always means the demo model, even if it is also a part of another model's name.
    machine.write_snapshot("own", "org/some-demo", COMMIT, &[("config.json", b"{}")]);
    assert_eq!(machine.hub().resolve_partial_name("some").as_deref(), Some("org/some-demo"));
    assert_eq!(machine.hub().resolve_partial_name("demo"), None);
}

#[test]
fn unreadable_folders_do_not_count_as_empty() {
    let (_fake, machine, blobs) = downloaded();
    // Replace the `snapshots` folder with a file. Removing the read permission is not enough, because root ignores it.
    let refs = machine.repo().join("refs");
    fs::write(machine.repo().join("blobs/unreferenced"), "x").unwrap();
    let snapshots = machine.repo().join("snapshots");
    let aside = machine.dir.path().join("snapshots");
    fs::rename(&snapshots, &aside).unwrap();
    fs::write(&snapshots, "").unwrap();
    assert!(format!("{:#}", machine.hub().prune().unwrap_err()).contains("nothing was deleted"));
    assert!(machine.hub().remove(REPO, None, &()).is_err());
    fs::remove_file(&snapshots).unwrap();
    fs::rename(&aside, &snapshots).unwrap();
    // Replace the ref with a dangling link.
    fs::rename(refs.join("main"), machine.repo().join("main")).unwrap();
    std::os::unix::fs::symlink("nowhere", refs.join("main")).unwrap();
    assert!(machine.hub().remove(REPO, None, &()).is_err());
    assert!(blobs.iter().all(|blob| blob.exists()) && machine.repo().join("blobs/unreferenced").exists());
    fs::rename(machine.repo().join("main"), refs.join("main")).unwrap();
    assert!(verify(&machine.hub()).is_empty());
    assert_eq!(machine.hub().prune().unwrap()[0].files, 1);
}

#[test]
fn snapshot_stays_while_it_has_other_weights() {
    let fake = FakeHub::start(&[
        ("a-Q4-00001-of-00002.gguf", b"GGUF"),
        ("a-Q4-00002-of-00002.gguf", b"GGUF2"),
        ("b-Q8-00002-of-00002.gguf", b"GGUF3"),
        ("c-F16.gguf", b"GGUF4"),
        ("model.safetensors", b"weights"),
    ]);
    let machine = Machine::new(fake.endpoint());
    let pick = FileFilter { include: vec!["*.gguf".into(), "*.safetensors".into()], ..FileFilter::default() };
    let snapshot = machine.hub().download(REPO, None, &pick, &()).unwrap();
    assert_eq!(machine.hub().remove(&format!("{REPO}:Q4"), None, &()).unwrap().freed_bytes, 9);
    machine.hub().remove(&format!("{REPO}:F16"), None, &()).unwrap();
    assert_eq!(file_names(&snapshot.path), ["b-Q8-00002-of-00002.gguf", "model.safetensors"]);
    assert_eq!(file_names(&machine.repo().join("blobs")).len(), 2);
}

#[test]
fn cache_of_other_tools_is_not_changed_through_an_alias() {
    let (fake, machine, _) = downloaded();
    let checked = machine.hub().verify(Some(REPO), None, &()).unwrap().remove(0);
    let checked = VerifiedSnapshot { files: vec![("config.json".into(), FileState::Corrupt)], ..checked };
    let own = machine.config().cache;
    for shared_cache in [own.clone(), own.join("../own")] {
        let hub = || Hub::new(HubConfig { shared_cache: shared_cache.clone(), ..machine.config() });
        let errors = [
            hub().download(REPO, None, &FileFilter::default(), &()).unwrap_err(),
            hub().remove(REPO, None, &()).unwrap_err(),
            hub().prune().unwrap_err(),
            hub().repair(&checked, &()).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.downcast_ref::<inferno::Error>().unwrap().exit_code(), 2, "{error}");
            assert!(error.to_string().contains("shared Hugging Face cache"), "{error}");
        }
    }
    assert!(fake.take_lines().is_empty());
}

#[test]
fn impossible_repair_deletes_nothing() {
    let (_fake, machine, blobs) = downloaded();
    let mut bytes = fs::read(&blobs[0]).unwrap();
    bytes[0] ^= 1;
    fs::write(&blobs[0], bytes).unwrap();
    let mut checked = machine.hub().verify(Some(REPO), None, &()).unwrap().remove(0);
    checked.files.push(("not-on-the-hub".into(), FileState::Missing));
    assert!(machine.hub().repair(&checked, &()).unwrap_err().to_string().contains("not-on-the-hub"));
    assert!(blobs[0].exists());

    // `verify` must report that the shard index is missing, not that model.safetensors is missing.
    let (fake, machine, _) = downloaded();
    let index = fake.state.lock().unwrap().files[INDEX].clone();
    let blob = machine.repo().join("blobs").join(etag(INDEX, &index));
    fs::remove_file(&blob).unwrap();
    assert_eq!(verify(&machine.hub()), [(INDEX.to_string(), FileState::Missing)]);
    fs::write(&blob, "{").unwrap();
    assert_eq!(verify(&machine.hub()), [(INDEX.to_string(), FileState::Corrupt)]);
    machine.hub().repair(&machine.hub().verify(Some(REPO), None, &()).unwrap()[0], &()).unwrap();
    assert!(verify(&machine.hub()).is_empty());
}

#[test]
fn missing_gguf_shard_is_named_with_its_folder() {
    let shards = ["Q8/a-Q8-00001-of-00002.gguf", "Q8/a-Q8-00002-of-00002.gguf"];
    let fake = FakeHub::start(&[(shards[0], b"GGUF"), (shards[1], b"GGUF2")]);
    let machine = Machine::new(fake.endpoint());
    let snapshot = machine.hub().download(REPO, None, &super::include_only("*Q8*"), &()).unwrap();
    fs::remove_file(snapshot.path.join(shards[1])).unwrap();
    assert_eq!(verify(&machine.hub()), [(shards[1].to_string(), FileState::Missing)]);
    machine.hub().repair(&machine.hub().verify(Some(REPO), None, &()).unwrap()[0], &()).unwrap();
    assert!(verify(&machine.hub()).is_empty());
}

#[test]
fn part_of_a_name_finds_the_model() {
    let machine = Machine::new("http://127.0.0.1:1".to_string());
    machine.write_snapshot("own", "openai/gpt-oss-20b", COMMIT, &COMPLETE);
    machine.write_snapshot("shared", "meta-llama/Llama-3.2-1B", COMMIT, &COMPLETE);
    let found = |part: &str| machine.hub().find(part, None).map(|snapshot| snapshot.name);
    assert_eq!(found("oss-20b").unwrap(), "openai/gpt-oss-20b");
    assert_eq!(found("llama").unwrap(), "meta-llama/Llama-3.2-1B");
    assert_eq!(found("oss@main").unwrap(), "openai/gpt-oss-20b");
    assert!(found("openai/gpt-oss").is_err(), "a name with an organization matched a longer name");
    machine.write_snapshot("own", "openai/gpt-oss-120b", COMMIT, &COMPLETE);
    assert!(format!("{:#}", found("oss").unwrap_err()).contains("openai/gpt-oss-120b, openai/gpt-oss-20b"));
    assert_eq!(found("oss-20b").unwrap(), "openai/gpt-oss-20b");
}

#[test]
fn last_use_is_recorded() {
    let machine = Machine::new("http://127.0.0.1:1".to_string());
    machine.write_snapshot("shared", "org/a", COMMIT, &COMPLETE);
    machine.write_snapshot("own", "org/b", COMMIT, &COMPLETE);
    let hub = machine.hub();
    let (a, b) = (hub.find("org/a", None).unwrap(), hub.find("org/b", None).unwrap());
    assert_eq!(hub.last_used(&a), None);
    hub.record_use(&a);
    hub.record_use(&b);
    assert!(hub.last_used(&a).unwrap().elapsed().unwrap().as_secs() < 60);
    assert_eq!(hub.list().unwrap().len(), 2);
    hub.remove("org/b", None, &()).unwrap();
    assert_eq!((hub.last_used(&b), hub.last_used(&a).is_some()), (None, true));
    assert!(fs::read_dir(machine.dir.path().join("shared/models--org--a")).is_ok());
}

#[test]
fn excluded_files_are_not_downloaded() {
    let fake = FakeHub::sharded();
    let machine = Machine::new(fake.endpoint());
    let pick = FileFilter { exclude: vec!["*.safetensors".into(), "chat_*".into()], ..FileFilter::default() };
    let snapshot = machine.hub().download(REPO, None, &pick, &()).unwrap();
    assert_eq!(file_names(&snapshot.path), ["config.json", "generation_config.json", INDEX, "tokenizer.json"]);
    assert!(machine.hub().find_tokenizer(REPO, None).is_ok());
}
