//! Replaces `gpu/` in builds without CUDA. In these builds, no [`DecodeGraph`] and no [`StepLauncher`] can be created,
//! so their methods never run.

use std::convert::Infallible;

use anyhow::{Result, bail};
use candle_core::{Device, Tensor};

use super::decode_graph::{GraphCommand, NoDecodeGraphReason};
use super::limits::{RunnerLimits, RunnerOptions};
use super::sampling::{SamplerResult, TokenLogprobs, TokenSampler};
use super::step::{ExpectedToken, KernelTime, LaunchCounts, RowSampling, StepExecutor, StepSequence};
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::{BlockTables, KvCache};

pub struct DecodeGraph(Infallible);

impl DecodeGraph {
    pub fn plan(_: &Decoder, _: &KvCache, _: usize) -> Result<Result<Box<Self>, NoDecodeGraphReason>> {
        Ok(Err(NoDecodeGraphReason::NotOnGpu))
    }

    pub fn run(&mut self, _: &GraphCommand, _: Option<&Tensor>) -> Result<Option<u32>> {
        match self.0 {}
    }

    pub fn continues(&self, _: u64, _: usize) -> bool {
        match self.0 {}
    }

    pub fn needs_tables(&self, _: &BlockTables) -> bool {
        match self.0 {}
    }

    pub fn steps_left(&self, _: usize) -> Result<usize> {
        match self.0 {}
    }

    pub fn queued_steps(&self) -> usize {
        match self.0 {}
    }

    pub fn stop(&mut self) {
        match self.0 {}
    }

    pub fn next_ungraphed(&mut self) -> Result<u32> {
        match self.0 {}
    }

    pub fn logits(&self) -> &Tensor {
        match self.0 {}
    }

    pub fn launch_counts(&self) -> Result<LaunchCounts> {
        match self.0 {}
    }

    pub fn kernel_times(&mut self) -> Result<Vec<KernelTime>> {
        match self.0 {}
    }
}

pub struct StepLauncher(Infallible);

impl StepLauncher {
    pub fn new(_: &Device, _: RunnerLimits, _: RunnerOptions) -> Result<Option<Self>> {
        Ok(None)
    }

    pub fn can_run_model(&self, _: &Decoder) -> bool {
        match self.0 {}
    }

    pub fn run(&mut self, _: &Decoder, _: &KvCache, _: &[StepSequence]) -> Result<Option<Tensor>> {
        match self.0 {}
    }

    pub fn queue(
        &mut self,
        _: &Decoder,
        _: &KvCache,
        _: StepExecutor,
        _: &[StepSequence],
        _: &[RowSampling],
    ) -> Result<usize> {
        match self.0 {}
    }

    pub fn wait(
        &self,
        _: usize,
        _: &[Option<ExpectedToken>],
        _: &mut dyn FnMut(usize, u32),
    ) -> Result<Vec<SamplerResult>> {
        match self.0 {}
    }
}

/// Always fails, but is never called: without CUDA, no logits are on a GPU.
pub fn choose_on_device(_: &mut [Option<&mut dyn TokenSampler>], _: &Tensor) -> Result<Vec<SamplerResult>> {
    bail!("internal error: a build without CUDA cannot choose tokens on a GPU")
}

/// Always fails, but is never called: without CUDA, no logits are on a GPU.
pub fn logprobs_on_device(_: &Tensor, _: &[u32], _: usize) -> Result<Vec<TokenLogprobs>> {
    bail!("internal error: a build without CUDA cannot compute log probabilities on a GPU")
}
