//! The commands that the first rank sends to the followers.

use std::sync::Arc;

#[cfg(feature = "cuda")]
use anyhow::{Context, Result};
#[cfg(feature = "cuda")]
use candle_core::Tensor;

#[cfg(feature = "cuda")]
use super::decode_graph::DecodeGraph;
#[cfg(feature = "cuda")]
use super::step_queue::RowSampling;
#[cfg(feature = "cuda")]
use super::step_sequence::StepSequence;
use crate::kernels::SumOrder;
#[cfg(feature = "cuda")]
use crate::kernels::decode::sample::DeviceSampling;
use crate::nn::kv_cache::BlockTables;
use crate::nn::pass::{LogitRows, StepBatch};

/// A command for a follower.
#[derive(Clone)]
pub(super) enum Command {
    /// Runs a batch one operation at a time.
    Forward(Arc<OwnedBatch>),
    /// Runs a decode step as a CUDA graph.
    #[cfg(feature = "cuda")]
    Batch(Arc<OwnedBatch>),
    /// Queues a step whose tokens stay on the GPU.
    #[cfg(feature = "cuda")]
    Queue(Arc<OwnedStep>),
    #[cfg(feature = "cuda")]
    Graph(GraphCommand),
    CopyBlock {
        from: u32,
        to: u32,
    },
}

/// A command for the decode graphs of all ranks.
#[cfg(feature = "cuda")]
#[derive(Clone)]
pub(super) enum GraphCommand {
    /// See [`DecodeGraph::start`].
    Start { sequence: u64, position: usize, token: u32, sampling: Option<DeviceSampling>, tables: BlockTables },
    /// See [`DecodeGraph::start_from`]. Uses the logits of the rank's last pass.
    StartFrom { sequence: u64, tokens: usize, sampling: Option<DeviceSampling>, tables: BlockTables },
    /// See [`DecodeGraph::set_tables`].
    SetTables(BlockTables),
    /// See [`DecodeGraph::next`].
    Next { limit: usize },
}

#[cfg(feature = "cuda")]
impl GraphCommand {
    /// Runs the command on the graph of a rank. `logits` are the logits of the rank's last pass, f32 `[1, vocab]`.
    /// Returns the token of `Next`.
    pub fn run(&self, graph: &mut DecodeGraph, logits: Option<&Tensor>) -> Result<Option<u32>> {
        match self {
            Self::Start { sequence, position, token, sampling, tables } => {
                graph.start(*sequence, *position, *token, sampling.clone(), tables)?;
            }
            Self::StartFrom { sequence, tokens, sampling, tables } => {
                let logits = logits.context("internal error: the last pass did not return a single row of logits")?;
                graph.start_from(*sequence, *tokens, logits, sampling.clone(), tables)?;
            }
            Self::SetTables(tables) => graph.set_tables(tables)?,
            Self::Next { limit } => return graph.next(*limit).map(Some),
        }
        Ok(None)
    }
}

/// A copy of a [`StepBatch`] for the threads of the followers.
pub(super) struct OwnedBatch {
    pub ids: Vec<u32>,
    /// For each sequence, the number of new tokens, the position of the first new token, and the block tables.
    pub sequences: Vec<(usize, usize, BlockTables)>,
    pub logits: LogitRows,
    pub sum_order: SumOrder,
}

impl From<&StepBatch<'_>> for OwnedBatch {
    fn from(batch: &StepBatch) -> Self {
        let sequences = batch.sequences.iter().map(|span| (span.tokens, span.position, span.tables.clone()));
        let (logits, sum_order) = (batch.logits, batch.sum_order);
        Self { ids: batch.ids.to_vec(), sequences: sequences.collect(), logits, sum_order }
    }
}

/// A copy of a queued step for the threads of the followers.
#[cfg(feature = "cuda")]
pub(super) struct OwnedStep {
    sequences: Vec<OwnedSequence>,
    pub samplings: Vec<RowSampling>,
}

#[cfg(feature = "cuda")]
struct OwnedSequence {
    id: u64,
    ids: Vec<u32>,
    awaits_input: bool,
    position: usize,
    tables: BlockTables,
}

#[cfg(feature = "cuda")]
impl OwnedStep {
    pub fn new(sequences: &[StepSequence], samplings: &[RowSampling]) -> Self {
        let owned = |sequence: &StepSequence| {
            let &StepSequence { id, ids, awaits_input, position, tables, .. } = sequence;
            OwnedSequence { id, ids: ids.to_vec(), awaits_input, position, tables: tables.clone() }
        };
        Self { sequences: sequences.iter().map(owned).collect(), samplings: samplings.to_vec() }
    }

    /// Returns the sequences without samplers.
    pub fn sequences(&self) -> Vec<StepSequence<'_>> {
        self.sequences.iter().map(OwnedSequence::borrow).collect()
    }
}

#[cfg(feature = "cuda")]
impl OwnedSequence {
    fn borrow(&self) -> StepSequence<'_> {
        StepSequence {
            id: self.id,
            ids: &self.ids,
            awaits_input: self.awaits_input,
            position: self.position,
            tables: &self.tables,
            sampler: None,
            limit: 0,
            grid: None,
            scores: None,
        }
    }
}
