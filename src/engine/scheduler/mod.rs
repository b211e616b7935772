//! Decides which tokens each step computes, for many sequences.
//!
//! The scheduler handles token ids and blocks. It uses neither a device nor a clock: the caller passes the time.
//! A simulator can therefore test the scheduler with millions of requests.
//!
//! Prefill and decode are not separate phases. Every sequence has tokens to compute:
//! the part of its prompt that is not computed yet, or the last sampled token.
//! A step first takes one token of every decoding sequence, then chunks of prompts, until its token budget is used.
//!
//! Sequences belong to tenants. Waiting tenants get equal numbers of tokens, as `fair_queue.rs` explains.
//! The sequences of one tenant are ordered by seniority, which depends on priority and arrival.
//!
//! If the KV cache runs out of blocks, the sequence with the last turn is preempted.
//! A preempted sequence gives up its blocks and recomputes its tokens later.
//! By then, most of these blocks are usually still cached.

mod fair_queue;
mod ledger;
mod order;
mod plan;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::ops::Range;
use std::time::Duration;

use super::blocks::{BlockCopy, BlockHashes, BlockManager, SequenceBlocks};
use crate::nn::kv_cache::BlockTables;
use crate::runner::PromptParts;
use fair_queue::FairQueue;
use ledger::TenantLedger;
use order::Seniority;

pub use ledger::TenantId;
pub use order::SequenceId;

/// A sequence is admitted only if there are enough free blocks for this many decode steps of all running sequences.
const GROWTH_STEPS: usize = 8;

/// A placeholder for a token that a queued step chooses. The device knows the token, so the value does not matter.
const PENDING_TOKEN: u32 = 0;

/// After this many preemptions, a sequence is admitted only if there are enough blocks for its longest possible answer.
/// Such a sequence is never preempted again.
const MAX_PREEMPTIONS: u32 = 2;

/// The limits of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// The maximum number of tokens in one step.
    pub token_budget: usize,
    /// The maximum number of sequences that run at once. Must not exceed `token_budget`.
    pub max_sequences: usize,
    /// The maximum number of tokens in a sequence, prompt and answer together.
    pub context: usize,
    /// If set, chunks of prompts end at the ends of these parts, and every later token is computed separately.
    /// A step may then exceed its token budget by less than one part.
    pub prompt_parts: Option<PromptParts>,
}

/// A sequence to submit to the scheduler.
#[derive(Clone, Debug)]
pub struct NewSequence {
    pub id: SequenceId,
    pub prompt: Vec<u32>,
    /// If set, the sequence reuses only the blocks of sequences with the same salt.
    pub cache_salt: Option<String>,
    /// If set, divides this prompt, as [`SchedulerConfig::prompt_parts`] divides all prompts.
    pub prompt_parts: Option<PromptParts>,
    /// Whether to compute every prompt token, even if it is in the prefix cache.
    pub computes_whole_prompt: bool,
    /// The ids of additional sequences with the same prompt and options. The prompt is computed once for all sequences.
    pub forks: Vec<SequenceId>,
    /// The maximum number of tokens to generate.
    pub max_tokens: usize,
    /// The owner of the sequence. Waiting tenants get equal numbers of tokens.
    pub tenant: TenantId,
    /// The priority among the sequences of a tenant: sequences with smaller values run first.
    /// A value lower by 1 has the same effect as an arrival 2 seconds earlier.
    pub priority: i32,
    pub arrival: Duration,
    /// The time at which the sequence expires if it has not started by then.
    pub deadline: Option<Duration>,
}

/// The work of one step, and the sequences that expired or were preempted while it was planned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// The work of each sequence: decoding sequences first, then chunks of prompts.
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

/// The predicted start of a sequence that is submitted now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preview {
    /// Whether the next step would start the sequence.
    pub starts_now: bool,
    /// The estimated number of waiting sequences that would start before this sequence.
    pub ahead: usize,
    /// The number of prompt tokens that are in the prefix cache.
    pub cached_tokens: usize,
    /// The number of free blocks that the sequence needs to start.
    pub needed_blocks: usize,
    /// The number of free blocks that the sequence needs for its longest possible answer.
    pub longest_blocks: usize,
    /// The number of unused blocks, minus the blocks that running sequences need for their next tokens.
    pub free_blocks: usize,
    pub total_blocks: usize,
}

/// The waiting and running sequences, and their blocks.
pub struct Scheduler {
    config: SchedulerConfig,
    blocks: BlockManager,
    sequences: BTreeMap<SequenceId, ScheduledSequence>,
    /// The tokens served to each tenant, which decide the turns of sequences.
    ledger: TenantLedger,
    /// The sequences without blocks.
    waiting: FairQueue,
    /// The sequences with blocks, the most senior first.
    running: BTreeSet<Seniority>,
    /// The sequences that the current plan admitted. The plan does not preempt these sequences,
    /// even if their turns have changed because the plan counted tokens for their tenants.
    admitted: Vec<SequenceId>,
    preemptions: u64,
}

/// The scheduler's state of a sequence that has not ended.
struct ScheduledSequence {
    /// The prompt and all tokens generated so far.
    tokens: Vec<u32>,
    /// Whether the last of `tokens` is a placeholder for the token that a queued step chooses.
    is_last_pending: bool,
    prompt_tokens: usize,
    /// If set, chunks of the prompt end at the ends of these parts, and every later token is computed separately.
    prompt_parts: Option<PromptParts>,
    /// Whether to compute the whole prompt without reusing cached tokens. Becomes false once the prompt is computed.
    computes_whole_prompt: bool,
    max_tokens: usize,
    tenant: TenantId,
    /// The number of tokens that were counted for the tenant. Recomputed tokens are not counted again.
    served: usize,
    seniority: Seniority,
    deadline: Option<Duration>,
    /// The blocks of a running sequence. `None` while it waits.
    blocks: Option<SequenceBlocks>,
    /// The block hashes of a waiting sequence, kept to avoid recomputing them.
    /// The block hashes of a running sequence are in `blocks`.
    hashes: BlockHashes,
    preemptions: u32,
    /// The sequences that share this prompt. They fork once this sequence has computed all prompt tokens but the last.
    forks: Vec<SequenceId>,
    /// The sequence from which this sequence will fork. Until the fork, this sequence neither waits nor runs.
    parent: Option<SequenceId>,
}

impl ScheduledSequence {
    /// Returns the number of tokens whose keys and values are in the cache, or 0 while the sequence waits.
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

    /// Returns the position up to which the next step can compute.
    ///
    /// Stops before the last prompt token if the sequence has forks, because each fork samples from that token.
    /// If the prompt is divided into parts, the last prompt token and all generated tokens are computed one by one.
    fn next_end(&self) -> usize {
        let (last, computed) = (self.prompt_tokens - 1, self.computed());
        match self.prompt_parts {
            Some(_) if computed >= last => computed + 1,
            None if self.forks.is_empty() => self.tokens.len(),
            _ => last,
        }
    }

    /// Returns the end of a chunk that starts at `start` and has at most `tokens` tokens. If the prompt is divided into
    /// parts, the chunk ends where a part ends, even if the first part needs more tokens. A chunk never ends after
    /// [`next_end`](Self::next_end).
    fn chunk_end(&self, start: usize, tokens: usize) -> usize {
        let end = start.saturating_add(tokens);
        let end = self.prompt_parts.map_or(end, |parts| parts.floor(end).max(parts.next(start)));
        end.min(self.next_end())
    }

    /// Returns whether the sequence runs, or ran before it was preempted.
    fn has_started(&self) -> bool {
        self.is_running() || self.preemptions > 0
    }

    /// Returns whether the last sampled token is the only token that is not computed yet.
    fn is_decoding(&self) -> bool {
        self.is_running() && self.left() == 1 && self.computed() >= self.prompt_tokens
    }

    /// Returns whether the sequence has tokens to compute before it decodes.
    fn needs_prefill(&self) -> bool {
        self.left() > 0 && !self.is_decoding()
    }

    /// Returns the maximum number of tokens in the sequence, including its prompt.
    fn longest(&self, context: usize) -> usize {
        self.prompt_tokens.saturating_add(self.max_tokens).min(context)
    }
}

impl Scheduler {
    /// Creates a scheduler. The blocks must hold at least one sequence of `config.context` tokens.
    pub fn new(config: SchedulerConfig, blocks: BlockManager) -> Self {
        let SchedulerConfig { token_budget, max_sequences, context, prompt_parts } = config;
        assert!(
            (1..=token_budget).contains(&max_sequences),
            "max_sequences is {max_sequences}: expected 1 to {token_budget}, the token budget"
        );
        assert!(
            prompt_parts.is_none_or(|parts| parts.tokens() <= token_budget),
            "a part of a prompt must fit in a step"
        );
        assert!(blocks.peak(context, token_budget) <= blocks.stats().total, "the blocks must hold {context} tokens");
        Self {
            config,
            blocks,
            sequences: BTreeMap::new(),
            ledger: TenantLedger::default(),
            waiting: FairQueue::default(),
            running: BTreeSet::new(),
            admitted: Vec::new(),
            preemptions: 0,
        }
    }

    /// Adds a sequence and its forks to the waiting queue.
    pub fn submit(&mut self, new: NewSequence) {
        let NewSequence { id, prompt, cache_salt, prompt_parts, forks, max_tokens, .. } = new;
        let NewSequence { computes_whole_prompt, tenant, priority, arrival, deadline, .. } = new;
        assert!((1..=self.config.context).contains(&prompt.len()), "cannot submit a prompt of {} tokens", prompt.len());
        assert!(
            prompt_parts.is_none_or(|parts| parts.tokens() <= self.config.token_budget),
            "a part of a prompt must fit in a step"
        );
        let hashes = self.blocks.hashes(cache_salt.as_deref(), prompt_parts);
        let sequence = |id, tokens, forks, parent| ScheduledSequence {
            prompt_tokens: prompt.len(),
            tokens,
            is_last_pending: false,
            prompt_parts: prompt_parts.or(self.config.prompt_parts),
            computes_whole_prompt,
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
        self.ledger.join(tenant, 1 + forks.len());
        self.waiting.insert(tenant, self.sequences[&id].seniority, &mut self.ledger);
    }

    /// Predicts when a sequence and its forks would start if they were submitted now.
    pub fn preview(&mut self, new: &NewSequence) -> Preview {
        let NewSequence { ref prompt, ref forks, max_tokens, tenant, .. } = *new;
        let SchedulerConfig { token_budget, max_sequences, context, .. } = self.config;
        let running: usize = self.running.iter().map(|seniority| self.demand(seniority)).sum();
        // The blocks of a cached prefix do not count as free while the sequence runs.
        let hashes = self.blocks.hashes(new.cache_salt.as_deref(), new.prompt_parts);
        let blocks = if new.computes_whole_prompt {
            self.blocks.start_uncached(prompt, prompt.len(), hashes)
        } else {
            self.blocks.start(prompt, prompt.len(), hashes)
        };
        let cached_tokens = blocks.computed();
        let chunk = (prompt.len() - cached_tokens).clamp(1, token_budget);
        let longest = prompt.len().saturating_add(max_tokens).min(context);
        let needed_blocks = self.blocks.demand(&blocks, longest.min(prompt.len() + GROWTH_STEPS), chunk);
        let longest_blocks = self.blocks.demand(&blocks, longest, chunk);
        let free_blocks = self.blocks.free().saturating_sub(running);
        self.blocks.abandon(blocks);
        let seniority = Seniority::new(new.priority, new.arrival, new.id);
        let ahead = self.waiting.ahead(tenant, seniority, &self.ledger);
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

    /// Returns how the prompt of a sequence is divided, or `None` if its results may depend on other sequences.
    pub fn prompt_parts(&self, id: SequenceId) -> Option<PromptParts> {
        self.sequences[&id].prompt_parts
    }

    /// Returns the number of tokens of a sequence whose keys and values are in the cache.
    pub fn computed(&self, id: SequenceId) -> usize {
        self.sequences[&id].computed()
    }

    /// Returns the sequence that computes a fork's prompt, or `None` if the fork has started or waits on its own.
    pub fn parent(&self, id: SequenceId) -> Option<SequenceId> {
        self.sequences[&id].parent
    }

    /// Returns the forks that wait for the prompt of a sequence.
    pub fn forks(&self, id: SequenceId) -> &[SequenceId] {
        self.sequences.get(&id).map_or(&[], |sequence| &sequence.forks)
    }

    /// Returns the block tables of a running sequence.
    pub fn tables(&self, id: SequenceId) -> Option<&BlockTables> {
        self.sequences[&id].blocks.as_ref().map(SequenceBlocks::tables)
    }

    /// Returns true if there are no waiting or running sequences.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Returns how often a sequence was preempted, or 0 if it has ended.
    pub fn preemptions(&self, id: SequenceId) -> u32 {
        self.sequences.get(&id).map_or(0, |sequence| sequence.preemptions)
    }

    pub fn stats(&self) -> SchedulerStats {
        let running = self.running.len();
        SchedulerStats { waiting: self.sequences.len() - running, running, preemptions: self.preemptions }
    }

    pub fn blocks(&self) -> &BlockManager {
        &self.blocks
    }

    /// Returns the block manager, to save or add cached prefixes. The caller must not change any sequence's blocks.
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
        sequence.computes_whole_prompt &= end + 1 < sequence.prompt_tokens;
        if let Some(blocks) = &mut sequence.blocks {
            self.blocks.commit(blocks, &sequence.tokens[..end]);
        }
    }

    /// Appends a placeholder for the token that a queued step chooses, so that the next step can be planned.
    /// [`push`](Self::push) replaces the placeholder. The caller plans at most one step before it calls `push`.
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
        self.sequences.get(&id).is_some_and(ScheduledSequence::is_running)
    }

    /// Removes a sequence that has ended or was canceled. Its blocks stay reusable until they are evicted.
    pub fn finish(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.remove(&id) else { return };
        let has_started = sequence.has_started();
        self.waiting.remove(sequence.tenant, &sequence.seniority);
        self.ledger.leave(sequence.tenant);
        self.running.remove(&sequence.seniority);
        if let Some(blocks) = sequence.blocks {
            self.blocks.release(blocks);
        }
        if let Some(parent) = sequence.parent.and_then(|parent| self.sequences.get_mut(&parent)) {
            parent.forks.retain(|&fork| fork != id);
        }
        // The first fork takes the place of the sequence, and reuses the blocks that are already computed.
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
            self.waiting.insert(successor.tenant, successor.seniority, &mut self.ledger);
        }
    }

    /// Removes the deadlines of forks, because the computation of their prompt has already started.
    fn clear_deadlines(&mut self, forks: &[SequenceId]) {
        for fork in forks {
            self.sequences.entry(*fork).and_modify(|fork| fork.deadline = None);
        }
    }
}
