//! The state of one sequence in the scheduler, and which of its tokens a step can compute next.

use std::time::Duration;

use super::ledger::TenantId;
use super::order::{Seniority, SequenceId};
use crate::engine::blocks::{BlockHashes, SequenceBlocks};
use crate::runner::PromptSegments;

/// A sequence that has not ended.
pub struct ScheduledSequence {
    /// The prompt and all tokens generated so far.
    pub tokens: Vec<u32>,
    /// Whether the last entry of `tokens` is a placeholder for the token that a queued step chooses.
    pub is_last_pending: bool,
    pub prompt_tokens: usize,
    /// See `SchedulerConfig::prompt_segments`.
    pub prompt_segments: Option<PromptSegments>,
    /// Whether to compute the whole prompt without reusing cached tokens.
    /// Set to false once all prompt tokens but the last are computed.
    pub computes_whole_prompt: bool,
    pub max_tokens: usize,
    pub tenant: TenantId,
    /// The position up to which the ledger has counted tokens. Recomputed tokens are not counted again.
    pub served: usize,
    pub seniority: Seniority,
    pub deadline: Option<Duration>,
    /// The blocks of the sequence while it runs. `None` while it waits.
    pub blocks: Option<SequenceBlocks>,
    /// The block hashes of a waiting sequence, kept so that attempts to start the sequence do not recompute them.
    /// Not used while the sequence runs: its block hashes are then in `blocks`.
    pub hashes: BlockHashes,
    pub preemptions: u32,
    /// The sequences that will fork from this sequence when it has computed all prompt tokens but the last.
    pub forks: Vec<SequenceId>,
    /// The sequence from which this sequence will fork. A sequence with a parent is not in the queue.
    pub parent: Option<SequenceId>,
}

impl ScheduledSequence {
    /// Returns [`SequenceBlocks::computed`], or 0 while the sequence waits.
    pub fn computed(&self) -> usize {
        self.blocks.as_ref().map_or(0, SequenceBlocks::computed)
    }

    /// Returns the number of tokens that are not computed yet.
    pub(super) fn uncomputed(&self) -> usize {
        self.tokens.len() - self.computed()
    }

    pub fn is_running(&self) -> bool {
        self.blocks.is_some()
    }

    /// Returns the end of the longest range that the next step can compute.
    ///
    /// If the sequence has forks or its prompt is divided into segments, the range ends before the last prompt token.
    /// Each fork computes this token itself. With segments, this token and all later tokens are computed one by one.
    pub fn next_end(&self) -> usize {
        let (last, computed) = (self.prompt_tokens - 1, self.computed());
        match self.prompt_segments {
            Some(_) if computed >= last => computed + 1,
            None if self.forks.is_empty() => self.tokens.len(),
            _ => last,
        }
    }

    /// Returns the end of a chunk that starts at `start` and has at most `tokens` tokens.
    /// A chunk never ends after [`next_end`](Self::next_end).
    ///
    /// If the prompt is divided into segments, the chunk ends where a segment ends, or at `next_end`.
    /// In this case, it includes at least one segment, even if the segment has more than `tokens` tokens.
    pub fn chunk_end(&self, start: usize, tokens: usize) -> usize {
        let end = start.saturating_add(tokens);
        let end = self.prompt_segments.map_or(end, |segments| segments.floor(end).max(segments.next(start)));
        end.min(self.next_end())
    }

    /// Returns whether the sequence is running or was running before a preemption.
    pub fn has_started(&self) -> bool {
        self.is_running() || self.preemptions > 0
    }

    /// Returns whether the sequence is running and has only one generated token, or its placeholder, left to compute.
    pub fn is_decoding(&self) -> bool {
        self.is_running() && self.uncomputed() == 1 && self.computed() >= self.prompt_tokens
    }

    /// Returns whether the sequence has tokens to compute and is not decoding.
    pub fn needs_prefill(&self) -> bool {
        self.uncomputed() > 0 && !self.is_decoding()
    }

    /// Returns the maximum number of tokens that the sequence can have, including its prompt.
    pub fn longest(&self, context: usize) -> usize {
        self.prompt_tokens.saturating_add(self.max_tokens).min(context)
    }
}
