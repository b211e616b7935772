//! Configures how the weights of a model are loaded: for which rank, quantized or not, and by which threads.

use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Device};

#[cfg(feature = "cuda")]
use super::loader::MAX_HOST_CONVERSION_BYTES;
use super::progress::LoadProgress;
use super::weights::Weights;
#[cfg(feature = "cuda")]
use crate::kernels::upload::CopyStream;
use crate::kernels::upload::UploadTarget;
use crate::weights::checkpoint::Checkpoint;
use crate::weights::quantized::QuantizationTarget;
#[cfg(feature = "cuda")]
use crate::weights::reading::Residency;
use crate::weights::reading::{PartReader, RankReader, ReadAheadOptions, ReadAheadReader, ReaderThreads, SharedReads};
use crate::world::World;

/// Builds [`Weights`]. By default, a single rank loads whole tensors, and float matrices are not quantized.
pub struct WeightsBuilder<'c> {
    checkpoint: &'c Checkpoint,
    device: Device,
    dtype: DType,
    progress: &'c LoadProgress<'c>,
    quantize: Option<QuantizationTarget>,
    world: World,
    shares_reads: bool,
    /// The threads that read tensors. If `None`, [`build`](Self::build) chooses them.
    threads: Option<ReaderThreads>,
}

impl<'c> WeightsBuilder<'c> {
    /// Returns a builder of weights that are loaded to `device`. `dtype` is the compute dtype.
    pub fn new(checkpoint: &'c Checkpoint, device: &Device, dtype: DType, progress: &'c LoadProgress<'c>) -> Self {
        Self {
            checkpoint,
            device: device.clone(),
            dtype,
            progress,
            quantize: None,
            world: World::alone(),
            shares_reads: true,
            threads: None,
        }
    }

    /// Quantizes float matrices during loading, if `quantize` is given.
    pub fn quantize(self, quantize: Option<QuantizationTarget>) -> Self {
        Self { quantize, ..self }
    }

    /// Loads only the parts of the model that the rank of `world` holds.
    /// Ranks that [share reads](Self::share_reads) wait for each other, so all ranks must load at the same time,
    /// on different threads.
    pub fn world(self, world: World) -> Self {
        Self { world, ..self }
    }

    /// Sets whether this rank shares reads with the other ranks. By default, it does.
    /// If the ranks share reads, bytes that several ranks need are read only once. These are the exceptions:
    /// - the scales of 8-bit weights
    /// - E4M3 tensors without scales
    /// - vectors of GGUF files that ranks divide, such as biases
    pub fn share_reads(self, shares_reads: bool) -> Self {
        Self { shares_reads, ..self }
    }

    /// Takes tensors from `reader`, which must copy them to the device of the weights.
    /// If float matrices are quantized during loading, [`build`](Self::build) ignores `reader`.
    pub fn read_ahead(self, reader: ReadAheadReader<impl UploadTarget>) -> Self {
        Self { threads: Some(ReaderThreads::Ahead(Arc::new(reader))), ..self }
    }

    /// Reads large tensors of safetensors files with `reader`, which must copy them to the device of the weights.
    pub fn read_parts(self, reader: PartReader<impl UploadTarget>) -> Self {
        Self { threads: Some(ReaderThreads::Parts(Arc::new(reader))), ..self }
    }

    /// Creates the weights, which load the tensors of the checkpoint.
    ///
    /// If a single rank loads safetensors files to a GPU without quantizing them, and the caller has set no reader,
    /// background threads start reading the files immediately.
    ///
    /// On a GPU, the loading methods may return a tensor before its copy to the device is complete.
    /// Kernels on the device's stream wait for the copy to complete.
    pub fn build(mut self) -> Result<Weights<'c>> {
        let threads = match self.threads.take() {
            // Quantizing reads each matrix when it is requested, so reading ahead would read the matrix twice.
            Some(ReaderThreads::Ahead(_)) if self.quantize.is_some() => ReaderThreads::Caller,
            Some(threads) => threads,
            None => self.default_threads()?,
        };
        let shared_reads = (self.shares_reads && self.world.size() > 1).then(|| SharedReads {
            world: self.world.clone(),
            threads: if self.device.is_cuda() { ReadAheadOptions::default().threads } else { 1 },
            buffers: Arc::default(),
        });
        Ok(Weights {
            checkpoint: self.checkpoint,
            prefix: String::new(),
            device: self.device,
            dtype: self.dtype,
            quantize: self.quantize,
            progress: self.progress,
            reader: RankReader { threads, progress_world: self.world.clone() },
            division_world: self.world,
            part: None,
            shared_reads,
        })
    }

    fn default_threads(&self) -> Result<ReaderThreads> {
        #[cfg(feature = "cuda")]
        if let (Device::Cuda(cuda), Checkpoint::Safetensors(_)) = (&self.device, self.checkpoint) {
            let target = CopyStream::new(cuda)?;
            let options = ReadAheadOptions::default();
            // Do not read ahead for one of several ranks, which does not need all bytes,
            // or for quantizing, which reads each matrix when it is requested.
            if self.world.size() > 1 || self.quantize.is_some() {
                return Ok(ReaderThreads::Parts(Arc::new(PartReader::new(target, options))));
            }
            let mut requests = self.checkpoint.read_requests(self.dtype);
            requests.retain(|request| {
                request.residency == Residency::Permanent || request.bytes() > MAX_HOST_CONVERSION_BYTES
            });
            return Ok(ReaderThreads::Ahead(Arc::new(ReadAheadReader::start(target, requests, options)?)));
        }
        Ok(ReaderThreads::Caller)
    }
}
