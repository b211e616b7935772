//! [`StepSequence`]: the input of one sequence in a step, and how its next token is chosen.

use std::ops::Range;

use crate::nn::kv_cache::BlockTables;
use crate::nn::pass::SequenceSpan;
use crate::runner::limits::PromptSegments;
use crate::runner::sampling::{TokenLogprobs, TokenSampler};

/// The input of one sequence in a step.
pub struct StepSequence<'s> {
    /// The id of the sequence, which must be the same in all of its steps.
    pub id: u64,
    /// The input tokens.
    pub ids: &'s [u32],
    /// Whether the input is the token that the last queued step chooses for this sequence.
    /// If true, `ids` holds a single placeholder.
    pub awaits_input: bool,
    /// The position of the first input token.
    /// The keys and values of all earlier positions to which these tokens attend are in the cache,
    /// or earlier queued steps write them.
    pub position: usize,
    /// The block tables of the sequence. They cover at least all positions up to the last input token.
    pub tables: &'s BlockTables,
    /// Chooses the next token. `None` if no token is needed, for example before the end of the prompt.
    pub sampler: Option<&'s mut dyn TokenSampler>,
    /// The maximum number of tokens that the sequence may still generate, including this step's token.
    /// The decode graph queues no steps beyond `limit`.
    pub limit: usize,
    /// How the prompt is divided into passes, so that the results do not depend on other sequences.
    /// If `None`, the runner's option `prompt_segments` applies.
    pub prompt_segments: Option<PromptSegments>,
    /// The prompt tokens whose log probabilities the step computes, if any.
    pub scores: Option<TokensToScore<'s>>,
}

impl<'s> StepSequence<'s> {
    /// Returns a sequence without a sampler, whose input tokens the host knows.
    pub(in crate::runner) fn new(id: u64, ids: &'s [u32], position: usize, tables: &'s BlockTables) -> Self {
        Self {
            id,
            ids,
            awaits_input: false,
            position,
            tables,
            sampler: None,
            limit: 0,
            prompt_segments: None,
            scores: None,
        }
    }

    /// Returns this sequence with the input tokens `ids`, of which the first is at `position`.
    /// The host knows these tokens. The result has no sampler and no scores.
    pub(in crate::runner) fn with_input<'i>(&self, ids: &'i [u32], position: usize) -> StepSequence<'i>
    where
        's: 'i,
    {
        StepSequence {
            limit: self.limit,
            prompt_segments: self.prompt_segments,
            ..StepSequence::new(self.id, ids, position, self.tables)
        }
    }

    /// Returns the number of input tokens, the position of the first input token, and the block tables.
    pub(in crate::runner) fn span(&self) -> SequenceSpan<'s> {
        SequenceSpan { tokens: self.ids.len(), position: self.position, tables: self.tables }
    }
}

/// Returns the sampler of each sequence, or `None` for a sequence that needs no token.
pub fn samplers<'a>(sequences: &'a mut [StepSequence]) -> Vec<Option<&'a mut dyn TokenSampler>> {
    let samplers = sequences.iter_mut().map(|sequence| sequence.sampler.as_deref_mut());
    samplers.map(|sampler| sampler.map(|sampler| sampler as &mut dyn TokenSampler)).collect()
}

/// Prompt tokens whose log probabilities a step computes. Each token follows an input token of the step.
pub struct TokensToScore<'s> {
    /// The index in the sequence's `ids` of the token that precedes `tokens[0]`.
    pub first: usize,
    pub tokens: &'s [u32],
    /// How many of the most likely tokens to report with each token.
    pub top: usize,
    /// Receives one entry for each token in `tokens`.
    pub logprobs: &'s mut Vec<TokenLogprobs>,
}

impl TokensToScore<'_> {
    /// Returns the tokens to score in a pass with only the input tokens in `range`, or `None` if it scores none.
    pub(in crate::runner) fn in_range(&mut self, range: Range<usize>) -> Option<TokensToScore<'_>> {
        let Self { first, tokens, top, logprobs } = self;
        let start = range.start.clamp(*first, *first + tokens.len());
        let end = range.end.clamp(*first, *first + tokens.len());
        let tokens = &tokens[start - *first..end - *first];
        (!tokens.is_empty()).then(|| TokensToScore { first: start - range.start, tokens, top: *top, logprobs })
    }
}
