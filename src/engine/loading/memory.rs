//! [`MemoryPlan`]: how much memory a model needs, computed from its config and weight headers.
//!
//! The loader makes the plan before it allocates memory for the model. `inferno show` prints the plan.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use candle_core::DType;

use crate::device::{DeviceInfo, MAX_RANKS, Split};
use crate::error::Error;
use crate::kernels::exchange::MAILBOX_BYTES;
use crate::kernels::scratch::MAX_ARENA_BYTES;
use crate::models::Architecture;
use crate::nn::kv_cache::{BLOCK_TOKENS, CacheLayout, LayerSpec, peak_blocks};
use crate::runner::MAX_SEQUENCES;
use crate::weights::Inventory;
use crate::weights::division::RankPart;
use crate::weights::inventory::ModelBytes;

/// The upper limit on the default context length, in tokens.
const DEFAULT_CONTEXT: usize = 32_768;
/// The lower limit on the default context length, in tokens.
/// The default is halved while the model does not fit in memory.
const SMALLEST_CONTEXT: usize = 2048;

/// An upper bound on the memory for library buffers, decode buffers, the decode graph and the logits of one token,
/// in bytes. The workspace of cuBLASLt takes up to 32 MiB of this memory.
const WORKSPACE_BYTES: u64 = 192 << 20;
/// The maximum total size of all arenas of batch graphs, in bytes, if no batch needs more than [`MAX_ARENA_BYTES`].
/// Each new arena is at least twice as large as the previous arena, which existing graphs still use.
/// All arenas together are therefore less than twice as large as the largest arena.
const ARENA_BYTES: u64 = 2 * MAX_ARENA_BYTES as u64;
/// The minimum result of [`workspace_bytes_per_token`]. Models with wide MLPs need more.
const MIN_WORKSPACE_BYTES_PER_TOKEN: u64 = 448 << 10;

/// The maximum chunk size in tokens.
///
/// Kernels count the elements of an activation (tokens · columns) as an i32.
/// With chunks of 16,384 tokens, an activation can have up to 131,071 columns.
/// The widest known activation has 106,496 columns: gate and up of Llama 3.1 405B, 2 · 53,248.
const MAX_CHUNK: usize = 16_384;

/// The maximum default chunk size, in tokens, if the layers are divided among ranks.
///
/// A rank waits until the other ranks have run their layers, and can give up after 5 s (`ANSWER_TIMEOUT`).
/// A chunk of 2,048 tokens takes much less than 5 s: for example, 0.5 s in 100 GB of bf16 layers at 400 TFLOPS.
const MAX_STAGE_CHUNK: usize = 2048;

/// Returns an upper bound on the activation memory per token of a chunk, in bytes.
///
/// Activation memory peaks in the down projection of an MLP. With b bytes per element of `dtype`, a token then needs:
///
/// - the outputs of gate_proj and up_proj in f32: 8 · intermediate
/// - the product of these outputs in `dtype`, and a quantized copy for some weight formats: 2b · intermediate
/// - three versions of the residual stream, two layer outputs and the MLP output, all in f32: 24 · hidden
/// - the two normed inputs in `dtype`: 2b · hidden
/// - a reserve for 8-bit matrix products, which need accumulators and a quantized input: 8 · hidden
///
/// The up projection needs less: its temporaries, such as 8-bit accumulators, take at most 2b · intermediate.
/// Attention and the experts of all supported families need less memory.
/// Example: for a token of Llama 3 70B in bf16, which needs 504 KiB, the bound is 624 KiB.
fn workspace_bytes_per_token(hidden_size: usize, intermediate_size: usize, dtype: DType) -> u64 {
    let bytes = dtype.size_in_bytes() as u64;
    let intermediate = (intermediate_size as u64).saturating_mul(8 + 2 * bytes);
    let needed = intermediate.saturating_add((hidden_size as u64).saturating_mul(32 + 2 * bytes));
    needed.max(MIN_WORKSPACE_BYTES_PER_TOKEN)
}

/// The kind of device that a model runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Gpu,
    Cpu,
}

impl DeviceKind {
    /// Returns the chunk sizes to choose from, best first.
    ///
    /// Larger chunks need more memory. On a GPU, they are faster until the tensor cores are saturated.
    fn chunk_sizes(self) -> &'static [usize] {
        match self {
            DeviceKind::Gpu => &[8192, 2048, 512],
            DeviceKind::Cpu => &[256],
        }
    }
}

/// The memory requirements of a model as a function of its [`Capacity`].
#[derive(Clone)]
pub struct MemoryPlan {
    /// The number of ranks. `weight_bytes`, `layers` and `layout` describe the part of one rank.
    ranks: usize,
    weight_bytes: u64,
    /// The parts of the model that the ranks hold, by world size.
    /// Entry i is for i + 1 ranks, which divide every layer.
    rank_parts: Arc<[Vec<RankPart>]>,
    /// The sizes of each layer, of the output head and of all other weights in the undivided model.
    parts: ModelBytes,
    /// Extra bytes needed while loading, to repack or stack the experts of one layer.
    /// The loader frees these bytes before it allocates the KV cache.
    loading_bytes: u64,
    /// Extra bytes needed in a forward pass, for the dequantized experts of one layer.
    unpacked_bytes: u64,
    /// An upper bound on the activation memory per token of a chunk, in bytes.
    workspace_bytes_per_token: u64,
    layers: Vec<LayerSpec>,
    layout: CacheLayout,
    /// The minimum number of full-context sequences that the KV cache can hold.
    sequences: usize,
    /// The memory to use on the device, in bytes. The KV cache gets what remains after weights and workspace.
    /// With `None`, the KV cache is only as large as `sequences` requires.
    limit_bytes: Option<u64>,
    /// The size of the logits of one token, in bytes.
    logits_row_bytes: u64,
    /// The chunk sizes to choose from, best first.
    chunks: Vec<usize>,
    dtype: DType,
    max_context: usize,
    /// The architecture's limit on the default context, in tokens. With RoPE scaling, the limit can be below
    /// `max_context`.
    default_context: usize,
}

/// The context length and chunk size for which memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// The context length in tokens.
    pub context: usize,
    /// The maximum number of tokens in one step, over all sequences of the step.
    pub chunk: usize,
}

impl MemoryPlan {
    /// Plans the memory of a model on one device. `dtype` is the dtype of activations and of the KV cache.
    pub fn new(inventory: &Inventory, architecture: &dyn Architecture, dtype: DType, device_kind: DeviceKind) -> Self {
        let (layers, max_context) = (architecture.cache_layers(), architecture.max_position_embeddings());
        Self {
            default_context: architecture.default_context(),
            logits_row_bytes: 4 * architecture.vocab_size() as u64,
            workspace_bytes_per_token: workspace_bytes_per_token(
                architecture.hidden_size(),
                architecture.intermediate_size(),
                dtype,
            ),
            ..Self::from_layers(inventory, layers, max_context, dtype, device_kind)
        }
    }

    /// Plans the memory of a model whose family may be unsupported. `layers` describes its KV cache.
    /// The plan does not account for wide MLPs or for logits.
    pub fn from_layers(
        inventory: &Inventory,
        layers: Vec<LayerSpec>,
        max_context: usize,
        dtype: DType,
        device_kind: DeviceKind,
    ) -> Self {
        Self {
            ranks: 1,
            weight_bytes: inventory.loaded_bytes(dtype),
            rank_parts: {
                let kv_heads: Vec<_> = layers.iter().map(|layer| layer.kv_heads).collect();
                (1..=MAX_RANKS).map(|ranks| inventory.rank_parts(&kv_heads, ranks, dtype)).collect()
            },
            parts: inventory.model_bytes(layers.len(), dtype),
            loading_bytes: if device_kind == DeviceKind::Gpu { inventory.largest_expert_layer(dtype) } else { 0 },
            unpacked_bytes: if device_kind == DeviceKind::Gpu { inventory.unpacked_expert_layer(dtype) } else { 0 },
            workspace_bytes_per_token: MIN_WORKSPACE_BYTES_PER_TOKEN,
            layout: CacheLayout::new(&layers),
            layers,
            sequences: 1,
            limit_bytes: None,
            logits_row_bytes: 0,
            chunks: device_kind.chunk_sizes().to_vec(),
            dtype,
            max_context,
            default_context: max_context,
        }
    }

    /// Sets the minimum number of full-context sequences that the KV cache can hold. Fails if `sequences` is 0.
    pub fn with_sequences(self, sequences: usize) -> Result<Self> {
        match sequences {
            0 => Err(Error::Usage("cannot load a model for 0 sequences: use 1 or more".into()).into()),
            _ => Ok(Self { sequences, ..self }),
        }
    }

    /// Divides the layers among ranks. Returns the layers of each rank.
    ///
    /// `free_bytes` is the free memory of each rank. Each rank gets layers in proportion to its room.
    /// The room of a rank is its free memory minus `WORKSPACE_BYTES` and its weights outside of layers.
    /// Every rank gets at least one layer. Fails if there are more ranks than layers.
    pub fn stages(&self, free_bytes: &[u64]) -> Result<Vec<Range<usize>>> {
        let (ranks, layers) = (free_bytes.len(), self.parts.layers.len());
        if ranks > layers {
            let message = format!("cannot divide {layers} layers among {ranks} devices: use at most {layers} devices");
            return Err(Error::Usage(message).into());
        }
        let fixed_bytes = WORKSPACE_BYTES + self.parts.other + self.parts.head / ranks as u64;
        let room = |free: &u64| u128::from(free.saturating_sub(fixed_bytes).max(1));
        let total_room: u128 = free_bytes.iter().map(room).sum();
        let total: u128 = self.parts.layers.iter().map(|&bytes| u128::from(bytes)).sum();
        let mut stages = Vec::with_capacity(ranks);
        let mut start = 0;
        // `bytes` is the size of all layers before `end`. `room_so_far` is the total room of ranks 0 to `rank`.
        let mut bytes = 0;
        let mut room_so_far = 0;
        for (rank, free) in free_bytes.iter().enumerate() {
            room_so_far += room(free);
            // Leave at least one layer for each later rank.
            let last = layers - (ranks - 1 - rank);
            let mut end = start;
            while end < last {
                let with_layer = bytes + u128::from(self.parts.layers[end]);
                // Add the layer if at least half of it lies within the total share of ranks 0 to `rank`.
                let is_within = (bytes + with_layer) * total_room <= 2 * total * room_so_far;
                if end > start && !is_within && rank + 1 < ranks {
                    break;
                }
                (end, bytes) = (end + 1, with_layer);
            }
            stages.push(start..end);
            start = end;
        }
        Ok(stages)
    }

    /// Divides the layers among `ranks` devices with equal memory. See [`stages`](Self::stages).
    fn stages_of_equal_devices(&self, ranks: usize) -> Result<Vec<Range<usize>>> {
        // The amount of free memory does not matter: equal devices get equal shares of the layers.
        self.stages(&vec![0; ranks])
    }

    /// Plans the memory of one of `ranks` ranks, which holds the layers in `layers` undivided.
    pub fn with_stage(mut self, layers: Range<usize>, ranks: usize) -> Self {
        self.ranks = ranks;
        let ModelBytes { layers: layer_bytes, head, other } = &self.parts;
        self.weight_bytes = layer_bytes[layers.clone()].iter().sum::<u64>() + head.div_ceil(ranks as u64) + other;
        self.layout = self.layout.of_layers(layers.clone());
        self.layers = self.layers[layers].to_vec();
        // Keep a chunk size that the user requested, even if it exceeds `MAX_STAGE_CHUNK`.
        if self.chunks.iter().any(|&chunk| chunk <= MAX_STAGE_CHUNK) {
            self.chunks.retain(|&chunk| chunk <= MAX_STAGE_CHUNK);
        }
        self
    }

    /// Divides every layer among several ranks, and plans the memory of the rank with the largest part.
    pub fn with_ranks(self, ranks: usize) -> Self {
        // If a tensor cannot be divided equally, the first rank has the largest part.
        self.with_rank(0, ranks)
    }

    /// Divides every layer among `ranks` ranks, and plans the memory of rank `rank`.
    pub fn with_rank(mut self, rank: usize, ranks: usize) -> Self {
        if ranks > 1 {
            self.ranks = ranks;
            let RankPart { weight_bytes, kv_heads } = &self.rank_parts[ranks - 1][rank];
            for (layer, kv_heads) in self.layers.iter_mut().zip(kv_heads) {
                layer.kv_heads = *kv_heads;
            }
            self.weight_bytes = *weight_bytes;
            self.layout = CacheLayout::new(&self.layers);
        }
        self
    }

    /// Divides the model among devices with equal memory, and plans the memory of the rank with the most weights.
    /// With [`Split::Layers`], fails if there are more ranks than layers.
    pub fn with_split(self, split: Split, ranks: usize) -> Result<Self> {
        if split == Split::Tensor || ranks == 1 {
            return Ok(self.with_ranks(ranks));
        }
        let stages = self.stages_of_equal_devices(ranks)?;
        let plans = stages.into_iter().map(|stage| self.clone().with_stage(stage, ranks));
        Ok(plans.max_by_key(|plan| plan.weight_bytes).unwrap_or(self))
    }

    /// Sets the memory to use on the device. The KV cache gets what remains after weights and workspace.
    pub fn with_limit(self, limit_bytes: u64) -> Self {
        Self { limit_bytes: Some(limit_bytes), ..self }
    }

    /// Sets the chunk size, if `chunk` is given. Fails if `chunk` is 0 or more than 16,384 tokens.
    pub fn with_chunk(self, chunk: Option<usize>) -> Result<Self> {
        match chunk {
            Some(0) => Err(Error::Usage("cannot load a model with --chunk 0: use --chunk 1 or more".into()).into()),
            Some(chunk) if chunk > MAX_CHUNK => {
                let message = format!("cannot load a model with --chunk {chunk}: use --chunk {MAX_CHUNK} or less");
                Err(Error::Usage(message).into())
            }
            Some(chunk) => Ok(Self { chunks: vec![chunk], ..self }),
            None => Ok(self),
        }
    }

    /// Returns the KV heads, head dimension and attention window of each layer.
    pub fn layers(&self) -> &[LayerSpec] {
        &self.layers
    }

    /// Returns the size of the rank's weights on the device, in bytes.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Returns the extra bytes needed while loading, which are freed before the KV cache is allocated.
    pub fn loading_bytes(&self) -> u64 {
        self.loading_bytes
    }

    /// Returns the layer groups of the KV cache. The layers of a group share block tables.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Returns the number of blocks in the KV cache: the blocks for `sequences` full-context sequences and
    /// the scratch block, or more if a memory limit leaves room for more.
    pub fn cache_blocks(&self, capacity: Capacity) -> usize {
        let Capacity { context, chunk } = capacity;
        // Only one sequence can have a full chunk, because all sequences share the `chunk` tokens of a step.
        let others = self.sequence_blocks(context).saturating_mul(self.sequences - 1);
        let needed = self.layout.peak_blocks(context, chunk).saturating_add(others).saturating_add(1);
        let Some(limit) = self.limit_bytes else { return needed };
        let other_bytes = self.weight_bytes.saturating_add(self.workspace_bytes(capacity));
        let room = limit.saturating_sub(other_bytes) / self.layout.block_bytes(self.dtype).max(1);
        usize::try_from(room).unwrap_or(usize::MAX).min(self.most_blocks()).max(needed)
    }

    /// Returns the number of blocks that one decoding sequence uses when it fills the context.
    pub fn sequence_blocks(&self, context: usize) -> usize {
        self.layout.peak_blocks(context, 1)
    }

    /// Returns the number of full-context sequences that fit if the KV cache gets all free memory of the device
    /// that remains after weights and workspace.
    pub fn sequences_that_fit(&self, capacity: Capacity, device: &DeviceInfo) -> usize {
        let logit_bytes = self.logit_bytes(capacity.chunk);
        let other_bytes = self.weight_bytes + self.workspace_bytes(capacity) + logit_bytes;
        let blocks = device.free_bytes.saturating_sub(other_bytes) / self.layout.block_bytes(self.dtype).max(1);
        (blocks as usize).min(self.most_blocks()) / self.sequence_blocks(capacity.context).max(1)
    }

    /// Returns the maximum number of blocks. Kernels count the elements of a cache tensor as an i32.
    fn most_blocks(&self) -> usize {
        let elements = self.layers.iter().map(|layer| layer.kv_heads * layer.head_dim * BLOCK_TOKENS).max();
        i32::MAX as usize / elements.unwrap_or(1).max(1)
    }

    /// Returns the size of the planned KV cache, in bytes.
    pub fn cache_bytes(&self, capacity: Capacity) -> u64 {
        self.block_bytes(self.cache_blocks(capacity))
    }

    /// Returns the size of a KV cache with `blocks` blocks, in bytes.
    pub fn block_bytes(&self, blocks: usize) -> u64 {
        (blocks as u64).saturating_mul(self.layout.block_bytes(self.dtype))
    }

    /// Returns the memory that passes need in addition to the weights and the KV cache, in bytes:
    /// activations, dequantized experts, logits, graphs, exchange buffers and library buffers.
    pub fn workspace_bytes(&self, capacity: Capacity) -> u64 {
        let chunk_bytes = self.workspace_bytes_per_token.saturating_mul(capacity.chunk as u64);
        let is_batch = self.sequences > 1 || self.limit_bytes.is_some();
        let batch_bytes = if is_batch { self.logit_bytes(capacity.chunk).saturating_add(ARENA_BYTES) } else { 0 };
        let exchange_bytes = if self.ranks > 1 { MAILBOX_BYTES as u64 } else { 0 };
        (WORKSPACE_BYTES + exchange_bytes)
            .saturating_add(chunk_bytes)
            .saturating_add(self.unpacked_bytes)
            .saturating_add(batch_bytes)
    }

    /// Returns the memory for the logits of steps with several sequences, in bytes.
    ///
    /// The sum has four terms: a buffer that all batch graphs share, the logits of a step,
    /// a copy of the rows to sample from, and another copy for log probabilities.
    fn logit_bytes(&self, chunk: usize) -> u64 {
        ((MAX_SEQUENCES + 3 * MAX_SEQUENCES.min(chunk)) as u64).saturating_mul(self.logits_row_bytes)
    }

    /// Returns `(full, sliding)`: sizes of keys and values in bytes.
    ///
    /// `full` is the size in all full-attention layers per 1,000 tokens of context.
    /// `sliding` is the maximum size in all sliding-window layers for one sequence of the longest context.
    pub fn cache_growth(&self, chunk: usize) -> (u64, u64) {
        let (sliding, full): (Vec<LayerSpec>, Vec<LayerSpec>) =
            self.layers.iter().partition(|layer| layer.window.is_some());
        let elements = |layers: &[LayerSpec]| -> u64 {
            layers.iter().map(|layer| 2 * layer.kv_heads as u64 * layer.head_dim as u64).fold(0, u64::saturating_add)
        };
        let bytes = self.dtype.size_in_bytes() as u64;
        let sliding_blocks = |layer: &LayerSpec| peak_blocks(layer.window, self.max_context, chunk) * BLOCK_TOKENS;
        let rows = sliding.iter().map(|layer| elements(&[*layer]).saturating_mul(sliding_blocks(layer) as u64));
        let sliding_bytes = rows.fold(0, u64::saturating_add).saturating_mul(bytes);
        (elements(&full).saturating_mul(1000 * bytes), sliding_bytes)
    }

    /// Returns the larger of the memory for loading and the memory for running the model, in bytes.
    pub fn bytes(&self, capacity: Capacity) -> u64 {
        let running = self.cache_bytes(capacity).saturating_add(self.workspace_bytes(capacity) - WORKSPACE_BYTES);
        self.weight_bytes.saturating_add(WORKSPACE_BYTES).saturating_add(running.max(self.loading_bytes))
    }

    /// Limits a chunk size to the maximum number of tokens in all sequences of the KV cache together.
    /// With a memory limit, returns `chunk`, because the KV cache may hold more than `sequences` sequences.
    fn useful_chunk(&self, chunk: usize, context: usize) -> usize {
        match self.limit_bytes {
            Some(_) => chunk,
            None => chunk.min(context.saturating_mul(self.sequences)),
        }
    }

    /// Returns the capacity with the context `context` and the smallest chunk size.
    pub fn smallest(&self, context: usize) -> Capacity {
        Capacity { context, chunk: self.useful_chunk(self.chunks.last().copied().unwrap_or(context), context) }
    }

    /// Returns the default context length in tokens, for a device with enough memory.
    pub fn default_context(&self) -> usize {
        self.max_context.min(self.default_context).min(DEFAULT_CONTEXT)
    }

    /// Returns the longest context in tokens that fits with the smallest chunk, or `None` if no context fits.
    pub fn largest_context(&self, device: &DeviceInfo) -> Option<usize> {
        let fits = |context| self.fits(self.smallest(context), device);
        if self.max_context == 0 || !fits(1) {
            return None;
        }
        // Invariant of the binary search: `fitting` fits, and `too_long` does not fit or exceeds `max_context`.
        let (mut fitting, mut too_long) = (1, self.max_context + 1);
        while too_long - fitting > 1 {
            let middle = fitting + (too_long - fitting) / 2;
            if fits(middle) { fitting = middle } else { too_long = middle }
        }
        Some(fitting)
    }

    /// Returns whether the model fits in the memory limit, if any, and in the free memory of the device.
    /// If the device's total memory is unknown, checks only the memory limit.
    fn fits(&self, capacity: Capacity, device: &DeviceInfo) -> bool {
        let bytes = self.bytes(capacity);
        self.limit_bytes.is_none_or(|limit| bytes <= limit) && (device.total_bytes == 0 || bytes <= device.free_bytes)
    }

    /// Returns the capacity for `context` with the best chunk size that fits, or `None` if no chunk size fits.
    fn fit(&self, context: usize, device: &DeviceInfo) -> Option<Capacity> {
        let chunk = |&chunk: &usize| Capacity { context, chunk: self.useful_chunk(chunk, context) };
        let mut capacities = self.chunks.iter().map(chunk);
        capacities.find(|capacity| self.fits(*capacity, device))
    }

    /// Chooses the capacity for the requested context, or else for the default context.
    ///
    /// If memory is short, reduces the chunk size first, then the default context. Never reduces a requested context.
    /// Fails if the requested context is invalid, or if nothing fits.
    pub fn choose(&self, requested: Option<usize>, device: &DeviceInfo) -> Result<Capacity> {
        let Some(context) = self.check_context(requested)? else {
            let default = self.default_context();
            return self.halvings(default).find_map(|context| self.fit(context, device)).ok_or_else(|| {
                let smallest = self.halvings(default).last().unwrap_or(default);
                self.out_of_memory(smallest, device).into()
            });
        };
        self.fit(context, device).ok_or_else(|| self.out_of_memory(context, device).into())
    }

    /// Returns `requested` unchanged. Fails if the requested context is 0 or longer than the model supports.
    pub fn check_context(&self, requested: Option<usize>) -> Result<Option<usize>> {
        let error = match requested {
            Some(0) => "cannot load a model with --context 0: use --context 1 or more".into(),
            Some(context) if context > self.max_context => {
                let limit = self.max_context;
                format!("cannot load the model with --context {context}: it supports at most {limit} tokens")
            }
            _ => return Ok(requested),
        };
        Err(Error::Usage(error).into())
    }

    /// Yields `longest`, then half of it, and so on down to [`SMALLEST_CONTEXT`].
    fn halvings(&self, longest: usize) -> impl Iterator<Item = usize> {
        let shortest = SMALLEST_CONTEXT.min(longest);
        let next = move |&context: &usize| (context > shortest).then(|| (context / 2).max(shortest));
        std::iter::successors(Some(longest), next)
    }

    /// Returns the error for a context that does not fit.
    /// The error suggests the longest context that fits, if there is one.
    /// On one GPU, the error also suggests 2, 4 or 8 such GPUs if `context` fits on that many.
    pub fn out_of_memory(&self, context: usize, device: &DeviceInfo) -> Error {
        let what = format!("this model with a context of {context} tokens");
        let (needed_bytes, free_bytes) = (self.bytes(self.smallest(context)), device.free_bytes);
        // The device can run out of memory although the plan fits. Then suggest half of the context.
        let shorter = |largest: usize| if largest < context { largest } else { context / 2 };
        let fitting_context = self.largest_context(device).map(shorter).filter(|&context| context > 0);
        let fits_on = |gpus: &usize| self.clone().with_ranks(*gpus).fit(context, device).is_some();
        let is_divisible = self.ranks == 1 && device.compute_capability.is_some();
        let fitting_gpus = [2, 4, 8].into_iter().find(|gpus| is_divisible && fits_on(gpus));
        Error::OutOfMemory {
            what,
            device: device.name.clone(),
            needed_bytes,
            free_bytes,
            limit_bytes: self.limit_bytes.filter(|&limit| limit < free_bytes && limit < needed_bytes),
            fitting_context,
            fitting_gpus,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn plan() -> MemoryPlan {
        const FULL: LayerSpec = LayerSpec { kv_heads: 8, head_dim: 64, window: None };
        const SLIDING: LayerSpec = LayerSpec { kv_heads: 8, head_dim: 64, window: Some(128) };
        MemoryPlan {
            ranks: 1,
            weight_bytes: 10 << 30,
            rank_parts: {
                let part = |ranks: u64| RankPart {
                    weight_bytes: (1 << 30) + (9 << 30) / ranks,
                    kv_heads: vec![8 / ranks as usize; 2],
                };
                (1..=8).map(|ranks| vec![part(ranks); ranks as usize]).collect()
            },
            parts: ModelBytes { layers: vec![4 << 30; 2], head: 1 << 30, other: 1 << 30 },
            loading_bytes: 0,
            unpacked_bytes: 0,
            workspace_bytes_per_token: MIN_WORKSPACE_BYTES_PER_TOKEN,
            layout: CacheLayout::new(&[FULL, SLIDING]),
            layers: vec![FULL, SLIDING],
            sequences: 1,
            limit_bytes: None,
            logits_row_bytes: 0,
            chunks: vec![2048, 512],
            dtype: DType::BF16,
            max_context: 131_072,
            default_context: 131_072,
        }
    }

    pub fn device(free_bytes: u64) -> DeviceInfo {
        DeviceInfo { name: "a GPU".into(), compute_capability: None, free_bytes, total_bytes: 80 << 30 }
    }

    #[test]
    fn chunk_shrinks_before_the_context_does() {
        let plan = plan();
        let all = Capacity { context: DEFAULT_CONTEXT, chunk: 2048 };
        assert_eq!(plan.choose(None, &device(80 << 30)).unwrap(), all);
        assert_eq!(plan.choose(None, &device(plan.bytes(all))).unwrap(), all);
        let small = Capacity { chunk: 512, ..all };
        assert_eq!(plan.choose(None, &device(plan.bytes(all) - 1)).unwrap(), small);
        assert_eq!(plan.choose(None, &device(plan.bytes(small))).unwrap(), small);
        let half = plan.choose(None, &device(plan.bytes(small) - 1)).unwrap();
        assert_eq!(half, Capacity { context: DEFAULT_CONTEXT / 2, chunk: 512 });
        assert_eq!(plan.choose(Some(100), &device(80 << 30)).unwrap(), Capacity { context: 100, chunk: 100 });
    }

    #[test]
    fn the_cache_takes_what_the_limit_leaves() {
        let limit = 14u64 << 30;
        let plan = plan().with_limit(limit);
        let capacity = plan.choose(None, &device(limit)).unwrap();
        assert_eq!(capacity, Capacity { context: DEFAULT_CONTEXT, chunk: 2048 });
        let bytes = plan.bytes(capacity);
        assert!(bytes <= limit && bytes + plan.layout.block_bytes(DType::BF16) > limit, "{bytes}");
        let sequences = plan.cache_blocks(capacity) / plan.sequence_blocks(DEFAULT_CONTEXT);
        assert_eq!(plan.sequences_that_fit(capacity, &device(limit)), sequences);
        // If one sequence of the default context does not fit in the limit, the default context shrinks.
        // If the user requests this context, `choose` fails.
        let smallest = Capacity { context: SMALLEST_CONTEXT, chunk: 512 };
        let plan = self::plan().with_limit(self::plan().bytes(smallest) + ARENA_BYTES + (10 << 20));
        assert!(plan.choose(None, &device(80 << 30)).unwrap().context < DEFAULT_CONTEXT);
        assert!(plan.choose(Some(DEFAULT_CONTEXT), &device(80 << 30)).is_err());
        // The number of cache blocks is limited, because kernels count the elements of a cache tensor as an i32.
        let plan = self::plan().with_limit(1 << 45);
        assert_eq!(plan.cache_blocks(capacity), i32::MAX as usize / (8 * 64 * BLOCK_TOKENS));
    }

    #[test]
    fn loading_can_need_more_memory_than_running() {
        let capacity = Capacity { context: 100, chunk: 100 };
        let running = plan().bytes(capacity);
        let plan = MemoryPlan { loading_bytes: 5 << 30, ..plan() };
        assert_eq!(plan.bytes(capacity), (10 << 30) + WORKSPACE_BYTES + (5 << 30));
        assert!(running < plan.bytes(capacity));
    }

    #[test]
    fn out_of_memory_error_names_a_context_that_fits() {
        let plan = plan();
        let fits = plan.bytes(Capacity { context: 4096, chunk: 512 });
        let error = plan.choose(Some(16_384), &device(fits)).unwrap_err();
        assert!(error.to_string().contains("--context 4096"), "{error}");
        // The context can be shorter than the shortest default context.
        let fits = plan.bytes(plan.smallest(300));
        for requested in [Some(1000), Some(16_384), None] {
            let error = plan.choose(requested, &device(fits)).unwrap_err();
            assert!(error.to_string().contains("--context 300"), "{requested:?}: {error}");
        }
        // Allocations can fail although the plan fits.
        for (context, suggested) in [(1000, Some(500)), (1, None)] {
            let error = plan.out_of_memory(context, &device(80 << 30));
            let Error::OutOfMemory { fitting_context, .. } = error else { panic!("{error}") };
            assert_eq!(fitting_context, suggested);
        }
        let error = plan.choose(None, &device(1 << 30)).unwrap_err();
        let Some(Error::OutOfMemory { fitting_context, .. }) = error.downcast_ref() else { panic!("{error}") };
        assert_eq!(*fitting_context, None);
        assert!(error.to_string().contains("no context fits: free memory on the device"), "{error}");
    }

    #[test]
    fn out_of_memory_error_names_gpu_memory_if_this_limit_is_too_small() {
        let error = |limit: u64, free| plan().with_limit(limit).choose(Some(16_384), &device(free)).unwrap_err();
        let limit = plan().with_limit(0).bytes(Capacity { context: 2048, chunk: 512 });
        let text = error(limit, 60 << 30).to_string();
        let allowed = format!("--gpu-memory allows only {:.1} GB of the 64.4 GB that is free", limit as f64 / 1e9);
        assert!(text.ends_with(&format!("but {allowed}\n  try --context 2048, or raise --gpu-memory")), "{text}");
        let text = error(1 << 30, 60 << 30).to_string();
        assert!(text.ends_with("fits: raise --gpu-memory, or choose a smaller model"), "{text}");
        let text = error(1 << 30, 2 << 30).to_string();
        assert!(text.contains("free memory on the device and raise --gpu-memory"), "{text}");
        // If the limit is not below the free memory, raising the limit does not help.
        for (limit, free) in [(40u64 << 30, 2 << 30), (2 << 30, 2 << 30)] {
            let text = error(limit, free).to_string();
            assert!(text.contains("only 2.1 GB is free") && !text.contains("--gpu-memory"), "{text}");
        }
        let gpu = DeviceInfo { compute_capability: Some((9, 0)), ..device(60 << 30) };
        let text = plan().with_limit(9 << 30).choose(Some(2048), &gpu).unwrap_err().to_string();
        assert!(text.ends_with("fits: raise --gpu-memory, or try --gpus 2 if you have 2 such GPUs"), "{text}");
    }

    #[test]
    fn out_of_memory_error_names_the_gpus_that_fit() {
        let gpu = |bytes| DeviceInfo { compute_capability: Some((9, 0)), ..device(bytes) };
        // Of the 10 GiB of weights, 1 GiB is not divided: every rank holds a copy.
        for (bytes, gpus) in [(9u64 << 30, Some(2)), (5 << 30, Some(4)), (1 << 30, None)] {
            let error = plan().choose(Some(2048), &gpu(bytes)).unwrap_err();
            let Some(Error::OutOfMemory { fitting_gpus, .. }) = error.downcast_ref() else { panic!("{error}") };
            assert_eq!(*fitting_gpus, gpus, "{error}");
            assert_eq!(error.to_string().contains("--gpus"), gpus.is_some(), "{error}");
        }
        let error = plan().choose(Some(2048), &device(9 << 30)).unwrap_err();
        assert!(!error.to_string().contains("--gpus"), "the error for a CPU suggests more GPUs: {error}");
    }

    #[test]
    fn several_ranks_divide_weights_and_cache() {
        let (one, two) = (plan(), plan().with_ranks(2));
        assert_eq!(two.weight_bytes(), (1 << 30) + (9 << 30) / 2);
        let capacity = Capacity { context: 4096, chunk: 512 };
        assert_eq!(two.cache_blocks(capacity), one.cache_blocks(capacity));
        assert_eq!(two.cache_bytes(capacity), one.cache_bytes(capacity) / 2);
        assert_eq!(two.workspace_bytes(capacity), one.workspace_bytes(capacity) + MAILBOX_BYTES as u64);
    }

    #[test]
    fn layers_are_divided_in_proportion_to_free_memory() {
        let parts = ModelBytes { layers: vec![1 << 30; 10], head: 2 << 30, other: 1 << 30 };
        let plan = MemoryPlan { parts, ..plan() };
        let stages = |gib: &[u64]| plan.stages(&gib.iter().map(|gib| gib << 30).collect::<Vec<_>>()).unwrap();
        assert_eq!(stages(&[20, 20]), [0..5, 5..10]);
        assert_eq!(stages(&[20, 20, 20]), [0..3, 3..7, 7..10]);
        assert_eq!(stages(&[10, 26]), [0..2, 2..10], "7.8 and 23.8 GiB remain for layers: 2.5 and 7.5 layers");
        assert_eq!(stages(&[0, 20]), [0..1, 1..10], "a rank without free memory gets one layer");
        assert_eq!(stages(&[20, 0, 0]), [0..8, 8..9, 9..10]);
        // A free memory of 0 stands for a CPU whose memory is unknown.
        assert_eq!(stages(&[0, 0]), [0..5, 5..10]);
        assert!(plan.stages(&[1 << 30; 11]).unwrap_err().to_string().contains("at most 10 devices"));
    }

    #[test]
    fn a_split_plans_the_rank_with_the_largest_part() {
        let parts = ModelBytes { layers: vec![1 << 30, 1 << 30, 1 << 30], head: 2 << 30, other: 1 << 30 };
        let layers = vec![LayerSpec { kv_heads: 8, head_dim: 64, window: None }; 3];
        let plan = MemoryPlan { parts, layout: CacheLayout::new(&layers), layers, ..plan() };
        let split = |split, ranks| plan.clone().with_split(split, ranks).map(|plan| plan.weight_bytes() >> 20);
        assert_eq!(split(Split::Layers, 2).unwrap(), 4 << 10, "2 layers, half of the head, all other weights");
        assert_eq!(split(Split::Tensor, 2).unwrap(), plan.clone().with_ranks(2).weight_bytes() >> 20);
        assert_eq!(split(Split::Layers, 1).unwrap(), plan.weight_bytes() >> 20);
        assert!(split(Split::Layers, 4).is_err());
    }

    #[test]
    fn a_rank_with_whole_layers_holds_their_weights_and_cache() {
        let (one, second) = (plan(), plan().with_stage(1..2, 2));
        assert_eq!(second.weight_bytes(), (4 << 30) + (1 << 29) + (1 << 30));
        let capacity = Capacity { context: 4096, chunk: 512 };
        assert_eq!(second.cache_blocks(capacity), one.cache_blocks(capacity));
        // The two layers are in different layer groups, so a block holds one layer in both plans.
        assert_eq!(second.cache_bytes(capacity), one.cache_bytes(capacity));
        assert_eq!(second.layers().len(), 1);
        assert_eq!(plan().with_chunk(Some(8192)).unwrap().with_stage(0..1, 2).chunks, [8192]);
        let plan = MemoryPlan { chunks: vec![8192, 2048, 512], ..plan() };
        assert_eq!(plan.with_stage(0..1, 2).chunks, [2048, 512]);
    }

    #[test]
    fn largest_context_is_the_last_one_that_fits() {
        let plan = plan();
        assert_eq!(plan.largest_context(&device(80 << 30)), Some(131_072));
        assert_eq!(plan.largest_context(&device(1 << 30)), None);
        // Above 512 tokens (the smallest chunk), the longest context that fits is a multiple of 64, the block size.
        for context in [1, 511, 5056, 131_072] {
            let bytes = plan.bytes(plan.smallest(context));
            assert_eq!(plan.largest_context(&device(bytes)), Some(context));
        }
    }

    #[test]
    fn wide_mlps_need_more_memory_per_token() {
        let kib = |hidden, intermediate, dtype| workspace_bytes_per_token(hidden, intermediate, dtype) >> 10;
        assert_eq!(kib(4096, 14_336, DType::BF16), 448, "Llama 3 8B");
        assert_eq!(kib(2880, 2880, DType::BF16), 448, "gpt-oss");
        assert_eq!(kib(8192, 28_672, DType::BF16), 624, "Llama 3 70B");
        assert_eq!(kib(4608, 36_864, DType::BF16), 594, "Gemma 2 27B");
        assert_eq!(kib(8192, 28_672, DType::F32), 768, "Llama 3 70B in f32");
    }

    #[test]
    fn only_full_layers_grow_with_the_context() {
        let plan = plan();
        let (per_1000, fixed) = plan.cache_growth(512);
        assert_eq!(per_1000, 1000 * 2 * 8 * 64 * 2);
        // The window and the chunk fill 10 blocks, or extend over 11 if they start in the middle of a block.
        assert_eq!(fixed, 11 * 64 * 2 * 8 * 64 * 2);
        let block_bytes = 64 * 2 * 8 * 64 * 2;
        let capacity = Capacity { context: 6400, chunk: 512 };
        assert_eq!(plan.cache_bytes(capacity), (1 + 100 + 11) * block_bytes);
        assert_eq!(plan.with_sequences(3).unwrap().cache_bytes(capacity), (1 + 100 + 11 + 2 * (100 + 4)) * block_bytes);
    }
}
