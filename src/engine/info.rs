//! What was loaded, and how long it took.

use candle_core::DType;
use serde::Serialize;

use crate::device::DeviceInfo;
use crate::kernels::attention::AttentionBackend;
use crate::runner::EagerReason;

/// A loaded model.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// `model_type` in config.json.
    pub family: &'static str,
    /// The format of quantized weights, such as `mxfp4` or `Q4_K_M`; `None` for plain floats.
    pub quantization: Option<String>,
    /// The number of parameters. Packed ones count as the values that they stand for.
    pub parameters: u64,
    /// Rows of logits.
    pub vocab_size: usize,
    /// The longest context that the model was made for.
    pub max_context: usize,
    /// The most positions of a sequence, as loaded.
    pub context: usize,
    /// The dtype of activations.
    pub dtype: DType,
    /// The attention kernel of prefill and of eager decode steps. The decode graph has its own.
    pub attention: AttentionBackend,
    /// What runs decode steps: `graph`, a CUDA graph of fused kernels, or `eager`, the decoder operation by operation.
    pub executor: &'static str,
    /// Why decode steps do not run as a graph; `None` if they do.
    pub eager_reason: Option<EagerReason>,
    pub device: DeviceInfo,
    /// Bytes of the weights on the device.
    pub weight_bytes: u64,
    /// Bytes of the KV cache on the device.
    pub cache_bytes: u64,
    pub load: LoadTimes,
}

/// Seconds that the parts of loading took. The tokenizer is parsed while the device is opened and the weights are read, so
/// the parts add up to more than the total.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct LoadTimes {
    /// Reading config.json and the headers of the weights.
    pub headers_s: f64,
    /// Loading tokenizer and chat format.
    pub tokenizer_s: f64,
    /// Opening the device.
    pub device_s: f64,
    /// Loading all weights onto the device.
    pub weights_s: f64,
    /// Allocating the KV cache.
    pub cache_s: f64,
    /// Planning and capturing the decode graph.
    pub graph_s: f64,
    pub total_s: f64,
}
