//! Replaces `on_device` in builds without CUDA.

use anyhow::{Result, bail};
use candle_core::Tensor;

use super::chosen_token::SamplerResult;
use super::logprobs::TokenLogprobs;
use super::token_sampler::TokenSampler;

/// Always fails, but is never called: without CUDA, no logits are on a GPU.
pub fn choose_on_device(_: &mut [Option<&mut dyn TokenSampler>], _: &Tensor) -> Result<Vec<SamplerResult>> {
    bail!("internal error: a build without CUDA cannot choose tokens on a GPU")
}

/// Always fails, but is never called: without CUDA, no logits are on a GPU.
pub fn logprobs_on_device(_: &Tensor, _: &[u32], _: usize) -> Result<Vec<TokenLogprobs>> {
    bail!("internal error: a build without CUDA cannot compute log probabilities on a GPU")
}
