//! The thread of a follower, which is a rank other than the first.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use anyhow::Result;
use anyhow::bail;
use candle_core::Tensor;

use super::command::{RankCache, RankCommand};
use super::parts::RankParts;
use crate::device::World;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;
use crate::runner::choose_token::NoToken;
use crate::runner::decode::Decode;
use crate::runner::limits::{RunnerLimits, RunnerOptions};
use crate::runner::step_launcher::StepLauncher;
use crate::text::error_message;

/// Runs the commands of the first rank until the first rank stops or a command fails.
pub fn follow(
    world: &World,
    parts: RankParts,
    commands: &Receiver<RankCommand>,
    limits: RunnerLimits,
    options: RunnerOptions,
) {
    // This thread must free the memory of its device, so the closure owns the parts.
    let run = move || -> Result<()> {
        let mut follower = Follower::new(world.clone(), parts, limits, options)?;
        loop {
            match commands.recv_timeout(CHECK_TIME) {
                Ok(command) => {
                    follower.run(&command)?;
                    world.tick();
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            // If the first rank hangs, only the followers can notice it.
            world.check()?;
        }
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => world.end(&failure(world, &error_message(&error))),
        Err(_) => world.end(&failure(world, PANIC)),
    }
}

/// The time after which an idle follower checks whether another rank has failed.
const CHECK_TIME: Duration = Duration::from_secs(1);

/// Why a rank whose thread panicked has failed, for the error message.
pub const PANIC: &str = "its thread panicked";

/// The state of a follower's thread.
struct Follower {
    /// Declared first, so that the graphs are dropped before the decoder and the cache, whose memory they use.
    decode: Decode,
    launcher: Option<StepLauncher>,
    decoder: Decoder,
    cache: KvCache,
    world: World,
    /// The logits of the last pass, f32 `[1, vocab]`, if the pass returned a single row.
    logits: Option<Tensor>,
}

impl Follower {
    fn new(world: World, parts: RankParts, limits: RunnerLimits, options: RunnerOptions) -> Result<Self> {
        let RankParts { decoder, cache } = parts;
        Ok(Self {
            decode: Decode::plan_together(&decoder, &cache, limits, options)?,
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
                self.keep(logits)?;
            }
            RankCommand::Score(batch, parts) => {
                let logits = batch.forward_scored(&self.decoder, &self.cache, parts)?;
                self.keep(logits)?;
            }
            RankCommand::Batch(step) => {
                let Some(launcher) = &mut self.launcher else { bail!("internal error: a graph without a GPU") };
                launcher.run(&self.decoder, &self.cache, &step.sequences())?;
            }
            RankCommand::Queue(route, step, samplings) => {
                let Some(launcher) = &mut self.launcher else { bail!("internal error: a queue without a GPU") };
                launcher.queue(&self.decoder, &self.cache, *route, &step.sequences(), samplings)?;
            }
            RankCommand::Graph(command) => {
                let Decode::Graph(graph) = &mut self.decode else { bail!("internal error: a rank has no graph") };
                match command.run(graph, self.logits.as_ref()) {
                    // The first rank has the same logits, and reports the error to the client.
                    Err(error) if error.is::<NoToken>() => {}
                    result => drop(result?),
                }
            }
            RankCommand::CopyBlock { from, to } => self.cache.copy_block(*from, *to)?,
            RankCommand::Cache(call) => call(RankCache { rank: self.world.rank(), cache: &self.cache }),
            // The first rank only wants to see progress, which every command records.
            RankCommand::Ping => {}
            RankCommand::Fail(fault) => fault.strike()?,
        }
        Ok(())
    }

    /// Keeps the logits of a pass for the decode graph. Does not keep logits of several rows, which can be large.
    fn keep(&mut self, logits: Tensor) -> Result<()> {
        self.logits = (logits.dim(0)? == 1).then_some(logits);
        Ok(())
    }
}

/// Returns the error message that all ranks receive if the rank of `world` fails because of `reason`.
pub fn failure(world: &World, reason: &str) -> String {
    format!("GPU {} of {} failed: {reason}; the others were stopped", world.rank() + 1, world.size())
}
