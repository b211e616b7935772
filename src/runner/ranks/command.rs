//! The commands that the first rank sends to the followers.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use candle_core::Tensor;

use super::failure::RankFault;
use super::scored_pass::forward_scored;
use crate::kernels::SumOrder;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::{BlockTables, KvCache};
use crate::nn::pass::{PassBatch, RowSelection, SequenceSpan};
use crate::runner::decode_graph::GraphCommand;
use crate::runner::step::{RowSampling, StepExecutor, StepSequence};

/// A command that the first rank sends to a follower.
#[derive(Clone)]
pub enum RankCommand {
    /// Runs a batch without a graph, one operation at a time.
    Forward(Arc<OwnedBatch>),
    /// Runs a batch without a graph, one operation at a time, and computes the logits of the given ranges of tokens.
    /// See [`forward_scored`].
    Score(Arc<OwnedBatch>, Arc<[Range<usize>]>),
    /// Runs a decode step as a batch graph.
    Batch(Arc<OwnedStep>),
    /// Queues a step that chooses its tokens on the GPU.
    Queue(StepExecutor, Arc<OwnedStep>, Arc<[RowSampling]>),
    /// Runs a command on the decode graph.
    Graph(GraphCommand),
    /// Copies a block of the KV cache.
    CopyBlock { from: u32, to: u32 },
    /// Calls a function with the follower's KV cache.
    Cache(RankCacheCall),
    /// Does nothing. The first rank sends pings to learn whether the follower still answers.
    Ping,
    /// Makes the follower fail, for tests.
    Fail(RankFault),
}

/// The KV cache of a rank, with the rank's index.
pub struct RankCache<'c> {
    pub rank: usize,
    pub cache: &'c KvCache,
}

/// A function to call with the KV cache of a rank.
pub type RankCacheCall = Arc<dyn Fn(RankCache) + Send + Sync>;

/// A [`PassBatch`] that owns its data, for the threads of followers.
pub struct OwnedBatch {
    ids: Vec<u32>,
    spans: Vec<OwnedSpan>,
    rows: RowSelection,
    sum_order: SumOrder,
}

/// A [`SequenceSpan`] that owns its data.
struct OwnedSpan {
    tokens: usize,
    position: usize,
    tables: BlockTables,
}

impl From<&PassBatch<'_>> for OwnedBatch {
    fn from(batch: &PassBatch) -> Self {
        let owned = |&SequenceSpan { tokens, position, tables }: &SequenceSpan| OwnedSpan {
            tokens,
            position,
            tables: tables.clone(),
        };
        let spans = batch.sequences.iter().map(owned).collect();
        Self { ids: batch.ids.to_vec(), spans, rows: batch.rows, sum_order: batch.sum_order }
    }
}

impl OwnedBatch {
    /// Runs the batch on one rank. Returns the logits.
    pub fn forward(&self, decoder: &Decoder, cache: &KvCache) -> Result<Tensor> {
        self.borrowed(|batch| decoder.forward(batch, cache))
    }

    /// Runs the batch on one rank with [`forward_scored`], and discards the logits of the ranges.
    /// Returns the logits of each sequence's last token.
    pub fn forward_scored(&self, decoder: &Decoder, cache: &KvCache, ranges: &[Range<usize>]) -> Result<Tensor> {
        self.borrowed(|batch| forward_scored(decoder, batch, cache, ranges, |_, _| Ok(())))
    }

    fn borrowed<R>(&self, run: impl FnOnce(&PassBatch) -> R) -> R {
        let Self { ids, spans, rows, sum_order } = self;
        let spans: Vec<SequenceSpan> = spans.iter().map(OwnedSpan::span).collect();
        run(&PassBatch { ids, sequences: &spans, rows: *rows, sum_order: *sum_order })
    }
}

impl OwnedSpan {
    fn span(&self) -> SequenceSpan<'_> {
        SequenceSpan { tokens: self.tokens, position: self.position, tables: &self.tables }
    }
}

/// The sequences of a step, which own their data, for the threads of followers.
pub struct OwnedStep(Vec<OwnedSequence>);

/// A [`StepSequence`] that owns its data. Has only the fields that batch graphs and queued steps read.
struct OwnedSequence {
    id: u64,
    ids: Vec<u32>,
    awaits_input: bool,
    position: usize,
    tables: BlockTables,
}

impl OwnedStep {
    pub fn new(sequences: &[StepSequence]) -> Self {
        let owned = |sequence: &StepSequence| {
            let &StepSequence { id, ids, awaits_input, position, tables, .. } = sequence;
            OwnedSequence { id, ids: ids.to_vec(), awaits_input, position, tables: tables.clone() }
        };
        Self(sequences.iter().map(owned).collect())
    }

    /// Returns the sequences, without samplers.
    pub fn sequences(&self) -> Vec<StepSequence<'_>> {
        self.0.iter().map(OwnedSequence::as_step_sequence).collect()
    }
}

impl OwnedSequence {
    fn as_step_sequence(&self) -> StepSequence<'_> {
        let Self { id, ids, awaits_input, position, tables } = self;
        StepSequence { awaits_input: *awaits_input, ..StepSequence::new(*id, ids, *position, tables) }
    }
}
