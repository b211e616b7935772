//! Tests of hub responses that are long, slow, deceptive or malformed.
//!
//! Each response must lead to the right result or to one error, within limits on time and memory.
//! Other tests check that suggested commands are quoted, and that no token is sent over http to other machines.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use inferno::hub::{FileFilter, Hub, HubConfig, Limits};
use tempfile::TempDir;

use super::process::command;
use super::{Machine, fast_limits, include_only, message_and_code};
use crate::harness::TestCase;
use crate::support::bounded::bounded;
use crate::support::fake_hub::{COMMIT, FakeHub, INDEX, REPO, etag};
use crate::support::named_cases;
use crate::support::program::text;

/// Starts a fake hub that answers every request for a listing with `listing`.
fn with_listing(listing: impl Into<Vec<u8>>) -> FakeHub {
    let fake = FakeHub::single();
    fake.change(|state| state.raw_listing = Some(Arc::new(listing.into())));
    fake
}

/// Returns a listing of `files`, each of which is a JSON object.
fn listing_of(files: impl IntoIterator<Item = String>) -> String {
    format!(r#"{{"sha":"{COMMIT}","siblings":[{}]}}"#, files.into_iter().collect::<Vec<_>>().join(","))
}

fn file(name: &str) -> String {
    format!(r#"{{"rfilename":{},"size":1,"blobId":"{}"}}"#, serde_json::to_string(name).unwrap(), "a".repeat(40))
}

#[test]
fn download_of_sixty_thousand_files_starts_at_once() {
    let files = (0..60_000)
        .map(|number| format!(r#"{{"rfilename":"data/{number:05}.bin","size":1000,"blobId":"{number:040x}"}}"#));
    let fake = with_listing(listing_of(files));
    let home = TempDir::new().unwrap();
    let start = Instant::now();
    let mut download = command(&home, &fake, &["download", REPO, "--include", "*"]);
    let mut child = download.stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let elapsed = start.elapsed();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(line, "60000 files, 60.0 MB\n");
    println!("the first line of output arrived after {elapsed:.1?}");
    // The limit is high, because other tests use the CPU at the same time.
    assert!(elapsed < Duration::from_secs(30), "{elapsed:?}");
}

#[test]
fn many_names_of_one_file_are_downloaded() {
    let config = br#"{"a":1}"#;
    let etag = etag("config.json", config);
    let name = |number: usize| if number == 0 { "config.json".to_string() } else { format!("copies/{number}.json") };
    let files = (0..20_000)
        .map(|number| format!(r#"{{"rfilename":"{}","size":{},"blobId":"{etag}"}}"#, name(number), config.len()));
    let fake = with_listing(listing_of(files));
    fake.change(|state| drop(state.files.insert("config.json".into(), config.to_vec())));
    let home = TempDir::new().unwrap();
    let output = bounded(command(&home, &fake, &["download", REPO, "--include", "*"]));
    output.assert_succeeds();
    let snapshot = home.path().join("models/models--org--tiny-model/snapshots").join(COMMIT);
    assert_eq!(fs::read(snapshot.join("copies/19999.json")).unwrap(), config);
    assert_eq!(fake.take_lines().len(), 2, "expected one request for the listing and one for the contents");
}

#[test]
fn long_lists_are_searched_and_shown_quickly() {
    // The index names 60,000 shards, but the hub lists only the first 59,999.
    let shard = |number: usize| format!("model-{number:05}-of-60000.safetensors");
    let map: Vec<String> = (0..60_000).map(|number| format!(r#""{number}":"{}""#, shard(number))).collect();
    let index = format!(r#"{{"weight_map":{{{}}}}}"#, map.join(","));
    let names = ["config.json".to_string(), "tokenizer.json".to_string(), INDEX.to_string()];
    let fake = FakeHub::start(&[(INDEX, index.as_bytes())]);
    let etag = etag(INDEX, index.as_bytes());
    let mut files: Vec<String> = names.into_iter().chain((0..59_999).map(shard)).map(|name| file(&name)).collect();
    files[2] = format!(r#"{{"rfilename":"{INDEX}","size":{},"blobId":"{etag}"}}"#, index.len());
    fake.change(|state| state.raw_listing = Some(Arc::new(listing_of(files).into())));
    let output = bounded(command(&TempDir::new().unwrap(), &fake, &["download", REPO]));
    output.assert_fails(1, &["lacks 'model-59999-of-60000.safetensors'"]);
    let output = bounded(command(&TempDir::new().unwrap(), &fake, &["show", REPO, "--remote"]));
    output.assert_fails(1, &["lists 60000 shards, but the limit is 2048"]);

    // The hub lists 60,000 GGUF models with 1024 shards each, but only the first shard of each model.
    let models = (0..60_000).map(|number| file(&format!("m-Q{number}-00001-of-01024.gguf")));
    let fake = with_listing(listing_of(models));
    for (args, model) in [
        (&["download", REPO][..], "m-Q29-00001-of-01024.gguf"),
        (&["show", REPO, "--remote"], "inferno show org/tiny-model:Q29 --remote"),
    ] {
        let output = bounded(command(&TempDir::new().unwrap(), &fake, args));
        output.assert_fails(2, &["several GGUF models", model, "and 59970 more"]);
    }

    // The hub lists files that are 250 folders deep, and another file at the path of the innermost folder.
    let folder = "a/".repeat(250);
    let files = (0..60_000).map(|number| file(&format!("{folder}{number}")));
    let fake = with_listing(listing_of(files.chain([file(&folder[..499])])));
    let output = bounded(command(&TempDir::new().unwrap(), &fake, &["download", REPO]));
    output.assert_fails(1, &["both as a file and as a folder"]);
}

#[test]
fn slow_answers_are_given_up() {
    let limits = Limits { response_timeout: Duration::from_millis(300), ..fast_limits() };
    let slow = |machine: &Machine| Hub::new(HubConfig { limits: limits.clone(), ..machine.config() });
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let start = Instant::now();
    fake.change(|state| state.listing_pace = Some((1, Duration::from_millis(20))));
    let (message, code) = message_and_code(slow(&machine).download(REPO, None, &FileFilter::default(), &()));
    assert!(code == 5 && message.contains("the hub sent only"), "{message}");
    assert_eq!(fake.take_lines().len(), 1, "a slow listing was requested again");

    // `Hub::inspect`, which `show --remote` calls, also gives up on a slow file.
    let fake = FakeHub::start(&[("config.json", &[b' '; 10_000])]);
    let machine = Machine::new(fake.endpoint());
    fake.change(|state| state.pace = Some((1, Duration::from_millis(20))));
    let error = slow(&machine).inspect(REPO, None).unwrap_err();
    assert!(error.to_string().contains("the hub sent only"), "{error:#}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());

    // A listing may take longer than the response timeout if its bytes arrive fast enough.
    let files = (0..2_000).map(|number| file(&format!("{number}.txt")));
    let fake = with_listing(listing_of(files));
    fake.change(|state| state.listing_pace = Some((5_000, Duration::from_millis(20))));
    let machine = Machine::new(fake.endpoint());
    let (message, _) = message_and_code(slow(&machine).download(REPO, None, &include_only("*.onnx"), &()));
    assert!(message.contains("'org/tiny-model': no file matches --include"), "{message}");
}

#[test]
fn deceptive_file_names_are_refused() {
    for (name, shown) in [
        ("model\u{202e}sr.gguf", r"'model\u{202e}sr.gguf'"),
        ("\u{200b}config.json", r"'\u{200b}config.json'"),
        ("a\u{2028}error: run this", r"'a\u{2028}error: run this'"),
        ("a\nerror: run this", r"'a\nerror: run this'"),
        ("a\u{1b}[2J", r"'a\u{1b}[2J'"),
        ("a\u{0}b", r"'a\u{0}b'"),
    ] {
        let fake = with_listing(listing_of([file("config.json"), file(name)]));
        for args in [&["download", REPO][..], &["show", REPO, "--remote"]] {
            let output = bounded(command(&TempDir::new().unwrap(), &fake, args));
            output.assert_fails(1, &[&format!("that inferno cannot use: {shown}")]);
        }
    }
}

/// A listing that the hub sends, and the error of `inferno download` for it.
struct RefusedListing {
    listing: Vec<u8>,
    exit_code: i32,
    message: &'static str,
}

fn refused_listings() -> Vec<TestCase<RefusedListing>> {
    let sha = format!(r#""sha":"{COMMIT}""#);
    let sibling = |fields: &str| format!(r#"{{{sha},"siblings":[{{"rfilename":"a",{fields}}}]}}"#);
    let long = "x".repeat(1 << 20);
    let digits = "9".repeat(1 << 20);
    let arrays = "[".repeat(1 << 20);
    let objects = r#"{"a":"#.repeat(1 << 20);
    let malformed: Vec<(&str, Vec<u8>)> = vec![
        ("empty", b"".into()),
        ("null", b"null".into()),
        ("list", b"[]".into()),
        ("not_utf8", b"\xff\xfe".into()),
        ("text_not_utf8", b"{\"sha\":\"\xc3\"}".into()),
        ("lone_surrogate", br#"{"sha":"\ud800"}"#.into()),
        ("no_commit", r#"{"siblings":[]}"#.into()),
        ("two_commits", format!("{{{sha},{sha}}}").into()),
        ("files_are_an_object", format!(r#"{{{sha},"siblings":{{}}}}"#).into()),
        ("file_is_a_number", format!(r#"{{{sha},"siblings":[1]}}"#).into()),
        ("files_are_a_text", format!(r#"{{{sha},"siblings":"{long}"}}"#).into()),
        ("negative_size", sibling(r#""size":-1"#).into()),
        ("fractional_size", sibling(r#""size":1e3"#).into()),
        ("size_over_64_bits", sibling(r#""size":18446744073709551616"#).into()),
        ("size_with_a_million_digits", sibling(&format!(r#""size":{digits}"#)).into()),
        ("etag_is_an_object", sibling(&format!(r#""blobId":{{"{long}":1}}"#)).into()),
        ("nested_files", format!(r#"{{{sha},"siblings":{arrays}"#).into()),
        ("nested_lists", format!(r#"{{{sha},"x":{arrays}"#).into()),
        ("nested_objects", format!(r#"{{{sha},"x":{objects}"#).into()),
    ];
    let files = |names: &[&str]| listing_of(names.iter().map(|name| file(name)));
    let impossible = [
        ("long_commit", format!(r#"{{"sha":"{long}"}}"#), "invalid commit hash for 'org/tiny-model': 'xxx"),
        ("long_name", files(&[&long]), "is not a valid path in a repository"),
        ("file_twice", files(&["a", "a"]), "lists 'a' in 'org/tiny-model' twice"),
        ("parent_folder", files(&["../a"]), "cannot use: '../a' is not a valid path"),
        ("absolute_path", files(&["/a"]), "cannot use: '/a' is not a valid path"),
        ("size_over_a_pebibyte", sibling(r#""size":1125899906842625"#), "impossible size for 'a'"),
        ("long_hash", sibling(&format!(r#""blobId":"{long}""#)), "invalid hash for 'a': 'xxx"),
    ];
    let malformed = malformed.into_iter().map(|(name, listing)| {
        (name, RefusedListing { listing, exit_code: 5, message: "the response is not from a model hub" })
    });
    let impossible = impossible
        .map(|(name, listing, message)| (name, RefusedListing { listing: listing.into(), exit_code: 1, message }));
    named_cases(malformed.chain(impossible))
}

#[test(each = refused_listings)]
fn refused_listings_are_one_error(RefusedListing { listing, exit_code, message }: RefusedListing) {
    let fake = with_listing(listing);
    bounded(command(&TempDir::new().unwrap(), &fake, &["download", REPO])).assert_fails(exit_code, &[message]);
}

#[test]
fn listing_with_too_many_files_is_an_error() {
    let fake = with_listing(listing_of((0..300_000).map(|_| file("a"))));
    let output = bounded(command(&TempDir::new().unwrap(), &fake, &["download", REPO]));
    output.assert_fails(1, &["more than 200000 files"]);
}

#[test]
fn names_that_differ_in_case_are_different_files() {
    let fake = FakeHub::start(&[("README.md", b"1"), ("readme.md", b"2"), ("config.json", b"{}")]);
    let machine = Machine::new(fake.endpoint());
    let snapshot = machine.hub().download(REPO, None, &include_only("*.md"), &()).unwrap();
    assert_eq!(fs::read(snapshot.path.join("README.md")).unwrap(), b"1");
    assert_eq!(fs::read(snapshot.path.join("readme.md")).unwrap(), b"2");
}

#[test]
fn huge_answers_are_not_read_to_the_end() {
    // The listing is 200 MiB long. The program must stop reading at the limit of 64 MiB.
    let fake = with_listing(vec![b' '; 200 << 20]);
    let output = bounded(command(&TempDir::new().unwrap(), &fake, &["download", REPO]));
    output.assert_fails(5, &["the list of files is larger than 64 MiB"]);
    assert_eq!(fake.take_lines().len(), 1, "the list of files was requested again");

    let index = vec![b' '; 40 << 20];
    let fake = FakeHub::start(&[("config.json", b"{}"), ("tokenizer.json", b"{}"), (INDEX, &index)]);
    for lists_sizes in [true, false] {
        fake.change(|state| state.lists_sizes = lists_sizes);
        let output = bounded(command(&TempDir::new().unwrap(), &fake, &["download", REPO]));
        output.assert_fails(1, &["model.safetensors.index.json is too large (41.9 MB)"]);
    }
    // The limit of 100 MB applies to each safetensors header and to the sum of all headers.
    // Here, each of 20 files claims a header of 90 MB, so only the sum exceeds the limit.
    let name = |number: usize| format!("{number}.safetensors");
    let map: Vec<String> = (0..20).map(|number| format!(r#""{number}":"{}""#, name(number))).collect();
    let index = format!(r#"{{"weight_map":{{{}}}}}"#, map.join(","));
    let header = [&(90_000_000u64).to_le_bytes()[..], &vec![b' '; 90_000_000]].concat();
    let names: Vec<String> = (0..20).map(name).collect();
    let mut files: Vec<(&str, &[u8])> = vec![("config.json", b"{}"), (INDEX, index.as_bytes())];
    files.extend(names[..1].iter().map(|name| (name.as_str(), &header[..])));
    let fake = FakeHub::start(&files);
    let listed = ["config.json".to_string(), INDEX.to_string()].into_iter().chain(names.iter().cloned());
    let listed = listed.map(|name| format!(r#"{{"rfilename":"{name}"}}"#));
    fake.change(|state| {
        state.raw_listing = Some(Arc::new(listing_of(listed).into()));
        for name in &names[1..] {
            state.files.insert(name.clone(), header[..200_000].to_vec());
        }
    });
    let output = bounded(command(&TempDir::new().unwrap(), &fake, &["show", REPO, "--remote"]));
    assert_eq!(output.status.code(), Some(1), "{}", output.stderr);
    assert!(output.stderr.contains("header"), "{}", output.stderr);
}

#[test]
fn suggested_commands_are_safe_to_paste() {
    let fake = FakeHub::start(&[("a-$(reboot).gguf", b"GGUF"), ("b-'; reboot; '.gguf", b"GGUF")]);
    let home = TempDir::new().unwrap();
    let output = bounded(command(&home, &fake, &["download", REPO]));
    output.assert_fails(2, &["inferno download 'org/tiny-model:$(reboot)'\n"]);
    let output = bounded(command(&home, &fake, &["show", REPO, "--remote"]));
    let shown =
        ["inferno show 'org/tiny-model:$(reboot)' --remote", r"inferno show 'org/tiny-model:'\''; reboot; '\''' --"];
    output.assert_fails(2, &shown);
}

#[test]
fn token_is_not_sent_over_http_to_other_machines() {
    let fake = FakeHub::single();
    let run = |endpoint: &str, args: &[&str]| {
        let home = TempDir::new().unwrap();
        let mut command = command(&home, &fake, args);
        // The fake hub also serves as the proxy, which inferno uses for all hosts except this machine.
        command.env("HF_ENDPOINT", endpoint).env("HTTP_PROXY", fake.endpoint()).env("HF_TOKEN", "hf_secret");
        let output = command.output().unwrap();
        (output, fake.take_heads().iter().filter(|head| head.contains("hf_secret")).count())
    };
    let (output, sent) = run(&fake.endpoint(), &["download", REPO]);
    assert!(output.status.success() && sent > 0, "{}", text(&output.stderr));
    assert!(!text(&output.stderr).contains("warning"), "{}", text(&output.stderr));
    let warning = "warning: the access token is not sent to http://hub.invalid: ";
    for args in [&["download", REPO][..], &["show", REPO, "--remote"]] {
        let (output, sent) = run("http://hub.invalid", args);
        let stderr = text(&output.stderr);
        assert_eq!(sent, 0, "{args:?}");
        assert_eq!(stderr.matches(warning).count(), 1, "{stderr}");
    }
    let (output, sent) = run("http://hub.invalid", &["doctor"]);
    assert_eq!(sent, 0);
    assert!(text(&output.stdout).contains("the access token is not sent"), "{}", text(&output.stdout));
    // No token was sent, so 401 means that the repository is missing or private, not that the token was rejected.
    fake.change(|state| state.listing_refused = Some((401, "", "")));
    let (output, _) = run("http://hub.invalid", &["download", REPO]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    assert!(!text(&output.stderr).contains("rejects the token"), "{}", text(&output.stderr));
}
