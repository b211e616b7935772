//! Chooses tokens on the GPU, and computes log probabilities there.

use std::collections::HashMap;

use anyhow::{Error, Result, anyhow};
use candle_core::Tensor;

use crate::kernels::sampling::{
    LogitEdit, MAILBOX_NO_TOKEN, RowLogprobs, TokenMask, edit_logits, mask_logits, sample_rows, top_logprobs,
};
use crate::runner::sampling::{ChosenToken, NO_ALLOWED_TOKEN, NoToken, SamplerResult, TokenLogprobs, TokenSampler};

/// Chooses a token on the GPU with each sampler. Row i of `logits`, f32 `[sequences, vocab]`, belongs to entry i of
/// `samplers`, which is `None` if the sequence needs no token. May change `logits` in place.
///
/// Waits for the tokens, if any. Only tokens and log probabilities are copied to the host.
pub fn choose_on_device(samplers: &mut [Option<&mut dyn TokenSampler>], logits: &Tensor) -> Result<Vec<SamplerResult>> {
    if samplers.iter().all(Option::is_none) {
        return Ok(samplers.iter().map(|_| None).collect());
    }
    let logits = sampled_rows(samplers, logits)?;
    let (masks, mut problems) = allowed_tokens(samplers);
    let scored = ScoredRows::copy(samplers, &logits)?;
    let edits = (0..).zip(present(samplers)).flat_map(|(row, sampler)| {
        sampler.logit_edits().into_iter().map(move |(token, value)| LogitEdit { row, token, value })
    });
    edit_logits(&logits, &edits.collect::<Vec<_>>())?;
    mask_logits(&logits, &masks)?;
    let parameters: Vec<_> = present(samplers).map(|sampler| sampler.on_device()).collect();
    let tokens = sample_rows(&logits, &parameters)?;
    let logprobs = match scored {
        Some(scored) => scored.logprobs(&tokens)?,
        None => vec![None; tokens.len()],
    };
    let mut choices = (0..).zip(tokens.into_iter().zip(logprobs));
    let chosen = samplers.iter_mut().map(|sampler| {
        let sampler = sampler.as_deref_mut()?;
        Some(match choices.next() {
            Some((row, (id, logprobs))) => match (problems.remove(&row), id) {
                (Some(problem), _) => Err(problem),
                (None, Some(id)) => {
                    sampler.record(id);
                    Ok(ChosenToken { id, logprobs })
                }
                (None, None) if masks.iter().any(|(masked, _)| *masked == row) => Err(anyhow!(NO_ALLOWED_TOKEN)),
                (None, None) => Err(NoToken.into()),
            },
            None => Err(NoToken.into()),
        })
    });
    Ok(chosen.collect())
}

/// Returns the samplers of the sequences that have one, in order.
fn present<'a>(samplers: &'a [Option<&mut dyn TokenSampler>]) -> impl Iterator<Item = &'a dyn TokenSampler> {
    samplers.iter().filter_map(|sampler| sampler.as_deref())
}

/// The rows of logits whose log probabilities were requested.
struct ScoredRows {
    /// For each row, its index among the sampled rows, and how many of the most likely tokens to report.
    rows: Vec<(u32, usize)>,
    /// A copy of the rows, f32 `[rows, vocab]`. Edits, masks and penalties change the original logits in place.
    logits: Tensor,
}

impl ScoredRows {
    /// Copies the rows of `logits` whose log probabilities were requested. Returns `None` if there are no such rows.
    /// `logits`, f32 `[rows, vocab]`, has one row for each sampler that is not `None`.
    fn copy(samplers: &[Option<&mut dyn TokenSampler>], logits: &Tensor) -> Result<Option<Self>> {
        let rows = (0..).zip(present(samplers));
        let rows: Vec<(u32, usize)> = rows.filter_map(|(row, sampler)| Some((row, sampler.top_logprobs()?))).collect();
        if rows.is_empty() {
            return Ok(None);
        }
        let indices: Vec<u32> = rows.iter().map(|&(row, _)| row).collect();
        let logits = logits.index_select(&Tensor::new(indices, logits.device())?, 0)?;
        Ok(Some(Self { rows, logits }))
    }

    /// Returns an entry for each of `tokens`, the tokens chosen from the sampled rows.
    /// An entry is `None` if no log probabilities were requested, and meaningless if its token is `None`.
    fn logprobs(&self, tokens: &[Option<u32>]) -> Result<Vec<Option<TokenLogprobs>>> {
        let mut logprobs = vec![None; tokens.len()];
        let chosen: Vec<u32> = self.rows.iter().map(|&(row, _)| tokens[row as usize].unwrap_or(0)).collect();
        let max_count = self.rows.iter().map(|&(_, count)| count).max().unwrap_or(0);
        let scores = top_logprobs(&self.logits, &chosen, max_count)?;
        for (&(row, count), RowLogprobs { chosen, mut top }) in self.rows.iter().zip(scores) {
            top.truncate(count);
            logprobs[row as usize] = Some(TokenLogprobs { chosen, top });
        }
        Ok(logprobs)
    }
}

/// Returns the rows of `logits`, f32 `[sequences, vocab]`, that belong to sequences with samplers.
fn sampled_rows(samplers: &[Option<&mut dyn TokenSampler>], logits: &Tensor) -> Result<Tensor> {
    let rows: Vec<u32> = (0..).zip(samplers).filter(|(_, sampler)| sampler.is_some()).map(|(row, _)| row).collect();
    Ok(if rows.len() == samplers.len() {
        logits.clone()
    } else {
        logits.index_select(&Tensor::new(rows, logits.device())?, 0)?
    })
}

/// Returns a mask for each row whose sampler allows only some tokens, and an error for each row whose mask cannot be
/// computed. Row i belongs to the i-th sampler that is not `None`.
fn allowed_tokens(samplers: &mut [Option<&mut dyn TokenSampler>]) -> (Vec<(u32, TokenMask)>, HashMap<u32, Error>) {
    let (mut masks, mut problems) = (Vec::new(), HashMap::new());
    for (row, sampler) in (0..).zip(samplers.iter_mut().flatten()) {
        match sampler.allowed_tokens() {
            Ok(Some(mask)) => masks.push((row, mask)),
            Ok(None) => {}
            Err(problem) => drop(problems.insert(row, problem)),
        }
    }
    (masks, problems)
}

/// Returns the log probabilities of each row's token in `tokens` and of the row's `top` most likely tokens.
/// `logits` are f32 `[tokens, vocab]`.
pub fn logprobs_on_device(logits: &Tensor, tokens: &[u32], top: usize) -> Result<Vec<TokenLogprobs>> {
    let rows = top_logprobs(logits, tokens, top)?.into_iter();
    Ok(rows.map(|RowLogprobs { chosen, top }| TokenLogprobs { chosen, top }).collect())
}

/// Returns the token id in a word that the GPU has written to a mailbox: the token id plus 1, or [`MAILBOX_NO_TOKEN`].
/// Fails with [`NoToken`] if the word is [`MAILBOX_NO_TOKEN`].
pub fn token_in_word(word: u32) -> Result<u32> {
    match word {
        MAILBOX_NO_TOKEN => Err(NoToken.into()),
        word => Ok(word - 1),
    }
}
