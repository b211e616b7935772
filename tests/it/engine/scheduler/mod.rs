//! Tests of the scheduler. Two of them simulate many requests with a virtual clock, and check every plan.
//! The others submit a few sequences, and check what the scheduler plans for them.
//!
//! - `scenario`: random scheduler configurations and requests
//! - `simulator`: runs a scenario and checks every plan
//!
//! To simulate a million requests:
//! `INFERNO_SIMULATED_REQUESTS=1000000 cargo test --release --test it scheduler::`

mod scenario;
mod simulator;

use std::collections::BTreeSet;
use std::time::Duration;

use inferno::engine::blocks::BlockManager;
use inferno::engine::scheduler::{NewSequence, Scheduler, SchedulerConfig, SequenceId, SequenceWork};
use inferno::nn::kv_cache::{BLOCK_TOKENS, peak_blocks};

use self::scenario::{Request, Scenario, assign_prompt_segments, assign_tenants, random_scenario};
use self::simulator::{Simulator, Summary, Tracked};

/// Returns the maximum number of blocks that a sequence of `tokens` tokens uses, in all layer groups together.
/// Each chunk of the sequence has at most `chunk` tokens.
fn sequence_peak_blocks(windows: &[Option<usize>], tokens: usize, chunk: usize) -> usize {
    windows.iter().map(|&window| peak_blocks(window, tokens, chunk)).sum()
}

#[test]
fn random_requests_get_what_the_scheduler_promises() {
    let count: usize = match std::env::var("INFERNO_SIMULATED_REQUESTS") {
        Ok(count) => count.parse().expect("INFERNO_SIMULATED_REQUESTS must be a number"),
        Err(_) => 20_000,
    };
    let mut total = Summary::default();
    let mut simulated = 0;
    for seed in 0.. {
        if simulated >= count {
            break;
        }
        let mut scenario = random_scenario(seed, 20 + seed as usize % 200);
        if seed % 3 == 0 {
            assign_tenants(&mut scenario, seed);
        }
        if seed % 4 == 1 {
            assign_prompt_segments(&mut scenario, seed);
        }
        simulated += scenario.requests.len();
        let Scenario { config, windows, blocks, .. } = &scenario;
        let summary = on_panic(
            || eprintln!("seed {seed}: {config:?}, windows {windows:?}, {blocks} blocks"),
            || Simulator::new(&scenario, seed).run(),
        );
        if seed % 16 == 0 {
            assert_eq!(Simulator::new(&scenario, seed).run(), summary, "two runs of the same scenario differ");
        }
        total.plans ^= summary.plans;
        total.finished += summary.finished;
        total.canceled += summary.canceled;
        total.expired += summary.expired;
        total.preemptions += summary.preemptions;
        total.protected += summary.protected;
        total.hit_tokens += summary.hit_tokens;
        total.long_chunks += summary.long_chunks;
        total.forked += summary.forked;
        total.steps += summary.steps;
        total.duration += summary.duration;
    }
    println!("{total:?}");
    let Summary { finished, canceled, expired, preemptions, protected, hit_tokens, long_chunks, .. } = total;
    assert!(finished > count / 2 && canceled > count / 50 && expired > count / 50, "{total:?}");
    assert!(preemptions > count / 50 && protected > count / 200 && total.forked > count / 50, "{total:?}");
    assert!(hit_tokens as usize > count && long_chunks > count / 10, "{total:?}");
}

/// Calls `run`. If `run` panics, calls `report` and resumes the panic.
fn on_panic<T>(report: impl Fn(), run: impl FnOnce() -> T) -> T {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
        Ok(result) => result,
        Err(panic) => {
            report();
            std::panic::resume_unwind(panic)
        }
    }
}

#[test]
fn low_priority_finishes_while_high_priority_requests_arrive() {
    let request = |arrival_ms: u64, priority| Request {
        prompt: (0..100).map(|position| arrival_ms as u32 + position).collect(),
        max_tokens: 20,
        answer: 20,
        tenant: 0,
        priority,
        arrival: Duration::from_millis(arrival_ms),
        deadline: None,
        cancel: None,
        forks: 0,
        is_fork: false,
        prompt_segments: None,
    };
    // The test submits 50 requests per second for 30 seconds.
    // The scheduler can finish about 33 per second, four at a time.
    let mut requests: Vec<_> = (0..1500).map(|n| request(20 * n, 0)).collect();
    let low = requests.partition_point(|request| request.arrival < Duration::from_secs(1));
    requests.insert(low, request(1001, 3));
    let config = SchedulerConfig { token_budget: 256, max_sequences: 4, context: 200, prompt_segments: None };
    let scenario = Scenario { config, windows: vec![None], blocks: 100, plans_ahead: false, requests };
    let mut simulator = Simulator::new(&scenario, 1);
    let summary = simulator.run();
    assert!(summary.duration > Duration::from_secs(40), "{summary:?}");
    // With priority 3, the request counts as arriving six seconds later: at 7 s instead of 1 s.
    let before = scenario.requests.iter().filter(|request| request.arrival < Duration::from_secs(7)).count();
    let started = |tracked: &Tracked| tracked.started.expect("all requests start");
    let start = started(&simulator.tracked[low]);
    let earlier = simulator.tracked.iter().filter(|tracked| started(tracked) < start).count();
    assert!(
        (before - 5..before + 5).contains(&earlier),
        "{earlier} requests started before the low-priority request, expected about {before}"
    );
}

/// Returns two schedulers: for a model with full attention, and for one that also has layers with 128-token windows.
fn schedulers(config: SchedulerConfig, blocks: usize) -> [Scheduler; 2] {
    let new = |windows| Scheduler::new(config, BlockManager::new(windows, blocks + 1));
    [new(vec![None]), new(vec![None, Some(128)])]
}

/// Returns a sequence with default options. Callers override some of them, such as `max_tokens`.
fn new_sequence(id: SequenceId, prompt: Vec<u32>) -> NewSequence {
    NewSequence {
        id,
        prompt,
        cache_salt: None,
        prompt_segments: None,
        computes_whole_prompt: false,
        forks: Vec::new(),
        max_tokens: 1,
        tenant: 0,
        priority: 0,
        arrival: Duration::ZERO,
        deadline: None,
    }
}

fn submit(scheduler: &mut Scheduler, id: SequenceId, len: usize, max_tokens: usize) {
    let prompt = (0..len as u32).map(|position| position ^ (id as u32) << 16).collect();
    let arrival = Duration::from_millis(id);
    scheduler.submit(NewSequence { max_tokens, arrival, ..new_sequence(id, prompt) });
}

/// Plans a step and completes it.
/// Returns the id of each sequence in the step, and the number of its tokens that the step computes.
fn step(scheduler: &mut Scheduler) -> Vec<(SequenceId, usize)> {
    let plan = scheduler.plan(Duration::from_secs(1));
    for &SequenceWork { id, ref range, is_last } in &plan.work {
        scheduler.advance(id, range.end);
        if is_last {
            scheduler.push(id, 1);
        }
    }
    plan.work.into_iter().map(|work| (work.id, work.range.len())).collect()
}

#[test]
fn a_long_prompt_leaves_half_of_the_budget_to_others() {
    let config = SchedulerConfig { token_budget: 1000, max_sequences: 10, context: 5000, prompt_segments: None };
    for mut scheduler in schedulers(config, 400) {
        submit(&mut scheduler, 0, 2500, 10);
        assert_eq!(step(&mut scheduler), [(0, 1000)], "sequence 0 must get the whole budget");
        submit(&mut scheduler, 1, 100, 10);
        submit(&mut scheduler, 2, 150, 10);
        assert_eq!(step(&mut scheduler), [(0, 750), (1, 100), (2, 150)]);
        submit(&mut scheduler, 3, 450, 10);
        submit(&mut scheduler, 4, 450, 10);
        assert_eq!(step(&mut scheduler), [(1, 1), (2, 1), (0, 500), (3, 450), (4, 48)]);
        assert_eq!(step(&mut scheduler), [(1, 1), (2, 1), (3, 1), (0, 250), (4, 402)]);
        assert_eq!(step(&mut scheduler), [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]);
    }
}

#[test]
fn a_prompt_may_fill_the_context_and_all_blocks() {
    for context in [1, 63, 64, 65, 128, 640] {
        for windows in [vec![None], vec![None, Some(128)], vec![Some(100)]] {
            let config = SchedulerConfig { token_budget: 100, max_sequences: 2, context, prompt_segments: None };
            let blocks = sequence_peak_blocks(&windows, context, config.token_budget);
            let mut scheduler = Scheduler::new(config, BlockManager::new(windows, blocks + 1));
            submit(&mut scheduler, 0, context, usize::MAX);
            let steps = std::iter::from_fn(|| (scheduler.computed(0) < context).then(|| step(&mut scheduler)));
            assert_eq!(steps.map(|work| work[0].1).sum::<usize>(), context);
            scheduler.finish(0);
            assert_eq!(scheduler.blocks().stats().used, 0);
        }
    }
}

#[test]
fn a_sequence_whose_token_is_not_sampled_yet_is_not_planned() {
    let config = SchedulerConfig { token_budget: 100, max_sequences: 4, context: 200, prompt_segments: None };
    for mut scheduler in schedulers(config, 20) {
        submit(&mut scheduler, 0, 50, 10);
        submit(&mut scheduler, 1, 200, 10);
        let plan = scheduler.plan(Duration::ZERO);
        let work = |id, range| SequenceWork { id, range, is_last: id == 0 };
        assert_eq!(plan.work, [work(0, 0..50), work(1, 0..50)]);
        plan.work.iter().for_each(|work| scheduler.advance(work.id, work.range.end));
        assert_eq!(
            scheduler.plan(Duration::ZERO).work,
            [work(1, 50..150)],
            "sequence 0 must not run without a new token"
        );
        scheduler.push(0, 7);
        assert_eq!(scheduler.plan(Duration::ZERO).work, [work(0, 50..51), work(1, 50..149)]);
    }
}

#[test]
fn a_sequence_that_is_preempted_twice_runs_to_its_end() {
    // A full sequence of 640 tokens needs all 10 blocks. Two sequences can start, because their prompts are short.
    let config = SchedulerConfig { token_budget: 64, max_sequences: 2, context: 640, prompt_segments: None };
    let mut scheduler = Scheduler::new(config, BlockManager::new(vec![None], 11));
    submit(&mut scheduler, 0, 10, usize::MAX);
    submit(&mut scheduler, 1, 10, usize::MAX);
    let (mut preemptions, mut ends) = (Vec::new(), Vec::new());
    for _ in 0..10_000 {
        let plan = scheduler.plan(Duration::ZERO);
        preemptions.extend(plan.preempted);
        for SequenceWork { id, range, is_last } in plan.work {
            scheduler.advance(id, range.end);
            if is_last && range.end == 640 {
                assert_eq!(scheduler.preemptions(id), if id == 1 { 2 } else { 0 });
                scheduler.finish(id);
                ends.push(id);
                // Submit sequence 0 again. It is senior to sequence 1 until sequence 1 has been preempted twice.
                if id == 0 && ends.len() < 4 {
                    submit(&mut scheduler, 0, 10, usize::MAX);
                }
            } else if is_last {
                scheduler.push(id, id as u32);
            }
        }
    }
    assert_eq!(preemptions, [1, 1]);
    assert_eq!(ends, [0, 0, 1, 0]);
    assert!(scheduler.is_idle());
}

#[test]
fn a_long_prompt_preempts_a_junior_sequence_only_for_its_own_half_of_the_budget() {
    let mut reached = BTreeSet::new();
    for head_start in 1..4 {
        // The prompt of sequence 0 needs 10 of the 11 blocks. Meanwhile, sequence 1 grows to three, so blocks run out.
        let config = SchedulerConfig { token_budget: 4, max_sequences: 2, context: 640, prompt_segments: None };
        let mut scheduler = Scheduler::new(config, BlockManager::new(vec![None], 12));
        submit(&mut scheduler, 0, 600, 10);
        for _ in 0..head_start {
            assert_eq!(step(&mut scheduler), [(0, 4)]);
        }
        submit(&mut scheduler, 1, 1, usize::MAX);
        loop {
            let start = scheduler.computed(0);
            let plan = scheduler.plan(Duration::ZERO);
            let preempts = start % BLOCK_TOKENS + 2 > BLOCK_TOKENS || start.is_multiple_of(BLOCK_TOKENS);
            if !plan.preempted.is_empty() {
                assert_eq!(plan.preempted, [1]);
                assert!(preempts, "at position {start}, sequence 1 was preempted for the second half of the budget");
                assert_eq!(plan.work.len(), 1, "the plan must not contain the preempted sequence");
                reached.insert(start % BLOCK_TOKENS);
                break;
            }
            for SequenceWork { id, range, is_last } in plan.work {
                scheduler.advance(id, range.end);
                if is_last {
                    scheduler.push(id, 1);
                }
            }
        }
    }
    assert_eq!(reached.len(), 2, "{reached:?}");
}

/// Submits a prompt of 200 tokens for sequence 0 and its forks 1, 2 and 3.
fn submit_with_forks(scheduler: &mut Scheduler, deadline: Option<Duration>) {
    let (prompt, forks, arrival) = ((0..200).collect(), vec![1, 2, 3], Duration::ZERO);
    scheduler.submit(NewSequence { forks, max_tokens: 9, arrival, deadline, ..new_sequence(0, prompt) });
}

#[test]
fn forks_share_the_prompt_and_compute_only_its_last_token() {
    let config = SchedulerConfig { token_budget: 128, max_sequences: 3, context: 400, prompt_segments: None };
    for mut scheduler in schedulers(config, 40) {
        submit_with_forks(&mut scheduler, None);
        assert_eq!(step(&mut scheduler), [(0, 128)]);
        assert_eq!(step(&mut scheduler), [(0, 71)], "the last prompt token must be left for the next step");
        // Only three sequences may run, so fork 3 waits. When it starts, it finds three full blocks in the cache.
        assert_eq!(step(&mut scheduler), [(0, 1), (1, 1), (2, 1)]);
        assert_eq!(scheduler.stats().waiting, 1);
        scheduler.finish(0);
        assert_eq!(step(&mut scheduler), [(1, 1), (2, 1), (3, 8)]);
        assert_eq!(step(&mut scheduler), [(1, 1), (2, 1), (3, 1)]);
    }
}

#[test]
fn a_fork_takes_the_place_of_a_canceled_parent() {
    let config = SchedulerConfig { token_budget: 128, max_sequences: 4, context: 400, prompt_segments: None };
    for mut scheduler in schedulers(config, 40) {
        submit_with_forks(&mut scheduler, None);
        assert_eq!(step(&mut scheduler), [(0, 128)]);
        scheduler.finish(2);
        scheduler.finish(0);
        assert_eq!(step(&mut scheduler), [(1, 71)], "sequence 1 must reuse two cached blocks");
        assert_eq!(step(&mut scheduler), [(1, 1), (3, 1)]);
        scheduler.finish(1);
        scheduler.finish(3);
        assert_eq!(scheduler.blocks().stats().used, 0);
    }
}

#[test]
fn forks_of_a_started_prompt_do_not_expire() {
    let config = SchedulerConfig { token_budget: 128, max_sequences: 4, context: 400, prompt_segments: None };
    for mut scheduler in schedulers(config, 40) {
        submit_with_forks(&mut scheduler, Some(Duration::from_millis(10)));
        let plan = scheduler.plan(Duration::ZERO);
        scheduler.advance(0, plan.work[0].range.end);
        // The client drops the first answer. The prefill started before the deadline, so the forks do not expire.
        scheduler.finish(0);
        let plan = scheduler.plan(Duration::from_secs(1));
        assert_eq!((plan.expired, plan.work[0].id), (Vec::new(), 1));
    }
}

#[test]
fn prompts_share_blocks_only_with_the_same_salt() {
    let config = SchedulerConfig { token_budget: 256, max_sequences: 4, context: 512, prompt_segments: None };
    for mut scheduler in schedulers(config, 200) {
        let mut cached = |id: SequenceId, salt: Option<&str>, token: u32| {
            let cache_salt = salt.map(str::to_string);
            let forks = if id == 0 { vec![1] } else { Vec::new() };
            let new = NewSequence { cache_salt, forks, max_tokens: 40, ..new_sequence(id, vec![token; 200]) };
            scheduler.submit(new);
            let plan = scheduler.plan(Duration::ZERO);
            let cached = plan.work.iter().find(|work| work.id == id).unwrap().range.start;
            // Fill at least one block with generated tokens, so that the cache also has such a block.
            for _ in 0..2 * BLOCK_TOKENS {
                step(&mut scheduler);
            }
            scheduler.finish(id);
            // Finish sequence 1 if it exists. It exists only as the fork of sequence 0.
            scheduler.finish(1);
            cached
        };
        let reusable = 199 / BLOCK_TOKENS * BLOCK_TOKENS;
        assert_eq!(cached(0, Some("a"), 7), 0);
        assert_eq!(cached(2, None, 7), 0);
        assert_eq!(cached(3, Some("b"), 7), 0);
        assert_eq!(cached(4, Some(""), 7), 0);
        for (id, salt) in [(5, Some("a")), (6, None), (7, Some("b")), (8, Some(""))] {
            assert_eq!(cached(id, salt, 7), reusable, "{salt:?}");
        }
        assert_eq!(cached(9, Some("a"), 8), 0);
    }
}
