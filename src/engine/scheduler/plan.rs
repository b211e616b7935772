//! Plans a step: which waiting sequences start, which tokens the step computes, and which sequences are preempted.

use std::collections::BTreeSet;
use std::mem;
use std::time::Duration;

use super::order::{SchedulingTurn, Seniority, SequenceId};
use super::sequence::ScheduledSequence;
use super::{GROWTH_STEPS, MAX_PREEMPTIONS, Scheduler, SequenceWork, StepPlan};

/// The sequences that can get a chunk in the planned step.
struct PrefillCandidates {
    /// The running sequences that need prefill, except those that `next_prefill` has already returned.
    running: BTreeSet<Seniority>,
    /// Whether waiting sequences may still start in the planned step.
    can_start: bool,
}

impl Scheduler {
    /// If a running sequence has computed all prompt tokens but the last, starts its forks until `max_sequences`
    /// sequences run, and moves the other forks to the queue. Returns the started forks.
    ///
    /// Each fork computes the last prompt token itself, to sample its own first token.
    fn start_forks(&mut self, id: SequenceId) -> Vec<Seniority> {
        let mut started = Vec::new();
        let Some(parent) = self.sequences.get_mut(&id) else { return started };
        if !parent.is_running() || parent.computed() + 1 != parent.prompt_tokens {
            return started;
        }
        let forks = mem::take(&mut parent.forks);
        self.clear_deadlines(&forks);
        for fork in forks {
            if !self.sequences.contains_key(&fork) {
                continue;
            }
            // A fork that would exceed `max_sequences` waits like any other sequence.
            // When it starts, it reuses the blocks of the prompt that are still in the prefix cache.
            let can_run = self.running.len() < self.config.max_sequences;
            let parent = self.sequences[&id].blocks.as_ref();
            let blocks = parent.filter(|_| can_run).map(|parent| self.blocks.fork(parent));
            let Some(fork) = self.sequences.get_mut(&fork) else { continue };
            fork.blocks = blocks;
            fork.parent = None;
            fork.computes_whole_prompt = false;
            if fork.is_running() {
                self.running.insert(fork.seniority);
                started.push(fork.seniority);
            } else {
                self.waiting.insert(fork.tenant, fork.seniority, &mut self.ledger);
            }
        }
        started
    }

    /// Plans the next step at time `now`.
    ///
    /// The plan has no work if no sequence is left, or if nothing can run before [`push`](Self::push) is called.
    pub fn plan(&mut self, now: Duration) -> StepPlan {
        let running: Vec<_> = self.running.iter().map(Seniority::id).collect();
        for id in running {
            self.start_forks(id);
        }
        self.started.clear();
        let mut plan = StepPlan { expired: self.expire(now), ..StepPlan::default() };
        let mut budget = self.config.token_budget;
        self.plan_decodes(&mut budget, &mut plan);
        self.plan_prefills(&mut budget, &mut plan);
        // Remove sequences that were preempted after they had been added to the plan.
        plan.work.retain(|work| self.sequences[&work.id].is_running());
        plan
    }

    /// Removes sequences whose deadline has passed, unless they or their parents have started. Returns the removed ids.
    fn expire(&mut self, now: Duration) -> Vec<SequenceId> {
        let has_expired = |sequence: &ScheduledSequence| {
            let parent = sequence.parent.and_then(|parent| self.sequences.get(&parent));
            let has_started = sequence.has_started() || parent.is_some_and(ScheduledSequence::has_started);
            !has_started && sequence.deadline.is_some_and(|deadline| deadline <= now)
        };
        let expired: Vec<_> = self.sequences.iter().filter(|(_, s)| has_expired(s)).map(|(&id, _)| id).collect();
        expired.iter().for_each(|&id| self.finish(id));
        expired
    }

    fn turn(&self, seniority: Seniority) -> SchedulingTurn {
        self.ledger.turn(self.sequences[&seniority.id()].tenant, seniority)
    }

    /// Returns the sequence with the first turn among `sequences`.
    fn first_in_turn(&self, sequences: &BTreeSet<Seniority>) -> Option<Seniority> {
        if self.ledger.has_one_tenant() {
            return sequences.first().copied();
        }
        sequences.iter().copied().min_by_key(|&sequence| self.turn(sequence))
    }

    /// Returns the running sequence with the last turn.
    fn last_in_turn(&self) -> Option<Seniority> {
        if self.ledger.has_one_tenant() {
            return self.running.last().copied();
        }
        self.running.iter().copied().max_by_key(|&sequence| self.turn(sequence))
    }

    /// Counts the tokens at positions `start..end` as served to the sequence's tenant, unless they were counted before.
    fn serve(&mut self, id: SequenceId, start: usize, end: usize) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let start = start.max(sequence.served);
        if start < end {
            sequence.served = end;
            self.ledger.serve(sequence.tenant, start..end, sequence.prompt_tokens);
        }
    }

    /// Plans one token of each decoding sequence that needs another step. Preempts sequences if blocks run out.
    fn plan_decodes(&mut self, budget: &mut usize, plan: &mut StepPlan) {
        let mut running: Vec<_> = self.running.iter().copied().collect();
        if !self.ledger.has_one_tenant() {
            running.sort_by_key(|&sequence| self.turn(sequence));
        }
        for id in running.iter().map(Seniority::id) {
            let sequence = &self.sequences[&id];
            let end = sequence.tokens.len();
            let longest = sequence.longest(self.config.context);
            let ahead = longest.min(end + GROWTH_STEPS);
            if sequence.is_last_pending && end >= longest {
                // The queued step chooses the last token of the sequence, so the sequence needs no other step.
                continue;
            }
            if sequence.is_decoding() && self.give_blocks(id, end, plan) {
                // The decode graph (see `runner/step/route.rs`) queues later steps before this step has ended.
                // Allocate blocks for the later steps too, but do not preempt other sequences for these blocks.
                self.try_give_blocks(id, ahead, plan);
                plan.work.push(SequenceWork { id, range: end - 1..end, is_last: true });
                *budget -= 1;
            }
        }
        // Count served tokens only after the loop, because counting changes the turns.
        for SequenceWork { id, range, .. } in &plan.work {
            self.serve(*id, range.start, range.end);
        }
    }

    /// Plans chunks of the running sequences that need prefill, and of waiting sequences that can start.
    fn plan_prefills(&mut self, budget: &mut usize, plan: &mut StepPlan) {
        let running = self.running.iter().copied().filter(|other| self.sequences[&other.id()].needs_prefill());
        let mut candidates = PrefillCandidates { running: running.collect(), can_start: true };
        let first_chunk = plan.work.len();
        while *budget > 0
            && let Some(id) = self.next_prefill(&mut candidates, plan)
        {
            self.plan_chunk(id, budget, plan);
        }
        self.give_rest_of_budget(first_chunk, budget, plan);
    }

    /// Returns the sequence with the first turn among the candidates and the waiting sequences that can start.
    /// Starts it if it was waiting. Otherwise, removes it from the candidates.
    ///
    /// Returns `None` if no candidate is left and no waiting sequence can start.
    fn next_prefill(&mut self, candidates: &mut PrefillCandidates, plan: &StepPlan) -> Option<SequenceId> {
        let PrefillCandidates { running, can_start } = candidates;
        // Start no sequence if `max_sequences` are running, nor after a preemption, because blocks have just run out.
        *can_start &= plan.preempted.is_empty() && self.running.len() < self.config.max_sequences;
        let next = self.first_in_turn(running);
        if *can_start
            && let Some((_, waiting)) = self.waiting.first(&self.ledger)
            && next.is_none_or(|next| self.turn(waiting) < self.turn(next))
        {
            // If the first waiting sequence cannot start, no other waiting sequence may overtake it.
            *can_start = self.try_start(waiting.id());
            if *can_start {
                running.extend(self.start_forks(waiting.id()));
                return Some(waiting.id());
            }
        }
        let next = next?;
        running.remove(&next);
        Some(next.id())
    }

    /// Plans a chunk of a sequence. Preempts sequences if blocks run out.
    /// Plans no chunk if the sequence was preempted after it became a candidate, or if it cannot get the blocks.
    fn plan_chunk(&mut self, id: SequenceId, budget: &mut usize, plan: &mut StepPlan) {
        let sequence = &self.sequences[&id];
        if !sequence.is_running() {
            return;
        }
        let start = sequence.computed();
        // Leave tokens for other prompts: at first, a chunk gets at most half of the step's token budget, rounded up,
        // or one prompt segment if the segment is larger.
        let tokens = (*budget).min(self.config.token_budget.div_ceil(2));
        let end = sequence.chunk_end(start, tokens);
        let is_last = end == sequence.tokens.len();
        if self.give_blocks(id, end, plan) {
            plan.work.push(SequenceWork { id, range: start..end, is_last });
            self.serve(id, start, end);
            *budget = budget.saturating_sub(end - start);
        }
    }

    /// Extends chunks that [`plan_chunk`](Self::plan_chunk) limited to half of the budget, while some budget is left.
    /// The chunks are the entries of `plan.work` from index `first_chunk` on.
    /// Skips a chunk if too few blocks are free, because an extension must not preempt other sequences.
    fn give_rest_of_budget(&mut self, first_chunk: usize, budget: &mut usize, plan: &mut StepPlan) {
        for index in first_chunk..plan.work.len() {
            let SequenceWork { id, range, .. } = plan.work[index].clone();
            let sequence = &self.sequences[&id];
            if *budget == 0 || range.end == sequence.next_end() {
                continue;
            }
            let (tokens, end) = (sequence.tokens.len(), sequence.chunk_end(range.end, *budget));
            if self.try_give_blocks(id, end, plan) {
                *budget = budget.saturating_sub(end - range.end);
                self.serve(id, range.end, end);
                plan.work[index] = SequenceWork { id, range: range.start..end, is_last: end == tokens };
            }
        }
    }

    /// Starts a waiting sequence if the free blocks cover its demand and the demands of all running sequences.
    /// Returns whether the sequence has started.
    fn try_start(&mut self, id: SequenceId) -> bool {
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        // Acquire the blocks of the cached prefix first. Otherwise, they would count as free blocks below.
        let hashes = mem::take(&mut sequence.hashes);
        sequence.blocks = Some(if sequence.computes_whole_prompt {
            self.blocks.start_uncached(&sequence.tokens, sequence.prompt_tokens, hashes)
        } else {
            self.blocks.start(&sequence.tokens, sequence.prompt_tokens, hashes)
        });
        let (tenant, seniority) = (sequence.tenant, sequence.seniority);
        let demand: usize = self.running.iter().chain([&seniority]).map(|other| self.demand(other)).sum();
        if demand <= self.blocks.free_blocks() {
            self.waiting.remove(tenant, &seniority);
            self.running.insert(seniority);
            self.started.push(id);
            return true;
        }
        if let Some(sequence) = self.sequences.get_mut(&id)
            && let Some(blocks) = sequence.blocks.take()
        {
            sequence.hashes = self.blocks.abandon(blocks);
        }
        false
    }

    /// Returns how many more blocks a sequence needs for its tokens and up to [`GROWTH_STEPS`] more tokens.
    /// For a protected sequence, counts the blocks for its longest possible answer. Returns 0 for a waiting sequence.
    pub(super) fn demand(&self, seniority: &Seniority) -> usize {
        let sequence = &self.sequences[&seniority.id()];
        let Some(held) = &sequence.blocks else { return 0 };
        let longest = sequence.longest(self.config.context);
        let tokens = if seniority.is_protected() { longest } else { longest.min(sequence.tokens.len() + GROWTH_STEPS) };
        self.blocks.demand(held, tokens, sequence.uncomputed().clamp(1, self.config.token_budget))
    }

    /// Allocates blocks to a sequence for all positions below `end`. Preempts sequences if necessary.
    ///
    /// While there are too few free blocks, preempts the sequence with the last turn.
    /// Returns false if the sequence `id` itself is preempted.
    /// Also returns false if the sequence with the last turn is protected, or if this plan has started it.
    ///
    /// A protected sequence always gets its blocks. It can preempt all unprotected sequences,
    /// and [`try_start`](Self::try_start) ensures that the blocks suffice for all protected sequences.
    fn give_blocks(&mut self, id: SequenceId, end: usize, plan: &mut StepPlan) -> bool {
        while !self.try_give_blocks(id, end, plan) {
            let victim = self.last_in_turn().filter(|victim| !victim.is_protected());
            let victim = victim.map(|victim| victim.id()).filter(|victim| !self.started.contains(victim));
            let Some(victim) = victim else { return false };
            self.preempt(victim, plan);
            if victim == id {
                return false;
            }
        }
        true
    }

    /// Allocates blocks to a sequence for all positions below `end`, without preemption.
    /// Returns false if there are too few free blocks.
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
        self.waiting.insert(sequence.tenant, sequence.seniority, &mut self.ledger);
        self.preemptions += 1;
        plan.preempted.push(id);
    }
}
