//! Runs the steps of a model: forward passes, and the choice of the next tokens.
//!
//! [Internal](crate#stable-api): can change in any release.
//!
//! On a GPU, decode steps usually run as CUDA graphs: the decode graph, which has fused kernels for a single sequence,
//! or batch graphs, one for each padded batch size.
//!
//! A [`Runner`] works on token ids, positions and block tables, and knows nothing of requests or text.
//! Its callers pass a sampler ([`TokenSampler`]) for each sequence that needs a token.
//!
//! How a step of the engine runs:
//!
//! 1. The engine loop calls `Runner::queue` (`run/queue.rs`). If the step cannot be queued, `queue` returns `None`, and
//!    the engine loop calls `Runner::step` (`run/step.rs`).
//! 2. `route` decides what runs the step, and whether the step is queued (`step/route.rs`).
//! 3. If several ranks run the model, the first rank sends the step to the others (`ranks/group.rs`).
//! 4. The step runs:
//!    - on the decode graph (`gpu/decode_graph/graph.rs`)
//!    - as a batch graph (`gpu/batch_graph.rs`)
//!    - operation by operation, by `Decoder::forward` or, if the step is queued, by `gpu/step_launcher.rs`
//! 5. The next tokens are chosen. `sampling/mod.rs` lists where.
//!    `Runner::step` returns the tokens. For a queued step, `Runner::take` returns them (`run/queue.rs`).
//!
//! The modules are:
//!
//! - `run/`: the methods of `Runner` that run and queue steps
//! - `step/`: what a step consists of, and the decision how it runs
//! - `gpu/`: everything that only builds with CUDA contain: the decode graph, batch graphs, and sampling on the GPU.
//!   In other builds, `no_cuda.rs` replaces this module.
//! - `decode_graph`: the commands of the decode graph, and the reasons why a runner has none
//! - `sampling/`: the interface of samplers, and functions that choose tokens on the host
//! - `ranks/`: the ranks that run a model together, and the commands that the first rank sends to the others
//! - `limits`: the limits and options of a runner, and how prompts are divided for deterministic answers

mod decode_graph;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
mod gpu;
mod limits;
mod ranks;
mod run;
mod sampling;
mod step;

use std::collections::HashMap;
use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device};

use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::{BlockTables, CacheLayout, KvCache};
use crate::world::World;
use gpu::StepLauncher;
use ranks::{PlannedGraph, RankGroup};
use step::{RunnerFacts, StepExecutor, StepFacts, StepTimes, route};

pub use decode_graph::NoDecodeGraphReason;
#[cfg(feature = "cuda")]
pub use gpu::DecodeGraph;
pub use limits::{MAX_SEQUENCES, PromptSegments, RunnerLimits, RunnerOptions};
pub use ranks::{RANK_PANICKED, RankCache, RankFault, RankModel, failure_message};
pub use sampling::{ChosenToken, SamplerResult, TokenLogprobs, TokenSampler};
pub use step::{ExecutionMode, KernelTime, LaunchCounts, QueuedStep, StepBytes, StepSequence, StepTime, TokensToScore};

/// A model and the KV cache of all sequences, on one device or divided among ranks.
pub struct Runner {
    /// Launches batch graphs and queued steps.
    /// `None` on a CPU, with [`RunnerOptions::eager`], or if the host copies data between ranks.
    /// Declared first, so that batch graphs are dropped before the decoder and the cache, whose memory they use.
    launcher: Option<StepLauncher>,
    /// All ranks, which run every pass together. The fields `decoder` and `cache` belong to the first rank.
    ranks: RankGroup,
    decoder: Decoder,
    cache: KvCache,
    limits: RunnerLimits,
    options: RunnerOptions,
    decode_graph: PlannedGraph,
    device: Device,
    /// The single sequence of `bench`, `perplexity` and `EngineHandle::logits`, which has the cache to itself.
    solo: SoloSequence,
    /// The tokens that the last queued step on a CPU chose, by sequence id. The next queued step uses them as input.
    queued_tokens: HashMap<u64, u32>,
    /// The time at which the tokens of a queued step were last taken.
    last_taken: Instant,
    times: StepTimes,
}

/// The cached tokens of the solo sequence and their block tables.
struct SoloSequence {
    /// The tokens whose keys and values are in the cache.
    cached: Vec<u32>,
    tables: BlockTables,
    /// The largest position that steps since the last [`clear`](Self::clear) write, plus one. Includes queued steps.
    /// From this, `Runner::rewind` finds out whether keys and values of a sliding window may have been overwritten.
    written: usize,
}

impl SoloSequence {
    fn new(layout: &CacheLayout, limits: RunnerLimits) -> Self {
        let tables = BlockTables::for_one_sequence(layout, limits.context, limits.chunk);
        Self { cached: Vec::new(), tables, written: 0 }
    }

    /// Forgets the cached tokens.
    fn clear(&mut self) {
        self.cached.clear();
        self.written = 0;
    }
}

impl Runner {
    /// Creates a runner with a single rank. See [`with_ranks`](Self::with_ranks).
    ///
    /// The cache must have enough blocks for one sequence of `limits.context` positions.
    pub fn new(
        decoder: Decoder,
        cache: KvCache,
        limits: RunnerLimits,
        device: Device,
        options: RunnerOptions,
    ) -> Result<Self> {
        let model = RankModel { decoder, cache };
        Self::with_ranks(World::alone(), model, Vec::new(), limits, device, options)
    }

    /// Creates a runner for a model that one or more ranks run, and plans the decode graphs of the ranks.
    /// `world` and `model` belong to the first rank, which runs on the thread that calls the methods of the runner.
    /// `others` holds all other ranks. Each of them runs on a new thread.
    ///
    /// All KV caches must have the same number of blocks, enough for one sequence of `limits.context` positions.
    pub fn with_ranks(
        world: World,
        model: RankModel,
        others: Vec<(World, RankModel)>,
        limits: RunnerLimits,
        device: Device,
        options: RunnerOptions,
    ) -> Result<Self> {
        let ranks = RankGroup::start(world, others, limits, options)?;
        let decode_graph = model.plan_decode_graph(limits, options)?;
        let RankModel { decoder, cache } = model;
        let solo = SoloSequence::new(cache.layout(), limits);
        let can_launch = !options.eager && ranks.supports_graphs();
        Ok(Self {
            launcher: if can_launch { StepLauncher::new(&device, limits, options)? } else { None },
            ranks,
            decoder,
            cache,
            limits,
            options,
            decode_graph,
            device,
            solo,
            queued_tokens: HashMap::new(),
            last_taken: Instant::now(),
            times: StepTimes::default(),
        })
    }

    pub fn limits(&self) -> RunnerLimits {
        self.limits
    }

    /// Returns how all prompts are divided into segments, or `None` if [`RunnerOptions::prompt_segments`] is not set.
    /// In the latter case, individual requests can still be deterministic ([`StepSequence::prompt_segments`]).
    pub fn prompt_segments(&self) -> Option<PromptSegments> {
        self.options.prompt_segments
    }

    /// Returns the first rank's KV cache, which all sequences share.
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// Returns whether a rank has failed, so that every later step fails. Always false with a single rank.
    pub fn has_failed_rank(&self) -> bool {
        self.ranks.has_failed_rank()
    }

    /// Returns the first rank's communicator: the number of ranks, and the connection to the other ranks.
    pub fn world(&self) -> &World {
        self.ranks.world()
    }

    /// Returns whether several ranks run the model.
    pub fn has_several_ranks(&self) -> bool {
        !self.ranks.is_single()
    }

    /// Restarts the timeouts of [`ping_ranks`](Self::ping_ranks).
    /// The engine calls this function when it begins to wait for a command, such as a new request.
    pub fn restart_ping_timeouts(&self) {
        self.ranks.restart_ping_timeouts();
    }

    /// Sends a ping to every rank except the first, and checks that these ranks have answered earlier pings.
    /// If a rank has not answered for 5 s, [`has_failed_rank`](Self::has_failed_rank) becomes true.
    ///
    /// The engine calls this function once a second while it waits for a command.
    pub fn ping_ranks(&self) {
        self.ranks.ping();
    }

    /// Makes a rank fail, for tests. Has no effect with a single rank.
    /// The first rank fails in its next pass or decode graph command.
    /// Any other rank fails after it has run the commands that it has already received.
    pub fn inject(&self, rank: usize, fault: RankFault) {
        self.ranks.inject(rank, fault);
    }

    /// Calls a function with the KV cache of every rank. Returns the results in rank order.
    /// Fails if a call fails, or if a rank fails or does not answer.
    pub fn with_caches<T: Send + 'static>(
        &self,
        call: impl Fn(RankCache) -> Result<T> + Send + Sync + 'static,
    ) -> Result<Vec<T>> {
        self.ranks.with_caches(&self.cache, call)
    }

    /// Copies block `from` of the cache to block `to`, on all ranks.
    pub fn copy_block(&self, from: u32, to: u32) -> Result<()> {
        self.ranks.copy_block(from, to)?;
        self.cache.copy_block(from, to)
    }

    pub fn vocab_size(&self) -> usize {
        self.decoder.vocab_size()
    }

    /// Returns the compute dtype, which is also the dtype of the KV cache.
    pub fn dtype(&self) -> DType {
        self.decoder.dtype()
    }

    /// Returns the first rank's device, which holds this rank's weights and KV cache.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns how decode steps run while only one request is active.
    /// Deterministic requests and requests with log probabilities can run differently.
    pub fn execution_mode(&self) -> ExecutionMode {
        match route(self.facts(), StepFacts::ONE_TOKEN).executor {
            StepExecutor::Eager => ExecutionMode::Eager,
            StepExecutor::DecodeGraph | StepExecutor::BatchGraph => ExecutionMode::Graph,
        }
    }

    /// Returns the properties of this runner that decide how its steps run.
    fn facts(&self) -> RunnerFacts {
        let launcher = self.launcher.as_ref();
        RunnerFacts {
            has_decode_graph: self.decode_graph.is_ok(),
            has_batch_graphs: launcher.is_some_and(|launcher| launcher.can_run_model(&self.decoder)),
            can_queue: match launcher {
                Some(_) => self.options.queue_steps.unwrap_or(true) && self.ranks.can_queue(),
                None => self.options.queue_steps.unwrap_or(false) && self.device.is_cpu(),
            },
            has_several_ranks: self.has_several_ranks(),
            is_deterministic: self.options.prompt_segments.is_some(),
        }
    }

    /// Returns why there is no decode graph, or `None` if there is one.
    pub fn no_decode_graph(&self) -> Option<&NoDecodeGraphReason> {
        self.decode_graph.as_ref().err()
    }
}
