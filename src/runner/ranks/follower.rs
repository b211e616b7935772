//! The thread of a follower, which is a rank other than the first.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Result, bail};
use candle_core::Tensor;

use super::command::{RankCache, RankCommand};
use super::failure::{RANK_PANICKED, failure_message};
use super::rank_model::{PlannedGraph, RankModel};
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;
use crate::runner::gpu::StepLauncher;
use crate::runner::limits::{RunnerLimits, RunnerOptions};
use crate::runner::sampling::NoToken;
use crate::text::error_message;
use crate::world::World;

/// How often an idle follower checks whether another rank has failed.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Runs the commands of the first rank until the first rank stops or any rank fails.
/// If this rank fails or panics, ends the world.
pub fn follow(
    world: &World,
    model: RankModel,
    commands: &Receiver<RankCommand>,
    limits: RunnerLimits,
    options: RunnerOptions,
) {
    let run = move || -> Result<()> {
        let mut follower = Follower::new(world.clone(), model, limits, options)?;
        loop {
            match commands.recv_timeout(CHECK_INTERVAL) {
                Ok(command) => {
                    follower.run(&command)?;
                    world.record_progress();
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            // Check for failures here, because only the followers can notice that the first rank hangs.
            world.check()?;
        }
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => world.end(&failure_message(world, &error_message(&error))),
        Err(_) => world.end(&failure_message(world, RANK_PANICKED)),
    }
}

/// The state of a follower's thread.
struct Follower {
    decode_graph: PlannedGraph,
    /// Declared before the decoder and the cache, so that batch graphs are dropped before the memory that they use.
    launcher: Option<StepLauncher>,
    decoder: Decoder,
    cache: KvCache,
    world: World,
    /// The logits of the last `Forward` or `Score` command, f32 `[1, vocab]`.
    /// `None` before the first of these commands, or if the last of them returned several rows.
    logits: Option<Tensor>,
}

impl Follower {
    fn new(world: World, model: RankModel, limits: RunnerLimits, options: RunnerOptions) -> Result<Self> {
        let decode_graph = model.plan_decode_graph(limits, options)?;
        let RankModel { decoder, cache } = model;
        Ok(Self {
            decode_graph,
            launcher: StepLauncher::new(cache.device(), limits, options)?,
            decoder,
            cache,
            world,
            logits: None,
        })
    }

    fn run(&mut self, command: &RankCommand) -> Result<()> {
        match command {
            RankCommand::Forward(batch) => {
                let logits = batch.forward(&self.decoder, &self.cache)?;
                self.keep(logits);
            }
            RankCommand::Score(batch, ranges) => {
                let logits = batch.forward_scored(&self.decoder, &self.cache, ranges)?;
                self.keep(logits);
            }
            RankCommand::Batch(step) => {
                let Some(launcher) = &mut self.launcher else {
                    bail!("internal error: a rank without a GPU cannot run a batch graph")
                };
                launcher.run(&self.decoder, &self.cache, &step.sequences())?;
            }
            RankCommand::Queue(executor, step, samplings) => {
                let Some(launcher) = &mut self.launcher else {
                    bail!("internal error: a rank without a GPU cannot queue a step")
                };
                launcher.queue(&self.decoder, &self.cache, *executor, &step.sequences(), samplings)?;
            }
            RankCommand::Graph(command) => {
                let Ok(graph) = &mut self.decode_graph else { bail!("internal error: a rank has no decode graph") };
                match graph.run(command, self.logits.as_ref()) {
                    // Ignore `NoToken`: the first rank gets the same error, which ends only the sequence.
                    Err(error) if error.is::<NoToken>() => {}
                    result => drop(result?),
                }
            }
            RankCommand::CopyBlock { from, to } => self.cache.copy_block(*from, *to)?,
            RankCommand::Cache(call) => call(RankCache { rank: self.world.rank(), cache: &self.cache }),
            // `follow` calls `World::record_progress` after every command, which answers the ping.
            RankCommand::Ping => {}
            RankCommand::Fail(fault) => fault.inject()?,
        }
        Ok(())
    }

    /// Keeps the logits of a pass if they have one row, so that the decode graph can start from them.
    /// Drops logits with several rows, because they can be large.
    fn keep(&mut self, logits: Tensor) {
        self.logits = (logits.dims()[0] == 1).then_some(logits);
    }
}
