//! The thread of a follower, which is a rank other than the first.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Receiver;

use anyhow::Result;
#[cfg(feature = "cuda")]
use anyhow::bail;
use candle_core::Tensor;

#[cfg(feature = "cuda")]
use super::batch_graph::{BatchGraphs, gpu};
#[cfg(feature = "cuda")]
use super::choose_token::NoToken;
use super::decode::Decode;
use super::limits::{RunnerLimits, RunnerOptions};
use super::rank_command::{Command, OwnedBatch};
use super::rank_parts::RankParts;
#[cfg(feature = "cuda")]
use super::rank_queue::RankQueue;
#[cfg(feature = "cuda")]
use super::step_queue::StepQueue;
#[cfg(feature = "cuda")]
use super::step_sequence::StepSequence;
use crate::device::World;
#[cfg(feature = "cuda")]
use crate::kernels::SumOrder;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;
use crate::nn::pass::{SequenceSpan, StepBatch};
use crate::text::error_message;

/// Runs the commands of the first rank until the first rank stops or a command fails.
pub(super) fn follow(
    world: &World,
    parts: RankParts,
    commands: &Receiver<Command>,
    limits: RunnerLimits,
    options: RunnerOptions,
) {
    // This thread must free the memory of its device, so the closure owns the parts.
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

/// The state of a follower's thread.
struct Follower {
    /// Declared first, so that the graphs are dropped before the decoder and the cache, whose memory they use.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code))]
    decode: Decode,
    #[cfg(feature = "cuda")]
    batches: Option<(BatchGraphs, StepQueue)>,
    decoder: Decoder,
    cache: KvCache,
    #[cfg(feature = "cuda")]
    sum_order: SumOrder,
    /// The logits of the last pass, f32 `[1, vocab]`, if the pass returned a single row.
    logits: Option<Tensor>,
}

impl Follower {
    fn new(parts: RankParts, limits: RunnerLimits, options: RunnerOptions) -> Result<Self> {
        let RankParts { decoder, cache } = parts;
        #[cfg(feature = "cuda")]
        let batches = match gpu(cache.device()) {
            Some(gpu) => Some((BatchGraphs::new(gpu, limits.context, options.sum_order()), StepQueue::new(gpu)?)),
            None => None,
        };
        Ok(Self {
            decode: Decode::plan_together(&decoder, &cache, limits, options)?,
            #[cfg(feature = "cuda")]
            batches,
            decoder,
            cache,
            #[cfg(feature = "cuda")]
            sum_order: options.sum_order(),
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
                // Do not keep logits of several rows, which can be large.
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
            Command::Queue(step) => {
                let Some((batches, queue)) = &mut self.batches else { bail!("internal error: a queue without a GPU") };
                let (decoder, cache, sum_order) = (&self.decoder, &self.cache, self.sum_order);
                RankQueue { decoder, cache, batches, queue, sum_order }.queue(&step.sequences(), &step.samplings)?;
            }
            #[cfg(feature = "cuda")]
            Command::Graph(command) => {
                let Decode::Graph(graph) = &mut self.decode else { bail!("internal error: a rank has no graph") };
                match command.run(graph, self.logits.as_ref()) {
                    // The first rank has the same logits, and reports the error to the client.
                    Err(error) if error.is::<NoToken>() => {}
                    result => drop(result?),
                }
            }
            Command::CopyBlock { from, to } => self.cache.copy_block(*from, *to)?,
        }
        Ok(())
    }
}

/// Returns the error message that all ranks receive if the rank of `world` fails because of `reason`.
pub(super) fn failure(world: &World, reason: &str) -> String {
    format!("GPU {} of {} failed: {reason}; the others were stopped", world.rank() + 1, world.size())
}
