//! [`Sampler`]: applies penalties, temperature, top-k, top-p and min-p to logits, in this order, then chooses a token.
//!
//! The order is the same as in transformers.
//! Each random number depends only on the seed and the number of earlier draws,
//! so the same seed, parameters and logits give the same tokens.
//! On a GPU, the sampling kernels apply the same rules. `kernels/decode/sample.cu` lists the rare differences.

use std::collections::BTreeMap;

use anyhow::Result;

use super::params::SamplingParams;
use super::token_counts::TokenCounts;
use crate::engine::constraint::ConstraintState;
use crate::kernels::sampling::{DeviceSampling, Penalties, RowEdits, SamplingKernelParams, TokenMask};
use crate::runner::TokenSampler;

/// The state for choosing the tokens of one answer: parameters, token counts, logit rules and constraint.
pub struct Sampler {
    params: SamplingParams,
    seen: TokenCounts,
    /// The number of random draws so far.
    draws: u64,
    /// The number of tokens chosen so far.
    chosen: usize,
    rules: LogitRules,
    /// The constraint that the answer must match.
    constraint: Option<ConstraintState>,
}

/// How a request changes logits before the penalties, and which log probabilities it asks for.
#[derive(Clone, Debug, Default)]
pub struct LogitRules {
    /// The biases of the request, by token id.
    pub bias: BTreeMap<u32, f32>,
    /// The tokens that are banned until `min_tokens` tokens have been chosen.
    /// The ban ends earlier if the constraint requires the answer to end.
    pub stop_tokens: Vec<u32>,
    pub min_tokens: usize,
    /// The number of most likely tokens to report with log probabilities, besides the chosen token.
    /// `None` reports no log probabilities.
    pub logprobs: Option<usize>,
}

impl Sampler {
    /// Creates a sampler. The tokens of `prompt` count toward the repetition penalty.
    pub fn new(params: SamplingParams, prompt: &[u32]) -> Self {
        Self {
            params,
            seen: TokenCounts::of_prompt(prompt),
            draws: 0,
            chosen: 0,
            rules: LogitRules::default(),
            constraint: None,
        }
    }

    /// Sets how the request changes logits, and which log probabilities it asks for.
    pub fn with_rules(self, rules: LogitRules) -> Self {
        Self { rules, ..self }
    }

    /// Sets the constraint that the answer must match.
    pub fn set_constraint(&mut self, constraint: ConstraintState) {
        self.constraint = Some(constraint);
    }

    /// Passes the chosen token to the constraint, if any. Returns the token to use, which can be a different token.
    /// Fails if the constraint rejects the chosen token and has no replacement for it.
    pub fn advance(&mut self, token: u32) -> Result<u32> {
        self.constraint.as_mut().map_or(Ok(token), |constraint| constraint.advance(token))
    }

    /// Chooses and counts the next token. `logits` are f32 `[vocab]`, and already include the biases.
    /// Applies penalties to `logits` in place.
    pub fn sample(&mut self, logits: &mut [f32]) -> u32 {
        self.penalize(logits);
        let token = self.choose_edited(logits, 0);
        self.count(token);
        token
    }

    /// Returns the next token for `logits`, to which biases and penalties are already applied.
    /// `in_flight` is the number of chosen tokens that are not counted yet.
    fn choose_edited(&self, logits: &[f32], in_flight: u32) -> u32 {
        if self.params.temperature == 0.0 {
            argmax(logits)
        } else {
            self.draw(logits, self.draws + u64::from(in_flight))
        }
    }

    /// Counts a chosen token. Later choices depend on the counts through penalties, random numbers and `min_tokens`.
    fn count(&mut self, token: u32) {
        self.seen.add_generated(token);
        self.draws += u64::from(self.params.temperature != 0.0);
        self.chosen += 1;
    }

    fn penalties(&self) -> Penalties {
        let SamplingParams { repetition_penalty, frequency_penalty, presence_penalty, .. } = self.params;
        Penalties { repetition: repetition_penalty, frequency: frequency_penalty, presence: presence_penalty }
    }

    fn penalize(&self, logits: &mut [f32]) {
        let penalties = self.penalties();
        for (id, generated) in self.seen.with_penalties(penalties) {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = penalties.apply(*logit, generated);
            }
        }
    }

    /// Returns the biases to add to the logits after `chosen` tokens: the biases of the request,
    /// and -inf for stop tokens until the minimum length is reached.
    fn edits_after(&self, chosen: usize) -> Vec<(u32, f32)> {
        let mut edits = self.rules.bias.clone();
        // If the constraint requires the answer to end, do not ban stop tokens: it may allow no other tokens.
        let must_end = self.constraint.as_ref().is_some_and(ConstraintState::must_end);
        if chosen < self.rules.min_tokens && !must_end {
            edits.extend(self.rules.stop_tokens.iter().map(|&token| (token, f32::NEG_INFINITY)));
        }
        edits.into_iter().collect()
    }

    /// Draws a token with the random number at index `draw`. See [`uniform`].
    fn draw(&self, logits: &[f32], draw: u64) -> u32 {
        let mut candidates = candidates(logits, &self.params);
        // The order decides which token a random number selects. Sort by id, as the sampling kernels do.
        if !candidates.is_sorted_by_key(|candidate| candidate.id) {
            candidates.sort_unstable_by_key(|candidate| candidate.id);
        }
        let total: f64 = candidates.iter().map(|c| c.weight).sum();
        let mut remaining = uniform(self.params.seed, draw) * total;
        for candidate in &candidates {
            remaining -= candidate.weight;
            if remaining < 0.0 {
                return candidate.id;
            }
        }
        candidates.last().map_or_else(|| argmax(logits), |candidate| candidate.id)
    }
}

impl TokenSampler for Sampler {
    fn choose(&mut self, logits: &mut [f32]) -> u32 {
        self.sample(logits)
    }

    fn logit_edits(&self) -> Vec<(u32, f32)> {
        self.edits_after(self.chosen)
    }

    fn top_logprobs(&self) -> Option<usize> {
        self.rules.logprobs
    }

    fn is_constrained(&self) -> bool {
        self.constraint.as_ref().is_some_and(ConstraintState::is_constrained)
    }

    fn allowed_tokens(&mut self) -> Result<Option<TokenMask>> {
        self.constraint.as_mut().map_or(Ok(None), ConstraintState::allowed_tokens)
    }

    fn can_queue(&self) -> bool {
        self.constraint.is_none()
    }

    fn queued_edits(&self, in_flight: u32) -> RowEdits {
        let penalties = self.penalties();
        let seen = self.seen.with_penalties(penalties).collect();
        RowEdits { values: self.edits_after(self.chosen + in_flight as usize), penalties, seen }
    }

    fn choose_queued(&self, logits: &[f32], in_flight: u32) -> u32 {
        self.choose_edited(logits, in_flight)
    }

    fn record(&mut self, token: u32) {
        self.count(token);
    }

    fn on_device(&self) -> Option<DeviceSampling> {
        // Do not use `..` here: a new parameter must cause a compile error until it is passed to the kernel.
        let SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            seed,
        } = self.params;
        if temperature == 0.0 && self.penalties() == Penalties::NONE {
            return None;
        }
        let params = SamplingKernelParams {
            temperature,
            top_k: top_k.min(u32::MAX as usize) as u32,
            top_p,
            min_p,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            seed,
            sampled_before: self.draws as u32,
        };
        let seen = self.seen.with_penalties(self.penalties()).collect();
        Some(DeviceSampling { params, seen })
    }
}

/// A token that can be drawn. Its weight is its probability relative to the most likely token, which has weight 1.
#[derive(Clone, Copy, Debug)]
pub struct TokenCandidate {
    pub id: u32,
    pub weight: f64,
}

/// Applies temperature, top-k, top-p and min-p. Returns the tokens that remain, or none if no logit is above -inf.
///
/// With top-k or top-p, the candidates are sorted by descending weight. Otherwise, they are sorted by id.
pub fn candidates(logits: &[f32], params: &SamplingParams) -> Vec<TokenCandidate> {
    let top = logits.iter().copied().filter(|logit| !logit.is_nan()).fold(f32::NEG_INFINITY, f32::max);
    if top == f32::NEG_INFINITY {
        return Vec::new();
    }
    // Do not use `..` here: a new parameter must cause a compile error until this function or `sample` applies it.
    let &SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty: _,
        frequency_penalty: _,
        presence_penalty: _,
        seed: _,
    } = params;
    let weigh = |(id, &logit): (usize, &f32)| TokenCandidate {
        id: id as u32,
        weight: if logit == top { 1.0 } else { ((logit - top) as f64 / temperature.max(1e-6) as f64).exp() },
    };
    let mut all: Vec<TokenCandidate> = logits.iter().enumerate().map(weigh).filter(|c| c.weight > 0.0).collect();
    if top_k > 0 {
        keep_top_k(&mut all, top_k);
    }
    if top_p < 1.0 {
        keep_top_p(&mut all, top_p as f64);
    }
    if min_p > 0.0 {
        all.retain(|candidate| candidate.weight >= min_p as f64);
    }
    all
}

/// Orders candidates by descending weight, and equal weights by id.
/// If candidates at a cutoff have equal weights, those with the lowest ids are therefore kept.
fn by_weight(a: &TokenCandidate, b: &TokenCandidate) -> std::cmp::Ordering {
    b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
}

fn keep_top_k(candidates: &mut Vec<TokenCandidate>, count: usize) {
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count, by_weight);
        candidates.truncate(count);
    }
    candidates.sort_unstable_by(by_weight);
}

/// Keeps the smallest set of most likely tokens whose probabilities sum to at least `p`. Keeps at least one token.
///
/// A vocabulary can have 200,000 tokens, and sorting them all would be slow. Usually, far fewer tokens are kept.
/// The function therefore sorts only the top 64 tokens at first, and then 8 times as many in each further attempt,
/// until their probabilities sum to at least `p`.
fn keep_top_p(candidates: &mut Vec<TokenCandidate>, p: f64) {
    let target = p * candidates.iter().map(|c| c.weight).sum::<f64>();
    let mut head = 64.min(candidates.len());
    loop {
        if head < candidates.len() {
            candidates.select_nth_unstable_by(head, by_weight);
        }
        candidates[..head].sort_unstable_by(by_weight);
        let mut sum = 0.0;
        let reached = candidates[..head].iter().position(|candidate| {
            sum += candidate.weight;
            sum >= target
        });
        match reached {
            Some(last) => return candidates.truncate(last + 1),
            None if head == candidates.len() => return,
            None => head = (head * 8).min(candidates.len()),
        }
    }
}

/// Returns the id of the highest logit, or the lowest id in a tie. Ignores NaN, but returns the last id if all are NaN.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > logits[best] || logits[best].is_nan() {
            best = id;
        }
    }
    best as u32
}

/// Returns the random number at index `counter` of the random sequence for `seed`, in [0, 1).
///
/// Source: SplitMix64 (Steele et al., OOPSLA 2014).
pub fn uniform(seed: u64, counter: u64) -> f64 {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    // Mix the seed first. Otherwise, seeds that differ by `GOLDEN` would give the same numbers, shifted by one.
    let start = mix(seed.wrapping_add(GOLDEN));
    let bits = mix(start.wrapping_add(counter.wrapping_add(1).wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}
