//! Loads a model onto one or more devices, one part per rank.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use candle_core::{DType, Device};

use crate::device::{self, DeviceChoice, Devices};
use crate::engine::fault::PlannedFault;
use crate::error::Error;
use crate::kernels::attention::AttentionBackend;
use crate::kernels::exchange::{self, ExchangePath};
use crate::models::ModelConfig;
use crate::nn::kv_cache::KvCache;
use crate::runner::{MAX_SEQUENCES, RANK_PANICKED, RankModel, failure_message};
use crate::text::{error_message, plain_cuda_errors};
use crate::weights::quantized::QuantizationTarget;
use crate::weights::{Checkpoint, LoadProgress, WeightsBuilder};
use crate::world::World;

/// Loads the decoder and allocates the KV cache of every rank.
pub(super) struct RankLoader<'l> {
    pub config: &'l ModelConfig,
    pub checkpoint: &'l Checkpoint,
    pub dtype: DType,
    pub quantize: Option<QuantizationTarget>,
    pub attention: AttentionBackend,
    /// The maximum number of positions in a sequence.
    pub context: usize,
    /// The number of blocks in the KV cache of each rank.
    pub cache_blocks: usize,
    /// Ranks may round partial results with at least this many elements to bf16. `None`: ranks do not round.
    pub min_rounded: Option<usize>,
    /// The layers of each rank. `None` if every rank holds a part of each layer.
    pub stages: Option<&'l [Range<usize>]>,
    /// The maximum number of tokens in one forward pass.
    pub chunk: usize,
    /// Whether to load the kernels of dense matrix products before the first request.
    /// See [`LoadOptions::warm_up`](super::options::LoadOptions::warm_up).
    pub warm_up: bool,
    /// The paths on which GPUs may exchange data, in the order in which they are tried.
    pub exchange_paths: &'l [ExchangePath],
}

/// The worlds, decoders and KV caches of all ranks, after loading.
pub(super) struct LoadedRanks {
    /// The world of the first rank.
    pub world: World,
    /// The decoder and the KV cache of the first rank.
    pub model: RankModel,
    /// The worlds, decoders and KV caches of all other ranks.
    pub others: Vec<(World, RankModel)>,
    pub attention: AttentionBackend,
    /// The time to allocate the KV cache of the first rank, in seconds.
    pub cache_s: f64,
}

struct LoadedRank {
    model: RankModel,
    attention: AttentionBackend,
    cache_s: f64,
}

impl RankLoader<'_> {
    /// Loads the parts of all ranks in parallel. `progress` counts only the tensors that the first rank loads.
    ///
    /// The calling thread loads the part of the first rank onto `first`, which is an open device.
    /// Every other rank has its own thread, which opens the rank's device.
    pub fn load(&self, first: &Device, devices: &Devices, progress: &LoadProgress) -> Result<LoadedRanks> {
        let worlds = World::threads(devices.count()).into_iter();
        let worlds = worlds.map(|world| match self.min_rounded {
            Some(min_elements) => world.with_rounded_partials(min_elements),
            None => world,
        });
        let mut worlds = worlds.map(|world| match self.stages {
            Some(stages) => world.with_stages(stages),
            None => world,
        });
        let world = worlds.next().unwrap_or_default();
        let others: Vec<_> = worlds.zip(devices.iter().skip(1)).collect();
        let load_other = |(world, choice): (World, DeviceChoice)| -> Result<(World, RankModel)> {
            let (world, LoadedRank { model, .. }) = self.load_other(world, choice)?;
            Ok((world, model))
        };
        let ((world, first), others) = load_all(
            world,
            others,
            |(world, _)| world,
            |world| self.load_rank(self.connect(world, first)?, first, progress),
            load_other,
        )?;
        let LoadedRank { model, attention, cache_s } = first;
        Ok(LoadedRanks { world, model, others, attention, cache_s })
    }

    fn load_other(&self, world: World, choice: DeviceChoice) -> Result<(World, LoadedRank)> {
        let device = device::open(choice)?;
        self.load_rank(self.connect(world, &device)?, &device, &LoadProgress::silent())
    }

    /// Connects the GPU of this rank to the GPUs of all other ranks, so that kernels exchange tensors instead of copies
    /// that the host starts. Returns `world` unchanged on a CPU, with a single rank, or if no exchange path works.
    fn connect(&self, world: World, device: &Device) -> Result<World> {
        Ok(exchange::connect(world, device, self.exchange_paths)?)
    }

    /// Loads the decoder of one rank, selects its attention kernel, and allocates its KV cache.
    /// If `warm_up` is set, also loads the kernels of dense matrix products.
    fn load_rank(&self, world: World, device: &Device, progress: &LoadProgress) -> Result<(World, LoadedRank)> {
        if let Some(planned) = PlannedFault::from_env() {
            planned.inject_while_loading(world.rank())?;
        }
        let &Self { config, checkpoint, dtype, quantize, attention, context, cache_blocks, .. } = self;
        let weights = WeightsBuilder::new(checkpoint, device, dtype, progress);
        let weights = weights.world(world.clone()).quantize(quantize).build()?;
        let mut decoder = config.build(&weights, context)?;
        let unsupported = |reason| Error::Usage(format!("cannot use --attention {attention}: {reason}"));
        let attention = decoder.set_attention_backend(attention).map_err(unsupported)?;
        drop(weights);
        device.synchronize()?;
        let started = Instant::now();
        let cache = KvCache::new(decoder.cache_layout(), cache_blocks, dtype, device)?;
        device.synchronize()?;
        let cache_s = started.elapsed().as_secs_f64();
        if self.warm_up {
            decoder.load_product_kernels(self.chunk, MAX_SEQUENCES.min(self.chunk))?;
        }
        Ok((world, LoadedRank { model: RankModel { decoder, cache }, attention, cache_s }))
    }
}

/// Calls `load_first` on the calling thread, and `load_other` for each item of `others` on a new thread.
///
/// If a rank fails or panics, ends the [`World`], so that no other rank waits for the failed rank.
/// Returns the error of the rank that failed first.
fn load_all<O: Send, F, T: Send>(
    first: World,
    others: Vec<O>,
    world_of: impl Fn(&O) -> &World,
    load_first: impl FnOnce(World) -> Result<F>,
    load_other: impl Fn(O) -> Result<T> + Sync,
) -> Result<(F, Vec<T>)> {
    let first_failed = Mutex::new(None);
    thread::scope(|scope| {
        let (load_other, first_failed) = (&load_other, &first_failed);
        let load = |other: O| {
            let world = world_of(&other).clone();
            scope.spawn(move || guarded(&world, first_failed, || load_other(other)))
        };
        let threads: Vec<_> = others.into_iter().map(load).collect();
        let loaded = guarded(&first.clone(), first_failed, || load_first(first));
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join().ok().flatten()).collect();
        if let Some(error) = first_failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(error);
        }
        let all_loaded = || Some((loaded?, results.into_iter().collect::<Option<_>>()?));
        all_loaded().context("internal error: a rank did not load its part")
    })
}

/// Calls `load` for the rank of `world`. Returns `None` if `load` fails or panics.
///
/// In both cases, ends the world, and stores the error in `first_failed` if no other rank has failed before.
/// In a world with a single rank, resumes a panic instead.
fn guarded<T>(
    world: &World,
    first_failed: &Mutex<Option<anyhow::Error>>,
    load: impl FnOnce() -> Result<T>,
) -> Option<T> {
    let error = match catch_unwind(AssertUnwindSafe(load)) {
        Ok(Ok(loaded)) => return Some(loaded),
        Ok(Err(error)) => error,
        Err(panic) if world.size() == 1 => resume_unwind(panic),
        Err(_) => Error::GpuFailed(failure_message(world, RANK_PANICKED)).into(),
    };
    let mut first_failed = first_failed.lock().unwrap_or_else(PoisonError::into_inner);
    let reason = failure_message(world, &error_message(&error));
    first_failed.get_or_insert_with(|| named(world, error));
    // The end of the world makes the other ranks fail. `first_failed` already has an error, so theirs are dropped.
    world.end(&reason);
    None
}

/// Returns an error that names the rank's GPU. Returns an [`Error`], or the error of a single rank, unchanged.
///
/// Replaces a CUDA error with [`Error::GpuFailed`], unless the GPU is out of memory. Adds context to all other errors.
fn named(world: &World, error: anyhow::Error) -> anyhow::Error {
    if world.size() == 1 || error.is::<Error>() {
        return error;
    }
    let text = format!("{error:#}");
    let is_cuda_error = plain_cuda_errors(&text) != text;
    if is_cuda_error && !device::is_out_of_memory(&error) {
        return Error::GpuFailed(failure_message(world, &error_message(&error))).into();
    }
    // The GPU itself may work: the error can be about a file, or the GPU can be out of memory.
    // In the latter case, `on_device.rs` adds an explanation to this error.
    error.context(format!("GPU {} of {}", world.rank() + 1, world.size()))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use anyhow::bail;

    use super::*;
    use crate::error::exit_code;

    /// Runs `load` on three ranks, which wait for each other before and after `load`. Returns the error of `load_all`.
    fn error_of(load: impl Fn(&World) -> Result<()> + Sync) -> anyhow::Error {
        let mut worlds = World::threads(3).into_iter();
        let run = |world: World| -> Result<()> {
            world.barrier()?;
            load(&world)?;
            world.barrier()?;
            Ok(())
        };
        let started = Instant::now();
        let error = load_all(worlds.next().unwrap(), worlds.collect(), |world| world, run, run).unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(45));
        error
    }

    #[test]
    fn a_rank_that_fails_while_loading_ends_all_ranks_with_its_error() {
        for failing in 0..3 {
            let name = format!("GPU {} of 3", failing + 1);
            let error = error_of(|world| if world.rank() == failing { bail!("a bad file") } else { Ok(()) });
            assert_eq!((format!("{error:#}"), exit_code(&error)), (format!("{name}: a bad file"), 1));

            let cuda = r#"DriverError(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error")"#;
            let error = error_of(|world| if world.rank() == failing { bail!("{cuda}") } else { Ok(()) });
            let expected = "uncorrectable ECC error (CUDA_ERROR_ECC_UNCORRECTABLE); the other GPUs were stopped";
            assert_eq!((format!("{error:#}"), exit_code(&error)), (format!("{name} failed: {expected}"), 7));

            let usage = || Err(Error::usage("use another flag"));
            let error = error_of(|world| if world.rank() == failing { usage() } else { Ok(()) });
            assert_eq!((format!("{error:#}"), exit_code(&error)), ("use another flag".to_string(), 2));
        }
    }

    #[test]
    fn a_rank_that_panics_while_loading_ends_all_ranks() {
        for failing in 0..3 {
            let error = error_of(|world| if world.rank() == failing { panic!("a bug") } else { Ok(()) });
            let expected = format!("GPU {} of 3 failed: its thread panicked; the other GPUs were stopped", failing + 1);
            assert_eq!((format!("{error:#}"), exit_code(&error)), (expected, 7));
        }
    }
}
