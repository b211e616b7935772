//! [`MemoryPlan`] and its constructors: the memory that a model needs, given its device and the user's options.

use std::sync::Arc;

use anyhow::Result;
use candle_core::DType;

use super::token_workspace::{MIN_WORKSPACE_BYTES_PER_TOKEN, workspace_bytes_per_token};
use crate::device::MAX_RANKS;
use crate::error::Error;
use crate::models::Architecture;
use crate::nn::kv_cache::{CacheLayout, LayerSpec};
use crate::weights::Inventory;
use crate::weights::inventory::ModelBytes;
use crate::weights::inventory::RankShare;

/// The maximum chunk size in tokens.
///
/// Kernels count the elements of an activation (tokens · columns) as an i32.
/// With chunks of 16,384 tokens, an activation can have up to 131,071 columns.
/// The widest known activation has 106,496 columns: gate and up of Llama 3.1 405B, 2 · 53,248.
const MAX_CHUNK: usize = 16_384;

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
    pub(super) ranks: usize,
    pub(super) weight_bytes: u64,
    /// The part of the model that each rank holds if the ranks divide every layer. Entry i is for i + 1 ranks.
    pub(super) rank_shares: Arc<[Vec<RankShare>]>,
    /// The sizes of the undivided model's weights: each layer, the output head, and all other weights.
    pub(super) model_bytes: ModelBytes,
    /// Extra bytes needed while loading onto a GPU, for example to repack or stack the experts of one layer.
    /// 0 on a CPU. The loader frees these bytes before it allocates the KV cache.
    pub(super) loading_bytes: u64,
    /// An upper bound on the bytes that a forward pass on a GPU needs for dequantized experts. 0 on a CPU.
    pub(super) unpacked_bytes: u64,
    /// An upper bound on the activation memory per token of a chunk, in bytes.
    pub(super) workspace_bytes_per_token: u64,
    pub(super) layers: Vec<LayerSpec>,
    pub(super) layout: CacheLayout,
    /// The minimum number of full-context sequences that the KV cache can hold.
    pub(super) sequences: usize,
    /// The maximum memory that the rank may use, in bytes. The KV cache gets what remains after weights and workspace.
    /// With `None`, the KV cache is only as large as `sequences` requires.
    pub(super) limit_bytes: Option<u64>,
    /// The size of the logits of one token, in bytes.
    pub(super) logits_row_bytes: u64,
    /// The chunk sizes to choose from, best first.
    pub(super) chunks: Vec<usize>,
    pub(super) dtype: DType,
    pub(super) max_context: usize,
    /// The architecture's limit on the default context, in tokens. With LongRoPE, the limit can be below `max_context`.
    pub(super) default_context: usize,
}

/// The context length and chunk size for which memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// The context length in tokens.
    pub context: usize,
    /// The maximum number of tokens in one forward pass, over all sequences.
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

    /// Plans the memory of a model of any family, even an unsupported one. `layers` describes its KV cache.
    /// The plan can be too small: it assumes narrow MLPs, and omits the logits of steps with several sequences.
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
            rank_shares: {
                let kv_heads: Vec<_> = layers.iter().map(|layer| layer.kv_heads).collect();
                (1..=MAX_RANKS).map(|ranks| inventory.rank_shares(&kv_heads, ranks, dtype)).collect()
            },
            model_bytes: inventory.model_bytes(layers.len(), dtype),
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

    /// Sets the maximum memory that the rank may use. The KV cache gets what remains after weights and workspace.
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

    /// Returns the KV heads, head dimension and attention window of each of the rank's layers.
    pub fn layers(&self) -> &[LayerSpec] {
        &self.layers
    }

    /// Returns the estimated size of the rank's weights on the device, in bytes.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Returns the extra bytes needed while loading onto a GPU. The loader frees them before it allocates the KV cache.
    pub fn loading_bytes(&self) -> u64 {
        self.loading_bytes
    }

    /// Returns the layer groups of the KV cache. The layers of a group share block tables.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }
}
