//! Servers and networks that fail in every way there is. What comes out is the file to the last byte, or an error and
//! nothing that looks like a model.

use std::fs;
use std::time::{Duration, Instant};

use inferno::hub::{FileFilter, Hub, HubConfig, Limits, Source};

use super::fake::{COMMIT, FakeHub, Fault, REPO, etag, pattern};
use super::{Heard, Machine, failure, impatient, included, names_in};

const WEIGHTS: &str = "model.safetensors";

/// The weights come in five parts or more.
fn in_parts(machine: &Machine) -> Hub {
    let limits = Limits { part_bytes: 10_000, connections: 3, ..impatient() };
    Hub::new(HubConfig { limits, ..machine.config() })
}

/// As a whole, by one connection.
fn in_one(machine: &Machine) -> Hub {
    let limits = Limits { connections: 1, ..impatient() };
    Hub::new(HubConfig { limits, ..machine.config() })
}

/// Downloads with such faults, and says what was heard.
fn survives(hub: impl Fn(&Machine) -> Hub, faults: &[Fault]) -> Vec<String> {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|world| world.faults.extend(faults));
    let heard = Heard::default();
    let snapshot = hub(&machine).download(REPO, None, &FileFilter::default(), &heard).unwrap();
    let weights = fs::read(snapshot.path.join(WEIGHTS)).unwrap();
    assert!(weights == pattern(50_000, 3), "{faults:?}");
    let blobs = names_in(&machine.repo().join("blobs"));
    assert!(blobs.iter().all(|name| !name.contains('.')), "nothing is left over: {blobs:?}");
    assert!(fake.world.lock().unwrap().faults.is_empty(), "all of it has happened");
    heard.all()
}

/// Fails with such faults, and leaves nothing that looks like a model.
fn fails(hub: impl Fn(&Machine) -> Hub, fault: Fault) -> (String, u8) {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|world| world.faults.extend([fault; 100]));
    let failure = failure(hub(&machine).download(REPO, None, &FileFilter::default(), &()));
    assert!(!machine.repo().join("refs").exists(), "{fault:?}");
    assert!(machine.hub().find(REPO, None).is_err(), "{fault:?}");
    assert!(!machine.repo().join("blobs").join(etag(WEIGHTS, &pattern(50_000, 3))).exists(), "{fault:?}");
    // What was there stays good for the next attempt.
    fake.change(|world| world.faults.clear());
    let snapshot = machine.hub().download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert!(fs::read(snapshot.path.join(WEIGHTS)).unwrap() == pattern(50_000, 3), "{fault:?}");
    failure
}

#[test]
fn bodies_are_cut_anywhere() {
    for cut in [0, 1, 9_999, 10_000, 10_001, 33_333, 49_999] {
        survives(in_one, &[Fault::Cut(cut)]);
        survives(in_parts, &[Fault::Cut(cut % 10_000), Fault::Fine, Fault::Cut(1), Fault::Cut(cut % 7_000)]);
    }
    // Many cuts are no failure as long as something comes.
    survives(in_one, &[Fault::Cut(2_000); 20]);
    let (message, code) = fails(in_one, Fault::Cut(0));
    assert_eq!(code, 5, "{message}");
    assert!(
        message.contains("stopped at 0 of 50000 bytes") && message.contains("run the same command to resume"),
        "{message}"
    );
}

#[test]
fn a_server_that_falls_silent_is_left() {
    let start = Instant::now();
    // A busy machine may be silent for as long.
    let stall_timeout = Duration::from_millis(200);
    let limits =
        |connections, part_bytes| Limits { connections, part_bytes, stall_timeout, max_failures: 20, ..impatient() };
    let with =
        |limits: Limits| move |machine: &Machine| Hub::new(HubConfig { limits: limits.clone(), ..machine.config() });
    let heard = survives(with(limits(1, 1 << 30)), &[Fault::Stall(20_000), Fault::Stall(0)]);
    assert!(heard.iter().any(|line| line.contains("timeout")), "{heard:?}");
    survives(with(limits(3, 10_000)), &[Fault::Stall(5_000), Fault::Fine, Fault::Stall(0)]);
    assert!(start.elapsed() < Duration::from_secs(15), "the fake hub itself hangs up after 20");
}

#[test]
fn parts_are_not_what_was_asked_for() {
    for fault in [Fault::OtherPart, Fault::WrongRange, Fault::TooMuch, Fault::Portal] {
        survives(in_parts, &[Fault::Fine, fault]);
        survives(in_one, &[Fault::Cut(20_000), fault]);
    }
    let refused = Fault::Status("416 Range Not Satisfiable");
    survives(in_parts, &[refused, Fault::Fine, refused]);
    for (fault, said) in [
        (Fault::WrongRange, "another part"),
        (Fault::Portal, "login page"),
        (refused, "no such part"),
        (Fault::Status("500 No"), "HTTP 500"),
    ] {
        let (message, code) = fails(in_parts, fault);
        assert_eq!(code, 5, "{message}");
        assert!(message.contains(said), "{message}");
    }
}

#[test]
fn a_server_without_ranges_sends_the_file_from_its_beginning() {
    // In the middle of it, once or from then on.
    survives(in_parts, &[Fault::Fine, Fault::Everything]);
    survives(in_one, &[Fault::Cut(20_000), Fault::Everything]);
    let fake = FakeHub::single();
    fake.change(|world| {
        world.does_ranges = false;
        world.faults.extend([Fault::Fine, Fault::Cut(30_000)]);
    });
    let machine = Machine::new(fake.endpoint());
    let snapshot = in_parts(&machine).download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert!(fs::read(snapshot.path.join(WEIGHTS)).unwrap() == pattern(50_000, 3));
}

#[test]
fn one_server_without_ranges_costs_nothing_of_what_is_here() {
    for slips in 1..=3 {
        let faults: Vec<Fault> =
            [Fault::Cut(20_000)].into_iter().chain((0..slips).map(|_| Fault::Everything)).collect();
        let heard = survives(in_one, &faults);
        assert_eq!(heard.iter().filter(|line| **line == format!("{WEIGHTS} 0")).count(), 1, "{heard:?}");
    }
}

#[cfg(unix)]
#[test]
fn what_is_fetched_goes_into_no_file_but_its_own() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let blobs = machine.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let parts = blobs.join(format!("{}.parts", etag(WEIGHTS, &pattern(50_000, 3))));
    let other = machine.dir.path().join("other");
    fs::write(&other, "precious").unwrap();
    std::os::unix::fs::symlink(&other, &parts).unwrap();
    assert!(machine.hub().download(REPO, None, &FileFilter::default(), &()).is_err());
    assert_eq!(fs::read(&other).unwrap(), b"precious");
}

#[test]
fn a_note_without_its_file_is_not_believed() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    let blobs = machine.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let note = blobs.join(format!("{}.parts.json", etag(WEIGHTS, &pattern(50_000, 3))));
    fs::write(&note, r#"{"done":[{"start":0,"end":50000}]}"#).unwrap();
    fake.change(|world| world.faults.extend([Fault::Status("404 No")]));
    assert!(machine.hub().download(REPO, None, &FileFilter::default(), &()).is_err());
    assert!(!fs::read_to_string(&note).is_ok_and(|note| note.contains("50000")));
}

#[test]
fn a_trickle_is_as_good_as_a_stall() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|world| world.pace = Some((500, Duration::from_millis(20))));
    let limits = Limits { connections: 1, stall_timeout: Duration::from_millis(200), max_failures: 20, ..impatient() };
    let hub = Hub::new(HubConfig { limits, ..machine.config() });
    let heard = Heard::default();
    hub.download(REPO, None, &FileFilter::default(), &heard).unwrap();
    assert!(heard.all().iter().any(|line| line.contains("bytes arrived in 0.4 s")));
}

#[test]
fn a_login_page_costs_nothing_of_what_is_here() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|world| {
        world.faults.push_back(Fault::Cut(30_000));
        world.faults.extend([Fault::Portal; 5]);
    });
    let (message, code) = failure(in_one(&machine).download(REPO, None, &FileFilter::default(), &()));
    assert_eq!(code, 5);
    assert!(message.contains("stopped at 30000 of 50000") && message.contains("login page"), "{message}");
    fake.heads();
    in_one(&machine).download(REPO, None, &FileFilter::default(), &()).unwrap();
    let heads = fake.heads();
    assert!(heads.iter().any(|head| head.to_lowercase().contains("range: bytes=30000-49999")), "{heads:?}");
}

#[test]
fn flipped_bytes_are_found_and_fetched_anew() {
    for (hub, at) in [(in_one as fn(&Machine) -> Hub, 0), (in_one, 49_999), (in_parts, 1_234)] {
        let heard = survives(hub, &[Fault::Flip(at)]);
        assert!(heard.iter().any(|line| line.contains("its contents do not match")), "{heard:?}");
    }
    let (message, code) = fails(in_parts, Fault::Flip(7));
    assert_eq!(code, 6, "{message}");
    assert!(message.contains(WEIGHTS) && message.contains("twice"), "{message}");
    // A small file has git's hash, and is judged too.
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|world| world.claimed_etag = Some("ce013625030ba8dba906f756967f9e9ca394464a"));
    assert_eq!(failure(machine.hub().download(REPO, None, &included("*.json"), &())).1, 6);
    assert!(names_in(&machine.repo().join("blobs")).is_empty());
}

#[test]
fn a_wrong_length_is_no_file() {
    for bytes in [49_999, 50_001] {
        let fake = FakeHub::single();
        fake.change(|world| world.claimed_bytes = Some(bytes));
        let machine = Machine::new(fake.endpoint());
        for hub in [in_one(&machine), in_parts(&machine)] {
            let (message, code) = failure(hub.download(REPO, None, &FileFilter::default(), &()));
            assert_eq!(code, 5, "{message}");
            assert!(machine.hub().find(REPO, None).is_err());
        }
    }
}

#[test]
fn contents_that_change_in_the_middle_are_not_mixed() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|world| {
        world.faults.push_back(Fault::Cut(30_000));
        world.faults.extend([Fault::Status("500 No"); 5]);
    });
    assert_eq!(failure(in_one(&machine).download(REPO, None, &FileFilter::default(), &())).1, 5);
    // The same commit with other contents, under the old hash: that cannot be.
    let old = etag(WEIGHTS, &pattern(50_000, 3));
    let old: &'static str = Box::leak(old.into_boxed_str());
    fake.change(|world| {
        world.faults.clear();
        world.files.insert(WEIGHTS.into(), pattern(50_000, 4));
        world.files.retain(|name, _| name == WEIGHTS || !name.contains("json"));
        world.claimed_etag = Some(old);
    });
    let (message, code) = failure(in_one(&machine).download(REPO, None, &included("*.safetensors"), &()));
    assert_eq!(code, 6, "{message}");
    // A new commit that says so is fetched as what it is.
    let newer = "f".repeat(40);
    fake.change(|world| {
        (world.claimed_etag, world.commit) = (None, newer.clone());
        world.files.insert("config.json".into(), b"{}".into());
        world.files.insert("tokenizer.json".into(), b"{}".into());
    });
    let snapshot = in_one(&machine).download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert_eq!(snapshot.revision, Some(newer));
    assert!(fs::read(snapshot.path.join(WEIGHTS)).unwrap() == pattern(50_000, 4));
}

#[test]
fn without_a_hash_the_etag_must_stay_the_same() {
    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|world| {
        (world.claimed_etag, world.etag_header) = (Some("weights-v1"), Some("v1"));
        world.faults.push_back(Fault::Cut(30_000));
        world.faults.extend([Fault::Status("500 No"); 5]);
    });
    let weights = included("*.safetensors");
    let gone = |world: &mut super::fake::World| world.files.retain(|name, _| name == WEIGHTS);
    fake.change(gone);
    assert_eq!(failure(in_one(&machine).download(REPO, None, &weights, &())).1, 5);
    fake.change(|world| {
        world.faults.clear();
        world.etag_header = Some("v2");
        world.files.insert(WEIGHTS.into(), pattern(50_000, 4));
    });
    let snapshot = in_one(&machine).download(REPO, None, &weights, &()).unwrap();
    assert!(fs::read(snapshot.path.join(WEIGHTS)).unwrap() == pattern(50_000, 4), "no mixture");
}

#[test]
fn busy_servers_are_asked_again_when_they_say() {
    survives(in_one, &[Fault::Status("500 No"), Fault::Status("503 No"), Fault::Status("429 No")]);
    let start = Instant::now();
    let heard = survives(in_one, &[Fault::Status("429 No\r\nretry-after: 1")]);
    assert!(start.elapsed() >= Duration::from_secs(1), "{heard:?}");
    assert!(heard.contains(&format!("retrying {WEIGHTS} after 1000 ms: HTTP 429 Too Many Requests")), "{heard:?}");
    let (message, code) = fails(in_one, Fault::Status("429 No\r\nretry-after: 3600"));
    assert_eq!(code, 5);
    assert!(message.contains("asks to wait 3600 s"), "{message}");

    let fake = FakeHub::single();
    let machine = Machine::new(fake.endpoint());
    fake.change(|world| world.listing_faults.extend(["503 No", "429 No\r\nretry-after: 0", "500 No"]));
    machine.hub().download(REPO, None, &FileFilter::default(), &()).unwrap();
    fake.change(|world| world.listing_faults.push_back("429 No\r\nretry-after: 3600"));
    let (message, code) = failure(machine.hub().download(REPO, None, &FileFilter::default(), &()));
    assert_eq!(code, 5);
    assert!(message.contains("try again in 3600 s"), "{message}");
}

#[test]
fn refusals_are_not_asked_again() {
    for (status, code) in [("401 No", 4), ("403 No", 4), ("404 No", 1), ("403 No\r\nx-error-code: GatedRepo", 4)] {
        let fake = FakeHub::single();
        let machine = Machine::new(fake.endpoint());
        fake.change(|world| world.faults.push_back(Fault::Status(status)));
        assert_eq!(failure(in_one(&machine).download(REPO, None, &FileFilter::default(), &())).1, code, "{status}");
    }
}

#[test]
fn the_token_stays_with_the_endpoint_in_every_redirect() {
    let storage = FakeHub::single();
    // The same host at another port, written in two ways, and another name of it.
    for to in ["http://127.0.0.1:", "//127.0.0.1:", "http://localhost:", "http://127.0.0.1@localhost:"] {
        let fake = FakeHub::single();
        fake.change(|world| world.storage = Some(format!("{to}{}", storage.port)));
        let machine = Machine::new(fake.endpoint());
        machine.with_token().download(REPO, None, &FileFilter::default(), &()).unwrap();
        assert!(fake.heads().iter().all(|head| head.contains("hf_secret")), "{to}");
        let there = storage.heads();
        assert!(!there.is_empty());
        assert!(there.iter().all(|head| !head.contains("hf_secret")), "{to}: {there:?}");
    }
    // On the endpoint itself it is needed.
    let fake = FakeHub::single();
    fake.change(|world| world.storage = Some(String::new()));
    let machine = Machine::new(fake.endpoint());
    machine.with_token().download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert!(fake.heads().iter().all(|head| head.contains("hf_secret")));
    // What leads nowhere, or round in circles.
    for nowhere in ["ftp://127.0.0.1/x?signature=SECRET&", "file:///etc/passwd?signature=SECRET&"] {
        fake.change(|world| world.storage = Some(nowhere.into()));
        fake.lines();
        let machine = Machine::new(fake.endpoint());
        let (message, code) = failure(machine.hub().download(REPO, None, &FileFilter::default(), &()));
        assert_eq!(code, 5, "{message}");
        assert!(message.contains("not a web address") && !message.contains("SECRET"), "{message}");
        assert!(fake.lines().len() <= 5, "what cannot change is not asked again");
    }
    fake.change(|world| world.storage = Some(format!("/{REPO}/resolve/{COMMIT}/model.safetensors?")));
    let machine = Machine::new(fake.endpoint());
    assert!(failure(machine.hub().download(REPO, None, &FileFilter::default(), &())).0.contains("redirects"));
}

#[test]
fn the_end_of_a_file_is_not_waited_for() {
    let start = Instant::now();
    let limits = Limits { connections: 1, stall_timeout: Duration::from_secs(10), ..impatient() };
    survives(|machine| Hub::new(HubConfig { limits: limits.clone(), ..machine.config() }), &[Fault::Endless]);
    assert!(start.elapsed() < Duration::from_secs(9));
}

#[test]
fn many_parts_by_many_connections_make_one_file() {
    let weights = pattern(1_000_003, 5);
    let fake = FakeHub::start(&[("config.json", b"{}"), ("tokenizer.json", b"{}"), (WEIGHTS, &weights)]);
    fake.change(|world| {
        world.faults.extend((0..60).map(|at| match at % 4 {
            0 => Fault::Cut(at * 50),
            1 => Fault::Status("503 No"),
            2 => Fault::WrongRange,
            _ => Fault::Fine,
        }));
    });
    let machine = Machine::new(fake.endpoint());
    let limits = Limits { part_bytes: 7_001, max_failures: 60, ..impatient() };
    let hub = Hub::new(HubConfig { limits, ..machine.config() });
    let snapshot = hub.download(REPO, None, &FileFilter::default(), &()).unwrap();
    assert_eq!(snapshot.source, Source::Inferno);
    assert!(fs::read(snapshot.path.join(WEIGHTS)).unwrap() == weights);
    let parts = fake.lines().iter().filter(|line| line.ends_with(WEIGHTS)).count();
    assert!(parts > 143, "{parts}");
}
