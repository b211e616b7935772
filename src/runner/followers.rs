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

use crate::device::World;
use crate::kernels::SumOrder;
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
    Forward(Arc<OwnedBatch>),
    CopyBlock { from: u32, to: u32 },
}

/// A copy of a [`StepBatch`] for other threads.
struct OwnedBatch {
    ids: Vec<u32>,
    /// The new tokens, their position and the block tables of each sequence.
    sequences: Vec<(usize, usize, BlockTables)>,
    logits: LogitRows,
    sum_order: SumOrder,
}

impl Followers {
    /// Starts a thread for each rank in `ranks`, which are all ranks of `world` but the first.
    pub fn start(world: World, ranks: Vec<(World, RankParts)>) -> Result<Self> {
        let start = |(world, parts): (World, RankParts)| -> Result<_> {
            let (sender, commands) = mpsc::channel();
            let thread = thread::Builder::new().name(format!("rank {}", world.rank()));
            let thread = thread.spawn(move || follow(&world, parts, &commands)).context("cannot start a thread")?;
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

    /// Runs `decoder`, the part of the first rank, together with the parts of all followers.
    ///
    /// If one of the ranks fails, the pass of every rank fails with its error, and so do all later passes: the keys and
    /// values of the ranks may no longer belong together.
    pub fn forward(&self, decoder: &Decoder, batch: &StepBatch, cache: &KvCache) -> Result<candle_core::Tensor> {
        if self.is_empty() {
            return decoder.forward(batch, cache);
        }
        // The ranks would all refuse an invalid batch. Refuse it before they start, so that later passes can succeed.
        decoder.validate(batch)?;
        let sequences = batch.sequences.iter().map(|span| (span.tokens, span.position, span.tables.clone()));
        let owned = OwnedBatch {
            ids: batch.ids.to_vec(),
            sequences: sequences.collect(),
            logits: batch.logits,
            sum_order: batch.sum_order,
        };
        self.send(&Command::Forward(Arc::new(owned)))?;
        let logits = decoder.forward(batch, cache);
        logits.inspect_err(|error| self.world.end(&failure(&self.world, &error_message(error))))
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
fn follow(world: &World, parts: RankParts, commands: &Receiver<Command>) {
    // The device's memory must be freed by this thread, so the closure owns the parts.
    let run = move || -> Result<()> {
        let RankParts { decoder, cache } = parts;
        while let Ok(command) = commands.recv() {
            match command {
                Command::Forward(batch) => {
                    let OwnedBatch { ids, sequences, logits, sum_order } = &*batch;
                    let spans = sequences.iter().map(|(tokens, position, tables)| SequenceSpan {
                        tokens: *tokens,
                        position: *position,
                        tables,
                    });
                    let (spans, logits, sum_order) = (spans.collect::<Vec<_>>(), *logits, *sum_order);
                    decoder.forward(&StepBatch { ids, sequences: &spans, logits, sum_order }, &cache)?;
                }
                Command::CopyBlock { from, to } => cache.copy_block(from, to)?,
            }
        }
        Ok(())
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => world.end(&failure(world, &error_message(&error))),
        Err(_) => world.end(&failure(world, "its thread panicked")),
    }
}

fn failure(world: &World, reason: &str) -> String {
    format!("GPU {} of {} failed: {reason}; the others were stopped", world.rank() + 1, world.size())
}
