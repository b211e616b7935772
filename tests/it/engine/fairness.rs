//! Checks with a virtual clock that the scheduler gives every tenant its share of tokens.

use std::collections::BTreeMap;
use std::time::Duration;

use inferno::engine::blocks::BlockManager;
use inferno::engine::scheduler::{NewSequence, Scheduler, SchedulerConfig, SequenceId, SequenceWork};
use inferno::nn::kv_cache::BLOCK_TOKENS;

/// The load from a group of a tenant's clients. Each client sends a new request when its previous request ends.
#[derive(Clone, Copy)]
struct Load {
    tenant: u64,
    clients: usize,
    prompt: usize,
    answer: usize,
    priority: i32,
}

impl Load {
    const fn new(tenant: u64, clients: usize, prompt: usize, answer: usize) -> Self {
        Self { tenant, clients, prompt, answer, priority: 0 }
    }
}

/// The limits of the scheduler in the simulation: 512 tokens per step, and 16 sequences of up to 2,048 tokens.
const CONFIG: SchedulerConfig =
    SchedulerConfig { token_budget: 512, max_sequences: 16, context: 2048, prompt_segments: None };

/// Simulates the clients of several tenants that share one scheduler.
struct TenantSimulator {
    scheduler: Scheduler,
    loads: Vec<Load>,
    /// The load and the number of generated tokens of each sequence.
    sequences: BTreeMap<SequenceId, (Load, usize)>,
    next: SequenceId,
    now: Duration,
    /// The weighted number of tokens served to each tenant since the last call of `take_served`.
    /// Tokens of a chunk that starts in the prompt count once, and all other tokens count twice.
    /// Tokens that are recomputed after a preemption count again.
    served: BTreeMap<u64, usize>,
}

impl TenantSimulator {
    fn new(loads: &[Load], blocks: usize) -> Self {
        let mut simulator = Self {
            scheduler: Scheduler::new(CONFIG, BlockManager::new(vec![None], blocks)),
            loads: Vec::new(),
            sequences: BTreeMap::new(),
            next: 0,
            now: Duration::ZERO,
            served: BTreeMap::new(),
        };
        loads.iter().for_each(|&load| simulator.add(load));
        simulator
    }

    /// Adds the clients of a load. Each client submits its first request.
    fn add(&mut self, load: Load) {
        self.loads.push(load);
        (0..load.clients).for_each(|_| self.submit(load));
    }

    fn submit(&mut self, load: Load) {
        let id = self.next;
        self.next += 1;
        // Prompts have no common prefix.
        let prompt = (0..load.prompt as u32).map(|position| position ^ (id as u32) << 12).collect();
        self.sequences.insert(id, (load, 0));
        self.scheduler.submit(NewSequence {
            id,
            prompt,
            cache_salt: None,
            prompt_segments: None,
            computes_whole_prompt: false,
            forks: Vec::new(),
            max_tokens: load.answer,
            tenant: load.tenant,
            priority: load.priority,
            arrival: self.now,
            deadline: None,
        });
    }

    /// Runs steps until `time` has passed on the virtual clock.
    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            let plan = self.scheduler.plan(self.now);
            assert!(!plan.work.is_empty());
            let tokens: usize = plan.work.iter().map(|work| work.range.len()).sum();
            self.now += Duration::from_micros(2000 + 10 * tokens as u64);
            for SequenceWork { id, range, is_last } in plan.work {
                self.scheduler.advance(id, range.end);
                let Some((load, generated)) = self.sequences.get_mut(&id) else { panic!("no sequence {id}") };
                let load = *load;
                let weight = if range.start < load.prompt { 1 } else { 2 };
                *self.served.entry(load.tenant).or_default() += weight * range.len();
                if is_last {
                    self.scheduler.push(id, id as u32);
                    *generated += 1;
                    if *generated == load.answer {
                        self.scheduler.finish(id);
                        self.sequences.remove(&id);
                        self.submit(load);
                    }
                }
            }
        }
    }

    /// Returns `served`, and sets all its counts to 0.
    fn take_served(&mut self) -> BTreeMap<u64, usize> {
        std::mem::take(&mut self.served)
    }
}

/// The number of blocks for `max_sequences` sequences of full length, plus the scratch block.
const AMPLE: usize = CONFIG.max_sequences * CONFIG.context / BLOCK_TOKENS + 1;

/// The number of blocks for about ten sequences of 360 tokens. More sequences may run, so some must be preempted.
const FEW: usize = 60;

#[test]
fn a_tenant_with_a_hundred_times_its_share_leaves_others_theirs() {
    let others = (1..8).map(|tenant| Load::new(tenant, 2, 300, 60));
    for blocks in [AMPLE, FEW] {
        let served = |clients: usize, prompt: usize, answer: usize| {
            let loads: Vec<_> = [Load::new(0, clients, prompt, answer)].into_iter().chain(others.clone()).collect();
            let mut simulator = TenantSimulator::new(&loads, blocks);
            simulator.run(Duration::from_secs(60));
            simulator.take_served()
        };
        for (prompt, answer) in [(300, 60), (300, 1), (1, 60), (1500, 500)] {
            let (fair, unfair) = (served(2, prompt, answer), served(200, prompt, answer));
            println!(
                "{blocks} blocks, {prompt} prompt tokens, {answer} answer tokens: tokens served to each tenant: \
                 {fair:?} if the first tenant has 2 clients, {unfair:?} if it has 200"
            );
            // With two clients, the first tenant may use less than its share. Other tenants then get the unused part,
            // so `before` may be more than a share.
            let share = unfair.values().sum::<usize>() / 8;
            for tenant in 1..8 {
                let (before, after) = (fair[&tenant], unfair[&tenant]);
                assert!(
                    after * 10 >= before.min(share) * 9,
                    "tenant {tenant} was served {after} tokens when the first tenant had 200 clients, but {before} \
                     when it had 2; the share of a tenant is {share}"
                );
            }
        }
    }
}

#[test]
fn tenants_that_wait_get_equal_numbers_of_tokens() {
    let loads = [Load::new(0, 100, 1000, 20), Load::new(1, 30, 50, 300), Load::new(2, 300, 10, 10)];
    let mut simulator = TenantSimulator::new(&loads, AMPLE);
    simulator.run(Duration::from_secs(20));
    for _ in 0..3 {
        simulator.take_served();
        simulator.run(Duration::from_secs(60));
        let served = simulator.take_served();
        let (least, most) = (served.values().min().unwrap(), served.values().max().unwrap());
        println!("{served:?}");
        assert!(least * 10 >= most * 9, "{served:?}");
    }
}

#[test]
fn an_idle_tenant_collects_no_credit() {
    let mut simulator = TenantSimulator::new(&[Load::new(0, 50, 200, 50)], AMPLE);
    simulator.run(Duration::from_secs(100));
    simulator.add(Load::new(1, 50, 200, 50));
    simulator.run(Duration::from_secs(2));
    simulator.take_served();
    simulator.run(Duration::from_secs(10));
    let served = simulator.take_served();
    assert!(served[&0] * 10 >= served[&1] * 9 && served[&1] * 10 >= served[&0] * 9, "{served:?}");
}

#[test]
fn priority_counts_only_within_a_tenant() {
    let urgent = Load { priority: -1_000_000, ..Load::new(0, 50, 200, 50) };
    let loads = [urgent, Load::new(0, 1, 200, 50), Load::new(1, 50, 200, 50)];
    let mut simulator = TenantSimulator::new(&loads, AMPLE);
    simulator.run(Duration::from_secs(30));
    let served = simulator.take_served();
    assert!(served[&1] * 10 >= served[&0] * 9, "{served:?}");
    // The urgent requests of the first tenant delay only its own request of normal priority.
    let patient = simulator.sequences.values().filter(|(load, _)| load.tenant == 0 && load.priority == 0);
    assert_eq!(patient.map(|&(_, generated)| generated).collect::<Vec<_>>(), [0]);
}
