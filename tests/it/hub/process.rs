//! Tests `inferno download` as a process: kills, concurrent downloads, full and read-only disks, proxies and output.
//! Also tests the output of other cache commands, and the download that `play` offers.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rexpect::session::spawn_command;
use tempfile::TempDir;

use crate::support::fake_hub::{COMMIT, FakeHub, REPO, etag, pattern};
#[cfg(target_os = "linux")]
use crate::support::program::MOUNTING;
use crate::support::program::{assert_fails, in_shell, inferno, text};
use crate::support::{Random, demo_dir, wait_until};

const WEIGHTS: &str = "model.safetensors";

pub fn command(home: &TempDir, fake: &FakeHub, args: &[&str]) -> Command {
    let mut command = inferno(home);
    command.env("HF_ENDPOINT", fake.endpoint()).args(args);
    for variable in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
        command.env_remove(variable);
    }
    command
}

fn download(home: &TempDir, fake: &FakeHub) -> Output {
    command(home, fake, &["download", REPO]).output().unwrap()
}

fn start(home: &TempDir, fake: &FakeHub) -> Child {
    command(home, fake, &["download", REPO]).stderr(Stdio::piped()).spawn().unwrap()
}

fn large(bytes: usize) -> (FakeHub, Vec<u8>) {
    let weights = pattern(bytes, 3);
    let files: [(&str, &[u8]); 4] =
        [("config.json", b"{}"), ("generation_config.json", b"{ }"), ("tokenizer.json", b"{}"), (WEIGHTS, &weights)];
    (FakeHub::start(&files), weights)
}

fn fetched(home: &TempDir) -> Vec<u8> {
    fs::read(repo(home).join("snapshots").join(COMMIT).join(WEIGHTS)).unwrap()
}

fn repo(home: &TempDir) -> std::path::PathBuf {
    home.path().join("models/models--org--tiny-model")
}

#[test]
fn killed_download_is_resumed() {
    let (fake, weights) = large(3_000_000);
    fake.change(|state| state.pace = Some((10_000, Duration::from_millis(10))));
    let home = TempDir::new().unwrap();
    let record = repo(&home).join("blobs").join(format!("{}.parts.json", etag(WEIGHTS, &weights)));
    for _ in 0..2 {
        let mut child = start(&home, &fake);
        let before = fs::read(&record).unwrap_or_default();
        wait_until("progress is saved", || fs::read(&record).is_ok_and(|json| json != before));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(
            !repo(&home).join("refs").exists() && !repo(&home).join("blobs").join(etag(WEIGHTS, &weights)).exists()
        );
        assert!(fake.state.lock().unwrap().sent_bytes < 3_000_000, "the download ended before the kill");
    }
    fake.change(|state| state.pace = None);
    fake.take_heads();
    let recorded: serde_json::Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    let recorded = recorded["done"].as_array().unwrap().iter();
    let recorded: u64 = recorded.map(|range| range["end"].as_u64().unwrap() - range["start"].as_u64().unwrap()).sum();
    let output = download(&home, &fake);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(fetched(&home) == weights);
    let requested_bytes = |head: &String| {
        let head = head.to_lowercase();
        let (first, last) = head.split_once("range: bytes=")?.1.lines().next()?.split_once('-')?;
        Some(last.trim().parse::<u64>().ok()? + 1 - first.parse::<u64>().ok()?)
    };
    let again: u64 = fake.take_heads().iter().filter_map(requested_bytes).sum();
    assert!(
        recorded > 0 && again == 3_000_000 - recorded,
        "the last download requested {again} of 3000000 bytes, although {recorded} bytes had been recorded"
    );
}

/// Kills 50 download processes at random times. A kill may hit the transfer, verification, renaming or linking of a
/// file, or come after the end of the download.
#[test]
fn repeatedly_killed_download_stays_consistent() {
    std::thread::scope(|scope| {
        for thread in 0..5u64 {
            scope.spawn(move || {
                let is_slow = thread < 2;
                let (fake, weights) = large(if is_slow { 10_000_000 } else { 400_000 });
                let home = TempDir::new().unwrap();
                let mut random = Random(thread);
                if is_slow {
                    fake.change(|state| state.pace = Some((10_000, Duration::from_millis(10))));
                }
                let (mut recorded_before, mut partial_downloads, mut was_progress_saved) = (0, 0, false);
                for _ in 0..10 {
                    let mut child = start(&home, &fake);
                    std::thread::sleep(Duration::from_millis(random.below(if is_slow { 2_500 } else { 120 }) as u64));
                    child.kill().unwrap();
                    child.wait().unwrap();
                    let recorded = check_recorded(&home, &weights);
                    // Once the ref of a model exists, `show` must find the model, and the model must be complete.
                    let found = command(&home, &fake, &["show", REPO]).output().unwrap().status.code() != Some(3);
                    if repo(&home).join("refs/main").exists() {
                        assert!(found && fetched(&home) == weights);
                        let snapshot = repo(&home).join("snapshots").join(COMMIT);
                        // A killed download may leave a temporary link.
                        let files = super::file_names(&snapshot).into_iter().filter(|name| !name.ends_with(".tmp"));
                        assert_eq!(files.count(), 4);
                        fs::remove_dir_all(repo(&home)).unwrap();
                        recorded_before = 0;
                    } else {
                        assert!(
                            recorded >= recorded_before,
                            "the recorded progress fell from {recorded_before} to {recorded} bytes"
                        );
                        recorded_before = recorded;
                        was_progress_saved |= recorded > 0;
                        partial_downloads += usize::from(repo(&home).exists());
                    }
                }
                assert!(
                    !is_slow || (was_progress_saved && partial_downloads > 0),
                    "no process was killed during a download, or no progress was saved"
                );
                fake.change(|state| state.pace = None);
                let output = download(&home, &fake);
                assert!(output.status.success(), "{}", text(&output.stderr));
                assert!(fetched(&home) == weights);
                let output = command(&home, &fake, &["verify"]).output().unwrap();
                assert!(output.status.success(), "{}", text(&output.stderr));
            });
        }
    });
}

/// Returns how many bytes of the weights are recorded as fetched. Asserts that these bytes are correct.
/// If the blob of the weights exists, all bytes count.
fn check_recorded(home: &TempDir, weights: &[u8]) -> usize {
    let blob = repo(home).join("blobs").join(etag(WEIGHTS, weights));
    if let Ok(bytes) = fs::read(&blob) {
        assert!(bytes == weights, "a blob has the wrong contents");
        return bytes.len();
    }
    let Ok(json) = fs::read(blob.with_extension("parts.json")) else { return 0 };
    let record: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let bytes = fs::read(blob.with_extension("parts")).unwrap();
    let at = |range: &serde_json::Value, end: &str| range[end].as_u64().unwrap() as usize;
    let ranges = record["done"].as_array().unwrap().iter().map(|range| at(range, "start")..at(range, "end"));
    ranges
        .map(|range| if bytes[range.clone()] == weights[range.clone()] { range.len() } else { panic!("{range:?}") })
        .sum()
}

#[test]
fn second_process_waits_for_the_first() {
    let (fake, weights) = large(1_000_000);
    fake.change(|state| state.pace = Some((10_000, Duration::from_millis(10))));
    let home = TempDir::new().unwrap();
    let first = start(&home, &fake);
    wait_until("the first process is downloading", || fake.state.lock().unwrap().sent_bytes > 20_000);
    let mut second = start(&home, &fake);
    let mut line = String::new();
    let mut stderr = BufReader::new(second.stderr.take().unwrap());
    stderr.read_line(&mut line).unwrap();
    assert!(line.contains(&format!("another inferno process is using {REPO}; waiting")), "{line}");
    let pruned = command(&home, &fake, &["prune"]).output().unwrap();
    assert!(text(&pruned.stdout).contains("skipped"), "{}", text(&pruned.stdout));
    let first = first.wait_with_output().unwrap();
    assert!(first.status.success(), "{}", text(&first.stderr));
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert!(second.wait().unwrap().success(), "{rest}");
    assert!(fetched(&home) == weights);
    let weights = fake.take_lines().iter().filter(|line| line.ends_with(WEIGHTS)).count();
    assert_eq!(weights, 1, "expected one request for the weights");
}

#[cfg(unix)]
#[test]
fn leftovers_with_the_same_process_id_are_skipped() {
    let (fake, weights) = large(50_000);
    let home = TempDir::new().unwrap();
    let snapshot = repo(&home).join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    // Create leftovers of an earlier process with the same process id. `exec` keeps the id of the shell.
    let script = "i=0; while [ $i -lt 200 ]; do : > \"$0.$$-$i.tmp\"; i=$((i + 1)); done; exec \"$@\"";
    let inferno = command(&home, &fake, &["download", REPO]);
    let output = in_shell(&["sh"], script, &snapshot.join(WEIGHTS), &inferno).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(fs::read_link(snapshot.join(WEIGHTS)).is_ok(), "the snapshot contains no link to the blob");
    assert!(fetched(&home) == weights);
}

#[cfg(unix)]
#[test]
fn download_resumes_after_a_full_disk() {
    let (fake, weights) = large(3_000_000);
    let home = TempDir::new().unwrap();
    // Limit the file size to 1 MiB (2,048 blocks of 512 bytes). Writes past the limit fail, as on a full disk.
    let limited = "ulimit -f 2048; exec \"$@\"";
    let inferno = command(&home, &fake, &["download", REPO]);
    let output = in_shell(&["sh"], limited, home.path(), &inferno).output().unwrap();
    assert_eq!(output.status.code(), Some(11), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("run the same command to resume"), "{}", text(&output.stderr));
    assert!(!repo(&home).join("refs").exists());
    fake.take_heads();
    let sent = fake.state.lock().unwrap().sent_bytes;
    let output = download(&home, &fake);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(fetched(&home) == weights);
    let again = fake.state.lock().unwrap().sent_bytes - sent;
    assert!(again < 2_500_000, "the second download fetched {again} bytes instead of resuming");
}

/// Fills the disk from another process during a download, after inferno has checked the free space.
#[cfg(target_os = "linux")]
#[test(mount)]
fn download_resumes_after_another_process_filled_the_disk() {
    let (fake, _) = large(3_000_000);
    fake.change(|state| state.pace = Some((50_000, Duration::from_millis(20))));
    let home = TempDir::new().unwrap();
    let models = home.path().join("models");
    fs::create_dir(&models).unwrap();
    let script = r#"
        mount -t tmpfs -o size=8m tmpfs "$0"
        "$@" & download=$!
        until [ -e "$0"/models--*/blobs/*.parts ]; do sleep 0.01; done
        cat /dev/zero > "$0/filler" 2> /dev/null
        wait $download; code=$?
        [ $code = 11 ] || exit $((100 + code))
        [ -z "$(ls "$0"/models--*/refs 2> /dev/null)" ] || exit 98
        rm "$0/filler"
        "$@" || exit 97
        "$1" verify || exit 96
    "#;
    let inferno = command(&home, &fake, &["download", REPO]);
    let output = in_shell(&MOUNTING, script, &models, &inferno).output().unwrap();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("run the same command to resume"), "{stderr}");
}

#[cfg(target_os = "linux")]
const READ_ONLY: &str = r#"mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@""#;

/// On a read-only disk, commands that need not write to the cache work, and commands that must write to it fail.
#[cfg(target_os = "linux")]
#[test(mount)]
fn read_only_cache_is_usable() {
    let fake = demo_hub();
    let home = TempDir::new().unwrap();
    let output = command(&home, &fake, &["download", REPO, "-q"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let models = home.path().join("models");
    let run = |args: &[&str]| in_shell(&MOUNTING, READ_ONLY, &models, &command(&home, &fake, args)).output().unwrap();
    for args in [
        &["play", "tiny-model", "--device", "cpu", "--prompt", "How do I download a model?"][..],
        &["list"],
        &["show", "tiny-model"],
        &["verify"],
        &["download", REPO],
    ] {
        let output = run(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    }
    for args in [&["remove", "tiny-model"][..], &["play", "demo", "--device", "cpu", "--prompt", "Hello"]] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(text(&output.stderr).contains("Read-only file system"), "{}", text(&output.stderr));
    }
    let output = command(&home, &fake, &["verify"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stdout));
    // For a model in the shared Hugging Face cache, `download` fetches nothing.
    // It succeeds even if it cannot write the ref to inferno's own cache.
    let own = home.path().join("own");
    fs::create_dir(&own).unwrap();
    let mut inferno = command(&home, &fake, &["download", REPO]);
    inferno.env("INFERNO_CACHE", &own).env("HF_HUB_CACHE", &models);
    let output = in_shell(&MOUNTING, READ_ONLY, &own, &inferno).output().unwrap();
    assert!(text(&output.stderr).contains("nothing to fetch"), "{}", text(&output.stderr));
}

#[test]
fn stall_timeout_comes_from_the_environment() {
    let fake = FakeHub::single();
    fake.change(|state| state.faults.push_back(crate::support::fake_hub::Fault::Stall(20_000)));
    let home = TempDir::new().unwrap();
    let start = Instant::now();
    let output = command(&home, &fake, &["download", REPO]).env("HF_HUB_DOWNLOAD_TIMEOUT", "0.3").output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains(&format!("{WEIGHTS}: timeout")), "{}", text(&output.stderr));
    // Without the stall timeout of the client, a stall would last until the fake hub hangs up after 20 s.
    assert!(start.elapsed() < Duration::from_secs(15), "the download took {:?}", start.elapsed());
    let output = command(&home, &fake, &["download", REPO]).env("HF_HUB_DOWNLOAD_TIMEOUT", "soon").output().unwrap();
    assert_fails(&output, 2, &["HF_HUB_DOWNLOAD_TIMEOUT"]);
}

#[test]
fn proxy_is_used() {
    let (fake, weights) = large(50_000);
    let home = TempDir::new().unwrap();
    let through = |endpoint: &str, no_proxy: &str| {
        let mut command = command(&home, &fake, &["download", REPO]);
        command.env("HF_ENDPOINT", endpoint).env("HTTP_PROXY", fake.endpoint()).env("NO_PROXY", no_proxy);
        command.env("HF_TOKEN", "hf_secret").output().unwrap()
    };
    let output = through("http://hub.invalid", "");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(fetched(&home) == weights);
    let heads = fake.take_heads();
    assert!(heads.iter().any(|head| head.starts_with("CONNECT hub.invalid:80 ")), "{heads:?}");
    // The endpoint is on another machine, so http would reveal the token to the network.
    assert!(heads.iter().all(|head| !head.contains("hf_secret")), "the token was sent over http");
    let warning = "warning: the access token is not sent to http://hub.invalid: http does not encrypt it";
    assert!(text(&output.stderr).starts_with(warning), "{}", text(&output.stderr));
    assert_fails(&through("http://hub.invalid", "hub.invalid"), 5, &["hub.invalid"]);
    assert!(fake.take_heads().is_empty());
}

#[test]
fn only_a_complete_revision_gets_a_command_to_run_it() {
    let fake = FakeHub::single();
    let home = TempDir::new().unwrap();
    assert!(download(&home, &fake).status.success());
    fake.change(|state| state.commit = "f".repeat(40));
    let lines = |args: &[&str]| {
        let args = [&["download", REPO, "--revision", "v2"], args].concat();
        let output = command(&home, &fake, &args).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    let incomplete = lines(&["--exclude", "tokenizer.json"]);
    assert!(!incomplete.contains("to run it"), "{incomplete}");
    let complete = lines(&[]);
    assert!(complete.contains("to run it: inferno play org/tiny-model --revision v2"), "{complete}");
}

#[test]
fn output_without_a_terminal_has_no_progress_bar() {
    let fake = FakeHub::single();
    let home = TempDir::new().unwrap();
    let output = download(&home, &fake);
    assert_eq!(text(&output.stdout), "");
    let lines = text(&output.stderr);
    assert!(lines.starts_with("3 files, 50.0 KB\n") && lines.contains("inferno play org/tiny-model"), "{lines}");
    assert!(!lines.contains('\u{1b}'), "{lines}");
    for quiet in ["--quiet", "-q"] {
        fs::remove_dir_all(repo(&home)).unwrap();
        let output = command(&home, &fake, &["download", REPO, quiet]).output().unwrap();
        assert!(output.status.success());
        assert_eq!((text(&output.stdout), text(&output.stderr)), (String::new(), String::new()));
    }
    fs::remove_dir_all(repo(&home)).unwrap();
    let output = command(&home, &fake, &["download", REPO]).env("HF_HUB_DISABLE_PROGRESS_BARS", "1").output().unwrap();
    assert!(!text(&output.stderr).contains("files"), "{}", text(&output.stderr));
    let output = command(&home, &fake, &["download", "org/other"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert_fails(&output, 5, &["HF_HUB_OFFLINE"]);
    assert_fails(&command(&home, &fake, &["download", REPO, "--exclude", "a{"]).output().unwrap(), 2, &["a{"]);
}

#[test]
fn verify_prune_and_remove_report_what_they_did() {
    let fake = FakeHub::single();
    let home = TempDir::new().unwrap();
    let run = |args: &[&str]| command(&home, &fake, args).output().unwrap();
    assert!(run(&["download", REPO, "-q"]).status.success());
    let output = run(&["verify", "tiny"]);
    assert_eq!(text(&output.stdout), format!("{REPO}: 3 of 3 files good (0123456)\n"));
    fs::write(repo(&home).join("blobs").join(etag(WEIGHTS, &pattern(50_000, 3))), "other").unwrap();
    let output = run(&["verify", "tiny", "-q"]);
    assert_fails(&output, 6, &["found 1 bad or missing file in 1 model", "inferno verify tiny --repair"]);
    assert!(text(&output.stdout).contains("bad      model.safetensors"), "{}", text(&output.stdout));
    let output = run(&["verify", "tiny", "-q", "--revision", "main"]);
    assert_fails(&output, 6, &["inferno verify tiny --revision main --repair"]);
    let output = run(&["verify", "--repair"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("1 file fetched again"), "{}", text(&output.stdout));
    assert!(run(&["verify"]).status.success());

    fs::write(repo(&home).join("blobs/begun.parts"), vec![0; 100_000]).unwrap();
    let output = run(&["prune"]);
    assert_eq!(text(&output.stdout), format!("{REPO}: 1 file, 100.0 KB\n100.0 KB freed\n"));
    assert_fails(&run(&["remove", "tiny"]), 2, &["only part of a name", &format!("inferno remove {REPO}")]);
    let output = run(&["remove", "tiny-model"]);
    assert_eq!(text(&output.stdout), format!("removed {REPO} (0123456): 50.0 KB freed\n"));
    assert_fails(&run(&["remove", "tiny-model"]), 3, &["tiny", "inferno list"]);
    assert_fails(&run(&["verify", "tiny"]), 3, &["tiny"]);
}

/// Starts a fake hub that serves the demo model as `REPO`.
fn demo_hub() -> FakeHub {
    let files: Vec<(String, Vec<u8>)> = fs::read_dir(demo_dir())
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect();
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (name.as_str(), &bytes[..])).collect();
    FakeHub::start(&files)
}

#[test]
fn play_offers_to_download_a_missing_model() {
    let fake = demo_hub();
    let home = TempDir::new().unwrap();
    let args = ["play", REPO, "--device", "cpu", "--prompt", "How do I download a model?"];
    assert_fails(&command(&home, &fake, &args).output().unwrap(), 3, &[&format!("inferno download {REPO}")]);
    assert!(fake.take_lines().is_empty(), "inferno contacted the hub without asking");

    let ask = |answer: &str| {
        let mut command = command(&home, &fake, &args);
        command.stdin(Stdio::inherit());
        let mut terminal = spawn_command(command, Some(60_000)).unwrap();
        let question = terminal.exp_string("[Y/n]").unwrap();
        assert!(question.contains(&format!("{REPO} is not downloaded; download")), "{question}");
        terminal.send_line(answer).unwrap();
        terminal.exp_eof().unwrap()
    };
    let refused = ask("n");
    assert!(refused.contains(&format!("inferno download {REPO}")), "{refused}");
    assert!(!repo(&home).exists());
    let answer = ask("y");
    assert!(answer.contains("inferno download"), "{answer}");
    assert!(repo(&home).join("refs/main").exists());

    // `list` now shows two models: `REPO`, which `play` has used, and the demo model, which no command has used.
    let list = |args: &[&str]| text(&command(&home, &fake, args).output().unwrap().stdout);
    let models: serde_json::Value = serde_json::from_str(&list(&["list", "--json", "--sort", "used"])).unwrap();
    assert_eq!(models[0]["name"], REPO);
    assert!(models[0]["last_used"].as_str().unwrap().starts_with("20"), "{models}");
    assert!(models[1]["last_used"].is_null());
    let table = list(&["list", "--sort", "size"]);
    assert!(table.contains("USED") && table.contains("now"), "{table}");
    assert_eq!(command(&home, &fake, &["list", "--sort", "color"]).output().unwrap().status.code(), Some(2));
    let output = command(&home, &fake, &["tokenize", "tiny-mod", "hello"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}
