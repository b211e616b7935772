//! The properties of a loaded model, and the times that loading took.

use candle_core::DType;
use serde::Serialize;

use crate::device::DeviceInfo;
use crate::kernels::attention::AttentionBackend;
use crate::runner::{ExecutionMode, NoDecodeGraphReason, PromptSegments};

/// Properties of a loaded model, and the settings with which the engine runs it.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// The model family: a value of `model_type` in config.json.
    pub family: &'static str,
    /// The quantization in the model's files, such as `mxfp4`, or the type of a GGUF file, such as `Q4_K_M` or `F16`.
    /// Includes the format to which the weights were quantized during loading, if any.
    /// `None` for float weights in safetensors files that were not quantized during loading.
    pub quantization: Option<String>,
    /// The number of parameters, counted after unpacking quantized weights.
    pub parameters: u64,
    /// The number of logits per token.
    pub vocab_size: usize,
    /// The longest context that the model supports, in tokens.
    pub max_context: usize,
    /// The context length: the maximum number of tokens in a sequence, prompt and answer together.
    pub context: usize,
    /// The maximum number of tokens in one forward pass, over all sequences.
    pub chunk: usize,
    /// The dtype of activations and of the KV cache.
    pub dtype: DType,
    /// The attention kernel outside the decode graph, which has its own attention kernel.
    /// If layers use different kernels, the kernel of the first rank's last layer.
    pub attention: AttentionBackend,
    /// How decode steps usually run while one request is active: as a CUDA graph, or operation by operation.
    pub execution_mode: ExecutionMode,
    /// Why the engine has no decode graph. `None` if it has one.
    pub no_decode_graph: Option<NoDecodeGraphReason>,
    /// Whether all answers are deterministic: no answer depends on other requests.
    /// See [`LoadOptions::deterministic`](crate::engine::LoadOptions::deterministic).
    pub is_deterministic: bool,
    /// How to divide the prompts of requests with [`deterministic`](crate::GenerateOptions::deterministic).
    /// `None` if the chunk size or the attention kernel does not support deterministic requests.
    pub request_segments: Option<PromptSegments>,
    /// The device that had the least free memory before the weights were loaded.
    pub device: DeviceInfo,
    /// The number of ranks that run the model together.
    pub ranks: usize,
    /// The estimated size of the weights on the rank with the largest part, in bytes.
    pub weight_bytes: u64,
    /// The size of the largest KV cache of any rank, in bytes.
    pub cache_bytes: u64,
    /// The number of blocks in the KV cache of each rank.
    /// A block holds the keys and values of 64 tokens in one layer group.
    pub cache_blocks: usize,
    /// The number of sequences of `context` tokens that fit in the KV cache at once.
    pub cache_sequences: usize,
    /// The maximum number of sequences that run at once.
    pub max_sequences: usize,
    /// Messages about invalid sampling defaults in the model's files. The engine ignores these defaults.
    pub ignored_defaults: Vec<String>,
    pub load: LoadTimes,
}

/// Load times in seconds.
///
/// The tokenizer loads while the devices open and the weights load, so the sum of the times can exceed `total_s`.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct LoadTimes {
    /// Time to read config.json and the headers of the weight files.
    pub headers_s: f64,
    /// Time to load and check the tokenizer and the chat format.
    pub tokenizer_s: f64,
    /// Time to open all devices.
    pub device_s: f64,
    /// Time to load the weights onto all devices, including the warm-up if there is one.
    pub weights_s: f64,
    /// Time to allocate the KV cache of the first rank.
    pub cache_s: f64,
    /// Time to create the runner, including the decode graph if there is one.
    pub graph_s: f64,
    pub total_s: f64,
}
