//! The threads of a rank that can read the tensors of safetensors files. `WeightsBuilder` chooses among them.

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

/// Reads the tensors of safetensors files on one rank.
#[derive(Clone)]
pub struct RankReader {
    pub threads: ReaderThreads,
    /// The rank that reads. Each read counts as progress of this rank, so that no other rank gives up waiting for it.
    pub world: World,
}

/// Which threads read the tensors of safetensors files.
#[derive(Clone)]
pub enum ReaderThreads {
    /// The thread that requests a tensor.
    Caller,
    /// Background threads, which read tensors before they are requested.
    /// They stop when the last clone of the weights is dropped.
    Ahead(Arc<dyn TensorReader>),
    /// Several threads, which together read each large tensor, or each large part of a tensor that this rank needs.
    /// The caller reads everything else.
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
