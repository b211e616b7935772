//! Seeded schedules of everything that can go wrong, all at once: each ends in the model to the last byte or in an error
//! that says what is the matter, with nothing on the disk that calls itself whole and is not.

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use inferno::hub::{FileFilter, FileState, Hub, HubConfig, Limits, Snapshot};

use super::fake::{FakeHub, Fault, INDEX, REPO, SHARDS, World, etag, pattern};
use super::{Machine, failure, impatient};
use crate::support::Random;

const SCHEDULES: u64 = 200;
/// All that is fetched of it.
const FILES: [&str; 7] =
    ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", INDEX, SHARDS[0], SHARDS[1]];

#[test]
fn two_hundred_schedules_end_well_or_clearly() {
    let next = AtomicU64::new(0);
    let (whole, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= SCHEDULES {
                        return;
                    }
                    let schedule = std::panic::catch_unwind(|| Schedule::new(seed).run());
                    let (good, bad) = schedule.unwrap_or_else(|_| panic!("in schedule {seed}"));
                    whole.fetch_add(good, Ordering::Relaxed);
                    failed.fetch_add(bad, Ordering::Relaxed);
                }
            });
        }
    });
    let (whole, failed) = (whole.into_inner(), failed.into_inner());
    println!("{whole} downloads came to their end, {failed} failed and said why");
    assert!(whole >= SCHEDULES as usize && failed >= 40, "{whole} and {failed}: too kind or too cruel to show much");
}

struct Schedule {
    random: Random,
    fake: FakeHub,
    /// Where large files are redirected to, now and then.
    storage: Option<FakeHub>,
    machine: Machine,
    limits: Limits,
    /// All contents that the hub has ever had, by hash.
    contents: BTreeMap<String, Vec<u8>>,
}

impl Schedule {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let (fake, storage) = (FakeHub::sharded(), FakeHub::sharded());
        let machine = Machine::new(fake.endpoint());
        let limits = Limits {
            connections: 1 + random.below(4),
            part_bytes: [3_000, 10_000, 1 << 16, 1 << 30][random.below(4)],
            // A busy machine may be silent for as long.
            stall_timeout: Duration::from_millis(400),
            max_failures: 1 + random.below(4) as u32,
            ..impatient()
        };
        let storage = (random.below(3) == 0).then_some(storage);
        fake.change(|world| {
            world.does_ranges = random.below(8) > 0;
            world.tells_sizes = random.below(4) > 0;
            world.storage = storage.as_ref().map(FakeHub::endpoint);
            if random.below(3) == 0 {
                let faults = ["503 No", "429 No\r\nretry-after: 0", "500 No", "502 No", "408 No"];
                world.listing_faults.extend((0..random.below(4)).map(|_| faults[random.below(faults.len())]));
            }
        });
        let mut schedule = Self { random, fake, storage, machine, limits, contents: BTreeMap::new() };
        schedule.plan();
        schedule
    }

    /// What goes wrong from here on.
    fn plan(&mut self) {
        let faults: Vec<Fault> = (0..self.random.below(26)).map(|_| fault(&mut self.random)).collect();
        let throughout = self.random.below(2) == 0;
        self.serving().change(|world| {
            world.faults = faults.into();
            if throughout {
                world.faulty = |_| true;
            }
        });
        let world = self.fake.world.lock().unwrap();
        self.contents.extend(world.files.iter().map(|(name, bytes)| (etag(name, bytes), bytes.clone())));
    }

    /// Who sends the contents.
    fn serving(&self) -> &FakeHub {
        self.storage.as_ref().unwrap_or(&self.fake)
    }

    fn change_all(&self, change: impl Fn(&mut World)) {
        self.fake.change(&change);
        if let Some(storage) = &self.storage {
            storage.change(&change);
        }
    }

    /// The same command again and again, as a person types it; the hub may have a new commit in between. At the end
    /// nothing goes wrong any more.
    fn run(mut self) -> (usize, usize) {
        let hub = Hub::new(HubConfig { limits: self.limits.clone(), ..self.machine.config() });
        let (mut whole, mut failed) = (0, 0);
        for attempt in 0..4 {
            if attempt == 3 {
                self.change_all(|world| world.faults.clear());
                self.fake.change(|world| world.listing_faults.clear());
            }
            match hub.download(REPO, None, &FileFilter::default(), &()) {
                Ok(snapshot) => {
                    whole += 1;
                    self.check_whole(&hub, &snapshot);
                }
                Err(error) => {
                    assert!(attempt < 3, "nothing went wrong any more: {error:#}");
                    failed += 1;
                    let (message, code) = failure(Err(error));
                    assert!([1, 4, 5, 6].contains(&code) && message.len() > 20, "{code}: {message}");
                    // The one error without a code of its own: the hub does not have what it lists.
                    assert!(code != 1 || message.contains("does not have it"), "{message}");
                    self.check_nothing_bad(&hub);
                }
            }
            if attempt < 2 && self.random.below(3) == 0 {
                let seed = self.random.below(250);
                let commit = format!("{:040x}", self.random.next());
                self.change_all(|world| {
                    world.commit = commit.clone();
                    world.files.insert(SHARDS[0].into(), pattern(150_000, seed));
                });
                self.plan();
            }
        }
        (whole, failed)
    }

    fn check_whole(&self, hub: &Hub, snapshot: &Snapshot) {
        let world = self.fake.world.lock().unwrap();
        assert_eq!(snapshot.revision.as_ref(), Some(&world.commit));
        for name in FILES {
            assert!(fs::read(snapshot.path.join(name)).unwrap() == world.files[name], "{name}");
        }
        assert_eq!(hub.find(REPO, None).unwrap(), *snapshot);
        self.check_nothing_bad(hub);
    }

    /// Whatever has the name of something whole is whole.
    fn check_nothing_bad(&self, hub: &Hub) {
        for entry in fs::read_dir(self.machine.repo().join("blobs")).into_iter().flatten() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if !name.contains('.') {
                assert!(fs::read(&path).unwrap() == self.contents[name], "{name} has other contents");
            }
        }
        let Ok(snapshot) = hub.find(REPO, None) else { return };
        // A model is not only its weights.
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
        // Refusals, the last two, end a download; there must be others as well.
        9..=12 => Fault::Status(STATUSES[random.below(8)]),
        13 => Fault::Status(STATUSES[random.below(10)]),
        14 => Fault::Portal,
        15 => Fault::OtherPart,
        16 => Fault::WrongRange,
        17 => Fault::TooMuch,
        18 => Fault::Everything,
        _ => Fault::Fine,
    }
}
