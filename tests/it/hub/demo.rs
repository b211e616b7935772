//! Tests of the demo model: repair by one or several processes, leftover files, the lock, and errors for `--revision`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use inferno::hub::{FileState, Hub, HubConfig};
use tempfile::TempDir;

use super::Machine;
use crate::support::demo_dir;
use crate::support::program::{assert_fails, inferno, text};

/// Writes the demo model to inferno's cache. Returns the directory of the model.
fn demo_path(home: &TempDir) -> PathBuf {
    let hub = Hub::new(HubConfig { cache: home.path().join("models"), ..Machine::new(String::new()).config() });
    hub.find("demo", None).unwrap().path
}

/// Returns the relative paths of all files below a directory, sorted.
fn paths_below(dir: &Path) -> Vec<String> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if entry.path().is_dir() {
            paths.extend(paths_below(&entry.path()).into_iter().map(|path| format!("{name}/{path}")));
        } else {
            paths.push(name);
        }
    }
    paths.sort();
    paths
}

#[test]
fn many_processes_repair_a_damaged_demo() {
    let home = TempDir::new().unwrap();
    let demo = demo_path(&home);
    let damages: [&dyn Fn(); 3] = [
        &|| fs::write(demo.join("model.safetensors"), "short").unwrap(),
        &|| {
            fs::remove_file(demo.join("config.json")).unwrap();
            fs::create_dir_all(demo.join("config.json/folder")).unwrap();
            fs::remove_file(demo.join("tokenizer.json")).unwrap();
        },
        &|| {
            fs::remove_dir_all(&demo).unwrap();
            fs::write(&demo, "a file").unwrap();
        },
    ];
    for damage in damages {
        damage();
        let start = |number: usize| -> Child {
            let args: &[&str] =
                if number.is_multiple_of(2) { &["show", "demo"] } else { &["tokenize", "demo", "hello"] };
            inferno(&home).args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let processes: Vec<Child> = (0..16).map(start).collect();
        for process in processes {
            let output = process.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", text(&output.stderr));
        }
        assert_eq!(paths_below(&demo), paths_below(&demo_dir()));
        for name in paths_below(&demo) {
            assert!(fs::read(demo.join(&name)).unwrap() == fs::read(demo_dir().join(&name)).unwrap(), "{name}");
        }
    }
}

#[test]
fn corrupt_demo_file_is_replaced_and_others_stay_untouched() {
    let machine = Machine::new("http://127.0.0.1:1".into());
    let demo = machine.hub().find("demo", None).unwrap().path;
    let other = fs::metadata(demo.join("config.json")).unwrap().modified().unwrap();
    let weights = demo.join("model.safetensors");
    let good = fs::read(&weights).unwrap();
    let mut bad = good.clone();
    bad[5_000_000] ^= 1;
    fs::write(&weights, bad).unwrap();
    // A running process may have the damaged file open. The repair must replace the file, not truncate it.
    let open = File::open(&weights).unwrap();
    let checked = machine.hub().verify(Some("demo"), None, &()).unwrap();
    assert_eq!(checked[0].damaged_files().collect::<Vec<_>>(), [&("model.safetensors".into(), FileState::Corrupt)]);
    machine.hub().repair(&checked[0], &()).unwrap();
    assert!(fs::read(&weights).unwrap() == good);
    assert_eq!(open.metadata().unwrap().len(), good.len() as u64);
    assert_eq!(
        fs::metadata(demo.join("config.json")).unwrap().modified().unwrap(),
        other,
        "an undamaged file was rewritten"
    );
}

#[test]
fn leftovers_of_the_demo_are_pruned() {
    let home = TempDir::new().unwrap();
    let demo = demo_path(&home);
    fs::write(demo.join("model.safetensors.123-4.tmp"), [0; 3000]).unwrap();
    // Earlier versions of inferno could leave a temporary directory with a name of this form.
    let old = demo.with_extension("567-0.tmp");
    fs::create_dir(&old).unwrap();
    fs::write(old.join("config.json"), [0; 1000]).unwrap();
    fs::write(old.join("model.safetensors"), [0; 2000]).unwrap();
    let prune = || inferno(&home).arg("prune").output().unwrap();

    let lock = File::options().append(true).create(true).open(home.path().join("models/.locks/demo.lock")).unwrap();
    lock.lock().unwrap();
    let output = prune();
    assert_eq!(text(&output.stdout), "demo: skipped because another inferno process is changing it\n0 B freed\n");
    assert!(old.exists());
    drop(lock);

    let output = prune();
    assert_eq!(text(&output.stdout), "demo: 3 files, 6.0 KB\n6.0 KB freed\n", "{}", text(&output.stderr));
    assert_eq!(paths_below(demo.parent().unwrap()).len(), paths_below(&demo_dir()).len());
    assert_eq!(text(&prune().stdout), "0 B freed\n");
}

/// A stopped process that holds the lock must not block other processes forever.
#[test]
fn demo_is_written_while_another_process_holds_the_lock() {
    let home = TempDir::new().unwrap();
    let demo = demo_path(&home);
    let lock = File::options().append(true).open(home.path().join("models/.locks/demo.lock")).unwrap();
    lock.lock().unwrap();
    fs::remove_file(demo.join("config.json")).unwrap();
    let output = inferno(&home).args(["tokenize", "demo", "hello"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(demo.join("config.json").is_file());
}

#[test]
fn demo_has_no_revisions() {
    let home = TempDir::new().unwrap();
    let demo = demo_path(&home);
    for command in [
        &["play", "demo", "--device", "cpu", "--prompt", "hello"][..],
        &["bench", "demo", "--device", "cpu"],
        &["show", "demo"],
        &["show", "demo", "--remote"],
        &["verify", "demo"],
        &["verify", "demo", "--repair"],
        &["remove", "demo"],
        &["download", "demo"],
    ] {
        let output = inferno(&home).args(command).args(["--revision", "x"]).output().unwrap();
        assert_fails(&output, 3, &["cannot find revision 'x' of demo: the demo model has no revisions"]);
    }
    for command in [&["tokenize", "demo", "hello", "--revision", "x"][..], &["tokenize", "demo@x", "hello"]] {
        assert_fails(&inferno(&home).args(command).output().unwrap(), 3, &["the demo model has no revisions"]);
    }
    let text_file = demo_dir().join("config.json");
    let perplexity =
        ["perplexity", "demo", "--device", "cpu", "--revision", "x", "--file", text_file.to_str().unwrap()];
    assert_fails(&inferno(&home).args(perplexity).output().unwrap(), 3, &["the demo model has no revisions"]);
    for command in [["show", "demo@x"], ["verify", "demo@x"], ["remove", "demo@x"], ["download", "demo@x"]] {
        assert_fails(&inferno(&home).args(command).output().unwrap(), 3, &["the demo model has no revisions"]);
    }
    assert!(demo.exists(), "a failed command deleted the demo");
    let folder = demo.to_str().unwrap();
    let output = inferno(&home).args(["show", folder, "--revision", "x"]).output().unwrap();
    assert_fails(&output, 3, &["local files have no revisions"]);
    // Without a model name, `verify --revision` checks only models that have the revision.
    let output = inferno(&home).args(["verify", "--revision", "x"]).output().unwrap();
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), String::new()));
}
