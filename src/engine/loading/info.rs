//! Properties of a loaded model and its load times.

use candle_core::DType;
use serde::Serialize;

use crate::device::DeviceInfo;
use crate::kernels::attention::AttentionBackend;
use crate::runner::{Executor, NoDecodeGraph, PromptParts};

/// Properties of a loaded model.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// The model family, named as in the `model_type` field of config.json.
    pub family: &'static str,
    /// The quantization format, such as `mxfp4` or `Q4_K_M`. `None` for unquantized weights.
    pub quantization: Option<String>,
    /// The number of parameters, counted after unpacking quantized weights.
    pub parameters: u64,
    /// The vocabulary size: the number of logits per token.
    pub vocab_size: usize,
    /// The longest context that the model supports, in tokens.
    pub max_context: usize,
    /// The context length for which the KV cache is allocated, in tokens.
    pub context: usize,
    /// The maximum number of tokens in one step.
    pub chunk: usize,
    /// The dtype of activations.
    pub dtype: DType,
    /// The attention kernel for all steps outside the decode graph. The graph uses its own kernel.
    pub attention: AttentionBackend,
    /// How the decode steps of a request run while it is the only one: `graph` (a CUDA graph) or `eager` (one operation
    /// at a time).
    pub executor: Executor,
    /// Why there is no decode graph, the fastest executor. `None` if there is one.
    pub no_decode_graph: Option<NoDecodeGraph>,
    /// Whether answers are independent of other requests.
    pub is_deterministic: bool,
    /// How prompts are divided for requests with [`deterministic`](crate::GenerateOptions::deterministic).
    /// `None` if the chunk size or the attention kernel does not support deterministic requests.
    pub request_parts: Option<PromptParts>,
    /// The device with the least free memory.
    pub device: DeviceInfo,
    /// The number of devices that run the model together.
    pub ranks: usize,
    /// The size of the weights on the device with the largest part, in bytes.
    pub weight_bytes: u64,
    /// The size of the KV cache on one device, in bytes.
    pub cache_bytes: u64,
    /// The number of blocks in the KV cache. A block holds 64 tokens of one group of layers.
    pub cache_blocks: usize,
    /// The number of full-context sequences that fit in the KV cache at once.
    pub cache_sequences: usize,
    /// The maximum number of sequences that run at once.
    pub max_sequences: usize,
    pub load: LoadTimes,
}

/// Load times in seconds.
///
/// The tokenizer and the weights load in parallel, so the individual times can add up to more than the total.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct LoadTimes {
    /// Time to read config.json and the weight headers.
    pub headers_s: f64,
    /// Time to load the tokenizer and chat format.
    pub tokenizer_s: f64,
    /// Time to open the device.
    pub device_s: f64,
    /// Time to load the weights onto the device.
    pub weights_s: f64,
    /// Time to allocate the KV cache.
    pub cache_s: f64,
    /// Time to plan and capture the decode graph.
    pub graph_s: f64,
    pub total_s: f64,
}
