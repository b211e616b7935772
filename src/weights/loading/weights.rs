//! [`Weights`]: the tensors of a module, the part of each tensor that a rank loads, and the device to load them to.

use std::ops::Range;

use candle_core::{DType, Device};

use super::progress::LoadProgress;
use crate::weights::checkpoint::Checkpoint;
use crate::weights::quantized::QuantizationTarget;
use crate::weights::reading::{Axis, DimOrder, RankReader, SharedReads, Slice, TensorPart};
use crate::world::World;

/// The tensors of a checkpoint whose names start with a prefix, plus the device and dtype to load them with.
/// [`WeightsBuilder`](super::WeightsBuilder) returns the weights of a whole checkpoint.
#[derive(Clone)]
pub struct Weights<'c> {
    pub(super) checkpoint: &'c Checkpoint,
    pub(super) prefix: String,
    pub(super) device: Device,
    pub(super) dtype: DType,
    /// The quantization of float matrices during loading, if any.
    pub(super) quantize: Option<QuantizationTarget>,
    pub(super) progress: &'c LoadProgress<'c>,
    /// Determines which part of each tensor is loaded: the part of this world's rank.
    /// [`World::alone`] after [`undivided`](Self::undivided), unlike `reader.progress_world`, which stays the same.
    pub(super) division_world: World,
    /// The part of each tensor that is loaded. `None` if whole tensors are loaded.
    pub(super) part: Option<TensorPart>,
    pub(super) reader: RankReader,
    /// Reads bytes together with the other ranks. `None` if this rank reads alone.
    pub(super) shared_reads: Option<SharedReads>,
}

impl Weights<'_> {
    /// Returns the rank whose part of the model is loaded, or [`World::alone`] after [`undivided`](Self::undivided).
    pub fn world(&self) -> &World {
        &self.division_world
    }

    /// Returns weights that load whole tensors, as if there were only one rank.
    pub fn undivided(&self) -> Self {
        Self { division_world: World::alone(), shared_reads: None, ..self.clone() }
    }

    /// Returns weights that load only the rows `ranges` of each matrix and vector. Each has `total` rows in the file.
    /// The loading methods of the returned weights expect the shape of the loaded rows, not the shape in the file.
    pub fn rows(&self, ranges: impl Into<Vec<Range<usize>>>, total: usize) -> Self {
        self.part(Axis::Rows, ranges.into(), total)
    }

    /// Returns weights that load only the columns in `range` of each matrix, and whole biases.
    /// In the file, each matrix has `total` columns.
    /// The loading methods of the returned weights expect the shape of the loaded columns, not the shape in the file.
    pub fn columns(&self, range: Range<usize>, total: usize) -> Self {
        self.part(Axis::Columns, vec![range], total)
    }

    fn part(&self, axis: Axis, ranges: Vec<Range<usize>>, total: usize) -> Self {
        // A single rank loads whole tensors, so that the background reader can read them ahead.
        let part = TensorPart { axis, ranges, total };
        Self { part: (self.division_world.size() > 1).then_some(part), ..self.clone() }
    }

    /// Returns the ranges of a tensor that this rank loads, or `None` if it loads the whole tensor.
    pub(super) fn slice(&self, order: DimOrder) -> Option<Slice> {
        self.part.as_ref()?.slice(order)
    }

    /// Returns a copy of these weights that loads float matrices without quantizing them.
    pub fn unquantized(&self) -> Self {
        Self { quantize: None, ..self.clone() }
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the compute dtype, to which [`float`](Self::float) converts tensors.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the weights of the submodule `name`, which may contain dots. Loading fails if they do not exist.
    pub fn at(&self, name: impl std::fmt::Display) -> Self {
        Self { prefix: self.full_name(&name.to_string()), ..self.clone() }
    }

    /// Returns the full name of a tensor in the checkpoint, including the prefix.
    pub(super) fn full_name(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) }
    }

    pub fn contains(&self, name: &str) -> bool {
        self.checkpoint.info(&self.full_name(name)).is_some()
    }
}
