//! Loads a model from a snapshot directory or a GGUF file. Checks that the model fits before allocating memory.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};

use super::info::{LoadTimes, ModelInfo};
use super::load_ranks::{LoadedRanks, RankLoader};
use super::memory::{Capacity, DeviceKind, MemoryPlan};
use super::memory_limit::MemoryLimit;
use super::rank_memory::RankMemory;
use crate::device::{self, DeviceChoice, DeviceInfo, Devices, Split};
use crate::engine::sampling::SamplingParams;
use crate::error::Error;
use crate::kernels::attention::AttentionBackend;
use crate::kernels::exchange::{ExchangePath, MIN_ROUNDED_ELEMENTS};
use crate::language::Language;
use crate::models::{self, ModelConfig};
use crate::nn::kv_cache::BLOCK_TOKENS;
use crate::runner::{MAX_SEQUENCES, PromptParts, Runner, RunnerLimits, RunnerOptions};
use crate::sandbox;
use crate::weights::quantized::QuantizationTarget;
use crate::weights::{Checkpoint, Inventory, LoadProgress};

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
    /// If true, loading takes longer: for gpt-oss-20b on an H200, 0.3 s (see docs/benchmark-history.md).
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

/// A loaded model: the parts from which `Engine::load` builds an engine.
pub struct EngineParts {
    pub language: Language,
    pub runner: Runner,
    pub defaults: SamplingParams,
    pub info: ModelInfo,
    /// Identifies the model files, the build and the settings that determine keys and values.
    /// A saved prefix is valid only with the same fingerprint.
    pub fingerprint: String,
}

/// Loads the model at the path `dir`: a snapshot directory or a GGUF file.
///
/// Fails if the architecture is not supported, or if the memory plan exceeds the free memory. In both cases, fails
/// before it allocates memory for the model.
pub fn load(dir: &Path, options: &LoadOptions) -> Result<EngineParts> {
    let started = Instant::now();
    let (config, checkpoint) = models::open(dir)?;
    let headers_s = started.elapsed().as_secs_f64();

    let (language, model) = load_language_and_model(dir, &config, &checkpoint, options)?;
    let times = LoadTimes { headers_s, total_s: started.elapsed().as_secs_f64(), ..model.times };

    let (defaults, ignored) = SamplingParams::from_generation_config(&language.generation_config);
    let source = if checkpoint.gguf().is_some() { "the GGUF metadata" } else { "generation_config.json" };
    let ignored_defaults = ignored.into_iter().map(|reason| format!("in {source}, {reason}")).collect();
    let info = model_info(&config, &checkpoint, options, &model, ignored_defaults, times);
    log(&info);
    tracing::debug!(stop_ids = ?language.stop_ids(), ?defaults, "generation");
    let runner = model.runner;
    // With LongRoPE, a context longer than `default_context` selects other RoPE factors, so keys and values differ.
    let has_long_context = runner.limits().context > config.architecture.default_context();
    let fingerprint = fingerprint(dir, &checkpoint, has_long_context, options, &info, runner.prompt_parts());
    Ok(EngineParts { language, runner, defaults, info, fingerprint })
}

/// Loads the tokenizer and the chat format on another thread, and at the same time the model on this thread.
fn load_language_and_model(
    dir: &Path,
    config: &ModelConfig,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
) -> Result<(Language, OnDevice)> {
    let is_refused = AtomicBool::new(false);
    let check = options.check_language;
    let (language, model) = thread::scope(|scope| {
        let language = scope.spawn(|| {
            let started = Instant::now();
            let language = sandbox::load_language_of(dir, checkpoint);
            let language = language.and_then(|language| check(&language).map(|()| language));
            is_refused.store(language.is_err(), Ordering::Relaxed);
            language.map(|language| (language, started.elapsed().as_secs_f64()))
        });
        let model = load_onto_device(config, checkpoint, options, &is_refused);
        (language.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), model)
    });
    // If both have failed, report the error of `language`. The error of `model` may only say that loading was canceled.
    let (language, tokenizer_s) = language?;
    let model = model?;
    Ok((language, OnDevice { times: LoadTimes { tokenizer_s, ..model.times }, ..model }))
}

/// Describes a loaded model. `ignored_defaults` explains why some of the model's sampling parameters were ignored.
fn model_info(
    config: &ModelConfig,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    model: &OnDevice,
    ignored_defaults: Vec<String>,
    load: LoadTimes,
) -> ModelInfo {
    let runner = &model.runner;
    ModelInfo {
        family: config.family.model_type,
        quantization: match (config.quantization.clone(), options.quantize) {
            (Some(stored), Some(quantize)) => Some(format!("{stored} and {quantize}")),
            (stored, quantize) => stored.or(quantize.map(|quantize| quantize.to_string())),
        },
        parameters: checkpoint.parameters(),
        vocab_size: config.architecture.vocab_size(),
        max_context: config.architecture.max_position_embeddings(),
        context: runner.limits().context,
        chunk: runner.limits().chunk,
        dtype: runner.dtype(),
        attention: model.attention,
        execution_mode: runner.execution_mode(),
        no_decode_graph: runner.no_decode_graph().cloned(),
        is_deterministic: runner.prompt_parts().is_some(),
        request_parts: deterministic_parts(runner.limits().chunk, model.attention).ok(),
        device: model.device_info.clone(),
        ranks: options.devices.count(),
        weight_bytes: model.weight_bytes,
        cache_bytes: model.cache_bytes,
        cache_blocks: runner.cache().blocks(),
        cache_sequences: model.cache_sequences,
        max_sequences: options
            .max_sequences
            .unwrap_or(MAX_SEQUENCES)
            .clamp(1, MAX_SEQUENCES.min(runner.limits().chunk)),
        ignored_defaults,
        load,
    }
}

/// Returns a string that identifies the model files, the build and the settings that determine keys and values.
///
/// The weight files are identified by path, size and modification time, and config.json by size and modification time.
/// Other files, such as tokenizer.json, do not affect the string.
/// If the engine is deterministic, the string includes the prompt parts, the number of ranks and the split.
fn fingerprint(
    dir: &Path,
    checkpoint: &Checkpoint,
    has_long_context: bool,
    options: &LoadOptions,
    info: &ModelInfo,
    prompt_parts: Option<PromptParts>,
) -> String {
    let state = |path: &Path| std::fs::metadata(path).ok().map(|metadata| (metadata.len(), metadata.modified().ok()));
    let requests = checkpoint.read_requests(info.dtype);
    let sources = requests.iter().flat_map(|request| &request.ranges).map(|range| range.source.path.as_path());
    let paths = sources.chain(checkpoint.gguf().into_iter().flat_map(|file| file.files()));
    let files: BTreeMap<_, _> = paths.map(|path| (path, state(path))).collect();
    let config_json = state(&dir.join("config.json"));
    let quantize = options.quantize.map(|quantize| quantize.to_string());
    let build = (env!("CARGO_PKG_VERSION"), env!("INFERNO_COMMIT"));
    let (dtype, attention) = (info.dtype, info.attention);
    // The number of ranks and the split change how sums are rounded, which matters only for deterministic answers.
    let ranks = prompt_parts.map(|_| (options.devices.count(), options.split));
    format!(
        "{files:?} {config_json:?} {has_long_context} {dtype:?} {quantize:?} {attention} {prompt_parts:?} {ranks:?} {build:?}"
    )
}

/// Returns how prompts are divided for deterministic answers.
/// Fails if the chunk size or the attention kernel does not support deterministic answers.
fn deterministic_parts(chunk: usize, attention: AttentionBackend) -> Result<PromptParts> {
    if attention == AttentionBackend::CandleFlashAttn {
        bail!(Error::Usage(
            "cannot use --deterministic: the attention kernel 'flash' does not support it; use --attention portable"
                .into()
        ));
    }
    PromptParts::new(chunk).with_context(|| {
        Error::Usage(format!(
            "cannot use --deterministic with a chunk size of {chunk}: raise --chunk and --context to {BLOCK_TOKENS} or more"
        ))
    })
}

fn log(info: &ModelInfo) {
    tracing::info!(
        family = info.family,
        quantization = info.quantization.as_deref().unwrap_or("none"),
        device = info.device.name,
        dtype = ?info.dtype,
        weight_bytes = info.weight_bytes,
        cache_bytes = info.cache_bytes,
        seconds = info.load.total_s,
        "loaded"
    );
    let no_decode_graph = info.no_decode_graph.as_ref().map(tracing::field::display);
    tracing::info!(attention = %info.attention, no_decode_graph, "execution mode: {}", info.execution_mode);
}

/// The runner of a loaded model, and values for its [`ModelInfo`].
struct OnDevice {
    runner: Runner,
    attention: AttentionBackend,
    device_info: DeviceInfo,
    weight_bytes: u64,
    cache_bytes: u64,
    cache_sequences: usize,
    /// The times of the steps that have run so far. The other times are 0.
    times: LoadTimes,
}

/// Plans the memory of a model, loads the weights and creates the runner.
/// Fails early if `is_refused` is set by the time the devices are open: the tokenizer or the chat format failed to
/// load, or `check_language` rejected them.
fn load_onto_device(
    config: &ModelConfig,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    is_refused: &AtomicBool,
) -> Result<OnDevice> {
    let architecture = &config.architecture;
    let started = Instant::now();
    let device = device::open(options.devices.first())?;
    let device_infos = device_infos(&device, &options.devices)?;
    let device_info = device_infos.iter().min_by_key(|info| info.free_bytes).unwrap_or(&device_infos[0]).clone();
    let device_s = started.elapsed().as_secs_f64();
    if is_refused.load(Ordering::Relaxed) {
        bail!("loading was canceled");
    }
    (options.on_device)(&device_info);
    let dtype = options.dtype.unwrap_or_else(|| device::default_dtype(&device));

    let device_kind = if device.is_cuda() { DeviceKind::Gpu } else { DeviceKind::Cpu };
    let inventory = Inventory::from_checkpoint(checkpoint, config.family.tensors, options.quantize);
    let plan = MemoryPlan::new(&inventory, architecture.as_ref(), dtype, device_kind).with_chunk(options.chunk)?;
    let plan = plan.with_sequences(options.sequences)?;
    let memory = RankMemory::new(&plan, &options.devices, &device_infos, options.split, options.memory)?;
    let capacity = memory.choose(options.context)?;

    let file_bytes = match &memory.stages {
        Some(stages) => inventory.stage_bytes(&stages[0]),
        None => inventory.bytes(),
    };
    let target = LoadTarget { device: &device, dtype, memory: &memory, capacity, file_bytes };
    let allocated = allocate(config, checkpoint, options, &target);
    let (runner, attention, times) = allocated.map_err(|error| {
        if !device::is_out_of_memory(&error) {
            return error;
        }
        // The plan fit in the free memory, but another process may have allocated memory since then.
        // Report how much memory is free now, and keep the device's error as the cause.
        let device_info = device::info_after_trim(&device).unwrap_or(device_info.clone());
        error.context(memory.first().out_of_memory(capacity.context, &device_info))
    })?;
    let (weight_bytes, cache_bytes) = (memory.weight_bytes(), memory.cache_bytes(capacity));
    let cache_sequences = memory.cache_sequences(capacity);
    let times = LoadTimes { device_s, ..times };
    Ok(OnDevice { runner, attention, device_info, weight_bytes, cache_bytes, cache_sequences, times })
}

/// Where and how to load a model. `device` is the first device.
struct LoadTarget<'t> {
    device: &'t Device,
    dtype: DType,
    memory: &'t RankMemory,
    capacity: Capacity,
    /// The size of the first device's tensors in the files, in bytes. Also counts tensors that are never loaded.
    file_bytes: u64,
}

/// Builds the decoder and the KV cache of each rank, and a runner for them.
/// Returns the runner, the attention kernel of the first rank's last layer, and the times of the steps that ran here.
fn allocate(
    config: &ModelConfig,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    target: &LoadTarget,
) -> Result<(Runner, AttentionBackend, LoadTimes)> {
    let &LoadTarget { device, dtype, memory, capacity, file_bytes } = target;
    let Capacity { context, chunk } = capacity;
    let report = |bytes| (options.progress)(bytes, file_bytes);
    let started = Instant::now();
    let progress = LoadProgress::new(&report);
    let loader = RankLoader {
        config,
        checkpoint,
        dtype,
        quantize: options.quantize,
        attention: options.attention,
        context,
        cache_blocks: memory.cache_blocks(capacity),
        // If answers must be deterministic, do not round partial sums to bf16.
        // Whether a sum is rounded depends on the number of tokens in the step, and therefore on other requests.
        min_rounded: (dtype == DType::BF16 && !options.deterministic).then_some(MIN_ROUNDED_ELEMENTS),
        stages: memory.stages.as_deref(),
        chunk,
        warm_up: options.warm_up,
        exchange_paths: ExchangePath::from_environment().map_err(Error::usage)?,
    };
    let LoadedRanks { world, model, others, attention, cache_s } = loader.load(device, &options.devices, &progress)?;
    let prompt_parts = options.deterministic.then(|| deterministic_parts(chunk, attention)).transpose()?;
    let weights_s = started.elapsed().as_secs_f64() - cache_s;

    let started = Instant::now();
    let runner_options = RunnerOptions { eager: options.eager, prompt_parts, queue_steps: options.queue_steps };
    let limits = RunnerLimits { context, chunk };
    let runner = Runner::with_ranks(world, model, others, limits, device.clone(), runner_options)?;
    let graph_s = started.elapsed().as_secs_f64();
    Ok((runner, attention, LoadTimes { weights_s, cache_s, graph_s, ..LoadTimes::default() }))
}

/// Opens the GPUs of all ranks except the first. Returns the properties of all devices, in rank order.
fn device_infos(first: &Device, devices: &Devices) -> Result<Vec<DeviceInfo>> {
    let first_info = device::info(first)?;
    let info = |choice| match choice {
        DeviceChoice::Cpu => Ok(first_info.clone()),
        choice => device::info(&device::open(choice)?),
    };
    let others = devices.iter().skip(1).map(info).collect::<Result<Vec<_>>>()?;
    Ok([vec![first_info.clone()], others].concat())
}
