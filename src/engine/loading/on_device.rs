//! Plans the memory of a model, loads its weights onto the devices, and creates the runner.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};

use super::info::LoadTimes;
use super::load_ranks::{LoadedRanks, RankLoader};
use super::memory::{Capacity, DeviceKind, MemoryPlan};
use super::options::LoadOptions;
use super::rank_memory::RankMemory;
use crate::device::{self, DeviceChoice, DeviceInfo, Devices};
use crate::error::Error;
use crate::kernels::attention::AttentionBackend;
use crate::kernels::exchange::{ExchangePath, MIN_ROUNDED_ELEMENTS};
use crate::models::ModelConfig;
use crate::nn::kv_cache::BLOCK_TOKENS;
use crate::runner::{PromptSegments, Runner, RunnerLimits, RunnerOptions};
use crate::weights::{Checkpoint, Inventory, LoadProgress};

/// The runner of a loaded model, and values for its [`ModelInfo`].
pub(super) struct LoadedRunner {
    pub runner: Runner,
    /// The attention kernel of the first rank's last layer.
    pub attention: AttentionBackend,
    pub device_info: DeviceInfo,
    pub weight_bytes: u64,
    pub cache_bytes: u64,
    pub cache_sequences: usize,
    /// The times of the steps that have run so far. The other times are 0.
    pub times: LoadTimes,
}

/// Plans the memory of a model, loads the weights and creates the runner.
/// Fails early if `is_refused` is set by the time the devices are open: the tokenizer or the chat format failed to
/// load, or `check_language` rejected them.
pub(super) fn load_onto_device(
    config: &ModelConfig,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    is_refused: &AtomicBool,
) -> Result<LoadedRunner> {
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
    let target =
        LoadTarget { device: &device, device_info: &device_info, dtype, memory: &memory, capacity, file_bytes };
    let loaded = allocate(config, checkpoint, options, &target).map_err(|error| {
        if !device::is_out_of_memory(&error) {
            return error;
        }
        // The plan fit in the free memory, but another process may have allocated memory since then.
        // Report how much memory is free now, and keep the device's error as the cause.
        let device_info = device::info_after_trim(&device).unwrap_or(device_info.clone());
        error.context(memory.first().out_of_memory(capacity.context, &device_info))
    })?;
    Ok(LoadedRunner { times: LoadTimes { device_s, ..loaded.times }, ..loaded })
}

/// Where and how to load a model. `device` is the first device.
struct LoadTarget<'t> {
    device: &'t Device,
    /// The device that had the least free memory before loading.
    device_info: &'t DeviceInfo,
    dtype: DType,
    memory: &'t RankMemory,
    capacity: Capacity,
    /// The size of the first device's tensors in the files, in bytes. Also counts tensors that are never loaded.
    file_bytes: u64,
}

/// Builds the decoder and the KV cache of each rank, and a runner for them.
fn allocate(
    config: &ModelConfig,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    target: &LoadTarget,
) -> Result<LoadedRunner> {
    let &LoadTarget { device, device_info, dtype, memory, capacity, file_bytes } = target;
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
    let prompt_segments = options.deterministic.then(|| deterministic_segments(chunk, attention)).transpose()?;
    let weights_s = started.elapsed().as_secs_f64() - cache_s;

    let started = Instant::now();
    let runner_options = RunnerOptions { eager: options.eager, prompt_segments, queue_steps: options.queue_steps };
    let limits = RunnerLimits { context, chunk };
    let runner = Runner::with_ranks(world, model, others, limits, device.clone(), runner_options)?;
    let graph_s = started.elapsed().as_secs_f64();
    Ok(LoadedRunner {
        runner,
        attention,
        device_info: device_info.clone(),
        weight_bytes: memory.weight_bytes(),
        cache_bytes: memory.cache_bytes(capacity),
        cache_sequences: memory.cache_sequences(capacity),
        times: LoadTimes { weights_s, cache_s, graph_s, ..LoadTimes::default() },
    })
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

/// Returns how prompts are divided for deterministic answers.
/// Fails if the chunk size or the attention kernel does not support deterministic answers.
pub(super) fn deterministic_segments(chunk: usize, attention: AttentionBackend) -> Result<PromptSegments> {
    if attention == AttentionBackend::CandleFlashAttn {
        bail!(Error::Usage(
            "cannot use --deterministic: the attention kernel 'flash' does not support it; use --attention portable"
                .into()
        ));
    }
    PromptSegments::new(chunk).with_context(|| {
        Error::Usage(format!(
            "cannot use --deterministic with a chunk size of {chunk}: raise --chunk and --context to {BLOCK_TOKENS} or more"
        ))
    })
}
