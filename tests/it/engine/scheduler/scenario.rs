//! Random scheduler configurations and requests for the simulator.

use std::time::Duration;

use inferno::engine::scheduler::SchedulerConfig;
use inferno::nn::kv_cache::BLOCK_TOKENS;
use inferno::runner::PromptSegments;

use super::sequence_peak_blocks;
use crate::engine::digest;
use crate::support::Random;

/// A simulated request.
#[derive(Clone, Debug)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub max_tokens: usize,
    /// The length of the answer in tokens, at most `max_tokens`.
    pub answer: usize,
    pub tenant: u64,
    pub priority: i32,
    pub arrival: Duration,
    pub deadline: Option<Duration>,
    /// The time at which the client cancels the request, or `None` if it does not cancel.
    pub cancel: Option<Duration>,
    /// The number of forks of this request. The forks come right after it in [`Scenario::requests`].
    pub forks: usize,
    pub is_fork: bool,
    /// If set, the prompt is divided into these segments instead of those in the scheduler's configuration.
    pub prompt_segments: Option<PromptSegments>,
}

/// The configuration of a scheduler and its KV cache, and the requests to submit.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub config: SchedulerConfig,
    pub windows: Vec<Option<usize>>,
    pub blocks: usize,
    /// Whether each step is planned before the tokens of the previous step are known.
    pub plans_ahead: bool,
    /// The requests, sorted by arrival. The index of a request is its id.
    pub requests: Vec<Request>,
}

/// Returns a random number from 1 to `limit`. Its logarithm is roughly uniformly distributed.
fn skewed(random: &mut Random, limit: usize) -> usize {
    let bits = random.below(limit.ilog2() as usize + 1);
    (1 + random.below(2 << bits)).min(limit)
}

/// Returns a random scheduler configuration, and `count` random requests with their forks.
pub fn random_scenario(seed: u64, count: usize) -> Scenario {
    // The first random numbers of consecutive seeds would be correlated, so hash the seed.
    let mut random = Random(digest(seed, 1));
    let random = &mut random;
    // A tight scenario has short prompts, long answers and few blocks, which lead to preemptions.
    let is_tight = random.below(3) == 0;
    let token_budget = match random.below(4) {
        0 if !is_tight => skewed(random, 64),
        _ => 32 + skewed(random, 2000),
    };
    let max_sequences =
        if is_tight { token_budget.min(4 + random.below(60)) } else { skewed(random, token_budget.min(100)) };
    let context = match random.below(4) {
        _ if is_tight => 200 + random.below(500),
        0 => 1 + random.below(100),
        1 => BLOCK_TOKENS * (1 + random.below(8)),
        _ => 100 + random.below(900),
    };
    let windows: &[Option<usize>] = match random.below(8) {
        0..2 => &[None],
        2..5 => &[None, Some(128)],
        5 => &[Some(100)],
        6 => &[Some(1), None, Some(65)],
        _ => &[Some(512), Some(64)],
    };
    let peak = sequence_peak_blocks(windows, context, token_budget);
    let blocks = 1 + match random.below(4) {
        _ if is_tight => peak + random.below(peak),
        0 => peak,
        1 => peak + random.below(peak * 2),
        2 => peak * (1 + random.below(8)),
        _ => peak * max_sequences,
    };
    let texts: Vec<Vec<u32>> = (0..3).map(|_| (0..context).map(|_| random.below(1000) as u32).collect()).collect();
    // With a gap of 0, all requests arrive at once. With a large gap between arrivals, only a few run at the same time.
    let gap_us = [0, 100, 1000, 10_000, 40_000][random.below(if is_tight { 3 } else { 5 })];
    let (has_priorities, has_deadlines, has_cancels) =
        (random.below(2) == 0, random.below(2) == 0, random.below(2) == 0);
    let token_limit = if is_tight { context / 2 + random.below(context / 2) } else { [1, 8, 40, 100][random.below(4)] };
    let mut arrival = Duration::ZERO;
    let requests = (0..count).map(|_| {
        arrival += Duration::from_micros(random.below(2 * gap_us + 1) as u64);
        let len = match random.below(3) {
            _ if is_tight => 1 + random.below(context.min(70)),
            0 => 1 + random.below(context),
            1 => (BLOCK_TOKENS * random.below(5) + random.below(3)).clamp(2, context + 1) - 1,
            _ => skewed(random, context),
        };
        let text = random.below(texts.len());
        let mut prompt = texts[text][..len].to_vec();
        // About half of the prompts are prefixes of a shared text.
        // In the others, random tokens replace the end of such a prefix, or all of it.
        let shared = random.below(2 * len);
        prompt.iter_mut().skip(shared).for_each(|token| *token = random.below(1000) as u32);
        let room = (context - len).max(1);
        let max_tokens = match random.below(8) {
            0 => usize::MAX,
            _ => 1 + random.below(token_limit),
        };
        let answer = (1 + random.below(max_tokens.min(token_limit))).min(room);
        let soon =
            |random: &mut Random, max_ms: usize| arrival + Duration::from_micros(random.below(max_ms * 1000) as u64);
        Request {
            forks: 0,
            is_fork: false,
            prompt_segments: None,
            prompt,
            max_tokens,
            answer,
            tenant: 0,
            priority: if has_priorities { random.below(4) as i32 - 1 } else { 0 },
            arrival,
            deadline: (has_deadlines && random.below(3) == 0).then(|| soon(random, 3000)),
            cancel: (has_cancels && random.below(5) == 0).then(|| soon(random, 1000)),
        }
    });
    let mut requests: Vec<Request> = requests.collect();
    let can_fork = random.below(2) == 0;
    let mut id = 0;
    while id < requests.len() {
        let forks = if can_fork && random.below(5) == 0 { random.below(6) } else { 0 };
        requests[id].forks = forks;
        for _ in 0..forks {
            let parent = &requests[id];
            let fork = Request {
                answer: 1 + random.below(parent.answer),
                cancel: parent.cancel.filter(|_| random.below(2) == 0),
                forks: 0,
                is_fork: true,
                ..parent.clone()
            };
            requests.insert(id + 1, fork);
        }
        id += 1 + forks;
    }
    let prompt_segments =
        PromptSegments::new(token_budget.min(64 + random.below(200))).filter(|_| random.below(3) == 0);
    let config = SchedulerConfig { token_budget, max_sequences, context, prompt_segments };
    let plans_ahead = random.below(2) == 0;
    Scenario { config, windows: windows.to_vec(), blocks, plans_ahead, requests }
}

/// Assigns the requests of a scenario to several tenants. A fork belongs to the same tenant as its parent.
pub fn assign_tenants(scenario: &mut Scenario, seed: u64) {
    let mut random = Random(digest(seed, 2));
    let tenants = 2 + random.below(4);
    let mut tenant = 0;
    for request in &mut scenario.requests {
        if !request.is_fork {
            // On average, the first tenant has more than half of the requests.
            tenant = random.below(tenants) as u64 * random.below(2) as u64;
        }
        request.tenant = tenant;
    }
}

/// Assigns prompt segments to some requests of a scenario. A fork has the same segments as its parent.
pub fn assign_prompt_segments(scenario: &mut Scenario, seed: u64) {
    let mut random = Random(digest(seed, 3));
    let prompt_segments = PromptSegments::new(scenario.config.token_budget.min(64 + random.below(200)));
    let mut own = None;
    for request in &mut scenario.requests {
        if !request.is_fork {
            own = prompt_segments.filter(|_| random.below(2) == 0);
        }
        request.prompt_segments = own;
    }
}
