//! Computes the logits or the negative log-likelihoods of given tokens.

use anyhow::{Result, bail};
use candle_core::{D, DType, Device, Tensor};

use super::EngineHandle;
use crate::runner::Runner;

/// The maximum number of tokens whose logits [`window_nll`] computes at once, to limit device memory.
const LOGITS_ROWS: usize = 256;

impl EngineHandle {
    /// Returns the logits after every token of `ids`, f32 `[tokens, vocab]`, on the CPU.
    ///
    /// Waits until all earlier requests have ended.
    /// Fails if `ids` is empty, contains an id outside the vocabulary, or does not fit in the context.
    /// Needs device memory for up to two copies of the logits, because the logits of several chunks are copied into
    /// one tensor.
    pub fn logits(&self, ids: &[u32]) -> Result<Tensor> {
        let ids = ids.to_vec();
        // Return a CPU tensor. The caller's thread would free a GPU tensor on the stream of the engine thread,
        // which no other thread may use while the engine thread captures a CUDA graph.
        self.with_runner(move |runner| Ok(runner.logits(&ids)?.to_device(&Device::Cpu)?))?
    }

    /// Returns the negative log-likelihood, in nats, of each token after the first, given the preceding tokens.
    ///
    /// A text longer than the context is split into windows.
    /// Each window after the first starts with the last `context / 2` tokens of the previous window, and scores only
    /// the tokens after them. Each of these tokens therefore has at least `context / 2` tokens before it.
    ///
    /// Fails if a token id is not in the vocabulary, or if the text or the context has fewer than 2 tokens.
    pub fn negative_log_likelihood(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let vocab_size = self.info().vocab_size;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
            bail!("cannot score token id {id}: the vocabulary has {vocab_size} tokens");
        }
        if ids.len() < 2 {
            bail!("cannot score the text: it has fewer than 2 tokens");
        }
        if self.context() < 2 {
            bail!("cannot score the text: the context holds fewer than 2 tokens; use --context 2 or more");
        }
        let ids = ids.to_vec();
        self.with_runner(move |runner| windows_nll(runner, &ids))?
    }
}

/// Scores a text of any length, window by window.
fn windows_nll(runner: &mut Runner, ids: &[u32]) -> Result<Vec<f32>> {
    let window = runner.limits().context;
    let mut losses = Vec::with_capacity(ids.len() - 1);
    let mut start = 0;
    while losses.len() + 1 < ids.len() {
        let end = (start + window).min(ids.len());
        let window_losses = window_nll(runner, &ids[start..end])?;
        // Keep the scores from the previous window for the tokens that both windows contain.
        // In that window, more tokens precede them.
        let known = losses.len() - start;
        losses.extend(&window_losses[known..]);
        start = end - (window / 2).min(end);
    }
    Ok(losses)
}

/// Scores a text that fits in the context. Forgets the runner's cached tokens before and after.
fn window_nll(runner: &mut Runner, ids: &[u32]) -> Result<Vec<f32>> {
    runner.reset();
    let rows = LOGITS_ROWS.min(runner.limits().chunk);
    let mut losses = Vec::with_capacity(ids.len() - 1);
    for (index, inputs) in ids[..ids.len() - 1].chunks(rows).enumerate() {
        let first_target = index * rows + 1;
        let targets = &ids[first_target..first_target + inputs.len()];
        let logits = runner.chunk_logits(inputs)?;
        let targets = Tensor::new(targets, runner.device())?.unsqueeze(1)?;
        let chosen = logits.gather(&targets, D::Minus1)?.squeeze(1)?;
        let nll = (logits.log_sum_exp(D::Minus1)? - chosen)?;
        losses.extend(nll.to_dtype(DType::F32)?.to_vec1::<f32>()?);
    }
    runner.reset();
    Ok(losses)
}
