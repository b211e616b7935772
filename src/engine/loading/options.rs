//! Options for loading a model.

use anyhow::Result;
use candle_core::DType;

use super::memory_limit::MemoryLimit;
use crate::device::{DeviceInfo, Devices, Split};
use crate::kernels::attention::AttentionBackend;
use crate::language::Language;
use crate::weights::quantized::QuantizationTarget;

/// Options for loading a model. The methods of [`EngineBuilder`](crate::engine::EngineBuilder) set them.
pub struct LoadOptions<'o> {
    /// The devices that run the model together. The default is the first GPU.
    pub devices: Devices,
    /// How several devices divide the model.
    /// By default, each device holds a part of every large matrix except the embeddings, which it holds whole.
    pub split: Split,
    /// The dtype of activations and of the KV cache. `None` selects bf16 on a GPU and f32 on a CPU.
    pub dtype: Option<DType>,
    /// The context length in tokens. `None` selects 32,768 or the model's default, whichever is less.
    /// If the model does not fit in memory even with the smallest chunk, the default is halved until the model fits,
    /// but not below 2,048.
    pub context: Option<usize>,
    /// The prefill chunk size in tokens.
    /// `None` selects up to 8,192 on a GPU and up to 256 on a CPU, depending on the free memory and the context.
    pub chunk: Option<usize>,
    /// The minimum number of full-context sequences that the KV cache can hold. The default is 1.
    /// More sequences can run at once if they are shorter than the context.
    /// A sequence waits to start while the KV cache has too few free blocks.
    pub sequences: usize,
    /// The maximum number of sequences that run at once. `None` selects the upper limit: 256 or the chunk size,
    /// whichever is less. A step must have room for one token of every running sequence.
    pub max_sequences: Option<usize>,
    /// The memory to use on each device. The KV cache gets what remains after weights and workspace.
    /// With `None`, the KV cache is only as large as `sequences` requires.
    pub memory: Option<MemoryLimit>,
    /// The format to which floating-point weight matrices are quantized during loading.
    /// With `None`, these matrices are not quantized.
    pub quantize: Option<QuantizationTarget>,
    /// Whether to run all steps operation by operation, even if a CUDA graph could run them.
    /// The default is `false`.
    pub eager: bool,
    /// Whether the tokens and logits of answers must not depend on other requests, prefix caching or preemption.
    /// If true, steps are slower, and prompts reuse fewer cached tokens. The default is `false`.
    pub deterministic: bool,
    /// Whether steps can be queued before the tokens of the previous step are known.
    /// `None` means `true` on a GPU and `false` on a CPU.
    /// On a GPU, no steps are queued if `eager` is set, if ranks share a GPU, or if the host copies data between ranks.
    /// Change the default only in tests: without queued steps, a GPU idles while it waits for the host.
    /// On a CPU, queuing gains nothing, because a step runs as soon as it is queued.
    pub queue_steps: Option<bool>,
    /// Whether to load the kernels of dense matrix products before the first request. The default is `false`.
    /// If true, loading takes longer: for gpt-oss-20b on an H200, 0.3 s (see docs/history/benchmarks.md).
    /// If false, the first steps with a new number of tokens can wait until cuBLASLt has loaded a kernel.
    pub warm_up: bool,
    /// The attention kernel. Loading fails if the device or the model does not support the kernel.
    /// The decode graph ignores this option: it has a kernel of its own.
    pub attention: AttentionBackend,
    /// A progress callback. Its arguments are the size of the tensors that the first device has loaded so far,
    /// and the size of all tensors for the first device, in bytes.
    /// A tensor counts with its whole size in the model's files, even if the device loads only a part of it.
    /// The second argument also counts tensors that are never loaded, such as a vision tower.
    pub progress: &'o dyn Fn(u64, u64),
    /// A callback that runs when all devices are open. Its argument is the device with the least free memory.
    pub on_device: &'o dyn Fn(&DeviceInfo),
    /// A function that checks the tokenizer and chat format while the weights load.
    /// If the function fails, loading fails.
    pub check_language: &'o (dyn Fn(&Language) -> Result<()> + Sync),
}

impl Default for LoadOptions<'_> {
    fn default() -> Self {
        Self {
            devices: Devices::default(),
            split: Split::default(),
            dtype: None,
            context: None,
            chunk: None,
            sequences: 1,
            max_sequences: None,
            memory: None,
            quantize: None,
            eager: false,
            deterministic: false,
            queue_steps: None,
            warm_up: false,
            attention: AttentionBackend::Auto,
            progress: &|_, _| (),
            on_device: &|_| (),
            check_language: &|_| Ok(()),
        }
    }
}
