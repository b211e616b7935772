//! Tests of finding a model by name or tag in both caches, or as a directory, and of the error for a missing model.

use std::fs;

use inferno::hub::{FileFilter, Snapshot, SnapshotSource};

use super::{COMPLETE, Machine, file_names, include_only, message_and_code};
use crate::support::fake_hub::{COMMIT, FakeHub, INDEX, REPO, SHARDS};

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
    machine.download().unwrap();
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
fn one_of_several_gguf_files_is_chosen_by_its_tag() {
    let fake = FakeHub::start(&[("a-Q4_K_M.gguf", b"GGUF"), ("a-Q8_0.gguf", b"GGUF!"), ("README.md", b"")]);
    let machine = Machine::new(fake.endpoint());
    let (message, code) = message_and_code(machine.download());
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
fn gguf_file_names_may_have_capitals() {
    let shards = ["b-Q8_0-00001-of-00002.GGUF", "b-Q8_0-00002-of-00002.GGUF"];
    let fake = FakeHub::start(&[("a-Q4_K_M.GGUF", b"GGUF?"), (shards[0], b"GGUF"), (shards[1], b"GGUF!")]);
    let machine = Machine::new(fake.endpoint());
    let (message, _) = message_and_code(machine.download());
    assert!(message.contains(&format!("inferno download {REPO}:Q4_K_M\n")), "{message}");
    let tag = |tag: &str| FileFilter { tag: Some(tag.to_string()), ..FileFilter::default() };
    let snapshot = machine.hub().download(REPO, None, &tag("Q8_0"), &()).unwrap();
    assert_eq!(file_names(&snapshot.path), shards);
    machine.hub().download(REPO, None, &tag("q4_k_m"), &()).unwrap();
    let found = machine.hub().find(&format!("{REPO}:Q8_0"), None).unwrap();
    assert_eq!(found.path, snapshot.path.join(shards[0]));
    let names: Vec<String> = machine.hub().list().unwrap().into_iter().map(|model| model.name).collect();
    assert_eq!(names, [format!("{REPO}:Q4_K_M"), format!("{REPO}:Q8_0")]);
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
