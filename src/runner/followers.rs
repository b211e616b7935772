//! The other ranks of a model that several devices run together.
//!
//! The runner is the first rank. Every other rank is a follower: a thread with its own part of the weights and of the KV
//! cache. Followers run the same passes as the runner at the same time. They exchange partial results within a pass, see
//! [`World`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, bail};
#[cfg(feature = "cuda")]
use candle_core::Device;
use candle_core::Tensor;

use super::Decode;
#[cfg(feature = "cuda")]
use super::batch_graph::{BatchGraphs, gpu};
#[cfg(feature = "cuda")]
use super::choose_token::NO_TOKEN;
#[cfg(feature = "cuda")]
use super::decode_graph::DecodeGraph;
use super::limits::{RunnerLimits, RunnerOptions};
#[cfg(feature = "cuda")]
use super::step_queue::StepQueue;
#[cfg(feature = "cuda")]
use super::step_sequence::StepSequence;
use crate::device::World;
use crate::kernels::SumOrder;
#[cfg(feature = "cuda")]
use crate::kernels::decode::sample::DeviceSampling;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::{BlockTables, KvCache};
use crate::nn::pass::{LogitRows, SequenceSpan, StepBatch};
use crate::text::error_message;

/// The part of a model that one rank holds.
pub struct RankParts {
    pub decoder: Decoder,
    pub cache: KvCache,
}

/// The threads of all ranks but the first. There are none if a model runs on a single device.
pub(super) struct Followers {
    /// The world of the first rank.
    world: World,
    threads: Vec<(Sender<Command>, JoinHandle<()>)>,
}

/// What a follower does next.
#[derive(Clone)]
enum Command {
    /// Runs a batch operation by operation.
    Forward(Arc<OwnedBatch>),
    /// Runs a decode step as a CUDA graph.
    #[cfg(feature = "cuda")]
    Batch(Arc<OwnedBatch>),
    #[cfg(feature = "cuda")]
    Graph(GraphCommand),
    CopyBlock {
        from: u32,
        to: u32,
    },
}

/// What the decode graphs of all ranks do.
#[cfg(feature = "cuda")]
#[derive(Clone)]
pub(super) enum GraphCommand {
    /// See [`DecodeGraph::start`].
    Start { sequence: u64, position: usize, token: u32, sampling: Option<DeviceSampling>, tables: BlockTables },
    /// See [`DecodeGraph::start_from`]. The logits are those of the last pass.
    StartFrom { sequence: u64, tokens: usize, sampling: Option<DeviceSampling>, tables: BlockTables },
    /// See [`DecodeGraph::set_tables`].
    SetTables(BlockTables),
    /// See [`DecodeGraph::next`].
    Next { limit: usize },
}

#[cfg(feature = "cuda")]
impl GraphCommand {
    /// Runs the command on the graph of a rank. `logits` are those of the last pass, f32 `[1, vocab]`.
    /// Returns the token of `Next`.
    fn run(&self, graph: &mut DecodeGraph, logits: Option<&Tensor>) -> Result<Option<u32>> {
        match self {
            Self::Start { sequence, position, token, sampling, tables } => {
                graph.start(*sequence, *position, *token, sampling.clone(), tables)?;
            }
            Self::StartFrom { sequence, tokens, sampling, tables } => {
                let logits = logits.context("internal error: the last pass had no logits of a single row")?;
                graph.start_from(*sequence, *tokens, logits, sampling.clone(), tables)?;
            }
            Self::SetTables(tables) => graph.set_tables(tables)?,
            Self::Next { limit } => return graph.next(*limit).map(Some),
        }
        Ok(None)
    }
}

/// A copy of a [`StepBatch`] for other threads.
struct OwnedBatch {
    ids: Vec<u32>,
    /// The new tokens, their position and the block tables of each sequence.
    sequences: Vec<(usize, usize, BlockTables)>,
    logits: LogitRows,
    sum_order: SumOrder,
}

impl From<&StepBatch<'_>> for OwnedBatch {
    fn from(batch: &StepBatch) -> Self {
        let sequences = batch.sequences.iter().map(|span| (span.tokens, span.position, span.tables.clone()));
        let (logits, sum_order) = (batch.logits, batch.sum_order);
        Self { ids: batch.ids.to_vec(), sequences: sequences.collect(), logits, sum_order }
    }
}

impl Followers {
    /// Starts a thread for each rank in `ranks`, which are all ranks of `world` but the first.
    pub fn start(
        world: World,
        ranks: Vec<(World, RankParts)>,
        limits: RunnerLimits,
        options: RunnerOptions,
    ) -> Result<Self> {
        let start = |(world, parts): (World, RankParts)| -> Result<_> {
            let (sender, commands) = mpsc::channel();
            let thread = thread::Builder::new().name(format!("rank {}", world.rank()));
            let follow = move || follow(&world, parts, &commands, limits, options);
            let thread = thread.spawn(follow).context("cannot start a thread")?;
            Ok((sender, thread))
        };
        Ok(Self { world, threads: ranks.into_iter().map(start).collect::<Result<_>>()? })
    }

    /// Returns whether the model runs on a single device.
    pub fn is_empty(&self) -> bool {
        self.threads.is_empty()
    }

    /// Returns whether no rank has failed.
    pub fn are_running(&self) -> bool {
        self.world.end_reason().is_none()
    }

    /// Returns whether the ranks exchange data without the host, so that CUDA graphs can contain the exchange.
    #[cfg(feature = "cuda")]
    pub fn support_graphs(&self) -> bool {
        self.is_empty() || self.world.exchange().is_some()
    }

    /// Fails if a rank has failed. Call this after the host has received results of a step, because the results of a step
    /// in which a rank failed are wrong.
    pub fn check(&self) -> Result<()> {
        Ok(self.world.check()?)
    }

    /// Runs `decoder`, the part of the first rank, together with the parts of all followers.
    ///
    /// If one of the ranks fails, the pass of every rank fails with its error, and so do all later passes: the keys and
    /// values of the ranks may no longer belong together.
    pub fn forward(&self, decoder: &Decoder, batch: &StepBatch, cache: &KvCache) -> Result<Tensor> {
        if self.is_empty() {
            return decoder.forward(batch, cache);
        }
        // The ranks would all refuse an invalid batch. Refuse it before they start, so that later passes can succeed.
        decoder.validate(batch)?;
        let logits = self.together(Command::Forward(Arc::new(batch.into())), || decoder.forward(batch, cache))?;
        logits.device().synchronize()?;
        self.check()?;
        Ok(logits)
    }

    /// Runs a decode step of all followers as a CUDA graph, together with `run`, which does so on the first rank.
    #[cfg(feature = "cuda")]
    pub fn run_batch<T>(
        &self,
        device: &Device,
        sequences: &[StepSequence],
        run: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let ids = sequences.iter().flat_map(|sequence| sequence.ids).copied().collect();
        let spans = sequences.iter().map(|sequence| (sequence.ids.len(), sequence.position, sequence.tables.clone()));
        let batch =
            OwnedBatch { ids, sequences: spans.collect(), logits: LogitRows::Last, sum_order: SumOrder::Fastest };
        let result = self.together(Command::Batch(Arc::new(batch)), run)?;
        // On a GPU that ranks share, a copy to the host would wait too, but keep the other ranks from launching kernels.
        if self.world.exchange().is_some_and(|exchange| !exchange.can_queue()) {
            device.synchronize()?;
        }
        Ok(result)
    }

    /// Runs a command on the decode graphs of all ranks. `graph` is that of the first rank, and `logits` are those of its last
    /// pass. Returns the token of [`GraphCommand::Next`].
    #[cfg(feature = "cuda")]
    pub fn run_graph(
        &self,
        graph: &mut DecodeGraph,
        command: GraphCommand,
        logits: Option<&Tensor>,
    ) -> Result<Option<u32>> {
        if self.is_empty() {
            return command.run(graph, logits);
        }
        // If no step is left, all ranks would fail, and that would end the world.
        if let GraphCommand::Next { limit } = command {
            graph.steps_left(limit)?;
        }
        self.check()?;
        self.send(&Command::Graph(command.clone()))?;
        let token = command.run(graph, logits);
        // The results of a step in which a rank failed are wrong.
        self.check()?;
        token
    }

    /// Returns the next token of the decode graphs of all ranks. See [`DecodeGraph::next`].
    #[cfg(feature = "cuda")]
    pub fn next_token(&self, graph: &mut DecodeGraph, limit: usize) -> Result<u32> {
        let token = self.run_graph(graph, GraphCommand::Next { limit }, None)?;
        token.context("internal error: a step has no token")
    }

    /// Sends a command to all followers and calls `run` on the first rank. If it fails, the world ends.
    fn together<T>(&self, command: Command, run: impl FnOnce() -> Result<T>) -> Result<T> {
        self.check()?;
        self.send(&command)?;
        run().inspect_err(|error| self.world.end(&failure(&self.world, &error_message(error))))
    }

    /// Copies a block in the cache of every follower.
    pub fn copy_block(&self, from: u32, to: u32) -> Result<()> {
        self.send(&Command::CopyBlock { from, to })
    }

    fn send(&self, command: &Command) -> Result<()> {
        for (sender, _) in &self.threads {
            if sender.send(command.clone()).is_err() {
                bail!(self.world.end_reason().unwrap_or_else(|| "internal error: a rank has stopped".into()));
            }
        }
        Ok(())
    }
}

impl Drop for Followers {
    fn drop(&mut self) {
        self.world.end("the engine has stopped");
        for (sender, thread) in self.threads.drain(..) {
            drop(sender);
            // The thread has already reported its error to the first rank.
            let _ = thread.join();
        }
    }
}

/// Runs the commands of the first rank until it stops or a pass fails.
fn follow(world: &World, parts: RankParts, commands: &Receiver<Command>, limits: RunnerLimits, options: RunnerOptions) {
    // The device's memory must be freed by this thread, so the closure owns the parts.
    let run = move || -> Result<()> {
        let mut follower = Follower::new(parts, limits, options)?;
        while let Ok(command) = commands.recv() {
            follower.run(&command)?;
        }
        Ok(())
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => world.end(&failure(world, &error_message(&error))),
        Err(_) => world.end(&failure(world, "its thread panicked")),
    }
}

/// What the thread of a follower owns.
struct Follower {
    /// Declared first, so that the graphs are dropped before the decoder and the cache, whose memory they use.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code))]
    decode: Decode,
    #[cfg(feature = "cuda")]
    batches: Option<(BatchGraphs, StepQueue)>,
    decoder: Decoder,
    cache: KvCache,
    /// The logits of the last pass, f32 `[1, vocab]`, if it had only one row of them.
    logits: Option<Tensor>,
}

impl Follower {
    fn new(parts: RankParts, limits: RunnerLimits, options: RunnerOptions) -> Result<Self> {
        let RankParts { decoder, cache } = parts;
        #[cfg(feature = "cuda")]
        let batches = match gpu(cache.layer(0).k.device()) {
            Some(gpu) => Some((BatchGraphs::new(gpu, limits.context, options.sum_order()), StepQueue::new(gpu)?)),
            None => None,
        };
        Ok(Self {
            decode: Decode::plan_together(&decoder, &cache, limits, options)?,
            #[cfg(feature = "cuda")]
            batches,
            decoder,
            cache,
            logits: None,
        })
    }

    fn run(&mut self, command: &Command) -> Result<()> {
        match command {
            Command::Forward(batch) => {
                let OwnedBatch { ids, sequences, logits, sum_order } = &**batch;
                let spans = sequences.iter().map(|(tokens, position, tables)| SequenceSpan {
                    tokens: *tokens,
                    position: *position,
                    tables,
                });
                let (spans, logits, sum_order) = (spans.collect::<Vec<_>>(), *logits, *sum_order);
                let batch = StepBatch { ids, sequences: &spans, logits, sum_order };
                let logits = self.decoder.forward(&batch, &self.cache)?;
                // Other logits can be large.
                self.logits = (logits.dim(0)? == 1).then_some(logits);
            }
            #[cfg(feature = "cuda")]
            Command::Batch(batch) => {
                let Some((graphs, queue)) = &mut self.batches else { bail!("internal error: a graph without a GPU") };
                let sequences = batch.ids.chunks(1).zip(&batch.sequences).map(|(ids, (_, position, tables))| {
                    let (position, id, limit) = (*position, 0, 0);
                    StepSequence {
                        id,
                        ids,
                        awaits_input: false,
                        position,
                        tables,
                        sampler: None,
                        limit,
                        grid: None,
                        scores: None,
                    }
                });
                graphs.run(&self.decoder, &self.cache, &sequences.collect::<Vec<_>>(), queue)?;
                queue.skip();
            }
            #[cfg(feature = "cuda")]
            Command::Graph(command) => {
                let Decode::Graph(graph) = &mut self.decode else { bail!("internal error: a rank has no graph") };
                match command.run(graph, self.logits.as_ref()) {
                    // The first rank has the same logits, and reports this to the client.
                    Err(error) if error.to_string() == NO_TOKEN => {}
                    result => drop(result?),
                }
            }
            Command::CopyBlock { from, to } => self.cache.copy_block(*from, *to)?,
        }
        Ok(())
    }
}

fn failure(world: &World, reason: &str) -> String {
    format!("GPU {} of {} failed: {reason}; the others were stopped", world.rank() + 1, world.size())
}
