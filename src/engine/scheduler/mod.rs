//! Decides which tokens each step computes, for many sequences.
//!
//! The scheduler handles token ids and blocks. It uses no device, and the caller passes the time. A simulator can
//! therefore test it with millions of requests.
//!
//! Prefill and decode are not separate phases. Every sequence has tokens to compute: the part of its prompt that is not
//! computed yet, or the last sampled token.
//! A step first takes one token of every sequence that decodes, then chunks of prompts, until its token budget is used.
//!
//! Sequences belong to tenants. Tenants that wait get equal numbers of tokens. The file `fair_queue.rs` explains how.
//! Within a tenant, the order is that of seniority: priority and arrival.
//!
//! If the KV cache runs out of blocks, the sequence with the last rank is preempted: it gives up its blocks and computes its
//! tokens again later. By then, most of these blocks are usually still cached.

mod fair_queue;
mod order;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::ops::Range;
use std::time::Duration;

use super::blocks::{BlockCopy, BlockHashes, BlockManager, SequenceBlocks};
use crate::nn::kv_cache::BlockTables;
use crate::runner::ChunkGrid;
use fair_queue::{FairQueue, Rank};
use order::Seniority;

pub use fair_queue::TenantId;
pub use order::SequenceId;

/// A sequence is admitted only if there are enough free blocks for this many decode steps of all running sequences.
const GROWTH_STEPS: usize = 8;

/// Stands for a token that a queued step chooses. The device knows the token, so the value does not matter.
const PENDING_TOKEN: u32 = 0;

/// After this many preemptions, a sequence is admitted only if there are enough blocks for its longest possible answer.
/// It is then never preempted again.
const MAX_PREEMPTIONS: u32 = 2;

/// The limits of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// The most tokens that one step computes.
    pub token_budget: usize,
    /// The most sequences that run at once. At most `token_budget`.
    pub max_sequences: usize,
    /// The most tokens of a sequence: prompt and answer together.
    pub context: usize,
    /// If set, chunks of prompts end at boundaries of this grid, and every later token is computed by itself.
    /// A step may then exceed its token budget by less than one part of the grid.
    pub grid: Option<ChunkGrid>,
}

/// A sequence to submit to the scheduler.
#[derive(Clone, Debug)]
pub struct NewSequence {
    pub id: SequenceId,
    pub prompt: Vec<u32>,
    /// If set, the sequence reuses only the blocks of sequences with the same salt.
    pub cache_salt: Option<String>,
    /// The ids of more sequences that differ from this one only in their id. The prompt is computed once for all.
    pub forks: Vec<SequenceId>,
    /// The most tokens to generate.
    pub max_tokens: usize,
    /// The owner of the sequence. Tenants that wait get equal numbers of tokens.
    pub tenant: TenantId,
    /// Among the sequences of a tenant, those with smaller values run first. A value lower by 1 counts as much as
    /// arriving 2 seconds earlier.
    pub priority: i32,
    pub arrival: Duration,
    /// The time at which the sequence expires if it has not started by then.
    pub deadline: Option<Duration>,
}

/// The work of one step, and the sequences that expired or were preempted while it was planned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Sequences that decode come first, then chunks of prompts.
    pub work: Vec<SequenceWork>,
    /// Blocks to copy before the step.
    pub copies: Vec<BlockCopy>,
    /// Sequences that expired while they waited. The scheduler has removed them.
    pub expired: Vec<SequenceId>,
    /// Sequences that gave up their blocks and wait again.
    pub preempted: Vec<SequenceId>,
}

/// The tokens of one sequence in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceWork {
    pub id: SequenceId,
    /// The positions whose keys and values the step computes.
    pub range: Range<usize>,
    /// Whether `range` includes the last known token, so that the next token can be sampled.
    pub is_last: bool,
}

/// The current numbers of waiting and running sequences, and the number of preemptions so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    pub waiting: usize,
    pub running: usize,
    pub preemptions: u64,
}

/// What would happen to a sequence if it were submitted now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preview {
    /// Whether the next step would start it.
    pub starts_now: bool,
    /// About how many waiting sequences would start before it.
    pub ahead: usize,
    /// The prompt tokens that are in the prefix cache.
    pub cached_tokens: usize,
    /// The free blocks that it needs to start.
    pub needed_blocks: usize,
    /// The free blocks that it needs for its longest answer.
    pub longest_blocks: usize,
    /// The blocks that no sequence uses, minus those that running sequences need for their next tokens.
    pub free_blocks: usize,
    pub total_blocks: usize,
}

/// The queues of waiting and running sequences, and their blocks.
pub struct Scheduler {
    config: SchedulerConfig,
    blocks: BlockManager,
    sequences: BTreeMap<SequenceId, Sequence>,
    /// The sequences without blocks.
    waiting: FairQueue,
    /// The sequences with blocks, the most senior first.
    running: BTreeSet<Seniority>,
    /// The sequences that the current plan admitted. It does not preempt them, although tokens that it counted for their
    /// tenants may have changed their ranks.
    admitted: Vec<SequenceId>,
    preemptions: u64,
}

struct Sequence {
    /// The prompt and all tokens generated so far.
    tokens: Vec<u32>,
    /// Whether the last of `tokens` is a placeholder for the token that a queued step chooses.
    is_last_pending: bool,
    prompt: usize,
    max_tokens: usize,
    tenant: TenantId,
    /// The number of tokens that were counted for the tenant. Tokens that are computed again do not count again.
    served: usize,
    seniority: Seniority,
    deadline: Option<Duration>,
    /// The blocks of a running sequence. `None` while it waits.
    blocks: Option<SequenceBlocks>,
    /// The block hashes of a waiting sequence, so that they are not computed again. A running one has them in `blocks`.
    hashes: BlockHashes,
    preemptions: u32,
    /// The sequences that share this prompt. They fork from this sequence when all but its last token is computed.
    forks: Vec<SequenceId>,
    /// The sequence from which this one will fork. Until then, it neither waits nor runs by itself.
    parent: Option<SequenceId>,
}

impl Sequence {
    fn computed(&self) -> usize {
        self.blocks.as_ref().map_or(0, SequenceBlocks::computed)
    }

    /// Returns the number of tokens that are not computed yet.
    fn left(&self) -> usize {
        self.tokens.len() - self.computed()
    }

    fn is_running(&self) -> bool {
        self.blocks.is_some()
    }

    /// Returns the position up to which the next step can compute. Forks need the last prompt token, to sample from it.
    /// With a grid, the last prompt token and all generated tokens are computed one by one.
    fn next_end(&self, grid: Option<ChunkGrid>) -> usize {
        let (last, computed) = (self.prompt - 1, self.computed());
        match grid {
            Some(_) if computed >= last => computed + 1,
            None if self.forks.is_empty() => self.tokens.len(),
            _ => last,
        }
    }

    /// Returns the end of a chunk that starts at `start` and has about `tokens` tokens.
    fn chunk_end(&self, grid: Option<ChunkGrid>, start: usize, tokens: usize) -> usize {
        let end = start.saturating_add(tokens);
        let end = grid.map_or(end, |grid| grid.floor(end).max(grid.next(start)));
        end.min(self.next_end(grid))
    }

    /// Returns whether the sequence runs, or ran before it was preempted.
    fn has_started(&self) -> bool {
        self.is_running() || self.preemptions > 0
    }

    /// Returns whether the last sampled token is the only one that is not computed yet.
    fn is_decoding(&self) -> bool {
        self.is_running() && self.left() == 1 && self.computed() >= self.prompt
    }

    /// Returns whether the sequence has tokens to compute before it decodes.
    fn needs_prefill(&self) -> bool {
        self.left() > 0 && !self.is_decoding()
    }

    /// Returns the most tokens that the sequence can have, including its prompt.
    fn longest(&self, context: usize) -> usize {
        self.prompt.saturating_add(self.max_tokens).min(context)
    }
}

impl Scheduler {
    /// Creates a scheduler. The blocks must hold at least one sequence of `config.context` tokens.
    pub fn new(config: SchedulerConfig, blocks: BlockManager) -> Self {
        let SchedulerConfig { token_budget, max_sequences, context, grid } = config;
        assert!(
            (1..=token_budget).contains(&max_sequences),
            "max_sequences is {max_sequences}: expected 1 to {token_budget}, the token budget"
        );
        assert!(grid.is_none_or(|grid| grid.tokens() <= token_budget), "a step must fit a part of the grid");
        assert!(blocks.peak(context, token_budget) <= blocks.stats().total, "a sequence of {context} tokens must fit");
        let (waiting, running) = (FairQueue::default(), BTreeSet::new());
        let (sequences, admitted) = (BTreeMap::new(), Vec::new());
        Self { config, blocks, sequences, waiting, running, admitted, preemptions: 0 }
    }

    /// Adds a sequence and its forks to the waiting queue.
    pub fn submit(&mut self, new: NewSequence) {
        let NewSequence { id, prompt, cache_salt, forks, max_tokens, tenant, priority, arrival, deadline } = new;
        assert!((1..=self.config.context).contains(&prompt.len()), "cannot submit a prompt of {} tokens", prompt.len());
        let hashes = self.blocks.hashes(cache_salt.as_deref());
        let sequence = |id, tokens, forks, parent| Sequence {
            prompt: prompt.len(),
            tokens,
            is_last_pending: false,
            max_tokens,
            tenant,
            served: 0,
            seniority: Seniority::new(priority, arrival, id),
            deadline,
            blocks: None,
            hashes: hashes.clone(),
            preemptions: 0,
            forks,
            parent,
        };
        let forked = forks.iter().map(|&fork| (fork, sequence(fork, prompt.clone(), Vec::new(), Some(id))));
        let all: Vec<_> = forked.chain([(id, sequence(id, prompt.clone(), forks.clone(), None))]).collect();
        for (id, sequence) in all {
            assert!(self.sequences.insert(id, sequence).is_none(), "sequence {id} was submitted twice");
        }
        self.waiting.join(tenant, 1 + forks.len());
        self.waiting.insert(tenant, self.sequences[&id].seniority);
    }

    /// Returns what would happen to a sequence and its forks if they were submitted now.
    pub fn preview(&mut self, new: &NewSequence) -> Preview {
        let NewSequence { ref prompt, ref forks, max_tokens, tenant, .. } = *new;
        let SchedulerConfig { token_budget, max_sequences, context, .. } = self.config;
        let running: usize = self.running.iter().map(|seniority| self.demand(seniority)).sum();
        // The blocks of a cached prefix do not count as free while the sequence runs.
        let hashes = self.blocks.hashes(new.cache_salt.as_deref());
        let blocks = self.blocks.start(prompt, prompt.len(), hashes);
        let cached_tokens = blocks.computed();
        let chunk = (prompt.len() - cached_tokens).clamp(1, token_budget);
        let longest = prompt.len().saturating_add(max_tokens).min(context);
        let needed_blocks = self.blocks.demand(&blocks, longest.min(prompt.len() + GROWTH_STEPS), chunk);
        let longest_blocks = self.blocks.demand(&blocks, longest, chunk);
        let free_blocks = self.blocks.free().saturating_sub(running);
        self.blocks.abandon(blocks);
        let ahead = self.waiting.ahead(tenant, Seniority::new(new.priority, new.arrival, new.id));
        let has_slot = self.running.len() + forks.len() < max_sequences;
        Preview {
            starts_now: ahead == 0 && has_slot && needed_blocks <= free_blocks,
            ahead,
            cached_tokens,
            needed_blocks,
            longest_blocks,
            free_blocks,
            total_blocks: self.blocks.stats().total,
        }
    }

    /// Returns the prompt of a sequence and all tokens generated so far.
    pub fn tokens(&self, id: SequenceId) -> &[u32] {
        &self.sequences[&id].tokens
    }

    /// Returns the number of tokens of a sequence whose keys and values are in the cache.
    pub fn computed(&self, id: SequenceId) -> usize {
        self.sequences[&id].computed()
    }

    /// Returns the sequence whose prompt a fork waits for, or `None` if the fork has started or waits by itself.
    pub fn parent(&self, id: SequenceId) -> Option<SequenceId> {
        self.sequences[&id].parent
    }

    /// Returns the block tables of a running sequence.
    pub fn tables(&self, id: SequenceId) -> Option<&BlockTables> {
        self.sequences[&id].blocks.as_ref().map(SequenceBlocks::tables)
    }

    /// Returns whether no sequence waits or runs.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty()
    }

    pub fn stats(&self) -> SchedulerStats {
        let running = self.running.len();
        SchedulerStats { waiting: self.sequences.len() - running, running, preemptions: self.preemptions }
    }

    pub fn blocks(&self) -> &BlockManager {
        &self.blocks
    }

    /// Returns the blocks, to save cached prefixes or to add some. No sequence may be changed.
    pub fn blocks_mut(&mut self) -> &mut BlockManager {
        &mut self.blocks
    }

    /// Forgets all cached prefixes, for example after a failed step.
    pub fn forget_prefixes(&mut self) {
        self.blocks.forget_prefixes();
    }

    /// Records that the keys and values of positions before `end` are in the cache.
    pub fn advance(&mut self, id: SequenceId, end: usize) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        if let Some(blocks) = &mut sequence.blocks {
            self.blocks.commit(blocks, &sequence.tokens[..end]);
        }
    }

    /// Appends a placeholder for the token that a queued step chooses, so that the next step can be planned.
    /// [`push`](Self::push) replaces it with the token. The caller plans at most one step before that.
    pub fn push_pending(&mut self, id: SequenceId) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.tokens.push(PENDING_TOKEN);
            sequence.is_last_pending = true;
        }
    }

    /// Appends a sampled token to a sequence, or replaces the placeholder for it.
    pub fn push(&mut self, id: SequenceId, token: u32) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        if mem::take(&mut sequence.is_last_pending) {
            sequence.tokens.pop();
        }
        sequence.tokens.push(token);
    }

    /// Returns whether the last token of a sequence is a placeholder.
    pub fn is_pending(&self, id: SequenceId) -> bool {
        self.sequences.get(&id).is_some_and(|sequence| sequence.is_last_pending)
    }

    /// Returns whether a sequence has blocks.
    pub fn is_running(&self, id: SequenceId) -> bool {
        self.sequences.get(&id).is_some_and(Sequence::is_running)
    }

    /// Removes a sequence that has ended or was canceled. Its blocks stay reusable until they are evicted.
    pub fn finish(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.remove(&id) else { return };
        let has_started = sequence.has_started();
        self.waiting.remove(sequence.tenant, &sequence.seniority);
        self.waiting.leave(sequence.tenant);
        self.running.remove(&sequence.seniority);
        if let Some(blocks) = sequence.blocks {
            self.blocks.release(blocks);
        }
        if let Some(parent) = sequence.parent.and_then(|parent| self.sequences.get_mut(&parent)) {
            parent.forks.retain(|&fork| fork != id);
        }
        // The first fork takes the place of the sequence. It reuses the blocks that are already computed.
        if has_started {
            self.clear_deadlines(&sequence.forks);
        }
        let mut forks = sequence.forks.into_iter();
        let Some(first) = forks.next() else { return };
        let forks: Vec<_> = forks.collect();
        for fork in &forks {
            self.sequences.entry(*fork).and_modify(|fork| fork.parent = Some(first));
        }
        if let Some(successor) = self.sequences.get_mut(&first) {
            (successor.parent, successor.forks) = (None, forks);
            self.waiting.insert(successor.tenant, successor.seniority);
        }
    }

    /// Lets forks wait without a limit, because their prompt has already started.
    fn clear_deadlines(&mut self, forks: &[SequenceId]) {
        for fork in forks {
            self.sequences.entry(*fork).and_modify(|fork| fork.deadline = None);
        }
    }

    /// Starts the forks of a running sequence once all of its prompt but the last token is computed.
    /// Each fork computes the last token itself, to sample its own first token. Returns the forks that run.
    fn start_forks(&mut self, id: SequenceId) -> Vec<Seniority> {
        let mut started = Vec::new();
        let Some(parent) = self.sequences.get_mut(&id) else { return started };
        if !parent.is_running() || parent.computed() + 1 != parent.prompt {
            return started;
        }
        let forks = mem::take(&mut parent.forks);
        self.clear_deadlines(&forks);
        for fork in forks {
            // Forks that may not run yet wait like other sequences, and will find the prompt in the prefix cache.
            let can_run = self.running.len() < self.config.max_sequences;
            let parent = self.sequences[&id].blocks.as_ref();
            let blocks = parent.filter(|_| can_run).map(|parent| self.blocks.fork(parent));
            let Some(fork) = self.sequences.get_mut(&fork) else { continue };
            (fork.blocks, fork.parent) = (blocks, None);
            if fork.is_running() {
                self.running.insert(fork.seniority);
                started.push(fork.seniority);
            } else {
                self.waiting.insert(fork.tenant, fork.seniority);
            }
        }
        started
    }

    /// Plans the next step at time `now`.
    ///
    /// A plan without work means that every sequence waits for [`push`](Self::push), or that none is left.
    pub fn plan(&mut self, now: Duration) -> StepPlan {
        let running: Vec<_> = self.running.iter().map(Seniority::id).collect();
        for id in running {
            self.start_forks(id);
        }
        self.admitted.clear();
        let mut plan = StepPlan { expired: self.expire(now), ..StepPlan::default() };
        let mut budget = self.config.token_budget;
        self.plan_decodes(&mut budget, &mut plan);
        self.plan_prefills(&mut budget, &mut plan);
        // Planning one sequence can preempt others that are already in the plan.
        plan.work.retain(|work| self.sequences[&work.id].is_running());
        plan
    }

    /// Removes the waiting sequences whose deadline has passed, unless they already started once.
    fn expire(&mut self, now: Duration) -> Vec<SequenceId> {
        let has_expired = |sequence: &Sequence| {
            let parent = sequence.parent.and_then(|parent| self.sequences.get(&parent));
            let has_started = sequence.has_started() || parent.is_some_and(Sequence::has_started);
            !has_started && sequence.deadline.is_some_and(|deadline| deadline <= now)
        };
        let expired: Vec<_> = self.sequences.iter().filter(|(_, s)| has_expired(s)).map(|(&id, _)| id).collect();
        expired.iter().for_each(|&id| self.finish(id));
        expired
    }

    /// Returns the rank of a sequence. The smallest rank gets tokens and blocks first.
    fn rank(&self, seniority: Seniority) -> Rank {
        self.waiting.rank(self.sequences[&seniority.id()].tenant, seniority)
    }

    /// Counts the tokens before `end` for the tenant of a sequence, except those that were counted before.
    fn serve(&mut self, id: SequenceId, start: usize, end: usize) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let start = start.max(sequence.served);
        if start < end {
            sequence.served = end;
            self.waiting.serve(sequence.tenant, start..end, sequence.prompt);
        }
    }

    /// Plans one token of every sequence that decodes. Preempts the sequences with the last ranks if blocks run out.
    fn plan_decodes(&mut self, budget: &mut usize, plan: &mut StepPlan) {
        let mut running: Vec<_> = self.running.iter().copied().collect();
        if !self.waiting.has_one_tenant() {
            running.sort_by_key(|&sequence| self.rank(sequence));
        }
        for id in running.iter().map(Seniority::id) {
            let sequence = &self.sequences[&id];
            let end = sequence.tokens.len();
            let longest = sequence.longest(self.config.context);
            let ahead = longest.min(end + GROWTH_STEPS);
            if sequence.is_last_pending && end >= longest {
                // The queued step chooses the last token of the sequence.
                continue;
            }
            if sequence.is_decoding() && self.give_blocks(id, end, plan) {
                // The decode graph queues the next steps before this step has ended. Give the sequence free blocks for
                // these steps too, but preempt no other sequence for them.
                self.try_give_blocks(id, ahead, plan);
                plan.work.push(SequenceWork { id, range: end - 1..end, is_last: true });
                *budget -= 1;
            }
        }
        // Only now, so that the order does not change in between.
        for SequenceWork { id, range, .. } in &plan.work {
            self.serve(*id, range.start, range.end);
        }
    }

    /// Plans prompt chunks of running sequences, and admits waiting sequences.
    fn plan_prefills(&mut self, budget: &mut usize, plan: &mut StepPlan) {
        let mut running: BTreeSet<_> =
            self.running.iter().copied().filter(|other| self.sequences[&other.id()].needs_prefill()).collect();
        let first_chunk = plan.work.len();
        let mut can_admit = true;
        while *budget > 0 {
            // Admit no sequence after a preemption: the preempted one needs the free blocks to run again.
            can_admit &= plan.preempted.is_empty() && self.running.len() < self.config.max_sequences;
            let candidate = self.waiting.first().map(|(_, candidate)| candidate).filter(|_| can_admit);
            let next = match self.waiting.has_one_tenant() {
                true => running.first().copied(),
                false => running.iter().copied().min_by_key(|&sequence| self.rank(sequence)),
            };
            let id = match (candidate, next) {
                (Some(candidate), next) if next.is_none_or(|next| self.rank(candidate) < self.rank(next)) => {
                    // If the first sequence cannot start, no other one may start before it.
                    can_admit = self.admit(candidate.id());
                    running.extend(self.start_forks(candidate.id()));
                    candidate.id()
                }
                (_, Some(next)) => {
                    running.remove(&next);
                    next.id()
                }
                (_, None) => break,
            };
            let sequence = &self.sequences[&id];
            if !sequence.is_running() {
                continue;
            }
            let start = sequence.computed();
            // A prompt first gets at most half of the token budget, so that other prompts get the other half.
            let tokens = (*budget).min(self.config.token_budget.div_ceil(2));
            let end = sequence.chunk_end(self.config.grid, start, tokens);
            let is_last = end == sequence.tokens.len();
            if self.give_blocks(id, end, plan) {
                plan.work.push(SequenceWork { id, range: start..end, is_last });
                self.serve(id, start, end);
                *budget = budget.saturating_sub(end - start);
            }
        }
        // Give the remaining budget to prompts that were limited to half of it above.
        for index in first_chunk..plan.work.len() {
            let SequenceWork { id, range, .. } = plan.work[index].clone();
            let sequence = &self.sequences[&id];
            if *budget == 0 || range.end == sequence.next_end(self.config.grid) {
                continue;
            }
            let (tokens, end) = (sequence.tokens.len(), sequence.chunk_end(self.config.grid, range.end, *budget));
            if self.try_give_blocks(id, end, plan) {
                *budget = budget.saturating_sub(end - range.end);
                self.serve(id, range.end, end);
                plan.work[index] = SequenceWork { id, range: range.start..end, is_last: end == tokens };
            }
        }
    }

    /// Starts a waiting sequence if the free blocks cover its demand and the demand of all running sequences.
    fn admit(&mut self, id: SequenceId) -> bool {
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        // The blocks of a cached prefix are in use from here on, so they do not count as free below.
        sequence.blocks = Some(self.blocks.start(&sequence.tokens, sequence.prompt, mem::take(&mut sequence.hashes)));
        let (tenant, seniority) = (sequence.tenant, sequence.seniority);
        let demand: usize = self.running.iter().chain([&seniority]).map(|other| self.demand(other)).sum();
        if demand <= self.blocks.free() {
            self.waiting.remove(tenant, &seniority);
            self.running.insert(seniority);
            self.admitted.push(id);
            return true;
        }
        if let Some(sequence) = self.sequences.get_mut(&id)
            && let Some(blocks) = sequence.blocks.take()
        {
            sequence.hashes = self.blocks.abandon(blocks);
        }
        false
    }

    /// Returns how many more blocks a sequence needs for its next [`GROWTH_STEPS`] tokens, or for its longest possible
    /// answer if it must never be preempted again.
    fn demand(&self, seniority: &Seniority) -> usize {
        let sequence = &self.sequences[&seniority.id()];
        let Some(held) = &sequence.blocks else { return 0 };
        let longest = sequence.longest(self.config.context);
        let tokens = match seniority.is_protected() {
            true => longest,
            false => longest.min(sequence.tokens.len() + GROWTH_STEPS),
        };
        self.blocks.demand(held, tokens, sequence.left().clamp(1, self.config.token_budget))
    }

    /// Gives a sequence blocks for all positions below `end`. While there are too few, preempts the sequence
    /// with the last rank. Returns false if that is the sequence itself, or one that just started.
    ///
    /// A protected sequence is never preempted and never lacks blocks: it can preempt all sequences that are not
    /// protected, and [`admit`](Self::admit) starts it only if there are enough blocks for all protected ones.
    fn give_blocks(&mut self, id: SequenceId, end: usize, plan: &mut StepPlan) -> bool {
        while !self.try_give_blocks(id, end, plan) {
            // The sequence with the last rank can be the one that needs the blocks.
            let last = match self.waiting.has_one_tenant() {
                true => self.running.last(),
                false => self.running.iter().max_by_key(|&&sequence| self.rank(sequence)),
            };
            let victim = last.filter(|victim| !victim.is_protected()).map(Seniority::id);
            let Some(victim) = victim.filter(|victim| !self.admitted.contains(victim)) else { return false };
            self.preempt(victim, plan);
            if victim == id {
                return false;
            }
        }
        true
    }

    /// Gives a sequence blocks for all positions below `end`, or returns false if there are too few.
    fn try_give_blocks(&mut self, id: SequenceId, end: usize, plan: &mut StepPlan) -> bool {
        let held = self.sequences.get_mut(&id).and_then(|sequence| sequence.blocks.as_mut());
        let Some(copies) = held.and_then(|held| self.blocks.grow(held, end)) else { return false };
        plan.copies.extend(copies);
        true
    }

    fn preempt(&mut self, id: SequenceId, plan: &mut StepPlan) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let Some(blocks) = sequence.blocks.take() else { return };
        sequence.hashes = self.blocks.release(blocks);
        self.running.remove(&sequence.seniority);
        sequence.preemptions += 1;
        if sequence.preemptions >= MAX_PREEMPTIONS {
            sequence.seniority = sequence.seniority.protected();
        }
        self.waiting.insert(sequence.tenant, sequence.seniority);
        self.preemptions += 1;
        plan.preempted.push(id);
    }
}
