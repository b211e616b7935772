//! Batched decode steps as CUDA graphs, with one graph per padded batch size.
//! For each step, the host launches one graph instead of hundreds of kernels.
//!
//! A batch graph replays the operations of [`Decoder::hidden_states`], and of [`Decoder::own_best_logits`] or
//! [`Decoder::own_logits`].
//! Except for rounding, the logits of the graph equal the logits of a step without a graph.
//! The *best logits* of a row are candidates for its largest logit (see [`best_logits`]).
//! If the kernel for the logits also finds the best logits, a graph stores all logits only in steps that need them.
//! If there are several ranks, a graph also exchanges the best logits of the ranks.
//!
//! Batches of more than 8 rows are padded to multiples of 8 or, above 64 rows, of 16, so that fewer graphs are needed.
//! A padding row repeats the last sequence, so it uses no additional experts, and rewrites the same keys and values
//! in the same slots.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use anyhow::{Result, bail};
use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Tensor};

use super::queued_step_buffers::QueuedStepBuffers;
use crate::kernels::SumOrder;
use crate::kernels::attention::{PassBlocks, QueryLayout, slot};
use crate::kernels::launch::LaunchGraph;
use crate::kernels::matmul::dense_wgmma::LogitsOutput;
use crate::kernels::rows::copy_rows;
use crate::kernels::sampling::{BEST_LOGITS_COLUMNS, best_logits};
use crate::kernels::scratch::{Arena, LayerSizes, MAX_ARENA_BYTES, MAX_ARENAS_BYTES};
use crate::kernels::step_inputs::StepInputs;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::{BLOCK_TOKENS, KvCache};
use crate::nn::pass::Pass;
use crate::runner::limits::MAX_SEQUENCES;
use crate::runner::step::StepSequence;

/// The graphs of a model, one per padded batch size.
pub struct BatchGraphs {
    device: CudaDevice,
    /// The number of entries in each block table: enough blocks for the context.
    table_blocks: usize,
    sum_order: SumOrder,
    graphs: BTreeMap<usize, BatchGraph>,
    /// The buffers for the logits, with `MAX_SEQUENCES` rows, which all graphs share. Allocated for the first batch.
    logits: Option<LogitsBuffers>,
    arenas: Arenas,
    /// Whether a batch graph has failed. If so, [`can_run_model`](Self::can_run_model) returns false.
    has_failed: bool,
}

/// The arenas of the graphs.
#[derive(Default)]
struct Arenas {
    /// The arena that was created last. A graph for which it is too small gets a new arena. Earlier graphs keep theirs.
    /// `None` until a graph needs an arena of at most `MAX_ARENA_BYTES`.
    newest: Option<Arena>,
    /// The size of all arenas together, in bytes.
    bytes: usize,
}

impl Arenas {
    /// Returns the newest arena if it has room for the pass on which `sizes` were measured.
    /// Otherwise, creates an arena for passes with up to `factor` times as many tokens.
    /// Returns `None` if the new arena would exceed `MAX_ARENA_BYTES`, or all arenas together `MAX_ARENAS_BYTES`.
    fn for_pass(&mut self, sizes: &LayerSizes, factor: usize, device: &Device) -> Result<Option<Arena>> {
        if let Some(arena) = self.newest.as_ref().filter(|arena| arena.fits(sizes)) {
            return Ok(Some(arena.clone()));
        }
        let bytes = sizes.arena_bytes(factor);
        if bytes > MAX_ARENA_BYTES || self.bytes + bytes > MAX_ARENAS_BYTES {
            return Ok(None);
        }
        let arena = Arena::new(sizes, factor, device)?;
        self.newest = Some(arena.clone());
        self.bytes += bytes;
        Ok(Some(arena))
    }
}

/// The buffers for the logits of a step. Each graph writes as many rows as its padded batch has.
#[derive(Clone)]
struct LogitsBuffers {
    /// This rank's logits, f32 `[rows, columns]`, with one column for each token in [`Decoder::own_tokens`].
    own: Tensor,
    /// This rank's best logits, f32 `[rows, BEST_LOGITS_COLUMNS]`.
    own_best: Tensor,
    /// The best logits of all ranks, f32 `[rows, ranks · BEST_LOGITS_COLUMNS]`. With one rank, this is `own_best`.
    best: Tensor,
}

impl LogitsBuffers {
    fn new(decoder: &Decoder, device: &Device) -> Result<Self> {
        let zeros = |columns| Tensor::zeros((MAX_SEQUENCES, columns), DType::F32, device);
        let own_best = zeros(BEST_LOGITS_COLUMNS)?;
        let best = match decoder.world().size() {
            1 => own_best.clone(),
            ranks => zeros(ranks * BEST_LOGITS_COLUMNS)?,
        };
        Ok(Self { own: zeros(decoder.own_tokens().len())?, own_best, best })
    }

    /// Returns the first `count` rows. They share memory with these buffers.
    fn first_rows(&self, count: usize) -> Result<Self> {
        let first_rows = |tensor: &Tensor| tensor.narrow(0, 0, count);
        Ok(Self { own: first_rows(&self.own)?, own_best: first_rows(&self.own_best)?, best: first_rows(&self.best)? })
    }
}

/// The graph of one padded batch size, and its buffers.
struct BatchGraph {
    /// The inputs, u32: token ids, positions, the slots to write in each layer group,
    /// the block tables of each layer group, and `skips_logits`.
    device_inputs: Tensor,
    /// The host's copy of the block tables and `skips_logits` in `device_inputs`.
    /// Of these words, the host sends only those that have changed.
    sent_words: Vec<u32>,
    ids: Tensor,
    pass: Pass,
    /// u32 `[1]`: 1 if the step needs only the best logits, otherwise 0.
    skips_logits: Tensor,
    /// The logits of the padded batch.
    logits: LogitsBuffers,
    /// Whether the graph finds the best logits and writes them to `logits.best`. False until the first step has run.
    finds_best: bool,
    /// The memory for the graph's intermediate results. `None` if the graph itself allocates this memory.
    arena: Option<Arena>,
    /// The captured graph. `None` until the first step of this size has run.
    graph: Option<LaunchGraph>,
}

impl BatchGraphs {
    /// Creates an empty set of graphs for sequences of up to `context` positions. `BatchGraphs::run` adds graphs.
    pub fn new(device: &CudaDevice, context: usize, sum_order: SumOrder) -> Self {
        let table_blocks = context.div_ceil(BLOCK_TOKENS);
        Self {
            device: device.clone(),
            table_blocks,
            sum_order,
            graphs: BTreeMap::new(),
            logits: None,
            arenas: Arenas::default(),
            has_failed: false,
        }
    }

    /// Returns whether decode steps can run as batch graphs: false after a batch graph has failed,
    /// and for the attention backend `CandleFlashAttn`, which reads block tables on the host.
    pub fn can_run_model(&self, decoder: &Decoder) -> bool {
        !self.has_failed && !decoder.reads_tables_on_host()
    }

    /// Queues a decode step of at most `MAX_SEQUENCES` sequences. `buffers` copies the inputs to the device.
    /// [`can_run_model`](Self::can_run_model) must be true.
    /// Returns only the best logits if `needs` allows it and the graph finds them.
    /// The next step overwrites the logits.
    ///
    /// If the step fails on a single GPU, returns `None`, and [`can_run_model`](Self::can_run_model) returns false from
    /// then on. The caller must then run the failed step operation by operation.
    /// With several ranks, a failure is an error.
    pub fn run(
        &mut self,
        decoder: &Decoder,
        cache: &KvCache,
        sequences: &[StepSequence],
        needs: NeededLogits,
        buffers: &mut QueuedStepBuffers,
    ) -> Result<Option<ComputedLogits>> {
        match self.try_run(decoder, cache, sequences, needs, buffers) {
            Ok(logits) => Ok(Some(logits)),
            // Do not repeat the step: the other ranks do not know about the failure, and would not repeat it.
            Err(error) if decoder.world().size() > 1 => Err(error),
            Err(error) => {
                // The failed step may have written keys and values to the cache. The repeated step overwrites them.
                tracing::warn!(
                    %error,
                    "cannot run batches as CUDA graphs; batches now run operation by operation, which is slower"
                );
                self.has_failed = true;
                self.graphs.clear();
                self.logits = None;
                self.arenas = Arenas::default();
                Ok(None)
            }
        }
    }

    /// Implements [`run`](Self::run), but always returns the error of a step that fails.
    fn try_run(
        &mut self,
        decoder: &Decoder,
        cache: &KvCache,
        sequences: &[StepSequence],
        needs: NeededLogits,
        buffers: &mut QueuedStepBuffers,
    ) -> Result<ComputedLogits> {
        let size = padded(sequences.len());
        let logits = match &mut self.logits {
            Some(logits) => logits,
            none => none.insert(LogitsBuffers::new(decoder, cache.device())?),
        };
        let logits = logits.first_rows(size)?;
        let batch = match self.graphs.entry(size) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let (table_blocks, sum_order) = (self.table_blocks, self.sum_order);
                entry.insert(BatchGraph::new(size, table_blocks, sum_order, decoder, cache, logits.clone())?)
            }
        };
        let inputs = batch.next_inputs(decoder, cache, sequences, needs, buffers, self.table_blocks)?;
        buffers.write_inputs(&inputs, &batch.device_inputs)?;
        batch.record_sent(&inputs.changes);
        match &batch.graph {
            Some(graph) => decoder.world().launch_together(|| graph.enqueue())?,
            None => batch.capture_first_step(&self.device, decoder, cache, &mut self.arenas)?,
        }
        let LogitsBuffers { own, best, .. } = logits.first_rows(sequences.len())?;
        Ok(match needs {
            NeededLogits::Best if batch.finds_best => ComputedLogits::Best(best),
            _ => ComputedLogits::All(own),
        })
    }
}

/// The logits that a step needs to choose its tokens. See [`ComputedLogits`].
#[derive(Clone, Copy, PartialEq)]
pub enum NeededLogits {
    All,
    /// Only the best logits of each row. The step may compute all logits instead.
    Best,
}

/// The logits that a step has computed.
pub enum ComputedLogits {
    /// All logits of this rank, with one column for each token in [`Decoder::own_tokens`]: f32 `[sequences, columns]`.
    All(Tensor),
    /// The best logits of each row, from all ranks: f32 `[sequences, ranks · BEST_LOGITS_COLUMNS]`.
    Best(Tensor),
}

/// Returns the padded batch size for a number of sequences.
/// Each padded size needs its own graph, so the padded sizes of large batches are further apart.
fn padded(sequences: usize) -> usize {
    match sequences {
        ..=8 => sequences,
        9..=64 => sequences.next_multiple_of(8),
        _ => sequences.next_multiple_of(16),
    }
}

impl BatchGraph {
    /// Creates the buffers of a batch of `size` rows. The graph will write to `logits`, which has `size` rows.
    fn new(
        size: usize,
        table_blocks: usize,
        sum_order: SumOrder,
        decoder: &Decoder,
        cache: &KvCache,
        logits: LogitsBuffers,
    ) -> Result<Self> {
        let groups = cache.layout().groups();
        let (words, tables) = (size * (2 + groups), groups * size * table_blocks);
        let device_inputs = Tensor::zeros(words + tables + 1, DType::U32, cache.device())?;
        let columns = |first: usize, count: usize| device_inputs.narrow(0, first * size, count * size);
        let blocks = |group: usize| {
            let tables = columns(2 + groups + group * table_blocks, table_blocks)?.reshape((size, table_blocks))?;
            Ok(PassBlocks { tables, slots: columns(2 + group, 1)? })
        };
        let blocks = (0..groups).map(blocks).collect::<candle_core::Result<Vec<_>>>()?;
        let pass = Pass::from_parts(
            QueryLayout::one_token_each(columns(1, 1)?)?,
            blocks,
            decoder.attention_backend(),
            sum_order,
        );
        Ok(Self {
            ids: columns(0, 1)?,
            pass,
            skips_logits: device_inputs.narrow(0, words + tables, 1)?,
            logits,
            finds_best: false,
            sent_words: vec![0; tables + 1],
            arena: None,
            graph: None,
            device_inputs,
        })
    }

    /// Checks the inputs of the padded batch.
    /// Returns the token ids of the batch or where the GPU finds them, the positions, the slots, and the changes to
    /// `self.sent_words`. Once the changes are sent, the caller must pass them to [`record_sent`](Self::record_sent).
    fn next_inputs(
        &self,
        decoder: &Decoder,
        cache: &KvCache,
        sequences: &[StepSequence],
        needs: NeededLogits,
        buffers: &QueuedStepBuffers,
        table_blocks: usize,
    ) -> Result<StepInputs> {
        let size = self.ids.dims1()?;
        let Some(last) = sequences.last() else { bail!("cannot run a batch: it has no sequences") };
        let padding = std::iter::repeat_n(last, size - sequences.len());
        let rows: Vec<&StepSequence> = sequences.iter().chain(padding).collect();
        let ids = token_ids(&rows, decoder.vocab_size())?;
        let sources = rows.iter().map(|sequence| buffers.source(sequence)).collect::<Result<_>>()?;
        let mut words: Vec<u32> = rows.iter().map(|sequence| sequence.position as u32).collect();
        let mut changes = Vec::new();
        for group in 0..cache.layout().groups() {
            for (row, sequence) in rows.iter().enumerate() {
                let table = used_table(sequence, group, table_blocks, decoder.context())?;
                words.push(slot(table, sequence.position));
                let first = (group * size + row) * table_blocks;
                self.add_changed_blocks(&mut changes, first, table, cache.blocks())?;
            }
        }
        let flag = self.sent_words.len() - 1;
        let skips_logits = u32::from(needs == NeededLogits::Best);
        if self.sent_words[flag] != skips_logits {
            changes.push((flag as u32, skips_logits));
        }
        Ok(StepInputs { ids, sources, words, changes })
    }

    /// Appends to `changes` each entry of a block table that differs from `self.sent_words`, where the table begins at
    /// the index `first`. Fails if a block of such an entry is not one of the `cache_blocks` blocks of the KV cache.
    fn add_changed_blocks(
        &self,
        changes: &mut Vec<(u32, u32)>,
        first: usize,
        table: &[u32],
        cache_blocks: usize,
    ) -> Result<()> {
        let sent = &self.sent_words[first..first + table.len()];
        for (index, (&sent, &block)) in sent.iter().zip(table).enumerate() {
            if sent == block {
                continue;
            }
            if block as usize >= cache_blocks {
                bail!("cannot run a batch: block {block} is not one of the {cache_blocks} blocks of the KV cache");
            }
            changes.push(((first + index) as u32, block));
        }
        Ok(())
    }

    /// Applies changes that were sent to the device to the host's copy.
    /// Until then, the copy stays as it is, so that it equals the words on the device even if a step fails.
    fn record_sent(&mut self, changes: &[(u32, u32)]) {
        for &(index, word) in changes {
            self.sent_words[index as usize] = word;
        }
    }

    /// Runs the first step of this batch size and captures the step as a graph.
    fn capture_first_step(
        &mut self,
        device: &CudaDevice,
        decoder: &Decoder,
        cache: &KvCache,
        arenas: &mut Arenas,
    ) -> Result<()> {
        // First run the step without a graph, to load all kernels and to allocate the counters of finished attention
        // partitions.
        // A capture cannot load kernels, and memory that is allocated during a capture belongs to the graph.
        let (result, sizes) = LayerSizes::measure(|| self.forward(decoder, cache));
        self.finds_best = result?;
        let size = self.ids.dims1()?;
        // A new arena has room for at least `size` rows rounded up to a power of two.
        // Larger batches up to this size can therefore use the same arena.
        // Without an arena, the graph allocates its memory itself.
        self.arena = arenas.for_pass(&sizes, size.next_power_of_two().div_ceil(size), cache.device())?;
        let forward = || match &self.arena {
            Some(arena) => arena.use_for(|| self.forward(decoder, cache)).map(drop),
            None => self.forward(decoder, cache).map(drop),
        };
        // SAFETY: `forward` frees all memory that it allocates.
        // `Runner` and `Follower` drop the graphs before the decoder and the cache.
        // `BatchGraph` owns its buffers and the arena. After loading, only the thread of this rank uses the stream.
        let graph = unsafe { LaunchGraph::capture_with(device, forward)? };
        // Run the step again, as a graph, because all steps of one batch size must use the same algorithms.
        // cuBLAS, which computes most f32 products, may have chosen other algorithms in the first run than during the
        // capture.
        decoder.world().launch_together(|| graph.enqueue())?;
        self.graph = Some(graph);
        Ok(())
    }

    /// Computes the logits of the current inputs and writes them to `self.logits.own`.
    /// Returns true if this function also finds the best logits and writes them to `self.logits.best`.
    /// In that case, `self.logits.own` may stay unchanged if `self.skips_logits` is 1.
    fn forward(&self, decoder: &Decoder, cache: &KvCache) -> Result<bool> {
        let (LogitsBuffers { own, own_best, best }, sum_order) = (&self.logits, self.pass.sum_order());
        let (ranks, first_token) = (decoder.world().size(), decoder.own_tokens().start);
        let hidden = decoder.hidden_states(&self.ids, &self.pass, cache, None)?;
        let output = LogitsOutput { logits: own, best: own_best, skips_logits: &self.skips_logits, first_token };
        let found = if decoder.own_best_logits(&hidden, sum_order, &output)? {
            own_best.clone()
        } else {
            let logits = decoder.own_logits(&hidden, sum_order, Some(own))?;
            if logits.id() != own.id() {
                copy_rows(own, &logits, 0)?;
            }
            // A single GPU then chooses tokens from all logits: finding the best logits first is not faster.
            if ranks == 1 {
                return Ok(false);
            }
            best_logits(own, first_token)?
        };
        if ranks == 1 {
            return Ok(true);
        }
        let of_ranks = decoder.world().all_gather_columns_into(&found, best.dim(1)?, Some(best))?;
        if of_ranks.id() != best.id() {
            copy_rows(best, &of_ranks, 0)?;
        }
        Ok(true)
    }
}

/// Returns the input token of each row. Fails if a token is outside the vocabulary.
fn token_ids(rows: &[&StepSequence], vocab_size: usize) -> Result<Vec<u32>> {
    let ids: Vec<u32> = rows.iter().map(|sequence| sequence.ids[0]).collect();
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
        bail!("cannot run a batch: token id {id} is outside the model's vocabulary of {vocab_size} tokens");
    }
    Ok(ids)
}

/// Returns the entries of a sequence's block table for a layer group, up to the block of the sequence's position.
/// Fails if the position has no block, or is beyond the context or the `table_blocks` entries of a table on the device.
fn used_table<'s>(sequence: &StepSequence<'s>, group: usize, table_blocks: usize, context: usize) -> Result<&'s [u32]> {
    let (table, position) = (sequence.tables.table(group), sequence.position);
    let used = position / BLOCK_TOKENS + 1;
    if used > table.len().min(table_blocks) || position >= context {
        bail!("cannot decode at position {position}: it has no block, or is beyond the context");
    }
    Ok(&table[..used])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_padded_to_few_sizes() {
        let sizes: Vec<usize> = [2, 7, 8, 9, 16, 17, 64, 65, 128, 129, 250].into_iter().map(padded).collect();
        assert_eq!(sizes, [2, 7, 8, 16, 16, 24, 64, 80, 128, 144, 256]);
        assert!((1..=MAX_SEQUENCES).all(|size| padded(size) >= size && padded(size) <= MAX_SEQUENCES));
    }
}
