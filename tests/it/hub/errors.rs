//! Tests of downloads that the hub or inferno refuses, and of a hub that does not answer.

use std::net::TcpListener;
use std::path::Path;

use inferno::hub::FileFilter;

use super::{Machine, file_names, message_and_code};
use crate::harness::TestCase;
use crate::support::fake_hub::{COMMIT, FakeHub, HubState, INDEX, REPO};
use crate::support::named_cases;

/// A response of the hub to the request for the list of files, and the error for it.
struct ListingRefusal {
    status: u16,
    /// The header `x-error-code`, which not all mirrors send.
    error_code: &'static str,
    body: &'static str,
    exit_code: u8,
    message: &'static str,
}

fn listing_refusals() -> Vec<TestCase<ListingRefusal>> {
    let page = "<html>what you saw previously is gone</html>";
    let no_repo = r#"{"error":"Repository not found"}"#;
    let no_revision = r#"{"error":"Invalid rev id: v9"}"#;
    let cases = [
        ("no_repo_with_code", 401, "RepoNotFound", "", 3, "cannot find repository"),
        ("no_repo_without_code", 401, "", "", 3, "cannot find repository"),
        ("no_repo_with_a_page", 404, "", page, 3, "cannot find repository"),
        ("no_repo_with_json", 404, "", no_repo, 3, "cannot find repository"),
        ("no_revision_with_code", 404, "RevisionNotFound", "", 3, "cannot find revision 'v9'"),
        ("no_revision_with_json", 404, "", no_revision, 3, "cannot find revision 'v9'"),
        ("gated_without_token", 401, "GatedRepo", "", 4, "accept its license"),
        ("gated_for_this_user", 403, "GatedRepo", "", 4, "accept its license"),
        ("too_many_requests", 429, "", "", 5, "HTTP 429"),
        ("unavailable", 503, "", "", 5, "HTTP 503"),
        ("login_page", 200, "", "<html>log in</html>", 5, "not from a model hub"),
    ];
    named_cases(cases.map(|(name, status, error_code, body, exit_code, message)| {
        (name, ListingRefusal { status, error_code, body, exit_code, message })
    }))
}

#[test(each = listing_refusals)]
fn each_refusal_of_the_hub_has_its_error(refusal: ListingRefusal) {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|state| state.listing_refused = Some((refusal.status, refusal.error_code, refusal.body)));
    let (message, code) = message_and_code(machine.hub().download(REPO, Some("v9"), &FileFilter::default(), &()));
    assert_eq!(code, refusal.exit_code, "{message}");
    assert!(message.contains(refusal.message), "{message}");
}

#[test]
fn rejected_tokens_and_gated_files_are_errors() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|state| state.listing_refused = Some((401, "", "")));
    let (message, code) = message_and_code(machine.with_token().download(REPO, None, &FileFilter::default(), &()));
    assert!(code == 4 && message.contains("rejects the token"), "{message}");
    // Anyone may list a gated repository. Only downloads of its files are restricted.
    fake.change(|state| (state.listing_refused, state.files_refused) = (None, Some((403, "GatedRepo"))));
    assert_eq!(message_and_code(machine.download()).1, 4);
    fake.change(|state| state.files_refused = Some((401, "")));
    let (message, code) = message_and_code(machine.with_token().download(REPO, None, &FileFilter::default(), &()));
    assert_eq!(code, 4);
    assert!(!message.contains("hf_secret"));
    assert!(machine.hub().find(REPO, None).is_err(), "the refused download left a model behind");
}

#[test]
fn token_is_sent_to_the_endpoint_only() {
    let (fake, storage) = (FakeHub::single(), FakeHub::single());
    // inferno treats `localhost` and the endpoint's 127.0.0.1 as different hosts.
    fake.change(|state| state.storage = Some(format!("http://localhost:{}", storage.port)));
    let machine = Machine::new(fake.endpoint());
    machine.with_token().download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert!(fake.take_heads().iter().all(|head| head.to_lowercase().contains("authorization: bearer hf_secret")));
    let storage_requests = storage.take_heads();
    // config.json and tokenizer.json have the same contents, so one request fetches both.
    assert_eq!(storage_requests.len(), 2, "{storage_requests:?}");
    assert!(storage_requests.iter().all(|head| !head.contains("hf_secret")), "{storage_requests:?}");
}

#[test]
fn error_names_a_hub_that_does_not_answer() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let machine = Machine::new(format!("http://127.0.0.1:{closed}"));
    let (message, code) = message_and_code(machine.download());
    assert_eq!(code, 5);
    assert!(message.contains(&format!("127.0.0.1:{closed}")), "{message}");
}

#[test]
fn error_names_the_formats_of_the_repository() {
    let fake = FakeHub::start(&[("config.json", b"{}"), ("a.onnx", b"ONNX"), ("pytorch_model.bin", b"pickle")]);
    let machine = Machine::new(fake.endpoint());
    let (message, _) = message_and_code(machine.download());
    assert!(message.contains("needs safetensors or GGUF") && message.contains(".bin, .onnx"), "{message}");
}

#[test]
fn full_disk_is_an_error_before_the_download() {
    let fake = FakeHub::single();
    fake.change(|state| state.claimed_bytes = Some(1 << 49));
    let machine = Machine::new(fake.endpoint());
    let (message, code) = message_and_code(machine.download());
    assert_eq!(code, 11, "{message}");
    assert_eq!(fake.take_lines().len(), 1, "expected only the request for the listing");
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
        let (message, _) = message_and_code(machine.download());
        assert!(message.contains("not a plain file name"), "{shard}: {message}");
        assert!(outside(&machine).is_empty(), "{shard}");
        assert!(!Path::new("/tmp/inferno-escaped").exists());
    }
    for name in ["../config.json", "/tmp/inferno-escaped", "a/../../b", "a\\b", "a\u{0}b"] {
        let fake = FakeHub::single();
        fake.change(|state| drop(state.files.insert(name.to_string(), b"{}".to_vec())));
        let machine = Machine::new(fake.endpoint());
        let (message, _) = message_and_code(machine.download());
        assert!(message.contains("not a valid path in a repository"), "{name:?}: {message}");
        assert!(file_names(machine.dir.path()).is_empty(), "{name:?}");
    }
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let message = || message_and_code(machine.download()).0;
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
        assert!(message.contains("use org/name"), "{repo:?}: {message}");
    }
    assert!(
        message_and_code(machine.hub().download(REPO, Some("../x"), &FileFilter::default(), &()))
            .0
            .contains("is not a valid revision")
    );
    assert!(fake.take_lines().is_empty());
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

#[test]
fn impossible_listings_are_refused() {
    for (change, expected) in [
        ((|state| state.claimed_bytes = Some(u64::MAX)) as fn(&mut HubState), "impossible size"),
        (|state| drop(state.files.insert("config.json/x".into(), b"{}".into())), "as a file and as a folder"),
    ] {
        let fake = FakeHub::single();
        fake.change(change);
        let machine = Machine::new(fake.endpoint());
        for result in [machine.download().map(|_| ()), machine.hub().inspect(REPO, None).map(|_| ())] {
            let error = result.unwrap_err();
            assert!(error.to_string().contains(expected), "expected {expected:?} in {error}");
        }
        assert!(!machine.repo().exists());
    }
}
