//! Loads the parts of a model onto its devices, one part per rank.

use std::ops::Range;
use std::panic::resume_unwind;
use std::thread;
use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device};

use crate::device::{self, DeviceChoice, Devices, World};
use crate::kernels::attention::AttentionBackend;
use crate::kernels::exchange;
use crate::models::ModelConfig;
use crate::nn::kv_cache::KvCache;
use crate::runner::RankParts;
use crate::weights::quantized::QuantizationTarget;
use crate::weights::{Checkpoint, LoadProgress, Weights};

/// Loads the parts of a model for all ranks.
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
    /// Whether ranks may round large partial results to bf16 before they add them.
    pub rounds_partials: bool,
    /// The layers of each rank. `None` if every rank holds a part of each layer.
    pub stages: Option<&'l [Range<usize>]>,
}

/// The loaded parts of all ranks.
pub(super) struct LoadedRanks {
    /// The world of the first rank.
    pub world: World,
    /// The decoder and the KV cache of the first rank.
    pub parts: RankParts,
    /// The worlds and the parts of all other ranks.
    pub others: Vec<(World, RankParts)>,
    pub attention: AttentionBackend,
    /// The time that the first rank took to allocate its KV cache, in seconds.
    pub cache_s: f64,
}

/// The loaded part of one rank.
struct LoadedRank {
    parts: RankParts,
    attention: AttentionBackend,
    cache_s: f64,
}

impl RankLoader<'_> {
    /// Loads the first rank's part onto `first`, which is already open. Reports only the progress of this rank.
    ///
    /// Loads the parts of all other ranks onto their devices, each on a separate thread.
    pub fn load(&self, first: &Device, devices: &Devices, progress: &LoadProgress) -> Result<LoadedRanks> {
        let worlds = World::threads(devices.count()).into_iter();
        let worlds = worlds.map(|world| if self.rounds_partials { world.with_rounded_partials() } else { world });
        let mut worlds = worlds.map(|world| match self.stages {
            Some(stages) => world.with_stages(stages),
            None => world,
        });
        let world = worlds.next().unwrap_or_default();
        thread::scope(|scope| {
            let threads: Vec<_> = (worlds.zip(devices.iter().skip(1)))
                .map(|(world, choice)| scope.spawn(move || self.load_other(world, choice)))
                .collect();
            let loaded = self.load_first(world, first, progress);
            let others = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
            let others = others.collect::<Vec<_>>();
            let (world, LoadedRank { parts, attention, cache_s }) = loaded?;
            Ok(LoadedRanks { world, parts, others: others.into_iter().collect::<Result<_>>()?, attention, cache_s })
        })
    }

    fn load_first(&self, world: World, device: &Device, progress: &LoadProgress) -> Result<(World, LoadedRank)> {
        let world = exchange::connect(world, device)?;
        let rank = self.load_rank(&world, device, progress)?;
        Ok((world, rank))
    }

    fn load_other(&self, world: World, choice: DeviceChoice) -> Result<(World, RankParts)> {
        let device = device::open(choice)?;
        let world = exchange::connect(world, &device)?;
        let LoadedRank { parts, .. } = self.load_rank(&world, &device, &LoadProgress::silent())?;
        Ok((world, parts))
    }

    /// Builds the decoder and the KV cache of one rank.
    fn load_rank(&self, world: &World, device: &Device, progress: &LoadProgress) -> Result<LoadedRank> {
        let &Self { config, checkpoint, dtype, quantize, attention, context, cache_blocks, .. } = self;
        let of_rank = || Weights::of_rank(checkpoint, device, dtype, progress, world.clone());
        let weights = match quantize {
            Some(quantize) => of_rank()?.quantized_to(quantize),
            None if world.size() > 1 => of_rank()?,
            None => Weights::new(checkpoint, device, dtype, progress)?,
        };
        let mut decoder = config.architecture.build(&weights, context)?;
        let attention = decoder.set_attention_backend(attention)?;
        drop(weights);
        device.synchronize()?;
        let started = Instant::now();
        let cache = KvCache::new(decoder.cache_layout(), cache_blocks, dtype, device)?;
        device.synchronize()?;
        Ok(LoadedRank { parts: RankParts { decoder, cache }, attention, cache_s: started.elapsed().as_secs_f64() })
    }
}
