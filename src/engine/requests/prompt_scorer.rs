//! [`PromptScorer`]: scores the tokens of a prompt on the engine thread, for prompt log probabilities.

use std::mem;
use std::ops::Range;

use crate::runner::{TokenLogprobs, TokensToScore};

/// Selects the prompt tokens that each step scores, and holds their log probabilities until the engine takes them.
pub struct PromptScorer {
    /// The number of most likely tokens to report for each prompt token.
    top: usize,
    prompt_tokens: usize,
    /// The number of tokens whose log probabilities have been sent.
    /// The first prompt token has no log probability, and does not count.
    sent: usize,
    /// The log probabilities of the current step, until they are taken.
    step: Vec<TokenLogprobs>,
}

impl PromptScorer {
    pub fn new(top: usize, prompt_tokens: usize) -> Self {
        Self { top, prompt_tokens, sent: 0, step: Vec::new() }
    }

    /// Returns the prompt tokens to score in a step with the input tokens `tokens[range]`, or `None` if there are none.
    ///
    /// A preempted sequence recomputes tokens, but does not score them again.
    pub fn of_step<'s>(&'s mut self, tokens: &'s [u32], range: Range<usize>) -> Option<TokensToScore<'s>> {
        self.step.clear();
        let scored = range.start.max(self.sent) + 1..self.prompt_tokens.min(range.end + 1);
        let first = scored.start - 1 - range.start;
        let tokens = tokens.get(scored).filter(|tokens| !tokens.is_empty())?;
        Some(TokensToScore { first, tokens, top: self.top, logprobs: &mut self.step })
    }

    /// Takes the log probabilities that the current step has computed, or returns `None` if it computed none.
    pub fn take(&mut self) -> Option<Vec<TokenLogprobs>> {
        Some(mem::take(&mut self.step)).filter(|step| !step.is_empty())
    }

    /// Records that the log probabilities of `tokens` more tokens have been sent.
    pub fn count(&mut self, tokens: usize) {
        self.sent += tokens;
    }
}
