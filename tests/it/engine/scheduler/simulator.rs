//! A simulator that runs the scheduler with a virtual clock, and checks every plan.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use inferno::engine::blocks::{BlockManager, SCRATCH_BLOCK};
use inferno::engine::scheduler::{NewSequence, Scheduler, SchedulerConfig, SequenceId, SequenceWork, StepPlan};
use inferno::nn::kv_cache::BLOCK_TOKENS;
use inferno::runner::PromptSegments;

use super::scenario::{Request, Scenario};
use super::{new_sequence, sequence_peak_blocks};
use crate::engine::digest;
use crate::support::Random;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Finished,
    Canceled,
    Expired,
}

/// The state of one sequence in the simulator.
#[derive(Default)]
pub struct Tracked {
    /// For each position, a digest of the tokens up to and including that position.
    digests: Vec<u64>,
    computed: usize,
    /// The time at which the sequence first started, or `None` if it has not started yet.
    pub started: Option<Duration>,
    is_running: bool,
    preemptions: usize,
    outcome: Option<Outcome>,
    /// The number of steps planned while the sequence was in [`Simulator::waiting`].
    waited: usize,
    /// The limit for `waited`: the most steps that sequences submitted earlier or ranked higher can take.
    ahead: usize,
}

/// The sort key of a waiting sequence. Of a tenant's sequences, the one with the smallest key starts first.
/// The parts of the key: whether the sequence was preempted fewer than twice; its arrival plus 2 s per priority level,
/// in nanoseconds; its arrival; its id.
type SortKey = (bool, i128, Duration, SequenceId);

pub struct Simulator<'a> {
    scenario: &'a Scenario,
    scheduler: Scheduler,
    /// The step whose sampled tokens are not known yet, if steps are planned ahead.
    queued: Option<StepPlan>,
    now: Duration,
    pub tracked: Vec<Tracked>,
    /// The submitted sequences that have not ended.
    unfinished: BTreeSet<SequenceId>,
    /// The submitted sequences that are waiting to run, except pending forks, sorted by [`SortKey`].
    waiting: BTreeSet<SortKey>,
    /// The sequences that the current plan preempted, if the plan also started forks.
    /// The check of the start order ignores these sequences.
    /// Forks start without a reserve of free blocks, so a plan can start a waiting sequence and then preempt a running
    /// sequence for a fork. After its second preemption, this sequence can rank above the started one.
    displaced: BTreeSet<SequenceId>,
    /// Submitted forks that are waiting for another sequence to compute their prompt.
    pending: BTreeSet<SequenceId>,
    /// The deadlines of sequences that have not started, except pending forks and forks whose prompt another sequence
    /// has started to compute.
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
pub struct Summary {
    /// A digest of the work in all plans.
    pub plans: u64,
    pub finished: usize,
    pub canceled: usize,
    pub expired: usize,
    pub preemptions: usize,
    /// The number of sequences that were preempted twice, and are therefore never preempted again.
    pub protected: usize,
    /// The number of forks that started with the blocks of another sequence.
    pub forked: usize,
    pub hit_tokens: u64,
    /// The number of chunks that exceed the limit in `Simulator::check_chunks`.
    /// Without prompt segments, the limit is half of the token budget, rounded up.
    pub long_chunks: usize,
    pub steps: usize,
    pub duration: Duration,
}

/// Returns the simulated duration of a step with `tokens` tokens: a fixed time plus a time per token.
fn step_time(tokens: usize) -> Duration {
    Duration::from_nanos(5_800_000 + 11_800 * tokens as u64)
}

impl<'a> Simulator<'a> {
    pub fn new(scenario: &'a Scenario, seed: u64) -> Self {
        let Scenario { config, ref windows, blocks, ref requests, .. } = *scenario;
        let scheduler = Scheduler::new(
            config,
            BlockManager::new(windows.clone(), blocks).with_prompt_segments(config.prompt_segments),
        );
        let max_blocks = sequence_peak_blocks(windows, config.context, config.token_budget) * config.max_sequences;
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
            has_ample_blocks: max_blocks < blocks,
            has_tenants: requests.iter().any(|request| request.tenant != requests[0].tenant),
            random: Random(seed),
            summary: Summary::default(),
        }
    }

    /// Simulates steps until all requests have ended. Returns what happened.
    pub fn run(&mut self) -> Summary {
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
        let Request { ref prompt, max_tokens, tenant, priority, arrival, deadline, is_fork, prompt_segments, .. } =
            *request;
        if !is_fork {
            let (prompt, forks) = (prompt.clone(), (id + 1..=id + request.forks as u64).collect());
            let new = NewSequence {
                prompt_segments,
                forks,
                max_tokens,
                tenant,
                priority,
                deadline,
                ..new_sequence(id, prompt)
            };
            self.scheduler.submit(NewSequence { arrival, ..new });
        }
        let rank = self.rank(id);
        // While a sequence waits, each step computes a token of a sequence that was submitted earlier or ranks higher.
        // A sequence is preempted at most twice, so each of its tokens is computed at most three times.
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

    /// Returns whether the prefill of a fork's prompt has started, in the fork, its parent or a sibling.
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

    /// Checks that no sequence expires before its deadline or after its start.
    fn check_expired(&mut self, plan: &StepPlan) {
        for &id in &plan.expired {
            let deadline = self.scenario.requests[id as usize].deadline;
            assert!(
                deadline.is_some_and(|deadline| deadline <= self.now),
                "sequence {id} expired, but has no deadline that has passed"
            );
            assert!(self.tracked[id as usize].started.is_none(), "sequence {id} expired after its start");
            self.end(id, Outcome::Expired);
        }
    }

    /// Checks that only running sequences are preempted, only if blocks can run out, and each sequence at most twice.
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
    /// Also checks that no deadline in `deadlines` has passed, because the plan must expire such sequences.
    fn check_stats(&self) {
        let running = self.tracked_running().len();
        assert!(running <= self.scenario.config.max_sequences);
        let stats = self.scheduler.stats();
        assert_eq!((stats.running, stats.waiting), (running, self.unfinished.len() - running));
        assert_eq!(stats.preemptions as usize, self.summary.preemptions);
        assert!(
            self.deadlines.first().is_none_or(|&(deadline, _)| deadline > self.now),
            "a sequence past its deadline has neither started nor expired"
        );
    }

    /// Returns the running sequences whose prompts the plan leaves unfinished.
    /// After a preemption, the generated tokens to recompute count as part of the prompt.
    fn with_unfinished_prompt(&self, plan: &StepPlan, decoding: &BTreeSet<SequenceId>) -> BTreeSet<SequenceId> {
        // A sequence with pending forks leaves its last prompt token to the next step.
        // A sequence with prompt segments also leaves its last prompt token, and then computes one token per step.
        let parents: BTreeSet<_> = self.pending.iter().filter_map(|&fork| self.scheduler.parent(fork)).collect();
        let is_done = |id: &SequenceId| {
            let last = self.scenario.requests[*id as usize].prompt.len() - 1;
            let end = match self.prompt_segments(*id) {
                Some(_) => last.max(self.scheduler.computed(*id) + 1),
                None => self.tracked[*id as usize].digests.len() - usize::from(parents.contains(id)),
            };
            let is_complete = self.awaits_last_token(*id);
            is_complete || decoding.contains(id) || plan.work.iter().any(|work| work.id == *id && work.range.end == end)
        };
        // With several tenants, a plan may leave out a running sequence that finds no free blocks,
        // because the plan does not preempt a sequence of another tenant that it has just started.
        let has_work = |id: &SequenceId| !self.has_tenants || plan.work.iter().any(|work| work.id == *id);
        self.tracked_running().into_iter().filter(|id| has_work(id) && !is_done(id)).collect()
    }

    /// Checks that a chunk exceeds half of the token budget only if the step completes all other running prompts.
    /// With prompt segments, the limit is higher.
    fn check_chunks(&mut self, plan: &StepPlan, unfinished: &BTreeSet<SequenceId>) {
        // A segment is never split. A chunk can therefore be one segment that is larger than half of the budget,
        // and can then be extended by another segment, even if less than a segment of the budget is left.
        let segment = self.segment_tokens();
        let longest = self.scenario.config.token_budget.div_ceil(2).max(segment.unwrap_or(1)) + segment.unwrap_or(0);
        for SequenceWork { id, .. } in plan.work.iter().filter(|work| work.range.len() > longest) {
            self.summary.long_chunks += 1;
            assert!(
                unfinished.iter().all(|other| other == id),
                "sequence {id} has too long a chunk, although other prompts are unfinished"
            );
        }
    }

    /// Checks that a step stays within its token budget.
    /// With prompt segments, the step may exceed the budget by less than one segment.
    /// With ample blocks, also checks that only the budget and `max_sequences` limit the step.
    fn check_budget(&self, plan: &StepPlan, unfinished: &BTreeSet<SequenceId>, has_forked: bool) {
        let SchedulerConfig { token_budget, max_sequences, .. } = self.scenario.config;
        let tokens: usize = plan.work.iter().map(|work| work.range.len()).sum();
        assert!(
            tokens < token_budget + self.segment_tokens().unwrap_or(1),
            "{tokens} tokens exceed a budget of {token_budget}"
        );
        if self.has_ample_blocks && tokens < token_budget {
            assert_eq!(
                unfinished.len(),
                0,
                "{} tokens of the budget are unused, although prompts are unfinished",
                token_budget - tokens
            );
            // While a sequence and its forks share a partly filled block, the scheduler reserves a copy of the block
            // for each of them, although the last one to write to the block needs no copy.
            let is_full = self.tracked_running().len() == max_sequences || has_forked;
            assert!(is_full || self.waiting.is_empty(), "a waiting sequence could have started");
        }
    }

    /// Returns the number of tokens in the largest prompt segment, or `None` if no prompt is divided into segments.
    fn segment_tokens(&self) -> Option<usize> {
        let own = self.scenario.requests.iter().filter_map(|request| request.prompt_segments);
        own.chain(self.scenario.config.prompt_segments).map(PromptSegments::tokens).max()
    }

    /// Returns the decoding sequences: running sequences that only have to compute their last sampled token.
    /// Leaves out sequences that need no more steps (see `awaits_last_token`).
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
        let prompt_segments = self.prompt_segments(id);
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
                prompt_segments.is_none_or(|segments| segments.floor(range.start) == range.start),
                "sequence {id} reuses an incomplete prompt segment"
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
                    assert_ne!(last, self.steps, "block {block} is written twice in one step");
                }
            }
        }
    }

    /// Copies the blocks that the plan copies.
    /// Then writes digests at the positions where a step would write keys and values.
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

    /// Returns the prompt segments of a sequence, or the scheduler's prompt segments if the sequence has none.
    fn prompt_segments(&self, id: SequenceId) -> Option<PromptSegments> {
        self.scenario.requests[id as usize].prompt_segments.or(self.scenario.config.prompt_segments)
    }

    /// Returns the positions that are computed in the same pass as `position`, if a step computes `range`.
    /// Without prompt segments, keys and values do not depend on the pass, so the returned range is empty.
    fn pass(&self, id: SequenceId, range: &Range<usize>, position: usize) -> Range<usize> {
        match self.prompt_segments(id) {
            Some(segments) => segments.floor(position).max(range.start)..segments.next(position).min(range.end),
            None => 0..0,
        }
    }

    /// Returns the digest that stands for the keys and values at a position.
    /// The digest depends on all tokens up to the position, on the pass, and on the layer group.
    fn digest(&self, id: SequenceId, group: usize, pass: Range<usize>, position: usize) -> u64 {
        let tokens = self.tracked[id as usize].digests[position];
        digest(digest(tokens, pass.start as u64), pass.end as u64).wrapping_add(group as u64)
    }

    /// For each sequence in a step, checks the digests at three of the positions that the step attends to:
    /// the first, a random one and the last.
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

/// Returns whether a cancellation at `time` may take effect while a step is running: true if `time` is an even number
/// of microseconds. Other cancellations take effect between steps.
fn is_during_step(time: Duration) -> bool {
    (time.as_nanos() / 1000).is_multiple_of(2)
}
