//! Batched decode steps as CUDA graphs, one graph for each batch size.
//!
//! A graph replays the operations of [`Decoder::forward_pass`], so it supports every model that runs on a GPU, and
//! computes the same results as the eager decoder. The host launches one graph instead of hundreds of kernels.
//!
//! Batches are padded to a few sizes, so that few graphs are needed. A padding row repeats the last sequence. It
//! therefore uses the same experts as this sequence, and writes identical keys and values to the same cache row.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Tensor};

use super::limits::MAX_SEQUENCES;
use super::queued_steps::QueuedStepBuffers;
use super::step_sequence::StepSequence;
use crate::kernels::SumOrder;
use crate::kernels::attention::{PassBlocks, Queries, slot};
use crate::kernels::launch::LaunchGraph;
use crate::kernels::rows::copy_rows;
use crate::kernels::scratch::{Arena, LayerSizes, MAX_ARENA_BYTES};
use crate::kernels::step_inputs::StepInputs;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::{BLOCK_TOKENS, KvCache};
use crate::nn::pass::{LogitRows, Pass};

/// The graphs of a model, by batch size.
pub struct BatchGraphs {
    device: CudaDevice,
    /// The number of entries in each block table.
    table_blocks: usize,
    sum_order: SumOrder,
    graphs: BTreeMap<usize, BatchGraph>,
    /// f32 `[MAX_SEQUENCES, vocab]`, shared by all graphs. The first batch allocates it.
    logits: Option<Tensor>,
    /// The arena for the intermediate results of new graphs, and the largest batch whose results fit in it.
    /// A larger batch replaces the arena, but earlier graphs keep theirs.
    arena: Option<(usize, Arena)>,
    /// Whether a graph step has failed. From then on, all steps run eagerly.
    has_failed: bool,
}

/// The graph of one batch size, and its buffers.
struct BatchGraph {
    /// u32: ids and positions, the cache rows to write for each group, and the block tables of each group.
    inputs: Tensor,
    /// The block tables that `inputs` contains. Only changes are sent to the device.
    tables: Vec<u32>,
    ids: Tensor,
    pass: Pass,
    /// f32 `[batch, vocab]`
    logits: Tensor,
    /// The memory for the graph's intermediate results. `None` if the graph allocates this memory itself.
    arena: Option<Arena>,
    /// `None` until the first step of this size has run.
    graph: Option<LaunchGraph>,
}

impl BatchGraphs {
    /// Creates an empty set of graphs for sequences of up to `context` positions. `run` captures the graphs.
    pub fn new(device: &CudaDevice, context: usize, sum_order: SumOrder) -> Self {
        let table_blocks = context.div_ceil(BLOCK_TOKENS);
        Self {
            device: device.clone(),
            table_blocks,
            sum_order,
            graphs: BTreeMap::new(),
            logits: None,
            arena: None,
            has_failed: false,
        }
    }

    /// Returns whether decode steps can run as graphs. They cannot with the backend `CandleFlashAttn`, or after a graph
    /// step has failed.
    pub fn can_run_model(&self, decoder: &Decoder) -> bool {
        !self.has_failed && !decoder.reads_tables_on_host()
    }

    /// Queues a decode step, like [`run`](Self::run), but returns `None` if the graph fails on a single GPU. From then
    /// on, [`can_run_model`](Self::can_run_model) is false, and all steps must run operation by operation.
    pub fn try_run(
        &mut self,
        decoder: &Decoder,
        cache: &KvCache,
        sequences: &[StepSequence],
        buffers: &mut QueuedStepBuffers,
    ) -> Result<Option<Tensor>> {
        match self.run(decoder, cache, sequences, buffers) {
            Ok(logits) => Ok(Some(logits)),
            // The other ranks do not know that the step failed on this rank, so they would not run it eagerly.
            Err(error) if decoder.world().size() > 1 => Err(error),
            Err(error) => {
                // The failed step changed only keys and values in the cache, which the eager step writes again.
                tracing::warn!(%error, "cannot run batches as CUDA graphs");
                self.has_failed = true;
                self.graphs.clear();
                self.logits = None;
                self.arena = None;
                Ok(None)
            }
        }
    }

    /// Queues a decode step of at most `MAX_SEQUENCES` sequences. [`can_run_model`](Self::can_run_model) must be true.
    /// Returns the logits, f32 `[sequences, vocab]`. The next step overwrites the logits.
    /// `buffers` copies the inputs to the device.
    pub fn run(
        &mut self,
        decoder: &Decoder,
        cache: &KvCache,
        sequences: &[StepSequence],
        buffers: &mut QueuedStepBuffers,
    ) -> Result<Tensor> {
        let size = padded(sequences.len());
        let logits = match &self.logits {
            Some(logits) => logits.clone(),
            None => Tensor::zeros((MAX_SEQUENCES, decoder.vocab_size()), DType::F32, cache.device())?,
        };
        let logits = self.logits.insert(logits).narrow(0, 0, size)?;
        if !self.graphs.contains_key(&size) {
            self.graphs.insert(
                size,
                BatchGraph::new(size, self.table_blocks, self.sum_order, decoder, cache, logits.clone())?,
            );
        }
        let Some(batch) = self.graphs.get_mut(&size) else { bail!("no graph for {size} sequences") };
        let inputs = batch.inputs(decoder, cache, sequences, buffers, self.table_blocks)?;
        buffers.write_inputs(&inputs, &batch.inputs)?;
        match &batch.graph {
            Some(graph) => decoder.world().launch_together(|| graph.enqueue())?,
            None => batch.capture_first_step(&self.device, decoder, cache, &mut self.arena)?,
        }
        Ok(logits.narrow(0, 0, sequences.len())?)
    }
}

/// Returns the number of sequences, rounded up to the number of rows of a graph. There is one graph for each number of
/// rows, so larger numbers are rounded up more, to capture fewer graphs.
fn padded(sequences: usize) -> usize {
    match sequences {
        ..=8 => sequences,
        9..=64 => sequences.next_multiple_of(8),
        _ => sequences.next_multiple_of(16),
    }
}

impl BatchGraph {
    /// Creates the input buffers of a batch. The graph writes its output to `logits`, f32 `[size, vocab]`.
    fn new(
        size: usize,
        table_blocks: usize,
        sum_order: SumOrder,
        decoder: &Decoder,
        cache: &KvCache,
        logits: Tensor,
    ) -> Result<Self> {
        let (groups, device) = (cache.layout().groups(), cache.device());
        let total = size * (2 + groups + groups * table_blocks);
        let inputs = Tensor::zeros(total, DType::U32, device)?;
        let part = |first: usize, count: usize| inputs.narrow(0, first * size, count * size);
        let blocks = |group: usize| {
            let tables = part(2 + groups + group * table_blocks, table_blocks)?.reshape((size, table_blocks))?;
            Ok(PassBlocks { tables, slots: part(2 + group, 1)? })
        };
        let blocks = (0..groups).map(blocks).collect::<candle_core::Result<Vec<_>>>()?;
        let pass =
            Pass::from_parts(Queries::one_token_each(part(1, 1)?)?, blocks, decoder.attention_backend(), sum_order);
        let tables = vec![0; groups * size * table_blocks];
        Ok(Self { ids: part(0, 1)?, pass, logits, tables, arena: None, graph: None, inputs })
    }

    /// Returns the ids, positions and cache rows of all sequences, and the changes to their block tables.
    fn inputs(
        &mut self,
        decoder: &Decoder,
        cache: &KvCache,
        sequences: &[StepSequence],
        buffers: &QueuedStepBuffers,
        table_blocks: usize,
    ) -> Result<StepInputs> {
        let (groups, size) = (cache.layout().groups(), self.ids.dims1()?);
        let Some(last) = sequences.last() else { bail!("a batch needs at least one sequence") };
        let rows = || sequences.iter().chain(std::iter::repeat_n(last, size - sequences.len()));
        let ids: Vec<u32> = rows().map(|sequence| sequence.ids[0]).collect();
        if let Some(id) = ids.iter().find(|&&id| id as usize >= decoder.vocab_size()) {
            bail!("token id {id} is outside the model's vocabulary of {} tokens", decoder.vocab_size());
        }
        let sources = rows().map(|sequence| buffers.source(sequence)).collect::<Result<_>>()?;
        let mut words: Vec<u32> = rows().map(|sequence| sequence.position as u32).collect();
        let mut changes = Vec::new();
        for group in 0..groups {
            for (row, sequence) in rows().enumerate() {
                let (table, position) = (sequence.tables.table(group), sequence.position);
                let used = position / BLOCK_TOKENS + 1;
                if used > table.len().min(table_blocks) || position >= decoder.context() {
                    bail!("position {position} has no block, or is beyond the context");
                }
                words.push(slot(table, position));
                let first = (group * size + row) * table_blocks;
                let known = &mut self.tables[first..first + used];
                for (index, (known, &block)) in known.iter_mut().zip(table).enumerate() {
                    if *known == block {
                        continue;
                    }
                    if block as usize >= cache.blocks() {
                        bail!("block {block} is not one of the {} blocks of the KV cache", cache.blocks());
                    }
                    *known = block;
                    changes.push(((first + index) as u32, block));
                }
            }
        }
        Ok(StepInputs { ids, sources, words, changes })
    }

    /// Runs the first step of this size, and captures it as a graph. Replaces `arena` if it is too small. See
    /// [`BatchGraphs::arena`].
    fn capture_first_step(
        &mut self,
        device: &CudaDevice,
        decoder: &Decoder,
        cache: &KvCache,
        arena: &mut Option<(usize, Arena)>,
    ) -> Result<()> {
        // Run the first step without a graph. It loads all kernels and allocates the counters of finished attention
        // splits. A capture allows neither loading nor allocating.
        let (result, sizes) = LayerSizes::measure(|| self.forward(decoder, cache));
        result?;
        let size = self.ids.dims1()?;
        let rows = size.next_power_of_two();
        if arena.as_ref().is_none_or(|(most, _)| *most < size) {
            let factor = rows.div_ceil(size);
            let fits = sizes.arena_bytes(factor) <= MAX_ARENA_BYTES;
            let new = fits.then(|| Arena::new(&sizes, factor, cache.device())).transpose()?;
            *arena = new.map(|arena| (rows, arena));
        }
        self.arena = arena.as_ref().map(|(_, arena)| arena.clone());
        let forward = || match &self.arena {
            Some(arena) => arena.use_for(|| self.forward(decoder, cache)),
            None => self.forward(decoder, cache),
        };
        // SAFETY: `forward_pass` frees all memory that it allocates, except for the logits, which `forward` frees.
        // `Runner` drops the graphs before the decoder and the cache, and `BatchGraph` owns its buffers, including the
        // arena. Only the engine thread uses the stream after loading.
        let graph = unsafe { LaunchGraph::capture_with(device, forward)? };
        // Run the step again, as a graph. cuBLAS may have chosen other algorithms for the capture than for the first
        // step, but all steps of a size must use the same algorithms.
        decoder.world().launch_together(|| graph.enqueue())?;
        self.graph = Some(graph);
        Ok(())
    }

    /// Computes the logits of the current inputs.
    fn forward(&self, decoder: &Decoder, cache: &KvCache) -> Result<()> {
        let logits = decoder.forward_pass(&self.ids, &self.pass, cache, LogitRows::Last, None)?;
        Ok(copy_rows(&self.logits, &logits, 0)?)
    }
}

const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<BatchGraphs>();
};

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
