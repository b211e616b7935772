//! Tests downloads from a hub that follows a schedule: a random sequence of faults.
//!
//! Each download must end with the exact model or with an expected error.
//! No partial file may have the name of a complete file.

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use inferno::hub::{FileFilter, FileState, Hub, HubConfig, Limits, Snapshot};

use super::{Machine, fast_limits, message_and_code};
use crate::support::Random;
use crate::support::fake_hub::{FakeHub, Fault, HubState, INDEX, REPO, SHARDS, etag, pattern};

const SCHEDULES: u64 = 200;
/// The files that a download fetches.
const FILES: [&str; 7] =
    ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", INDEX, SHARDS[0], SHARDS[1]];

#[test]
fn two_hundred_fault_schedules_end_with_a_model_or_an_error() {
    let next = AtomicU64::new(0);
    let (succeeded, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= SCHEDULES {
                        return;
                    }
                    let schedule = std::panic::catch_unwind(|| Schedule::new(seed).run());
                    let (good, bad) = schedule.unwrap_or_else(|_| panic!("schedule {seed} failed"));
                    succeeded.fetch_add(good, Ordering::Relaxed);
                    failed.fetch_add(bad, Ordering::Relaxed);
                }
            });
        }
    });
    let (succeeded, failed) = (succeeded.into_inner(), failed.into_inner());
    println!("{succeeded} downloads succeeded, {failed} failed with an error");
    assert!(
        succeeded >= SCHEDULES as usize && failed >= 40,
        "{succeeded} succeeded, {failed} failed: the schedules have too many or too few faults"
    );
}

struct Schedule {
    random: Random,
    fake: FakeHub,
    /// The host to which the hub redirects requests for files. `None` in schedules without redirects.
    storage: Option<FakeHub>,
    machine: Machine,
    limits: Limits,
    /// The contents of every file that the hub has ever had. The key is the file's etag.
    contents: BTreeMap<String, Vec<u8>>,
}

impl Schedule {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let (fake, storage) = (FakeHub::sharded(), FakeHub::sharded());
        let machine = Machine::new(fake.endpoint());
        let limits = Limits {
            connections: 1 + random.below(4),
            range_bytes: [3_000, 10_000, 1 << 16, 1 << 30][random.below(4)],
            // Long enough for the fake hub to respond, even on a busy machine.
            stall_timeout: Duration::from_millis(400),
            max_failures: 1 + random.below(4) as u32,
            ..fast_limits()
        };
        let storage = (random.below(3) == 0).then_some(storage);
        fake.change(|state| {
            state.supports_ranges = random.below(8) > 0;
            state.lists_sizes = random.below(4) > 0;
            state.storage = storage.as_ref().map(FakeHub::endpoint);
            if random.below(3) == 0 {
                let faults = ["503 No", "429 No\r\nretry-after: 0", "500 No", "502 No", "408 No"];
                state.listing_faults.extend((0..random.below(4)).map(|_| faults[random.below(faults.len())]));
            }
        });
        let mut schedule = Self { random, fake, storage, machine, limits, contents: BTreeMap::new() };
        schedule.choose_faults();
        schedule
    }

    /// Chooses the faults for the next downloads, and records the hub's current files in `contents`.
    fn choose_faults(&mut self) {
        let faults: Vec<Fault> = (0..self.random.below(26)).map(|_| fault(&mut self.random)).collect();
        let in_all_files = self.random.below(2) == 0;
        self.content_server().change(|state| {
            state.faults = faults.into();
            if in_all_files {
                state.faulty = |_| true;
            }
        });
        let state = self.fake.state.lock().unwrap();
        self.contents.extend(state.files.iter().map(|(name, bytes)| (etag(name, bytes), bytes.clone())));
    }

    /// Returns the server that sends the file contents.
    fn content_server(&self) -> &FakeHub {
        self.storage.as_ref().unwrap_or(&self.fake)
    }

    fn change_all(&self, change: impl Fn(&mut HubState)) {
        self.fake.change(&change);
        if let Some(storage) = &self.storage {
            storage.change(&change);
        }
    }

    /// Attempts the download four times, even after a success. The last attempt has no faults.
    /// After the first and the second attempt, the hub may get a new commit.
    /// Returns how many attempts succeeded and how many failed.
    fn run(mut self) -> (usize, usize) {
        let hub = Hub::new(HubConfig { limits: self.limits.clone(), ..self.machine.config() });
        let (mut succeeded, mut failed) = (0, 0);
        for attempt in 0..4 {
            if attempt == 3 {
                self.change_all(|state| state.faults.clear());
                self.fake.change(|state| state.listing_faults.clear());
            }
            match hub.download(REPO, None, &FileFilter::default(), &()) {
                Ok(snapshot) => {
                    succeeded += 1;
                    self.check_complete(&hub, &snapshot);
                }
                Err(error) => {
                    assert!(attempt < 3, "the last attempt had no faults, but it failed: {error:#}");
                    failed += 1;
                    let (message, code) = message_and_code(Err(error));
                    assert!([1, 4, 5, 6].contains(&code) && message.len() > 20, "{code}: {message}");
                    // In these schedules, exit code 1 has only one cause: status 404 for a file that the hub lists.
                    assert!(code != 1 || message.contains("does not have it"), "{message}");
                    self.check_cache(&hub);
                }
            }
            if attempt < 2 && self.random.below(3) == 0 {
                let seed = self.random.below(250);
                let commit = format!("{:040x}", self.random.next());
                self.change_all(|state| {
                    state.commit = commit.clone();
                    state.files.insert(SHARDS[0].into(), pattern(150_000, seed));
                });
                self.choose_faults();
            }
        }
        (succeeded, failed)
    }

    fn check_complete(&self, hub: &Hub, snapshot: &Snapshot) {
        let state = self.fake.state.lock().unwrap();
        assert_eq!(snapshot.revision.as_ref(), Some(&state.commit));
        for name in FILES {
            assert!(fs::read(snapshot.path.join(name)).unwrap() == state.files[name], "{name}");
        }
        assert_eq!(hub.find(REPO, None).unwrap(), *snapshot);
        self.check_cache(hub);
    }

    /// Checks the contents of every blob, except those of unfinished downloads.
    /// If the model can be found, also checks that it has all files and that they are undamaged.
    fn check_cache(&self, hub: &Hub) {
        for entry in fs::read_dir(self.machine.repo().join("blobs")).into_iter().flatten() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if !name.contains('.') {
                assert!(fs::read(&path).unwrap() == self.contents[name], "{name} has the wrong contents");
            }
        }
        let Ok(snapshot) = hub.find(REPO, None) else { return };
        assert!(FILES.iter().all(|name| snapshot.path.join(name).is_file()), "{snapshot:?}");
        for checked in hub.verify(Some(REPO), snapshot.revision.as_deref(), &()).unwrap() {
            assert!(checked.files.iter().all(|(_, state)| *state == FileState::Good), "{checked:?}");
        }
    }
}

fn fault(random: &mut Random) -> Fault {
    const STATUSES: [&str; 10] = [
        "500 No",
        "502 No",
        "503 No",
        "504 No",
        "408 No",
        "429 No",
        "429 No\r\nretry-after: 0",
        "416 Range Not Satisfiable",
        "403 No",
        "404 No",
    ];
    match random.below(20) {
        0..=6 => Fault::Cut(random.below(120_000) >> random.below(12)),
        7 => Fault::Stall(random.below(60_000)),
        8 => Fault::Flip(random.below(200_000)),
        // If the hub itself sends status 403 or 404, the download ends, so the schedules use them less often.
        9..=12 => Fault::Status(STATUSES[random.below(8)]),
        13 => Fault::Status(STATUSES[random.below(10)]),
        14 => Fault::Portal,
        15 => Fault::OtherRange,
        16 => Fault::WrongRange,
        17 => Fault::BodyTwice,
        18 => Fault::WholeFile,
        _ => Fault::None,
    }
}
