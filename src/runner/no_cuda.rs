//! Replaces `decode_graph`, `step_launcher` and `device_choice` in builds without CUDA.
//!
//! The functions have the same signatures, so most code of the runner's other modules is the same in all builds.
//! [`DecodeGraph`] and [`StepLauncher`] cannot be created, so their methods never run.

use std::convert::Infallible;

use anyhow::{Result, bail};
use candle_core::{Device, Tensor};

use super::limits::{RunnerLimits, RunnerOptions};
use super::logprobs::TokenLogprobs;
use super::no_decode_graph::NoDecodeGraph;
use super::queued_steps::{ExpectedToken, RowSampling};
use super::route::StepExecutor;
use super::step_cost::KernelTime;
use super::step_sequence::{Chosen, StepSequence};
use crate::kernels::sampling::DeviceSampling;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::{BlockTables, KvCache};

/// The decode graph, which cannot be created without CUDA.
pub struct DecodeGraph {
    never: Infallible,
}

impl DecodeGraph {
    pub fn plan(_: &Decoder, _: &KvCache, _: usize) -> Result<Result<Box<Self>, NoDecodeGraph>> {
        Ok(Err(NoDecodeGraph::NotOnGpu))
    }

    pub fn start(&mut self, _: u64, _: usize, _: u32, _: Option<DeviceSampling>, _: &BlockTables) -> Result<()> {
        match self.never {}
    }

    pub fn start_from(
        &mut self,
        _: u64,
        _: usize,
        _: &Tensor,
        _: Option<DeviceSampling>,
        _: &BlockTables,
    ) -> Result<()> {
        match self.never {}
    }

    pub fn continues(&self, _: u64, _: usize) -> bool {
        match self.never {}
    }

    pub fn stop(&mut self) {
        match self.never {}
    }

    pub fn set_tables(&mut self, _: &BlockTables) -> Result<()> {
        match self.never {}
    }

    pub fn needs_tables(&self, _: &BlockTables) -> bool {
        match self.never {}
    }

    pub fn next(&mut self, _: usize) -> Result<u32> {
        match self.never {}
    }

    pub fn next_ungraphed(&mut self) -> Result<u32> {
        match self.never {}
    }

    pub fn steps_left(&self, _: usize) -> Result<usize> {
        match self.never {}
    }

    pub fn queued_steps(&self) -> usize {
        match self.never {}
    }

    pub fn logits(&self) -> &Tensor {
        match self.never {}
    }

    pub fn launches(&self) -> usize {
        match self.never {}
    }

    pub fn nodes(&self) -> Result<usize> {
        match self.never {}
    }

    pub fn kernel_times(&mut self) -> Result<Vec<KernelTime>> {
        match self.never {}
    }
}

/// Launches batch graphs and queued steps. A launcher cannot be created without CUDA.
pub struct StepLauncher {
    never: Infallible,
}

impl StepLauncher {
    pub fn new(_: &Device, _: RunnerLimits, _: RunnerOptions) -> Result<Option<Self>> {
        Ok(None)
    }

    pub fn can_run_model(&self, _: &Decoder) -> bool {
        match self.never {}
    }

    pub fn run(&mut self, _: &Decoder, _: &KvCache, _: &[StepSequence]) -> Result<Tensor> {
        match self.never {}
    }

    pub fn try_run(&mut self, _: &Decoder, _: &KvCache, _: &[StepSequence]) -> Result<Option<Tensor>> {
        match self.never {}
    }

    pub fn queue(
        &mut self,
        _: &Decoder,
        _: &KvCache,
        _: StepExecutor,
        _: &[StepSequence],
        _: &[RowSampling],
    ) -> Result<usize> {
        match self.never {}
    }

    pub fn wait(&self, _: usize, _: &[Option<ExpectedToken>], _: &mut dyn FnMut(usize, u32)) -> Result<Vec<Chosen>> {
        match self.never {}
    }
}

/// Always fails. Without CUDA, logits are never on a GPU, so the function is never called.
pub fn choose_on_device(_: &mut [StepSequence], _: &Tensor) -> Result<Vec<Chosen>> {
    bail!("internal error: a build without CUDA cannot choose tokens on a GPU")
}

/// Always fails. Without CUDA, logits are never on a GPU, so the function is never called.
pub fn logprobs_on_device(_: &Tensor, _: &[u32], _: usize) -> Result<Vec<TokenLogprobs>> {
    bail!("internal error: a build without CUDA cannot compute log probabilities on a GPU")
}
