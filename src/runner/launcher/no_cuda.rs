//! Replaces `step_launcher` in builds without CUDA.
//! In these builds, a [`StepLauncher`] cannot be created: `new` returns `None`, and the other methods never run.

use std::convert::Infallible;

use anyhow::Result;
use candle_core::{Device, Tensor};

use super::row_sampling::RowSampling;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;
use crate::runner::limits::{RunnerLimits, RunnerOptions};
use crate::runner::sampling::SamplerResult;
use crate::runner::step::{ExpectedToken, StepExecutor, StepSequence};

/// Replaces the launcher of batch graphs and queued steps, which exists only in builds with CUDA.
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

    pub fn wait(
        &self,
        _: usize,
        _: &[Option<ExpectedToken>],
        _: &mut dyn FnMut(usize, u32),
    ) -> Result<Vec<SamplerResult>> {
        match self.never {}
    }
}
