//! Prefills and greedily decodes a single sequence, and measures steps, for the command `bench` and for tests.

use anyhow::{Context, Result, bail};
use candle_core::{D, Tensor};

use crate::kernels::sampling::DeviceSampling;
use crate::nn::kv_cache::{self, BLOCK_TOKENS, peak_blocks};
use crate::nn::mlp::ExpertCost;
use crate::nn::pass::RowSelection;
use crate::runner::Runner;
use crate::runner::decode_graph::GraphCommand;
use crate::runner::step::{KernelTime, LaunchCounts, StepBytes, StepTime};

/// The id of the solo sequence in the decode graph.
const SOLO: u64 = u64::MAX;

impl Runner {
    /// Prefills `tokens` after the cached tokens, one chunk at a time, and waits for the device.
    pub fn fill(&mut self, tokens: &[u32]) -> Result<()> {
        for chunk in tokens.chunks(self.limits.chunk) {
            self.forward_solo(chunk, RowSelection::Last)?;
        }
        Ok(self.device.synchronize()?)
    }

    /// Runs `count` greedy decode steps after the cached tokens, with `first` as the input of the first step.
    /// Returns the chosen tokens in order.
    pub fn decode_steps(&mut self, first: u32, count: usize) -> Result<Vec<u32>> {
        let mut chosen = Vec::with_capacity(count);
        let mut token = first;
        if self.start_graph(first, None)? {
            for left in (1..=count).rev() {
                token = self.solo_graph_step(token, left)?;
                chosen.push(token);
            }
            self.device.synchronize()?;
            return Ok(chosen);
        }
        for _ in 0..count {
            let logits = self.forward_solo(&[token], RowSelection::Last)?;
            // Choose the token on the device, so that only its four bytes are copied to the host.
            token = logits.argmax(D::Minus1)?.to_vec1::<u32>()?[0];
            chosen.push(token);
        }
        self.device.synchronize()?;
        Ok(chosen)
    }

    /// Runs `count` greedy steps of the decode graph as individual kernel launches, for comparison with the graph.
    ///
    /// Forgets the cached tokens after the last step.
    /// Fails without a decode graph, with several ranks, or if the steps exceed the context.
    pub fn decode_steps_ungraphed(&mut self, first: u32, count: usize) -> Result<Vec<u32>> {
        if !self.ranks.is_single() {
            bail!("cannot run decode steps as individual launches: several GPUs run the model");
        }
        if count > self.limits.context - self.solo.cached.len() || !self.start_graph(first, None)? {
            bail!("cannot run {count} decode steps: the context is too short, or there is no decode graph");
        }
        let Ok(graph) = &mut self.decode_graph else { bail!("internal error: the runner has no decode graph") };
        let chosen = (0..count).map(|_| graph.next_ungraphed()).collect();
        self.reset();
        chosen
    }

    /// Forgets the cached tokens, then runs `ids`, one decode step per token.
    /// Returns the logits of every token, f32 `[tokens, vocab]`.
    ///
    /// In contrast, [`logits`](Self::logits) computes the logits by prefill.
    pub fn step_logits(&mut self, ids: &[u32]) -> Result<Tensor> {
        self.reset();
        let mut rows = Vec::with_capacity(ids.len());
        for &id in ids {
            rows.push(self.one_step_logits(id)?);
        }
        Ok(Tensor::cat(&rows, 0)?)
    }

    fn one_step_logits(&mut self, id: u32) -> Result<Tensor> {
        // With several ranks, only steps with sampling parameters gather the logits of all ranks.
        if !self.start_graph(id, Some(DeviceSampling::greedy()))? {
            return self.forward_solo(&[id], RowSelection::Last);
        }
        self.solo_graph_step(id, 1)?;
        let Ok(graph) = &self.decode_graph else { bail!("internal error: the runner has no decode graph") };
        // Copy the logits, because the next step overwrites them.
        Ok(graph.logits().unsqueeze(0)?.force_contiguous()?)
    }

    /// Starts the decode graph after the cached tokens, with `token` as its first input. Returns false without a graph.
    fn start_graph(&mut self, token: u32, sampling: Option<DeviceSampling>) -> Result<bool> {
        let Ok(graph) = &mut self.decode_graph else { return Ok(false) };
        let (position, tables) = (self.solo.cached.len(), self.solo.tables.clone());
        let start = GraphCommand::Start { sequence: SOLO, position, token, sampling, tables };
        self.ranks.run_graph(graph, start, None)?;
        Ok(true)
    }

    /// Waits for the next token of the decode graph. Records `input`, the input token of the step, as cached.
    /// `limit` is the maximum number of tokens still to generate, including the next token.
    fn solo_graph_step(&mut self, input: u32, limit: usize) -> Result<u32> {
        let Ok(graph) = &mut self.decode_graph else { bail!("internal error: the runner has no decode graph") };
        let token = self.ranks.next_token(graph, limit)?;
        self.solo.cached.push(input);
        // Steps that are already queued also write keys and values after the cached tokens.
        self.solo.written = self.solo.written.max(self.solo.cached.len() + graph.queued_steps());
        Ok(token)
    }

    /// Keeps only the first `len` cached tokens, and waits for the device.
    /// Prefills the kept tokens again if later positions may have overwritten keys and values that the next token
    /// attends to.
    pub fn rewind(&mut self, len: usize) -> Result<()> {
        if len > self.solo.cached.len() {
            bail!("cannot rewind to {len} tokens: only {} are cached", self.solo.cached.len());
        }
        self.stop_graph();
        // Layer groups with a sliding window use their blocks as a ring buffer.
        // The removed positions may therefore have overwritten keys and values in the window of the next token.
        let overwritten = self.cache.layout().windows().iter().flatten().any(|&window| {
            let rows = peak_blocks(Some(window), self.limits.context, self.limits.chunk) * BLOCK_TOKENS;
            let window_start = (len + 1).saturating_sub(window) / BLOCK_TOKENS * BLOCK_TOKENS;
            self.solo.written > window_start + rows
        });
        self.solo.cached.truncate(len);
        if overwritten {
            let tokens = self.solo.cached.clone();
            self.reset();
            self.fill(&tokens).context("cannot prefill the cached tokens again")?;
        }
        Ok(self.device.synchronize()?)
    }

    /// Returns the number of bytes that the first rank reads in a decode step after `depth` cached tokens.
    pub fn step_bytes(&self, depth: usize) -> StepBytes {
        let cache = kv_cache::step_bytes(self.decoder.cache_layers(), depth, self.dtype());
        StepBytes { weights: self.decoder.step_bytes(), cache }
    }

    /// Returns the number of bytes that the first rank reads in a decode step of `sequences` sequences.
    /// Each sequence has `depth` cached tokens. `experts` is the mean number of distinct experts used per layer.
    pub fn batch_bytes(&self, sequences: usize, depth: usize, experts: f64) -> StepBytes {
        let one = self.step_bytes(depth);
        let ExpertCost { per_token, bytes } = self.decoder.expert_cost();
        let extra = (experts - per_token as f64).max(0.0) * bytes as f64;
        StepBytes { weights: one.weights + extra as u64, cache: one.cache * sequences as u64 }
    }

    /// Returns the number of experts that each token uses per layer, or 0 if the model has no experts.
    pub fn chosen_experts(&self) -> usize {
        self.decoder.expert_cost().per_token
    }

    /// Returns the mean number of distinct experts per layer in the batches that `ExpertUsage` counted since the last
    /// call. Returns `None` if `ExpertUsage` counted no batch.
    pub fn take_used_experts(&mut self) -> Result<Option<f64>> {
        self.decoder.take_used_experts()
    }

    /// Returns the mean durations, by kind of step, of the steps since the last call.
    /// Steps of the solo sequence are not included.
    pub fn take_step_times(&mut self) -> Vec<StepTime> {
        self.times.take()
    }

    /// Times each kernel of a decode step after the cached tokens.
    /// Returns `None` without a decode graph, with several ranks, or if the context is full.
    pub fn kernel_times(&mut self) -> Result<Option<Vec<KernelTime>>> {
        if !self.ranks.is_single() || self.solo.cached.len() >= self.limits.context || !self.start_graph(0, None)? {
            return Ok(None);
        }
        let dtype = self.dtype();
        let Ok(graph) = &mut self.decode_graph else { return Ok(None) };
        let mut times = graph.kernel_times()?;
        let cache = kv_cache::step_bytes(self.decoder.cache_layers(), self.solo.cached.len(), dtype);
        // The number of bytes that attention reads depends on the number of cached tokens, and is known only for all
        // layers together. Report it only if all layers use the same attention kernel.
        let mut attention = times.iter_mut().filter(|time| time.name.starts_with("flash_attention"));
        if let (Some(time), None) = (attention.next(), attention.next()) {
            time.bytes = cache;
        }
        self.solo.written = self.solo.written.max(self.solo.cached.len() + 1);
        Ok(Some(times))
    }

    /// Counts the launches of one decode graph step. Returns `None` if there is no decode graph.
    pub fn launch_counts(&self) -> Result<Option<LaunchCounts>> {
        let Ok(graph) = &self.decode_graph else { return Ok(None) };
        graph.launch_counts().map(Some)
    }
}
