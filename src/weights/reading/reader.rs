//! Which threads of a rank read the tensors of safetensors files. `WeightsBuilder` chooses the threads.

use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Tensor};

use super::part::{PartToRead, Slice};
use super::part_reader::PartReader;
use super::read_ahead::ReadAheadReader;
use super::shared_reads::SharedReads;
use super::source::ByteRange;
use crate::kernels::upload::UploadTarget;
use crate::world::World;

/// How one rank reads the tensors of safetensors files.
#[derive(Clone)]
pub struct RankReader {
    pub threads: ReaderThreads,
    /// Records the progress of this rank at each tensor, so that the other ranks do not give up waiting for this rank.
    /// They also wait while this rank loads whole tensors (`Weights::undivided`).
    pub progress_world: World,
}

/// Which threads read the tensors of safetensors files.
/// E4M3 tensors, the matrices and scales of compressed-tensors, and matrices that are quantized during loading are
/// exceptions: the code that converts them also reads them.
#[derive(Clone)]
pub enum ReaderThreads {
    /// The thread that requests a tensor.
    Caller,
    /// Background threads, which read the tensors of the read-ahead list before they are requested.
    /// The caller reads all other tensors. The threads stop when the last clone of the weights is dropped.
    Ahead(Arc<dyn TensorReader>),
    /// Several threads, which together read each tensor of which this rank needs a large part.
    /// Other tensors are read by the caller, or by the threads of [`SharedReads`].
    Parts(Arc<dyn PartSource>),
}

/// The methods of [`ReadAheadReader`] without its type parameter, for use as a trait object.
pub trait TensorReader {
    fn contains(&self, name: &str) -> bool;
    fn take(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Tensor>;
}

impl<T: UploadTarget> TensorReader for ReadAheadReader<T> {
    fn contains(&self, name: &str) -> bool {
        self.contains(name)
    }

    fn take(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.take(name, dtype, shape)
    }
}

/// The methods of [`PartReader`] without its type parameter, for use as a trait object.
pub trait PartSource {
    fn read(&self, tensor: &ByteRange, dtype: DType, shape: &[usize], slice: Option<&Slice>) -> Result<Tensor>;
    fn read_shared(&self, shared: &SharedReads, tensor: &ByteRange, part: &PartToRead) -> Result<Tensor>;
}

impl<T: UploadTarget> PartSource for PartReader<T> {
    fn read(&self, tensor: &ByteRange, dtype: DType, shape: &[usize], slice: Option<&Slice>) -> Result<Tensor> {
        self.read(tensor, dtype, shape, slice)
    }

    fn read_shared(&self, shared: &SharedReads, tensor: &ByteRange, part: &PartToRead) -> Result<Tensor> {
        self.read_shared(shared, tensor, part)
    }
}
