//! Decides which tokens of which sequences each step computes.
//!
//! [Internal](crate#stable-api): can change in any release.
//!
//! The scheduler works with token ids and block ids. It uses no device and reads no clock: the caller passes the time.
//! A simulator can therefore test the scheduler with millions of requests.
//!
//! Decode and prefill share steps. A step computes at most one token of each decoding sequence.
//! Chunks of prompts can use the rest of the step's token budget.
//!
//! Each sequence belongs to a tenant. Tenants with waiting sequences are served about equal numbers of tokens,
//! counted by weight: see `fair_queue.rs`.
//! The sequences of one tenant are ordered by seniority, which depends on preemptions, priority and arrival.
//!
//! If the KV cache runs out of blocks, the scheduler preempts the running sequence whose turn comes last,
//! unless this sequence is protected (see `MAX_PREEMPTIONS`) or was started by the same plan.
//! A preempted sequence gives up its blocks and waits.
//! When it restarts, it recomputes all of its tokens except those that it reuses from the prefix cache.

mod fair_queue;
mod ledger;
mod order;
mod plan;
mod sequence;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::ops::Range;
use std::time::Duration;

use super::blocks::{BlockCopy, BlockManager, SequenceBlocks};
use crate::nn::kv_cache::BlockTables;
use crate::runner::PromptSegments;
use fair_queue::FairQueue;
use ledger::TenantLedger;
use order::Seniority;
use sequence::ScheduledSequence;

pub use ledger::TenantId;
pub use order::SequenceId;

/// The number of tokens by which `Scheduler::demand` expects an unprotected sequence to grow.
/// A sequence starts only if the free blocks cover its demand and the demands of all running sequences.
/// A fork that starts with the blocks of its parent is an exception: it starts if fewer than
/// `max_sequences` sequences run.
/// A decode step also tries to allocate blocks for this many tokens after its own token.
/// A larger value avoids more preemptions, but sequences then start later.
const GROWTH_STEPS: usize = 8;

/// A placeholder for the token of a queued step, which the host does not know yet.
/// Its value does not matter: a step that is queued next reads the token on the device,
/// and before any other step, [`push`](Scheduler::push) replaces the placeholder.
const PENDING_TOKEN: u32 = 0;

/// The number of preemptions after which a sequence is protected: it is never preempted again.
/// A protected sequence restarts only if enough blocks are free for its longest possible answer.
const MAX_PREEMPTIONS: u32 = 2;

/// The limits of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// The maximum number of tokens in one step. See `prompt_segments` for an exception.
    pub token_budget: usize,
    /// The maximum number of sequences that run at once, from 1 to `token_budget`.
    pub max_sequences: usize,
    /// The maximum number of tokens in a sequence, prompt and answer together.
    pub context: usize,
    /// If set, all prompts without [`NewSequence::prompt_segments`] are divided into these segments.
    /// Each chunk of a divided prompt contains whole segments, so a step can exceed the token budget by less than a
    /// segment. The last segment ends before the last prompt token. This token and all generated tokens are computed
    /// one by one.
    pub prompt_segments: Option<PromptSegments>,
}

/// A sequence to submit to the scheduler.
#[derive(Clone, Debug)]
pub struct NewSequence {
    pub id: SequenceId,
    pub prompt: Vec<u32>,
    /// The sequence reuses only cached blocks of sequences with the same salt, or without a salt if this is `None`.
    pub cache_salt: Option<String>,
    /// If set, the prompt is divided into these segments instead of those in [`SchedulerConfig::prompt_segments`].
    pub prompt_segments: Option<PromptSegments>,
    /// Whether to compute all prompt tokens, even those in the prefix cache.
    pub computes_whole_prompt: bool,
    /// The ids of additional sequences with the same prompt and options, which share the prefill of this sequence.
    pub forks: Vec<SequenceId>,
    /// The maximum number of tokens to generate.
    pub max_tokens: usize,
    /// The owner of the sequence.
    pub tenant: TenantId,
    /// The priority among the sequences of a tenant. A value lower by 1 has the same effect as an arrival 2 s earlier.
    pub priority: i32,
    pub arrival: Duration,
    /// If the sequence has not started when [`Scheduler::plan`] is called with this time or a later time, it expires.
    pub deadline: Option<Duration>,
}

/// The work of one step, the block copies before it, and the sequences that expired or were preempted during planning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// One entry per sequence in the step: first decoding sequences, then sequences in prefill.
    pub work: Vec<SequenceWork>,
    /// Blocks to copy before the step, in this order.
    pub copies: Vec<BlockCopy>,
    /// Sequences that expired while they waited. The scheduler has removed them.
    pub expired: Vec<SequenceId>,
    /// Sequences that gave up their blocks during planning, and wait again.
    pub preempted: Vec<SequenceId>,
}

/// The tokens of one sequence in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceWork {
    pub id: SequenceId,
    /// The positions whose keys and values the step computes.
    pub range: Range<usize>,
    /// Whether `range` ends with the sequence's last token, so that the step can sample the next token.
    pub is_last: bool,
}

/// The current numbers of waiting and running sequences, and the total number of preemptions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    pub waiting: usize,
    pub running: usize,
    pub preemptions: u64,
}

/// The predicted start of a sequence that is submitted now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preview {
    /// Whether the next step would start the sequence, and `max_sequences` would then allow all of its forks to run.
    /// Does not consider the blocks of the forks, nor whether the step has tokens left in its budget.
    pub starts_now: bool,
    /// The estimated number of waiting sequences that start before the previewed sequence.
    pub ahead: usize,
    /// The number of prompt tokens that the sequence would reuse from the prefix cache.
    pub cached_tokens: usize,
    /// The number of blocks that the sequence needs to start, in addition to its cached blocks.
    pub needed_blocks: usize,
    /// The number of blocks that the sequence needs for its longest possible answer, in addition to its cached blocks.
    pub longest_blocks: usize,
    /// The number of free blocks outside the sequence's cached prefix, minus the demands of all running sequences.
    /// 0 if these demands are larger. See `Scheduler::demand`.
    pub free_blocks: usize,
    pub total_blocks: usize,
}

/// The waiting and running sequences, and their blocks.
pub struct Scheduler {
    config: SchedulerConfig,
    blocks: BlockManager,
    sequences: BTreeMap<SequenceId, ScheduledSequence>,
    /// The tokens served to each tenant. The sequences of tenants with more served tokens get later turns.
    ledger: TenantLedger,
    /// The sequences without blocks, except forks that still have a parent.
    waiting: FairQueue,
    /// The sequences with blocks, the most senior first.
    running: BTreeSet<Seniority>,
    /// The sequences that the current plan has taken from the queue and started. The plan does not preempt them,
    /// even if a sequence's turn becomes the last after the plan has counted tokens as served to its tenant.
    started: Vec<SequenceId>,
    preemptions: u64,
}

impl Scheduler {
    /// Creates a scheduler. Panics if `blocks` cannot hold a sequence of `config.context` tokens, if `max_sequences`
    /// is 0 or exceeds the token budget, or if a prompt segment is larger than the token budget.
    pub fn new(config: SchedulerConfig, blocks: BlockManager) -> Self {
        let SchedulerConfig { token_budget, max_sequences, context, prompt_segments } = config;
        assert!(
            (1..=token_budget).contains(&max_sequences),
            "max_sequences is {max_sequences}: expected 1 to {token_budget}, the token budget"
        );
        assert!(
            prompt_segments.is_none_or(|segments| segments.tokens() <= token_budget),
            "a prompt segment is larger than the token budget of a step"
        );
        assert!(
            blocks.peak_blocks(context, token_budget) <= blocks.stats().total,
            "the cache cannot hold {context} tokens"
        );
        Self {
            config,
            blocks,
            sequences: BTreeMap::new(),
            ledger: TenantLedger::default(),
            waiting: FairQueue::default(),
            running: BTreeSet::new(),
            started: Vec::new(),
            preemptions: 0,
        }
    }

    /// Adds a sequence to the queue. Its forks enter the queue only if they cannot start with the sequence's blocks.
    ///
    /// Panics if an id is already in use, or if the prompt is empty or longer than the context.
    /// Also panics if a prompt segment is larger than the token budget.
    pub fn submit(&mut self, new: NewSequence) {
        let NewSequence {
            id,
            prompt,
            cache_salt,
            prompt_segments,
            computes_whole_prompt,
            forks,
            max_tokens,
            tenant,
            priority,
            arrival,
            deadline,
        } = new;
        assert!(
            (1..=self.config.context).contains(&prompt.len()),
            "cannot submit a prompt of {} tokens: it is empty or longer than the context",
            prompt.len()
        );
        assert!(
            prompt_segments.is_none_or(|segments| segments.tokens() <= self.config.token_budget),
            "a prompt segment is larger than the token budget of a step"
        );
        let hashes = self.blocks.hashes(cache_salt.as_deref(), prompt_segments);
        let sequence = |id, tokens, forks, parent| ScheduledSequence {
            prompt_tokens: prompt.len(),
            tokens,
            is_last_pending: false,
            prompt_segments: prompt_segments.or(self.config.prompt_segments),
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

    /// Predicts when a sequence with its forks would start if it were submitted now.
    pub fn preview(&self, new: &NewSequence) -> Preview {
        let NewSequence { ref prompt, ref forks, max_tokens, tenant, .. } = *new;
        let SchedulerConfig { token_budget, max_sequences, context, .. } = self.config;
        let running_demand: usize = self.running.iter().map(|seniority| self.demand(seniority)).sum();
        let hashes = self.blocks.hashes(new.cache_salt.as_deref(), new.prompt_segments);
        let max_blocks = if new.computes_whole_prompt { 0 } else { usize::MAX };
        let prefix = self.blocks.find_prefix(prompt, prompt.len(), hashes, max_blocks);
        let chunk = (prompt.len() - prefix.tokens()).clamp(1, token_budget);
        let longest = prompt.len().saturating_add(max_tokens).min(context);
        let needed_blocks = self.blocks.demand_after(&prefix, longest.min(prompt.len() + GROWTH_STEPS), chunk);
        let free_blocks = self.blocks.free_blocks_after(&prefix).saturating_sub(running_demand);
        let seniority = Seniority::new(new.priority, new.arrival, new.id);
        let ahead = self.waiting.ahead(tenant, seniority, &self.ledger);
        let can_run = self.running.len() + forks.len() < max_sequences;
        Preview {
            starts_now: ahead == 0 && can_run && needed_blocks <= free_blocks,
            ahead,
            cached_tokens: prefix.tokens(),
            needed_blocks,
            longest_blocks: self.blocks.demand_after(&prefix, longest, chunk),
            free_blocks,
            total_blocks: self.blocks.stats().total,
        }
    }

    /// Returns the prompt of a sequence and all tokens generated so far. The last token can be a placeholder.
    /// Panics if the sequence has ended.
    pub fn tokens(&self, id: SequenceId) -> &[u32] {
        &self.sequences[&id].tokens
    }

    /// Returns how the prompt of a sequence is divided into segments, or `None` if the prompt is not divided.
    /// Panics if the sequence has ended.
    pub fn prompt_segments(&self, id: SequenceId) -> Option<PromptSegments> {
        self.sequences[&id].prompt_segments
    }

    /// Returns [`SequenceBlocks::computed`] of a sequence, or 0 while the sequence waits.
    /// Panics if the sequence has ended.
    pub fn computed(&self, id: SequenceId) -> usize {
        self.sequences[&id].computed()
    }

    /// Returns the sequence from which a sequence will fork, or `None` if it is not a fork or no longer has a parent.
    /// Panics if the sequence has ended.
    pub fn parent(&self, id: SequenceId) -> Option<SequenceId> {
        self.sequences[&id].parent
    }

    /// Returns the sequences that will fork from a sequence, or an empty list if it has ended.
    pub fn forks(&self, id: SequenceId) -> &[SequenceId] {
        self.sequences.get(&id).map_or(&[], |sequence| &sequence.forks)
    }

    /// Returns the block tables of a sequence, or `None` if it is not running.
    pub fn tables(&self, id: SequenceId) -> Option<&BlockTables> {
        self.sequences.get(&id)?.blocks.as_ref().map(SequenceBlocks::tables)
    }

    /// Returns whether all sequences have ended.
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

    /// Returns the block manager, to save or add cached prefixes.
    pub fn blocks_mut(&mut self) -> &mut BlockManager {
        &mut self.blocks
    }

    /// Forgets all cached prefixes, for example because a failed step may have damaged them.
    pub fn forget_prefixes(&mut self) {
        self.blocks.forget_prefixes();
    }

    /// Records that the keys and values of all positions before `end` are computed.
    /// The step that writes them may still be queued, because the device runs later steps after this step.
    pub fn advance(&mut self, id: SequenceId, end: usize) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        sequence.computes_whole_prompt &= end + 1 < sequence.prompt_tokens;
        if let Some(blocks) = &mut sequence.blocks {
            self.blocks.commit(blocks, &sequence.tokens[..end]);
        }
    }

    /// Appends a placeholder for the token that a queued step chooses, so that the next step can be planned.
    /// [`push`](Self::push) must replace the placeholder before the next one is appended.
    pub fn push_pending(&mut self, id: SequenceId) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            debug_assert!(!sequence.is_last_pending, "the last token of sequence {id} is already a placeholder");
            sequence.tokens.push(PENDING_TOKEN);
            sequence.is_last_pending = true;
        }
    }

    /// Appends a sampled token to a sequence. Replaces the placeholder for the token, if there is one.
    pub fn push(&mut self, id: SequenceId, token: u32) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        if mem::take(&mut sequence.is_last_pending) {
            sequence.tokens.pop();
        }
        sequence.tokens.push(token);
    }

    /// Returns whether the last token of a sequence is a placeholder. See [`push_pending`](Self::push_pending).
    pub fn is_pending(&self, id: SequenceId) -> bool {
        self.sequences.get(&id).is_some_and(|sequence| sequence.is_last_pending)
    }

    /// Returns whether a sequence has blocks.
    pub fn is_running(&self, id: SequenceId) -> bool {
        self.sequences.get(&id).is_some_and(ScheduledSequence::is_running)
    }

    /// Removes a sequence that has ended. Its cached blocks stay reusable until they are evicted.
    /// If forks wait for the sequence, the first fork takes its place.
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
        // The first fork becomes the parent of the other forks, and waits in the queue.
        // It reuses the removed sequence's blocks that are still cached, unless it computes the whole prompt.
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

    /// Removes the deadlines of forks: they do not expire once the prefill of their prompt has started.
    fn clear_deadlines(&mut self, forks: &[SequenceId]) {
        for fork in forks {
            self.sequences.entry(*fork).and_modify(|fork| fork.deadline = None);
        }
    }
}
