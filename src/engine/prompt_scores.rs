//! The log probabilities of a prompt's tokens, on the engine thread.

use std::mem;
use std::ops::Range;

use crate::runner::{ScoreTokens, TokenLogprobs};

/// Which tokens of a prompt have log probabilities already.
pub struct PromptScores {
    /// How many of the most likely tokens to report with each token.
    top: usize,
    /// The number of tokens of the prompt.
    prompt: usize,
    /// The number of tokens after the first whose log probabilities were sent.
    sent: usize,
    /// The log probabilities of the current step.
    step: Vec<TokenLogprobs>,
}

impl PromptScores {
    pub fn new(top: usize, prompt: usize) -> Self {
        Self { top, prompt, sent: 0, step: Vec::new() }
    }

    /// Returns the prompt tokens that a step scores if its input tokens are `tokens[range]`. A sequence that was
    /// preempted computes some tokens again, which does not score them again.
    pub fn of_step<'s>(&'s mut self, tokens: &'s [u32], range: Range<usize>) -> Option<ScoreTokens<'s>> {
        self.step.clear();
        let scored = range.start.max(self.sent) + 1..self.prompt.min(range.end + 1);
        let first = scored.start - 1 - range.start;
        let tokens = tokens.get(scored).filter(|tokens| !tokens.is_empty())?;
        Some(ScoreTokens { first, tokens, top: self.top, logprobs: &mut self.step })
    }

    /// Takes the log probabilities that the last step computed.
    pub fn take(&mut self) -> Option<Vec<TokenLogprobs>> {
        Some(mem::take(&mut self.step)).filter(|step| !step.is_empty())
    }

    /// Counts tokens whose log probabilities are sent.
    pub fn count(&mut self, tokens: usize) {
        self.sent += tokens;
    }
}
