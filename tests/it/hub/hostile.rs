//! Tests of downloads from servers and networks that fail, stall or corrupt the data.
//!
//! Each download must end with the exact file, or with an error and no file on disk that looks like a model.

use std::fs;
use std::time::{Duration, Instant};

use inferno::hub::{FileFilter, Hub, HubConfig, Limits, SnapshotSource};

use super::{Machine, Recorder, fast_limits, file_names, include_only, message_and_code};
use crate::harness::TestCase;
use crate::support::fake_hub::{COMMIT, FakeHub, Fault, REPO, etag, pattern};
use crate::support::named_cases;

const WEIGHTS: &str = "model.safetensors";

/// Returns a hub client that uses three connections and requests files in ranges of at most 10,000 bytes.
fn in_ranges(machine: &Machine) -> Hub {
    let limits = Limits { range_bytes: 10_000, connections: 3, ..fast_limits() };
    Hub::new(HubConfig { limits, ..machine.config() })
}

/// Returns a hub client that uses one connection and requests each file as a single range.
fn in_one(machine: &Machine) -> Hub {
    let limits = Limits { connections: 1, ..fast_limits() };
    Hub::new(HubConfig { limits, ..machine.config() })
}

/// Checks that a download succeeds despite `faults`. Returns its progress events.
fn survives(hub: impl Fn(&Machine) -> Hub, faults: &[Fault]) -> Vec<String> {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|state| state.faults.extend(faults));
    let events = Recorder::default();
    let snapshot = hub(&machine).download(REPO, None, &FileFilter::default(), &events).unwrap();
    let weights = fs::read(snapshot.path.join(WEIGHTS)).unwrap();
    assert!(weights == pattern(50_000, 3), "{faults:?}");
    let blobs = file_names(&machine.repo().join("blobs"));
    assert!(blobs.iter().all(|name| !name.contains('.')), "temporary files remain: {blobs:?}");
    assert!(fake.state.lock().unwrap().faults.is_empty(), "not all faults were injected");
    events.all()
}

/// Checks that a download fails if every request for the weights gets `fault`, that it leaves no model behind,
/// and that a later download succeeds. Returns the error message and the exit code of the first download.
fn fails(hub: impl Fn(&Machine) -> Hub, fault: Fault) -> (String, u8) {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|state| state.faults.extend([fault; 100]));
    let message_and_code = message_and_code(hub(&machine).download(REPO, None, &FileFilter::default(), &()));
    assert!(!machine.repo().join("refs").exists(), "{fault:?}");
    assert!(machine.hub().find(REPO, None).is_err(), "{fault:?}");
    assert!(!machine.repo().join("blobs").join(etag(WEIGHTS, &pattern(50_000, 3))).exists(), "{fault:?}");
    // The next download may reuse bytes that the failed download fetched.
    fake.change(|state| state.faults.clear());
    let snapshot = machine.download().unwrap();
    assert!(fs::read(snapshot.path.join(WEIGHTS)).unwrap() == pattern(50_000, 3), "{fault:?}");
    message_and_code
}

/// Returns the numbers of bytes after which the connection breaks.
fn cuts() -> Vec<TestCase<usize>> {
    named_cases([0, 1, 9_999, 10_000, 10_001, 33_333, 49_999].map(|cut| (format!("after_{cut}_bytes"), cut)))
}

#[test(each = cuts)]
fn truncated_body_is_resumed(cut: usize) {
    survives(in_one, &[Fault::Cut(cut)]);
    survives(in_ranges, &[Fault::Cut(cut % 10_000), Fault::None, Fault::Cut(1), Fault::Cut(cut % 7_000)]);
}

#[test]
fn failures_are_counted_from_the_last_progress() {
    // In a file of 50,000 bytes, the count of failures restarts after every 4 KiB of progress.
    // A download therefore survives many broken connections.
    survives(in_one, &[Fault::Cut(2_000); 20]);
    let (message, code) = fails(in_one, Fault::Cut(0));
    assert_eq!(code, 5, "{message}");
    assert!(
        message.contains("stopped at 0 of 50000 bytes") && message.contains("run the same command to resume"),
        "{message}"
    );
}

#[test]
fn server_that_sends_one_byte_per_connection_is_given_up() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|state| state.faults.extend([Fault::Cut(1); 100]));
    let (message, code) = message_and_code(in_one(&machine).download(REPO, None, &FileFilter::default(), &()));
    assert_eq!(code, 5, "{message}");
    assert!(message.contains("stopped at 5 of 50000 bytes"), "{message}");
    // The client makes five attempts: the first one and four retries.
    assert_eq!(fake.take_lines().iter().filter(|line| line.ends_with(WEIGHTS)).count(), 5);
    // The next download starts after the five bytes that the failed download received.
    fake.change(|state| state.faults.clear());
    in_one(&machine).download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert!(fake.take_heads().iter().any(|head| head.to_lowercase().contains("range: bytes=5-49999")));
}

#[test]
fn stalled_transfer_is_retried_after_the_timeout() {
    // Long enough for the fake hub to respond, even on a busy machine.
    let stall_timeout = Duration::from_millis(200);
    let check = |connections, range_bytes, faults: &[Fault]| {
        let limits = Limits { connections, range_bytes, stall_timeout, max_failures: 20, ..fast_limits() };
        let events = survives(|machine| Hub::new(HubConfig { limits: limits.clone(), ..machine.config() }), faults);
        // Without the stall timeout, the stalls would end without a timeout, when the fake hub hangs up.
        let timeouts = events.iter().filter(|line| line.contains("timeout")).count();
        assert!(timeouts >= 2, "{events:?}");
    };
    check(1, 1 << 30, &[Fault::Stall(20_000), Fault::Stall(0)]);
    check(3, 10_000, &[Fault::Stall(5_000), Fault::None, Fault::Stall(0)]);
}

const RANGE_REFUSED: Fault = Fault::Status("416 Range Not Satisfiable");

fn wrong_responses() -> Vec<TestCase<Fault>> {
    named_cases([
        ("other_range", Fault::OtherRange),
        ("wrong_range", Fault::WrongRange),
        ("body_twice", Fault::BodyTwice),
        ("portal", Fault::Portal),
    ])
}

#[test(each = wrong_responses)]
fn wrong_response_is_requested_again(fault: Fault) {
    survives(in_ranges, &[Fault::None, fault]);
    survives(in_one, &[Fault::Cut(20_000), fault]);
}

#[test]
fn refused_range_is_requested_again() {
    survives(in_ranges, &[RANGE_REFUSED, Fault::None, RANGE_REFUSED]);
}

/// Returns responses that a retry cannot repair, each with a text of the error message.
fn lasting_faults() -> Vec<TestCase<(Fault, &'static str)>> {
    named_cases([
        ("wrong_range", (Fault::WrongRange, "a range other than the requested one")),
        ("portal", (Fault::Portal, "login page")),
        ("refused_range", (RANGE_REFUSED, "outside the file")),
        ("server_error", (Fault::Status("500 No"), "HTTP 500")),
    ])
}

#[test(each = lasting_faults)]
fn download_fails_if_a_fault_lasts((fault, expected): (Fault, &'static str)) {
    let (message, code) = fails(in_ranges, fault);
    assert_eq!(code, 5, "{message}");
    assert!(message.contains(expected), "{message}");
}

#[test]
fn server_without_ranges_sends_whole_files() {
    // A server may ignore one range request or all range requests.
    survives(in_ranges, &[Fault::None, Fault::WholeFile]);
    survives(in_one, &[Fault::Cut(20_000), Fault::WholeFile]);
    let fake = FakeHub::single();
    fake.change(|state| {
        state.supports_ranges = false;
        state.faults.extend([Fault::None, Fault::Cut(30_000)]);
    });
    let machine = Machine::new(fake.endpoint());
    let snapshot = in_ranges(&machine).download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert!(fs::read(snapshot.path.join(WEIGHTS)).unwrap() == pattern(50_000, 3));
}

#[test]
fn few_whole_responses_do_not_discard_fetched_bytes() {
    for slips in 1..=3 {
        let faults: Vec<Fault> = [Fault::Cut(20_000)].into_iter().chain((0..slips).map(|_| Fault::WholeFile)).collect();
        let events = survives(in_one, &faults);
        assert_eq!(events.iter().filter(|line| **line == format!("{WEIGHTS} 0")).count(), 1, "{events:?}");
    }
}

#[cfg(unix)]
#[test]
fn download_does_not_follow_links() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let blobs = machine.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let parts = blobs.join(format!("{}.parts", etag(WEIGHTS, &pattern(50_000, 3))));
    let other = machine.dir.path().join("other");
    fs::write(&other, "precious").unwrap();
    std::os::unix::fs::symlink(&other, &parts).unwrap();
    assert!(machine.download().is_err());
    assert_eq!(fs::read(&other).unwrap(), b"precious");
}

#[test]
fn record_without_its_file_is_ignored() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let blobs = machine.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let record = blobs.join(format!("{}.parts.json", etag(WEIGHTS, &pattern(50_000, 3))));
    fs::write(&record, r#"{"done":[{"start":0,"end":50000}]}"#).unwrap();
    fake.change(|state| state.faults.extend([Fault::Status("404 No")]));
    assert!(machine.download().is_err());
    assert!(!fs::read_to_string(&record).is_ok_and(|json| json.contains("50000")));
}

#[test]
fn slow_transfer_counts_as_stalled() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|state| state.pace = Some((500, Duration::from_millis(20))));
    let limits =
        Limits { connections: 1, stall_timeout: Duration::from_millis(200), max_failures: 20, ..fast_limits() };
    let hub = Hub::new(HubConfig { limits, ..machine.config() });
    let events = Recorder::default();
    hub.download(REPO, None, &FileFilter::default(), &events).unwrap();
    assert!(events.all().iter().any(|line| line.contains("bytes arrived in 0.4 s")));
}

#[test]
fn login_page_does_not_discard_fetched_bytes() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|state| {
        state.faults.push_back(Fault::Cut(30_000));
        state.faults.extend([Fault::Portal; 5]);
    });
    let (message, code) = message_and_code(in_one(&machine).download(REPO, None, &FileFilter::default(), &()));
    assert_eq!(code, 5);
    assert!(message.contains("stopped at 30000 of 50000") && message.contains("login page"), "{message}");
    fake.take_heads();
    in_one(&machine).download(REPO, None, &FileFilter::default(), &()).unwrap();
    let heads = fake.take_heads();
    assert!(heads.iter().any(|head| head.to_lowercase().contains("range: bytes=30000-49999")), "{heads:?}");
}

#[test]
fn file_with_a_flipped_bit_is_fetched_again() {
    for (hub, at) in [(in_one as fn(&Machine) -> Hub, 0), (in_one, 49_999), (in_ranges, 1_234)] {
        let events = survives(hub, &[Fault::Flip(at)]);
        assert!(events.iter().any(|line| line.contains("the contents do not match")), "byte {at}: {events:?}");
    }
    let (message, code) = fails(in_ranges, Fault::Flip(7));
    assert_eq!(code, 6, "{message}");
    assert!(message.contains(WEIGHTS) && message.contains("twice"), "{message}");
    // Small files are verified with git's blob hash.
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|state| state.claimed_etag = Some("ce013625030ba8dba906f756967f9e9ca394464a"));
    assert_eq!(message_and_code(machine.hub().download(REPO, None, &include_only("*.json"), &())).1, 6);
    assert!(file_names(&machine.repo().join("blobs")).is_empty());
}

#[test]
fn file_of_the_wrong_length_is_an_error() {
    for bytes in [49_999, 50_001] {
        let fake = FakeHub::single();
        fake.change(|state| state.claimed_bytes = Some(bytes));
        let machine = Machine::new(fake.endpoint());
        for hub in [in_one(&machine), in_ranges(&machine)] {
            let (message, code) = message_and_code(hub.download(REPO, None, &FileFilter::default(), &()));
            assert_eq!(code, 5, "{bytes} bytes: {message}");
            assert!(machine.hub().find(REPO, None).is_err(), "{bytes} bytes");
        }
    }
}

#[test]
fn contents_of_two_versions_are_not_mixed() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|state| {
        state.faults.push_back(Fault::Cut(30_000));
        state.faults.extend([Fault::Status("500 No"); 5]);
    });
    assert_eq!(message_and_code(in_one(&machine).download(REPO, None, &FileFilter::default(), &())).1, 5);
    // If the contents of a file change, but the commit and the listed hash do not, the download fails.
    let old = etag(WEIGHTS, &pattern(50_000, 3));
    let old: &'static str = Box::leak(old.into_boxed_str());
    fake.change(|state| {
        state.faults.clear();
        state.files.insert(WEIGHTS.into(), pattern(50_000, 4));
        state.files.retain(|name, _| name == WEIGHTS || !name.contains("json"));
        state.claimed_etag = Some(old);
    });
    let (message, code) = message_and_code(in_one(&machine).download(REPO, None, &include_only("*.safetensors"), &()));
    assert_eq!(code, 6, "{message}");
    // If a new commit lists the new hash, the new contents of the file are downloaded.
    let newer = "f".repeat(40);
    fake.change(|state| {
        (state.claimed_etag, state.commit) = (None, newer.clone());
        state.files.insert("config.json".into(), b"{}".into());
        state.files.insert("tokenizer.json".into(), b"{}".into());
    });
    let snapshot = in_one(&machine).download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert_eq!(snapshot.revision, Some(newer));
    assert!(fs::read(snapshot.path.join(WEIGHTS)).unwrap() == pattern(50_000, 4));
}

#[test]
fn changed_etag_restarts_a_file_without_a_hash() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|state| {
        (state.claimed_etag, state.etag_header) = (Some("weights-v1"), Some("v1"));
        state.faults.push_back(Fault::Cut(30_000));
        state.faults.extend([Fault::Status("500 No"); 5]);
    });
    let weights = include_only("*.safetensors");
    let gone = |state: &mut crate::support::fake_hub::HubState| state.files.retain(|name, _| name == WEIGHTS);
    fake.change(gone);
    assert_eq!(message_and_code(in_one(&machine).download(REPO, None, &weights, &())).1, 5);
    fake.change(|state| {
        state.faults.clear();
        state.etag_header = Some("v2");
        state.files.insert(WEIGHTS.into(), pattern(50_000, 4));
    });
    let snapshot = in_one(&machine).download(REPO, None, &weights, &()).unwrap();
    assert!(
        fs::read(snapshot.path.join(WEIGHTS)).unwrap() == pattern(50_000, 4),
        "the file does not have the contents of the new version"
    );
}

#[test]
fn retry_after_header_is_obeyed() {
    survives(in_one, &[Fault::Status("500 No"), Fault::Status("503 No"), Fault::Status("429 No")]);
    let start = Instant::now();
    let events = survives(in_one, &[Fault::Status("429 No\r\nretry-after: 1")]);
    assert!(start.elapsed() >= Duration::from_secs(1), "{events:?}");
    assert!(events.contains(&format!("retrying {WEIGHTS} after 1000 ms: HTTP 429 Too Many Requests")), "{events:?}");
    let (message, code) = fails(in_one, Fault::Status("429 No\r\nretry-after: 3600"));
    assert_eq!(code, 5);
    assert!(message.contains("the server asks to wait 3600 s"), "{message}");

    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|state| state.listing_faults.extend(["503 No", "429 No\r\nretry-after: 0", "500 No"]));
    machine.download().unwrap();
    fake.change(|state| state.listing_faults.push_back("429 No\r\nretry-after: 3600"));
    let (message, code) = message_and_code(machine.download());
    assert_eq!(code, 5);
    assert!(message.contains("try again in 3600 s"), "{message}");
}

#[test]
fn refusals_are_not_retried() {
    for (status, code) in [("401 No", 4), ("403 No", 4), ("404 No", 1), ("403 No\r\nx-error-code: GatedRepo", 4)] {
        let fake = FakeHub::single();
        let machine = Machine::new(fake.endpoint());
        fake.change(|state| state.faults.push_back(Fault::Status(status)));
        assert_eq!(
            message_and_code(in_one(&machine).download(REPO, None, &FileFilter::default(), &())).1,
            code,
            "{status}"
        );
    }
}

#[test]
fn redirects_never_take_the_token_to_another_host() {
    let storage = FakeHub::single();
    // The storage server runs on another port of this machine. In the last URL, 127.0.0.1 is only a user name.
    for to in ["http://127.0.0.1:", "//127.0.0.1:", "http://localhost:", "http://127.0.0.1@localhost:"] {
        let fake = FakeHub::single();
        fake.change(|state| state.storage = Some(format!("{to}{}", storage.port)));
        let machine = Machine::new(fake.endpoint());
        machine.with_token().download(REPO, None, &FileFilter::default(), &()).unwrap();
        assert!(fake.take_heads().iter().all(|head| head.contains("hf_secret")), "{to}");
        let storage_requests = storage.take_heads();
        assert!(!storage_requests.is_empty(), "{to}");
        assert!(storage_requests.iter().all(|head| !head.contains("hf_secret")), "{to}: {storage_requests:?}");
    }
    // A redirect within the endpoint keeps the token.
    let fake = FakeHub::single();
    fake.change(|state| state.storage = Some(String::new()));
    let machine = Machine::new(fake.endpoint());
    machine.with_token().download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert!(fake.take_heads().iter().all(|head| head.contains("hf_secret")));
    // Redirects to schemes other than http and https are errors, and so are endless redirects.
    for nowhere in ["ftp://127.0.0.1/x?signature=SECRET&", "file:///etc/passwd?signature=SECRET&"] {
        fake.change(|state| state.storage = Some(nowhere.into()));
        fake.take_lines();
        let machine = Machine::new(fake.endpoint());
        let (message, code) = message_and_code(machine.download());
        assert_eq!(code, 5, "{nowhere}: {message}");
        assert!(message.contains("not a valid web address") && !message.contains("SECRET"), "{nowhere}: {message}");
        assert!(fake.take_lines().len() <= 5, "{nowhere}: a permanent error was retried");
    }
    fake.change(|state| state.storage = Some(format!("/{REPO}/resolve/{COMMIT}/model.safetensors?")));
    let machine = Machine::new(fake.endpoint());
    assert!(message_and_code(machine.download()).0.contains("redirects"));
}

#[test]
fn download_ends_without_waiting_for_the_end_of_the_body() {
    let start = Instant::now();
    let limits = Limits { connections: 1, stall_timeout: Duration::from_secs(60), ..fast_limits() };
    survives(|machine| Hub::new(HubConfig { limits: limits.clone(), ..machine.config() }), &[Fault::NoLength]);
    assert!(start.elapsed() < Duration::from_secs(45));
}

#[test]
fn many_ranges_over_many_connections_make_one_file() {
    let weights = pattern(1_000_003, 5);
    let fake = FakeHub::start(&[("config.json", b"{}"), ("tokenizer.json", b"{}"), (WEIGHTS, &weights)]);
    fake.change(|state| {
        state.faults.extend((0..60).map(|at| match at % 4 {
            0 => Fault::Cut(at * 50),
            1 => Fault::Status("503 No"),
            2 => Fault::WrongRange,
            _ => Fault::None,
        }));
    });
    let machine = Machine::new(fake.endpoint());
    let limits = Limits { range_bytes: 7_001, max_failures: 60, ..fast_limits() };
    let hub = Hub::new(HubConfig { limits, ..machine.config() });
    let snapshot = hub.download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert_eq!(snapshot.source, SnapshotSource::Inferno);
    assert!(fs::read(snapshot.path.join(WEIGHTS)).unwrap() == weights);
    let parts = fake.take_lines().iter().filter(|line| line.ends_with(WEIGHTS)).count();
    assert!(parts > 143, "{parts}");
}
