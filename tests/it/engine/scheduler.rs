//! Runs the scheduler with random requests and a virtual clock, and checks every plan.
//!
//! To simulate a million requests:
//! `INFERNO_SIMULATED_REQUESTS=1000000 cargo test --release --test it scheduler::`

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use inferno::engine::blocks::{BlockManager, SCRATCH_BLOCK};
use inferno::engine::scheduler::{NewSequence, Scheduler, SchedulerConfig, SequenceId, SequenceWork, StepPlan};
use inferno::nn::kv_cache::{BLOCK_TOKENS, peak_blocks};
use inferno::runner::PromptParts;

use crate::support::Random;

/// Returns the most blocks that a sequence of `tokens` tokens uses at any time, summed over all layer groups.
/// Each chunk of the sequence has at most `chunk` tokens.
fn most_blocks(windows: &[Option<usize>], tokens: usize, chunk: usize) -> usize {
    windows.iter().map(|&window| peak_blocks(window, tokens, chunk)).sum()
}

/// A simulated request.
#[derive(Clone, Debug)]
struct Request {
    prompt: Vec<u32>,
    max_tokens: usize,
    /// The length of the answer in tokens, at most `max_tokens`.
    answer: usize,
    tenant: u64,
    priority: i32,
    arrival: Duration,
    deadline: Option<Duration>,
    /// The time at which the client cancels the request.
    cancel: Option<Duration>,
    /// The number of forks of this request. The forks of a request come right after it in the list of requests.
    forks: usize,
    is_fork: bool,
    /// The parts into which the prompt is divided. If not set, the scheduler's configuration decides.
    /// No pass crosses the end of a prompt part.
    prompt_parts: Option<PromptParts>,
}

/// The configuration of a scheduler, and the requests to submit.
#[derive(Clone, Debug)]
struct Scenario {
    config: SchedulerConfig,
    windows: Vec<Option<usize>>,
    blocks: usize,
    /// Whether each step is planned before the tokens of the previous step are known.
    plans_ahead: bool,
    /// The requests, sorted by arrival. The index of a request is its id.
    requests: Vec<Request>,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Finished,
    Canceled,
    Expired,
}

/// The state of one sequence in the simulator.
#[derive(Default)]
struct Tracked {
    /// For each position, a digest of the tokens up to and including that position.
    digests: Vec<u64>,
    computed: usize,
    /// The time of the sequence's first step, if the sequence has started.
    started: Option<Duration>,
    is_running: bool,
    preemptions: usize,
    outcome: Option<Outcome>,
    /// The number of steps that ran while the sequence was waiting.
    waited: usize,
    /// The limit for `waited`: the most steps that all sequences ahead of the waiting sequence may take.
    ahead: usize,
}

/// The sort key of a waiting sequence. The sequence with the smallest key starts first.
/// The parts of the key: whether the sequence was preempted fewer than twice, its arrival plus 2 s per priority level
/// in nanoseconds, its arrival, and its id.
type SortKey = (bool, i128, Duration, SequenceId);

struct Simulator<'a> {
    scenario: &'a Scenario,
    scheduler: Scheduler,
    /// The queued step. Its tokens are not known yet.
    queued: Option<StepPlan>,
    now: Duration,
    tracked: Vec<Tracked>,
    /// The submitted sequences that have not ended.
    unfinished: BTreeSet<SequenceId>,
    /// The submitted sequences that are waiting to run, except pending forks, sorted by [`SortKey`].
    waiting: BTreeSet<SortKey>,
    /// The sequences that the current plan preempted, if the plan also started forks.
    /// Forks start without a reserve of free blocks.
    /// A plan that has admitted a new sequence can therefore still preempt a running sequence for a fork.
    displaced: BTreeSet<SequenceId>,
    /// Submitted forks that are waiting for the prompt of another sequence.
    pending: BTreeSet<SequenceId>,
    /// The deadlines of sequences that have not started, except pending forks.
    deadlines: BTreeSet<(Duration, SequenceId)>,
    /// The last digest written to each position of each block. `Simulator::digest` computes the digests.
    contents: Vec<u64>,
    /// For each block, the number of the last step that wrote the block.
    written: Vec<usize>,
    steps: usize,
    /// Whether there are enough blocks for `max_sequences` sequences of full length.
    has_ample_blocks: bool,
    /// Whether the requests belong to several tenants.
    has_tenants: bool,
    random: Random,
    summary: Summary,
}

/// What happened in a simulation. Two simulations of the same scenario must have equal summaries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Summary {
    /// A digest of the work in all plans.
    plans: u64,
    finished: usize,
    canceled: usize,
    expired: usize,
    preemptions: usize,
    /// The number of sequences that were preempted twice, and are therefore never preempted again.
    protected: usize,
    /// The number of forks that started with the blocks of another sequence.
    forked: usize,
    hit_tokens: u64,
    /// The number of chunks that exceed the limit in `Simulator::check_chunks`.
    /// The limit is about half of the token budget.
    long_chunks: usize,
    steps: usize,
    duration: Duration,
}

/// Returns the digest of a sequence after one more token.
fn digest(before: u64, token: u64) -> u64 {
    (before ^ token).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
}

/// Returns the simulated time of a step with `tokens` tokens: a fixed time, and a time for each token.
fn step_time(tokens: usize) -> Duration {
    Duration::from_nanos(5_800_000 + 11_800 * tokens as u64)
}

impl<'a> Simulator<'a> {
    fn new(scenario: &'a Scenario, seed: u64) -> Self {
        let Scenario { config, ref windows, blocks, ref requests, .. } = *scenario;
        let scheduler =
            Scheduler::new(config, BlockManager::new(windows.clone(), blocks).with_prompt_parts(config.prompt_parts));
        let most = most_blocks(windows, config.context, config.token_budget) * config.max_sequences;
        Self {
            scenario,
            scheduler,
            queued: None,
            now: Duration::ZERO,
            tracked: requests.iter().map(|_| Tracked::default()).collect(),
            unfinished: BTreeSet::new(),
            waiting: BTreeSet::new(),
            displaced: BTreeSet::new(),
            pending: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            contents: vec![0; blocks * BLOCK_TOKENS],
            written: vec![0; blocks],
            steps: 0,
            has_ample_blocks: most < blocks,
            has_tenants: requests.iter().any(|request| request.tenant != requests[0].tenant),
            random: Random(seed),
            summary: Summary::default(),
        }
    }

    /// Simulates steps until all requests have ended.
    fn run(&mut self) -> Summary {
        let requests = &self.scenario.requests;
        let mut arrivals = (0..).zip(requests).peekable();
        let mut cancels: Vec<_> = (0..).zip(requests).filter_map(|(id, request)| Some((request.cancel?, id))).collect();
        cancels.sort();
        let mut cancels = cancels.into_iter().peekable();
        while arrivals.peek().is_some() || !self.unfinished.is_empty() {
            if self.unfinished.is_empty()
                && let Some((_, next)) = arrivals.peek()
            {
                self.now = self.now.max(next.arrival);
            }
            while let Some((id, request)) = arrivals.next_if(|(_, request)| request.arrival <= self.now) {
                self.submit(id, request);
            }
            while let Some((_, id)) = cancels.next_if(|&(time, _)| time <= self.now) {
                self.cancel(id);
            }
            let plan = self.scheduler.plan(self.now);
            self.check(&plan);
            self.write(&plan);
            self.read(&plan);
            self.now += step_time(plan.work.iter().map(|work| work.range.len()).sum());
            // Some clients cancel while the step is running.
            while let Some((_, id)) = cancels.next_if(|&(time, _)| time <= self.now && is_during_step(time)) {
                self.cancel(id);
            }
            if self.scenario.plans_ahead {
                self.finish_queued();
                self.commit_ahead(plan);
            } else {
                self.finish_step(&plan);
            }
        }
        assert!(self.scheduler.is_idle());
        assert_eq!(self.scheduler.blocks().stats().used, 0, "some blocks are still in use at the end");
        let stats = self.scheduler.blocks().stats();
        let Summary { finished, canceled, expired, .. } = self.summary;
        assert_eq!(finished + canceled + expired, requests.len());
        let duration = self.now;
        Summary { hit_tokens: stats.hit_tokens, steps: self.steps, duration, ..self.summary.clone() }
    }

    fn submit(&mut self, id: SequenceId, request: &Request) {
        let Request { ref prompt, max_tokens, tenant, priority, arrival, deadline, is_fork, prompt_parts, .. } =
            *request;
        if !is_fork {
            let (prompt, forks) = (prompt.clone(), (id + 1..=id + request.forks as u64).collect());
            let new =
                NewSequence { prompt_parts, forks, max_tokens, tenant, priority, deadline, ..new_sequence(id, prompt) };
            self.scheduler.submit(NewSequence { arrival, ..new });
        }
        let rank = self.rank(id);
        // While a sequence is waiting, every step computes at least one token of an earlier or more senior sequence.
        // A sequence is preempted at most twice, so each token is computed at most three times.
        let steps = |id: SequenceId| {
            let Request { prompt, answer, .. } = &self.scenario.requests[id as usize];
            // If steps are planned ahead, a step can be empty, or compute a token after the end of an answer.
            3 * (prompt.len() + answer + 2 * usize::from(self.scenario.plans_ahead))
        };
        let ahead = self.unfinished.iter().map(|&other| steps(other)).sum();
        let own = steps(id);
        let pending = self.pending.iter().map(|&fork| self.rank(fork)).filter(|fork| *fork >= rank);
        let behind: Vec<_> = self.waiting.range(rank..).copied().chain(pending).collect();
        for (.., other) in behind {
            self.tracked[other as usize].ahead += own;
        }
        let tracked = &mut self.tracked[id as usize];
        tracked.ahead = ahead;
        tracked.digests = prompt
            .iter()
            .scan(1, |last, &token| {
                *last = digest(*last, token.into());
                Some(*last)
            })
            .collect();
        self.unfinished.insert(id);
        if is_fork { _ = self.pending.insert(id) } else { self.wait(id) }
    }

    fn wait(&mut self, id: SequenceId) {
        self.waiting.insert(self.rank(id));
        if let Some(deadline) = self.scenario.requests[id as usize].deadline {
            self.deadlines.insert((deadline, id));
        }
    }

    /// Marks pending forks as running if the plan started them.
    /// Moves other pending forks to `waiting` if they have no parent anymore.
    fn update_forks(&mut self, plan: &StepPlan) {
        for id in self.pending.clone() {
            if plan.expired.contains(&id) || self.scheduler.parent(id).is_some() {
                continue;
            }
            self.pending.remove(&id);
            let prompt = self.scenario.requests[id as usize].prompt.len();
            let is_preempted = plan.preempted.contains(&id);
            if is_preempted || self.scheduler.tables(id).is_some() && self.scheduler.computed(id) + 1 == prompt {
                let tracked = &mut self.tracked[id as usize];
                (tracked.is_running, tracked.computed, tracked.started) = (true, prompt - 1, Some(self.now));
                self.summary.forked += 1;
            } else {
                self.wait(id);
                if self.has_family_started(id, plan) {
                    self.deadlines.retain(|&(_, other)| other != id);
                }
            }
        }
    }

    /// Returns whether the prefill of a fork's prompt has started, in the fork, its parent or another fork.
    /// Once the prefill has started, the fork has no deadline.
    fn has_family_started(&self, id: SequenceId, plan: &StepPlan) -> bool {
        let requests = &self.scenario.requests;
        let first = (0..=id as usize).rev().find(|&index| !requests[index].is_fork).unwrap_or(0);
        (first..=first + requests[first].forks).any(|member| {
            let id = member as SequenceId;
            let is_planned = plan.work.iter().any(|work| work.id == id) || plan.preempted.contains(&id);
            self.tracked[member].started.is_some() || is_planned
        })
    }

    fn rank(&self, id: SequenceId) -> SortKey {
        let Request { arrival, priority, .. } = self.scenario.requests[id as usize];
        let nanoseconds = arrival.as_nanos() as i128 + i128::from(priority) * 2_000_000_000;
        (self.tracked[id as usize].preemptions < 2, nanoseconds, arrival, id)
    }

    fn cancel(&mut self, id: SequenceId) {
        if self.unfinished.contains(&id) {
            self.scheduler.finish(id);
            self.end(id, Outcome::Canceled);
        }
    }

    fn end(&mut self, id: SequenceId, outcome: Outcome) {
        let request = &self.scenario.requests[id as usize];
        assert!(self.unfinished.remove(&id), "{outcome:?}: sequence {id} was not submitted, or has already ended");
        self.waiting.remove(&self.rank(id));
        self.pending.remove(&id);
        if let Some(deadline) = request.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        let tracked = &mut self.tracked[id as usize];
        tracked.outcome = Some(outcome);
        tracked.is_running = false;
        tracked.digests = Vec::new();
        match outcome {
            Outcome::Finished => self.summary.finished += 1,
            Outcome::Canceled => self.summary.canceled += 1,
            Outcome::Expired => self.summary.expired += 1,
        }
    }

    /// Checks a plan against the guarantees of the scheduler, and updates the simulator.
    fn check(&mut self, plan: &StepPlan) {
        self.steps += 1;
        self.check_expired(plan);
        let forked = self.summary.forked;
        self.update_forks(plan);
        let has_forked = self.summary.forked > forked;
        self.displaced.clear();
        if has_forked {
            self.displaced.extend(&plan.preempted);
        }
        let decoding = self.decoding();
        self.check_preempted(plan);
        self.check_order(plan, &decoding);
        let mut ids = BTreeSet::new();
        for work in &plan.work {
            assert!(ids.insert(work.id), "sequence {} is in the plan twice", work.id);
            assert!(!plan.preempted.contains(&work.id), "the plan runs and preempts sequence {}", work.id);
            self.check_work(work);
        }
        self.check_stats();
        let unfinished = self.with_unfinished_prompt(plan, &decoding);
        self.check_chunks(plan, &unfinished);
        self.check_budget(plan, &unfinished, has_forked);
        for &(.., id) in &self.waiting {
            self.tracked[id as usize].waited += 1;
        }
        for SequenceWork { id, range, is_last } in &plan.work {
            for value in [*id, range.start as u64, range.end as u64, u64::from(*is_last)] {
                self.summary.plans = digest(self.summary.plans, value);
            }
        }
    }

    /// Checks that sequences expire only after their deadline, and only if they have not started.
    fn check_expired(&mut self, plan: &StepPlan) {
        for &id in &plan.expired {
            let deadline = self.scenario.requests[id as usize].deadline;
            assert!(deadline.is_some_and(|deadline| deadline <= self.now), "sequence {id} expired before its deadline");
            assert!(self.tracked[id as usize].started.is_none(), "sequence {id} expired after its start");
            self.end(id, Outcome::Expired);
        }
    }

    /// Checks that running sequences are preempted only if blocks can run out, and each sequence at most twice.
    fn check_preempted(&mut self, plan: &StepPlan) {
        for &id in &plan.preempted {
            assert!(!self.has_ample_blocks, "sequence {id} was preempted although there are blocks for all sequences");
            let tracked = &mut self.tracked[id as usize];
            assert!(tracked.is_running, "sequence {id} was preempted, but was not running");
            tracked.is_running = false;
            tracked.computed = 0;
            tracked.preemptions += 1;
            assert!(tracked.preemptions <= 2, "sequence {id} was preempted more than twice");
            self.summary.preemptions += 1;
            self.summary.protected += usize::from(tracked.preemptions == 2);
            self.waiting.insert(self.rank(id));
        }
    }

    /// Checks that the plan starts with one decode for each sequence in `decoding` that the plan does not preempt.
    /// An empty plan is allowed only if no sequence is left, or if a queued step runs.
    fn check_order(&self, plan: &StepPlan, decoding: &BTreeSet<SequenceId>) {
        let is_decode = |work: &SequenceWork| decoding.contains(&work.id);
        assert!(plan.work.is_sorted_by_key(|work| !is_decode(work)), "a prefill comes before a decode");
        let preempted = decoding.iter().filter(|id| plan.preempted.contains(id)).count();
        assert_eq!(plan.work.iter().filter(|work| is_decode(work)).count(), decoding.len() - preempted);
        assert!(
            !plan.work.is_empty() || self.unfinished.is_empty() || self.queued.is_some(),
            "the plan is empty, but sequences {:?} are unfinished",
            self.unfinished
        );
    }

    /// Checks that the statistics of the scheduler agree with the simulator.
    /// Also checks that every sequence past its deadline has started or expired, except pending forks.
    fn check_stats(&self) {
        let running = self.tracked_running().len();
        assert!(running <= self.scenario.config.max_sequences);
        let stats = self.scheduler.stats();
        assert_eq!((stats.running, stats.waiting), (running, self.unfinished.len() - running));
        assert_eq!(stats.preemptions as usize, self.summary.preemptions);
        assert!(self.deadlines.first().is_none_or(|&(deadline, _)| deadline > self.now), "a sequence is overdue");
    }

    /// Returns the running sequences whose prompts the plan leaves unfinished.
    fn with_unfinished_prompt(&self, plan: &StepPlan, decoding: &BTreeSet<SequenceId>) -> BTreeSet<SequenceId> {
        // A sequence with pending forks leaves its last prompt token to the next step.
        // A sequence with prompt parts also leaves its last prompt token, and then computes one token per step.
        let parents: BTreeSet<_> = self.pending.iter().filter_map(|&fork| self.scheduler.parent(fork)).collect();
        let is_done = |id: &SequenceId| {
            let last = self.scenario.requests[*id as usize].prompt.len() - 1;
            let end = match self.prompt_parts(*id) {
                Some(_) => last.max(self.scheduler.computed(*id) + 1),
                None => self.tracked[*id as usize].digests.len() - usize::from(parents.contains(id)),
            };
            let is_complete = self.awaits_last_token(*id);
            is_complete || decoding.contains(id) || plan.work.iter().any(|work| work.id == *id && work.range.end == end)
        };
        // With several tenants, a plan may leave out a running sequence that finds no free blocks.
        // The plan does not preempt a newly started sequence of another tenant for such a sequence.
        let has_work = |id: &SequenceId| !self.has_tenants || plan.work.iter().any(|work| work.id == *id);
        self.tracked_running().into_iter().filter(|id| has_work(id) && !is_done(id)).collect()
    }

    /// Checks that a chunk exceeds half of the token budget only if the step completes all other running prompts.
    fn check_chunks(&mut self, plan: &StepPlan, unfinished: &BTreeSet<SequenceId>) {
        // With prompt parts, a step rounds its remaining budget up to whole parts.
        // A chunk can therefore be longer by almost one part.
        let part = self.part_tokens();
        let longest = self.scenario.config.token_budget.div_ceil(2).max(part.unwrap_or(1)) + part.unwrap_or(0);
        for SequenceWork { id, .. } in plan.work.iter().filter(|work| work.range.len() > longest) {
            self.summary.long_chunks += 1;
            assert!(unfinished.iter().all(|other| other == id), "sequence {id} used the budget of other sequences");
        }
    }

    /// Checks that a step with prompt parts exceeds its token budget by less than one part.
    /// Without prompt parts, a step must stay within its budget.
    /// With ample blocks, also checks that only the budget and `max_sequences` limit the step.
    fn check_budget(&self, plan: &StepPlan, unfinished: &BTreeSet<SequenceId>, has_forked: bool) {
        let SchedulerConfig { token_budget, max_sequences, .. } = self.scenario.config;
        let tokens: usize = plan.work.iter().map(|work| work.range.len()).sum();
        assert!(
            tokens < token_budget + self.part_tokens().unwrap_or(1),
            "{tokens} tokens exceed a budget of {token_budget}"
        );
        if self.has_ample_blocks && tokens < token_budget {
            assert_eq!(unfinished.len(), 0, "{} tokens of the budget are unused", token_budget - tokens);
            // Until forks have copied their shared block, the scheduler counts one block too many for them.
            let is_full = self.tracked_running().len() == max_sequences || has_forked;
            assert!(is_full || self.waiting.is_empty(), "a waiting sequence could have started");
        }
    }

    /// Returns the number of tokens in a prompt part, or `None` if no prompt is divided into parts.
    fn part_tokens(&self) -> Option<usize> {
        let own = self.scenario.requests.iter().find_map(|request| request.prompt_parts);
        own.or(self.scenario.config.prompt_parts).map(PromptParts::tokens)
    }

    /// Returns the decoding sequences: running sequences that only have to compute their last sampled token.
    fn decoding(&self) -> BTreeSet<SequenceId> {
        let is_decoding = |id: &SequenceId| {
            let tracked = &self.tracked[*id as usize];
            let prompt = self.scenario.requests[*id as usize].prompt.len();
            let is_decoding = tracked.computed + 1 == tracked.digests.len() && tracked.computed >= prompt;
            tracked.is_running && is_decoding && !self.awaits_last_token(*id)
        };
        self.unfinished.iter().copied().filter(is_decoding).collect()
    }

    /// Returns whether the queued step samples the last token that `max_tokens` and the context allow for a sequence.
    fn awaits_last_token(&self, id: SequenceId) -> bool {
        let Request { prompt, max_tokens, .. } = &self.scenario.requests[id as usize];
        let longest = prompt.len().saturating_add(*max_tokens).min(self.scenario.config.context);
        self.scheduler.is_pending(id) && self.tracked[id as usize].digests.len() >= longest
    }

    fn tracked_running(&self) -> Vec<SequenceId> {
        self.unfinished.iter().copied().filter(|&id| self.tracked[id as usize].is_running).collect()
    }

    /// Checks the work of one sequence, and records that the sequence is running.
    fn check_work(&mut self, work: &SequenceWork) {
        let SequenceWork { id, ref range, is_last } = *work;
        let prompt_parts = self.prompt_parts(id);
        let tracked = &mut self.tracked[id as usize];
        let len = tracked.digests.len();
        assert!(self.unfinished.contains(&id), "sequence {id} was not submitted, or has already ended");
        assert!(
            !range.is_empty() && range.end <= len,
            "sequence {id} has {len} tokens, but the step computes {range:?}"
        );
        assert_eq!(self.scheduler.tokens(id).len(), len);
        assert_eq!(is_last, range.end == len);
        assert_eq!(range.start, self.scheduler.computed(id));
        let (was_running, last) = (tracked.is_running, tracked.computed);
        tracked.is_running = true;
        tracked.computed = range.start;
        if was_running {
            assert_eq!(range.start, last, "sequence {id} did not continue where it stopped");
        } else {
            assert!(range.start.is_multiple_of(BLOCK_TOKENS), "sequence {id} reuses only part of a block");
            assert!(
                prompt_parts.is_none_or(|parts| parts.floor(range.start) == range.start),
                "sequence {id} reuses an incomplete prompt part"
            );
            if tracked.started.is_none() {
                tracked.started = Some(self.now);
                // Sequences of other tenants can start first, even if they arrive later.
                assert!(
                    self.has_tenants || tracked.waited <= tracked.ahead,
                    "sequence {id} waited {} steps, but the limit is {}",
                    tracked.waited,
                    tracked.ahead
                );
                if let Some(deadline) = self.scenario.requests[id as usize].deadline {
                    let is_fork = self.scenario.requests[id as usize].is_fork;
                    assert!(self.deadlines.remove(&(deadline, id)) || is_fork);
                }
            }
            let rank = self.rank(id);
            let tenant = |id: SequenceId| self.scenario.requests[id as usize].tenant;
            let is_rival = |other: SequenceId| !self.displaced.contains(&other) && tenant(other) == tenant(id);
            let first = self.waiting.iter().find(|(.., other)| is_rival(*other));
            assert_eq!(first, Some(&rank), "sequence {id} started before a sequence that ranks higher");
            self.waiting.remove(&rank);
        }
        let tables = self.scheduler.tables(id).expect("a planned sequence has no blocks");
        for (group, &window) in self.scenario.windows.iter().enumerate() {
            let first = window.map_or(0, |window| range.start.saturating_sub(window - 1)) / BLOCK_TOKENS;
            for index in first..range.end.div_ceil(BLOCK_TOKENS) {
                let block = tables.get(group, index);
                assert_ne!(block, SCRATCH_BLOCK, "sequence {id} has no block {index} in layer group {group}");
                if index >= range.start / BLOCK_TOKENS {
                    let last = std::mem::replace(&mut self.written[block as usize], self.steps);
                    assert_ne!(last, self.steps, "two sequences write block {block}");
                }
            }
        }
    }

    /// Writes digests at the positions where a step would write keys and values.
    fn write(&mut self, plan: &StepPlan) {
        for copy in &plan.copies {
            let from = copy.from as usize * BLOCK_TOKENS;
            self.contents.copy_within(from..from + BLOCK_TOKENS, copy.to as usize * BLOCK_TOKENS);
        }
        for SequenceWork { id, range, .. } in &plan.work {
            let tables = self.scheduler.tables(*id).expect("a planned sequence has no blocks");
            for group in 0..self.scenario.windows.len() {
                for position in range.clone() {
                    let block = tables.get(group, position / BLOCK_TOKENS) as usize;
                    self.contents[block * BLOCK_TOKENS + position % BLOCK_TOKENS] =
                        self.digest(*id, group, self.pass(*id, range, position), position);
                }
            }
        }
    }

    /// Returns the prompt parts of a sequence, or the scheduler's prompt parts if the sequence has none.
    fn prompt_parts(&self, id: SequenceId) -> Option<PromptParts> {
        self.scenario.requests[id as usize].prompt_parts.or(self.scenario.config.prompt_parts)
    }

    /// Returns the positions that are computed in the same pass as `position`, if a step computes `range`.
    /// Without prompt parts, keys and values do not depend on the pass, so the returned range is empty.
    fn pass(&self, id: SequenceId, range: &Range<usize>, position: usize) -> Range<usize> {
        match self.prompt_parts(id) {
            Some(parts) => parts.floor(position).max(range.start)..parts.next(position).min(range.end),
            None => 0..0,
        }
    }

    /// Returns the digest that stands for the keys and values at a position.
    /// The digest depends on all tokens up to the position, on the pass, and on the layer group.
    fn digest(&self, id: SequenceId, group: usize, pass: Range<usize>, position: usize) -> u64 {
        let tokens = self.tracked[id as usize].digests[position];
        digest(digest(tokens, pass.start as u64), pass.end as u64).wrapping_add(group as u64)
    }

    /// Checks the digests at some of the positions that a step attends to.
    fn read(&mut self, plan: &StepPlan) {
        for SequenceWork { id, range, .. } in &plan.work {
            let tables = self.scheduler.tables(*id).expect("a planned sequence has no blocks");
            for (group, &window) in self.scenario.windows.iter().enumerate() {
                let first = window.map_or(0, |window| range.start.saturating_sub(window - 1));
                for position in [first, first + self.random.below(range.start - first + 1), range.end - 1] {
                    let block = tables.get(group, position / BLOCK_TOKENS) as usize;
                    let read = self.contents[block * BLOCK_TOKENS + position % BLOCK_TOKENS];
                    let last = self.scenario.requests[*id as usize].prompt.len() - 1;
                    let own = if position < last { 0..last } else { position..position + 1 };
                    let want = self.digest(*id, group, self.pass(*id, &own, position), position);
                    assert_eq!(
                        read, want,
                        "sequence {id} reads wrong data at position {position} in layer group {group}, range {range:?}"
                    );
                }
            }
        }
    }

    /// Commits a planned step before its tokens are known.
    fn commit_ahead(&mut self, plan: StepPlan) {
        for &SequenceWork { id, ref range, is_last } in &plan.work {
            let tracked = &mut self.tracked[id as usize];
            if tracked.outcome.is_some() {
                continue;
            }
            self.scheduler.advance(id, range.end);
            tracked.computed = range.end;
            if is_last {
                let last = tracked.digests[range.end - 1];
                tracked.digests.push(digest(last, token_after(last).into()));
                self.scheduler.push_pending(id);
            }
        }
        self.queued = Some(plan);
    }

    /// Passes the tokens of the queued step to the scheduler, and ends the sequences that are complete.
    fn finish_queued(&mut self) {
        for SequenceWork { id, range, is_last } in self.queued.take().map(|plan| plan.work).unwrap_or_default() {
            let tracked = &self.tracked[id as usize];
            if tracked.outcome.is_some() || !is_last {
                continue;
            }
            assert!(self.scheduler.is_pending(id));
            self.scheduler.push(id, token_after(tracked.digests[range.end - 1]));
            let Request { prompt, answer, .. } = &self.scenario.requests[id as usize];
            if range.end + 1 == prompt.len() + answer {
                self.scheduler.finish(id);
                self.end(id, Outcome::Finished);
            }
        }
    }

    /// Commits a step, appends the sampled tokens, and ends the sequences that are complete.
    fn finish_step(&mut self, plan: &StepPlan) {
        for &SequenceWork { id, ref range, is_last } in &plan.work {
            self.scheduler.advance(id, range.end);
            let tracked = &mut self.tracked[id as usize];
            if tracked.outcome.is_some() {
                continue;
            }
            tracked.computed = range.end;
            if is_last {
                let last = tracked.digests[range.end - 1];
                let token = token_after(last);
                tracked.digests.push(digest(last, token.into()));
                self.scheduler.push(id, token);
                let Request { prompt, answer, .. } = &self.scenario.requests[id as usize];
                if tracked.digests.len() == prompt.len() + answer {
                    self.scheduler.finish(id);
                    self.end(id, Outcome::Finished);
                }
            }
        }
    }
}

/// Returns the next token after a text with the digest `last`. Equal prompts get equal answers.
fn token_after(last: u64) -> u32 {
    (last >> 20) as u32 % 1000
}

/// Returns whether a cancellation at `time` happens while a step is running. This is so for about half of all times.
fn is_during_step(time: Duration) -> bool {
    (time.as_nanos() / 1000).is_multiple_of(2)
}

/// Returns a random number from 1 to `most`. Its logarithm is roughly uniformly distributed.
fn skewed(random: &mut Random, most: usize) -> usize {
    let bits = random.below(most.ilog2() as usize + 1);
    (1 + random.below(2 << bits)).min(most)
}

/// Returns a random scheduler and `count` random requests.
fn random_scenario(seed: u64, count: usize) -> Scenario {
    // Similar seeds would produce similar first random numbers, so hash the seed.
    let mut random = Random(digest(seed, 1));
    let random = &mut random;
    // Short prompts, long answers and few blocks lead to preemptions.
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
    let peak = most_blocks(windows, context, token_budget);
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
    let most_tokens = if is_tight { context / 2 + random.below(context / 2) } else { [1, 8, 40, 100][random.below(4)] };
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
        // About half of the prompts continue with random tokens after a prefix that other prompts share.
        let shared = random.below(2 * len);
        prompt.iter_mut().skip(shared).for_each(|token| *token = random.below(1000) as u32);
        let room = (context - len).max(1);
        let max_tokens = match random.below(8) {
            0 => usize::MAX,
            _ => 1 + random.below(most_tokens),
        };
        let answer = (1 + random.below(max_tokens.min(most_tokens))).min(room);
        let soon =
            |random: &mut Random, most_ms: usize| arrival + Duration::from_micros(random.below(most_ms * 1000) as u64);
        Request {
            forks: 0,
            is_fork: false,
            prompt_parts: None,
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
    let prompt_parts = PromptParts::new(token_budget.min(64 + random.below(200))).filter(|_| random.below(3) == 0);
    let config = SchedulerConfig { token_budget, max_sequences, context, prompt_parts };
    let plans_ahead = random.below(2) == 0;
    Scenario { config, windows: windows.to_vec(), blocks, plans_ahead, requests }
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
            assign_prompt_parts(&mut scenario, seed);
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

/// Assigns the requests of a scenario to several tenants. A fork belongs to the same tenant as its parent.
fn assign_tenants(scenario: &mut Scenario, seed: u64) {
    let mut random = Random(digest(seed, 2));
    let tenants = 2 + random.below(4);
    let mut tenant = 0;
    for request in &mut scenario.requests {
        if !request.is_fork {
            // The first tenant has the most requests.
            tenant = random.below(tenants) as u64 * random.below(2) as u64;
        }
        request.tenant = tenant;
    }
}

/// Assigns prompt parts to some requests of a scenario. A fork has the same parts as its parent.
fn assign_prompt_parts(scenario: &mut Scenario, seed: u64) {
    let mut random = Random(digest(seed, 3));
    let prompt_parts = PromptParts::new(scenario.config.token_budget.min(64 + random.below(200)));
    let mut own = None;
    for request in &mut scenario.requests {
        if !request.is_fork {
            own = prompt_parts.filter(|_| random.below(2) == 0);
        }
        request.prompt_parts = own;
    }
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
        prompt_parts: None,
    };
    // The test submits 50 requests per second for 30 seconds.
    // The scheduler can finish about 33 per second, four at a time.
    let mut requests: Vec<_> = (0..1500).map(|n| request(20 * n, 0)).collect();
    let low = requests.partition_point(|request| request.arrival < Duration::from_secs(1));
    requests.insert(low, request(1001, 3));
    let config = SchedulerConfig { token_budget: 256, max_sequences: 4, context: 200, prompt_parts: None };
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
        "{earlier} requests started before request {low}, expected about {before}"
    );
}

/// Returns two schedulers: for a model with full attention, and for one that also has layers with 128-token windows.
fn schedulers(config: SchedulerConfig, blocks: usize) -> [Scheduler; 2] {
    let new = |windows| Scheduler::new(config, BlockManager::new(windows, blocks + 1));
    [new(vec![None]), new(vec![None, Some(128)])]
}

/// Returns a sequence that generates one token.
fn new_sequence(id: SequenceId, prompt: Vec<u32>) -> NewSequence {
    NewSequence {
        id,
        prompt,
        cache_salt: None,
        prompt_parts: None,
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

/// Plans a step and completes it. Returns the id and the number of tokens of each sequence in the step.
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
    let config = SchedulerConfig { token_budget: 1000, max_sequences: 10, context: 5000, prompt_parts: None };
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
            let config = SchedulerConfig { token_budget: 100, max_sequences: 2, context, prompt_parts: None };
            let blocks = most_blocks(&windows, context, config.token_budget);
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
    let config = SchedulerConfig { token_budget: 100, max_sequences: 4, context: 200, prompt_parts: None };
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
    let config = SchedulerConfig { token_budget: 64, max_sequences: 2, context: 640, prompt_parts: None };
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
        // The prompt of sequence 0 needs 10 of 11 blocks. Meanwhile, sequence 1 grows to three blocks.
        let config = SchedulerConfig { token_budget: 4, max_sequences: 2, context: 640, prompt_parts: None };
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
    let config = SchedulerConfig { token_budget: 128, max_sequences: 3, context: 400, prompt_parts: None };
    for mut scheduler in schedulers(config, 40) {
        submit_with_forks(&mut scheduler, None);
        assert_eq!(step(&mut scheduler), [(0, 128)]);
        assert_eq!(step(&mut scheduler), [(0, 71)], "the last prompt token must be left for the forks");
        // Only three sequences may run. The last fork waits, and finds three full blocks in the prefix cache.
        assert_eq!(step(&mut scheduler), [(0, 1), (1, 1), (2, 1)]);
        assert_eq!(scheduler.stats().waiting, 1);
        scheduler.finish(0);
        assert_eq!(step(&mut scheduler), [(1, 1), (2, 1), (3, 8)]);
        assert_eq!(step(&mut scheduler), [(1, 1), (2, 1), (3, 1)]);
    }
}

#[test]
fn a_fork_takes_the_place_of_a_canceled_parent() {
    let config = SchedulerConfig { token_budget: 128, max_sequences: 4, context: 400, prompt_parts: None };
    for mut scheduler in schedulers(config, 40) {
        submit_with_forks(&mut scheduler, None);
        assert_eq!(step(&mut scheduler), [(0, 128)]);
        scheduler.finish(2);
        scheduler.finish(0);
        assert_eq!(step(&mut scheduler), [(1, 71)], "two blocks must be cached");
        assert_eq!(step(&mut scheduler), [(1, 1), (3, 1)]);
        scheduler.finish(1);
        scheduler.finish(3);
        assert_eq!(scheduler.blocks().stats().used, 0);
    }
}

#[test]
fn forks_of_a_started_prompt_do_not_expire() {
    let config = SchedulerConfig { token_budget: 128, max_sequences: 4, context: 400, prompt_parts: None };
    for mut scheduler in schedulers(config, 40) {
        submit_with_forks(&mut scheduler, Some(Duration::from_millis(10)));
        let plan = scheduler.plan(Duration::ZERO);
        scheduler.advance(0, plan.work[0].range.end);
        // The client drops the first answer. The forks wait again, but the prefill started before the deadline.
        scheduler.finish(0);
        let plan = scheduler.plan(Duration::from_secs(1));
        assert_eq!((plan.expired, plan.work[0].id), (Vec::new(), 1));
    }
}

#[test]
fn prompts_share_blocks_only_with_the_same_salt() {
    let config = SchedulerConfig { token_budget: 256, max_sequences: 4, context: 512, prompt_parts: None };
    for mut scheduler in schedulers(config, 200) {
        let mut cached = |id: SequenceId, salt: Option<&str>, token: u32| {
            let cache_salt = salt.map(str::to_string);
            let forks = if id == 0 { vec![1] } else { Vec::new() };
            let new = NewSequence { cache_salt, forks, max_tokens: 40, ..new_sequence(id, vec![token; 200]) };
            scheduler.submit(new);
            let plan = scheduler.plan(Duration::ZERO);
            let cached = plan.work.iter().find(|work| work.id == id).unwrap().range.start;
            // Generate enough tokens to fill at least one block of the answer.
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
