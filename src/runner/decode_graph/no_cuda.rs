//! Replaces `graph` in builds without CUDA, where `plan` never creates a [`DecodeGraph`], so its methods never run.

use std::convert::Infallible;

use anyhow::Result;
use candle_core::Tensor;

use super::no_decode_graph::{NoDecodeGraph, Planned};
use crate::kernels::sampling::DeviceSampling;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::{BlockTables, KvCache};
use crate::runner::step::KernelTime;

/// The decode graph, which cannot be created without CUDA.
pub struct DecodeGraph {
    never: Infallible,
}

impl DecodeGraph {
    pub fn plan(_: &Decoder, _: &KvCache, _: usize) -> Result<Planned<Self>> {
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
