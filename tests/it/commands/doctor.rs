//! Tests of `inferno doctor` on machines with and without problems.

use std::fs;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::demo_dir;
use crate::support::fake_hub::{COMMIT, FakeHub};
use crate::support::program::{inferno, text, without_driver};

/// Runs `inferno doctor --json`. Returns the report, and a function that looks up the worst finding with a given name.
/// The function returns the finding's status, and a string with the finding's text and its next command.
fn diagnose(command: &mut Command) -> (Value, impl Fn(&str) -> (String, String) + use<>) {
    let output = command.args(["doctor", "--json"]).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let code = if report["status"] == "FAIL" { 1 } else { 0 };
    assert_eq!(output.status.code(), Some(code), "{}", text(&output.stderr));
    let findings = report["findings"].as_array().unwrap().clone();
    for finding in &findings {
        assert_eq!(finding["next"].is_null(), finding["status"] == "PASS", "{finding}");
        assert!(!finding["what"].as_str().unwrap().contains('\n'), "{finding}");
    }
    let find = move |name: &str| {
        let word = |finding: &Value, field: &str| finding[field].as_str().unwrap_or_default().to_string();
        let of_name = findings.iter().filter(|finding| finding["name"] == name);
        let worst = of_name.max_by_key(|finding| ["PASS", "WARN", "FAIL"].iter().position(|s| finding["status"] == *s));
        let worst = worst.unwrap_or_else(|| panic!("no finding has the name {name}: {findings:?}"));
        (word(worst, "status"), format!("{} {}", word(worst, "what"), word(worst, "next")))
    };
    (report, find)
}

fn expect(found: (String, String), status: &str, words: &[&str]) {
    assert_eq!(found.0, status, "{}", found.1);
    for word in words {
        assert!(found.1.contains(word), "the finding does not contain {word:?}: {}", found.1);
    }
}

#[test(no_driver)]
fn machine_without_a_gpu_fails_with_the_next_command() {
    let home = TempDir::new().unwrap();
    let (report, find) = diagnose(&mut without_driver(&home));
    expect(find("build"), "PASS", &[env!("CARGO_PKG_VERSION")]);
    expect(find("cache"), "PASS", &["models"]);
    assert_eq!(fs::read_dir(home.path().join("models")).unwrap().count(), 0, "the probe file was not deleted");
    expect(find("hub"), "WARN", &["http://127.0.0.1:1", "is unavailable", "curl -I"]);
    expect(find("models"), "PASS", &["inferno play demo"]);
    assert_eq!(report["status"], "FAIL");
    let (reason, next) =
        if cfg!(feature = "cuda") { ("libcuda.so.1", "nvidia-smi") } else { ("no GPU support", "--features cuda") };
    expect(find("GPU"), "FAIL", &[reason, "inferno play demo --device cpu", next]);
    let help = text(&inferno(&home).args(["doctor", "--help"]).output().unwrap().stdout);
    let (_, checks) = help.split_once("Checks: ").unwrap();
    for finding in report["findings"].as_array().unwrap() {
        let name = finding["name"].as_str().unwrap();
        assert!(checks.contains(name), "the help does not list the check {name}: {checks}");
    }
    let output = inferno(&home).arg("doctor").output().unwrap();
    let lines = text(&output.stdout);
    assert!(lines.starts_with("PASS  build "), "{lines}");
    assert!(lines.contains("next: curl -I http://127.0.0.1:1"), "{lines}");
}

#[test]
fn hub_and_token_are_checked() {
    let fake = FakeHub::single();
    let home = TempDir::new().unwrap();
    let with = |token: Option<&str>, offline: bool| {
        let mut command = inferno(&home);
        command.env("HF_ENDPOINT", fake.endpoint());
        if let Some(token) = token {
            command.env("HF_TOKEN", token);
        }
        if offline {
            command.env("HF_HUB_OFFLINE", "1");
        }
        let (report, find) = diagnose(&mut command);
        assert!(!report.to_string().contains("hf_"), "the report shows the token");
        find("hub")
    };
    expect(with(None, false), "PASS", &["no token"]);
    assert!(fake.take_heads().iter().all(|head| !head.to_lowercase().contains("authorization")));
    expect(with(Some("hf_secret"), false), "PASS", &["accepts the token"]);
    expect(with(Some("hf_wrong"), false), "WARN", &["rejects the token"]);
    fake.take_heads();
    expect(with(Some("hf_secret"), true), "PASS", &["HF_HUB_OFFLINE"]);
    assert!(fake.take_heads().is_empty());
}

#[test]
fn unusable_models_are_reported() {
    let home = TempDir::new().unwrap();
    let place = |repo: &str, files: &[(&str, &[u8])]| {
        let repo = home.path().join("models").join(format!("models--{repo}"));
        let snapshot = repo.join("snapshots").join(COMMIT);
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(repo.join("refs")).unwrap();
        fs::write(repo.join("refs/main"), COMMIT).unwrap();
        for (name, bytes) in files {
            fs::write(snapshot.join(name), bytes).unwrap();
        }
    };
    let file = |name: &str| fs::read(demo_dir().join(name)).unwrap();
    let (config, tokenizer) = (file("config.json"), file("tokenizer.json"));
    place("org--part", &[("config.json", &config), ("tokenizer.json", &tokenizer)]);
    let (_, find) = diagnose(&mut inferno(&home));
    expect(find("models"), "WARN", &["org/part is incomplete", "model.safetensors", "inferno download org/part"]);

    fs::remove_dir_all(home.path().join("models")).unwrap();
    let strange = br#"{"model_type": "mamba9"}"#;
    place("org--strange", &[("config.json", strange), ("tokenizer.json", &tokenizer), ("model.safetensors", b"")]);
    let (_, find) = diagnose(&mut inferno(&home));
    expect(find("models"), "WARN", &["org/strange", "mamba9", "inferno show org/strange"]);

    fs::remove_dir_all(home.path().join("models")).unwrap();
    let weights = file("model.safetensors");
    place("org--good", &[("config.json", &config), ("tokenizer.json", &tokenizer), ("model.safetensors", &weights)]);
    let (_, find) = diagnose(&mut inferno(&home));
    expect(find("models"), "PASS", &["1 model, complete"]);
}

#[test]
fn cache_that_cannot_be_created_is_a_failure() {
    let home = TempDir::new().unwrap();
    // Put a file in place of the folder. A read-only folder would not stop root.
    fs::write(home.path().join("models"), "in the way").unwrap();
    let (_, find) = diagnose(&mut inferno(&home));
    expect(find("cache"), "FAIL", &["cannot create", "INFERNO_CACHE"]);
    let (_, find) = diagnose(inferno(&home).env("HF_ENDPOINT", "ftp://nowhere"));
    expect(find("settings"), "FAIL", &["HF_ENDPOINT"]);
}
