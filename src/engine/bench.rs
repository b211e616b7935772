//! What `inferno bench` needs beside generating: bare steps without sampling, and what each must read.

use anyhow::{Context, Result, bail};
use candle_core::{D, Tensor};
use serde::Serialize;

use super::sampler::uniform;
use super::{Decoding, Engine};
use crate::nn::kv_cache;
use crate::nn::pass::LogitRows;

/// Bytes that one decode step cannot avoid reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepBytes {
    /// Every dense tensor once, the chosen experts, one row of the embedding.
    pub weights: u64,
    /// Keys and values in sight.
    pub cache: u64,
}

impl StepBytes {
    pub fn total(&self) -> u64 {
        self.weights + self.cache
    }
}

/// What one kernel of a decode step takes.
#[derive(Clone, Debug, Serialize)]
pub struct KernelTime {
    pub name: String,
    /// Launches per token.
    pub calls: usize,
    /// Of all its launches, per token.
    pub seconds: f64,
    /// Read and written by all its launches, per token.
    pub bytes: u64,
}

/// What the host and the driver do for one token.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LaunchCounts {
    pub kernels: usize,
    /// Nodes of the graph that is launched; 0 without one.
    pub graph_nodes: usize,
    pub host_syncs: usize,
    pub copies: usize,
}

impl Engine {
    /// `count` token ids that depend on `seed` alone.
    pub fn random_tokens(&self, seed: u64, count: usize) -> Vec<u32> {
        let vocab_size = self.info.vocab_size as f64;
        (0..count as u64).map(|index| (uniform(seed, index) * vocab_size) as u32).collect()
    }

    /// Reads tokens after the cached ones, in chunks, and waits for the device.
    pub fn fill(&mut self, tokens: &[u32]) -> Result<()> {
        for chunk in tokens.chunks(self.cache.chunk()) {
            self.forward_tensor(chunk, LogitRows::Last)?;
        }
        Ok(self.device.synchronize()?)
    }

    /// `count` greedy steps after the cached tokens, the first of them on `first`, and waits for the device. Returns the
    /// token that each step chose.
    pub fn decode_steps(&mut self, first: u32, count: usize) -> Result<Vec<u32>> {
        let mut chosen = Vec::with_capacity(count);
        let mut token = first;
        if self.start_steps(first)? {
            for left in (1..=count).rev() {
                token = self.next_step(Some(token), left)?;
                chosen.push(token);
            }
            self.device.synchronize()?;
            return Ok(chosen);
        }
        for _ in 0..count {
            let logits = self.forward_tensor(&[token], LogitRows::Last)?;
            // The four bytes of the token come to the host, not the logits.
            token = logits.argmax(D::Minus1)?.to_vec1::<u32>()?[0];
            chosen.push(token);
        }
        self.device.synchronize()?;
        Ok(chosen)
    }

    /// The same with each step's launches issued one by one instead of as a graph, to judge the graph by. The cache is
    /// forgotten afterwards. Fails without a graph.
    #[cfg(feature = "cuda")]
    pub fn decode_steps_ungraphed(&mut self, first: u32, count: usize) -> Result<Vec<u32>> {
        if count > self.cache.context() - self.cache.len() || !self.start_steps(first)? {
            bail!("{count} steps of a graph do not fit, or there is none");
        }
        let Decoding::Graph(executor) = &mut self.decoding else { bail!("there is no graph to run") };
        let chosen = (0..count).map(|_| executor.next_ungraphed()).collect();
        self.forget();
        chosen
    }

    /// Logits f32 \[T, V\] of every position of `ids`, as `logits`, but each from a decode step: how the executor is judged.
    pub fn step_logits(&mut self, ids: &[u32]) -> Result<Tensor> {
        self.forget();
        let mut rows = Vec::with_capacity(ids.len());
        for &id in ids {
            rows.push(self.one_step_logits(id)?);
        }
        Ok(Tensor::cat(&rows, 0)?)
    }

    fn one_step_logits(&mut self, id: u32) -> Result<Tensor> {
        if !self.start_steps(id)? {
            return self.forward_tensor(&[id], LogitRows::Last);
        }
        self.next_step(Some(id), 1)?;
        match &self.decoding {
            Decoding::Eager(_) => bail!("there is no graph to run"),
            #[cfg(feature = "cuda")]
            // A copy: the next step writes there again.
            Decoding::Graph(executor) => Ok(executor.logits().unsqueeze(0)?.force_contiguous()?),
        }
    }

    /// Goes back to the first `len` cached tokens and remembers that point, so that coming back again reads nothing anew.
    pub fn rewind(&mut self, len: usize) -> Result<()> {
        if len > self.cached.len() {
            bail!("cannot go back to {len} tokens, {} are cached", self.cached.len());
        }
        let left = self.cache.truncate(len)?;
        // Sliding layers may have gone back further.
        let missing = self.cached[left..len].to_vec();
        self.cached.truncate(left);
        self.fill(&missing).context("cannot read the cached tokens again")?;
        self.cache.set_checkpoint()?;
        Ok(self.device.synchronize()?)
    }

    /// What a decode step reads behind `depth` cached tokens.
    pub fn step_bytes(&self, depth: usize) -> StepBytes {
        let cache = kv_cache::step_bytes(self.decoder.cache_layers(), depth, self.info.dtype);
        StepBytes { weights: self.decoder.step_bytes(), cache }
    }

    /// Times each kernel of a decode step after the cached tokens; `None` if the executor cannot.
    pub fn kernel_times(&mut self) -> Result<Option<Vec<KernelTime>>> {
        #[cfg(feature = "cuda")]
        if self.cache.len() < self.cache.context() && self.start_steps(0)? {
            let Decoding::Graph(executor) = &mut self.decoding else { return Ok(None) };
            let mut times = executor.kernel_times()?;
            let cache = kv_cache::step_bytes(self.decoder.cache_layers(), self.cache.len(), self.info.dtype);
            // What attention reads depends on the depth; a model whose layers differ has several kernels.
            let mut attention = times.iter_mut().filter(|time| time.name.starts_with("flash_attention"));
            if let (Some(time), None) = (attention.next(), attention.next()) {
                time.bytes = cache;
            }
            self.cache.advance_written(0, 1);
            return Ok(Some(times));
        }
        Ok(None)
    }

    /// What a decode step has the host and the driver do; `None` if the executor does not count.
    pub fn launch_counts(&self) -> Option<LaunchCounts> {
        match &self.decoding {
            Decoding::Eager(_) => None,
            #[cfg(feature = "cuda")]
            Decoding::Graph(executor) => {
                let kernels = executor.launches();
                Some(LaunchCounts { kernels, graph_nodes: kernels, host_syncs: 0, copies: 0 })
            }
        }
    }
}
