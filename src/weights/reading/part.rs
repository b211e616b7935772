//! The part of a tensor that a rank loads if several ranks run a model together.

use std::borrow::Cow;
use std::ops::Range;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

use super::shared_reads::SharedReads;
use super::source::StoredBytes;

/// The approximate minimum number of bytes that are worth a system call of their own.
/// If only a shorter run of bytes is needed, most reads fetch the whole row that contains the run.
pub(super) const MIN_RUN_BYTES: usize = 64 << 10;

/// The part of each tensor that [`Weights`](crate::weights::Weights) loads: some of the rows or some of the columns.
#[derive(Clone, Debug)]
pub struct TensorPart {
    pub axis: Axis,
    /// The ranges of rows or columns to load. The loaded part contains them in this order.
    pub ranges: Vec<Range<usize>>,
    /// The number of rows or columns of the whole tensor in the file.
    pub total: usize,
}

/// A dimension of a matrix `[rows, columns]`. Rows are the outputs of a linear layer, and columns are its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    Rows,
    Columns,
}

/// The order of the dimensions of a tensor. A stack holds one matrix or vector per expert, for example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DimOrder {
    /// `[rows]`: a vector, which is divided like the rows of a matrix.
    Rows,
    /// `[stack, rows]`
    StackedRows,
    /// `[rows, columns]`
    RowsColumns,
    /// `[columns, rows]`: a transposed matrix.
    ColumnsRows,
    /// `[stack, rows, columns]`
    StackedRowsColumns,
    /// `[stack, columns, rows]`: a stack of transposed matrices.
    StackedColumnsRows,
}

impl DimOrder {
    /// Returns the index of the dimension for `axis`, or `None` if the tensor consists of vectors without columns.
    fn dim(self, axis: Axis) -> Option<usize> {
        let (rows, columns) = match self {
            Self::Rows => (0, None),
            Self::StackedRows => (1, None),
            Self::RowsColumns => (0, Some(1)),
            Self::ColumnsRows => (1, Some(0)),
            Self::StackedRowsColumns => (1, Some(2)),
            Self::StackedColumnsRows => (2, Some(1)),
        };
        match axis {
            Axis::Rows => Some(rows),
            Axis::Columns => columns,
        }
    }
}

impl TensorPart {
    /// Returns the ranges of a tensor that are loaded.
    /// Returns `None` if the tensor does not have the divided dimension and is therefore loaded whole.
    pub fn slice(&self, order: DimOrder) -> Option<Slice> {
        let dim = order.dim(self.axis)?;
        Some(Slice { dim, ranges: self.ranges.clone(), total: self.total })
    }
}

/// The selected ranges in one dimension of a tensor.
#[derive(Clone, Debug)]
pub struct Slice {
    pub dim: usize,
    pub ranges: Vec<Range<usize>>,
    /// The length of the divided dimension in the file.
    pub total: usize,
}

impl Slice {
    /// Converts the ranges from elements to units of `size` elements. The ranges must consist of whole units.
    pub fn in_units(&self, size: usize) -> Self {
        let ranges = self.ranges.iter().map(|range| range.start / size..range.end.div_ceil(size)).collect();
        Self { dim: self.dim, ranges, total: self.total / size }
    }

    /// Returns the shape of the tensor in the file, given the shape of the part.
    pub fn stored_shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut stored = shape.to_vec();
        stored[self.dim] = self.total;
        stored
    }

    /// Concatenates the selected ranges of `whole`, which is a whole tensor in host memory.
    pub fn of(&self, whole: &Tensor) -> Result<Tensor> {
        let parts = self.ranges.iter().map(|range| whole.narrow(self.dim, range.start, range.len()));
        let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
        Ok(match parts.as_slice() {
            [part] => part.force_contiguous()?,
            several => Tensor::cat(several, self.dim)?,
        })
    }

    /// Returns whether the ranks should read whole rows together, because each rank needs only short runs of bytes.
    /// This is the case if the tensor has several rows (see [`row_bytes`](Self::row_bytes)), and a rank needs less than
    /// [`MIN_RUN_BYTES`] of a row on average. The result is the same on all ranks.
    /// `stored` is the shape of the tensor in the file.
    pub fn has_short_runs(&self, stored: &[usize], dtype: DType, ranks: usize) -> bool {
        let outer: usize = stored[..self.dim].iter().product();
        outer > 1 && self.row_bytes(stored, dtype) / ranks < MIN_RUN_BYTES
    }

    /// Returns the number of bytes of a row. A row spans the divided dimension and the dimensions after it.
    pub fn row_bytes(&self, stored: &[usize], dtype: DType) -> usize {
        stored[self.dim..].iter().product::<usize>() * dtype.size_in_bytes()
    }

    /// Reads the selected part of a tensor to host memory. The part has the shape `shape`.
    /// If `shared` is given and the tensor is in a file, all ranks read it together, and each rank keeps its own part.
    pub fn read(
        &self,
        name: &str,
        bytes: &StoredBytes,
        dtype: DType,
        shape: &[usize],
        shared: Option<&SharedReads>,
    ) -> Result<Tensor> {
        let stored = self.stored_shape(shape);
        let outer: usize = stored[..self.dim].iter().product();
        let inner = stored[self.dim + 1..].iter().product::<usize>() * dtype.size_in_bytes();
        let row_bytes = self.total * inner;
        let mut part = Vec::new();
        let mut add_row = |row: &[u8]| {
            self.ranges.iter().for_each(|range| part.extend_from_slice(&row[range.start * inner..range.end * inner]));
        };
        match (shared, bytes) {
            (Some(shared), StoredBytes::File(file)) => {
                shared.read(name, file, row_bytes, |_, rows| {
                    rows.chunks_exact(row_bytes).for_each(&mut add_row);
                    Ok(())
                })?;
            }
            // Read a short row with one system call instead of one for each run of selected bytes.
            _ if row_bytes < MIN_RUN_BYTES && outer > 1 => {
                for index in 0..outer {
                    add_row(&bytes.read_range(index * row_bytes, row_bytes)?);
                }
            }
            _ => {
                for (index, range) in (0..outer).flat_map(|index| self.ranges.iter().map(move |range| (index, range))) {
                    let start = index * row_bytes + range.start * inner;
                    part.extend_from_slice(&bytes.read_range(start, range.len() * inner)?);
                }
            }
        }
        if part.is_empty() {
            return Ok(Tensor::zeros(shape, dtype, &Device::Cpu)?);
        }
        match dtype {
            DType::U8 => Ok(Tensor::from_vec(part, shape, &Device::Cpu)?),
            _ => StoredBytes::Memory(&part).tensor(dtype, shape),
        }
    }
}

impl StoredBytes<'_> {
    /// Returns `bytes` bytes of the tensor, starting at byte `start`.
    fn read_range(&self, start: usize, bytes: usize) -> Result<Cow<'_, [u8]>> {
        Ok(match self {
            Self::File(range) => range.source.read_to_vec(range.start + start as u64, bytes)?.into(),
            Self::Memory(all) => (&all[start..start + bytes]).into(),
        })
    }
}

/// A tensor of a safetensors file, or the part of it that `slice` selects. `shape` is the shape of the part.
pub struct PartToRead<'r> {
    pub name: &'r str,
    pub dtype: DType,
    pub shape: &'r [usize],
    pub slice: Option<&'r Slice>,
}

impl PartToRead<'_> {
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size_in_bytes()
    }

    /// Reads the part to host memory. With `shared`, the ranks read the tensor together.
    pub fn read_to_host(&self, tensor: &StoredBytes, shared: Option<&SharedReads>) -> Result<Tensor> {
        match (self.slice, shared, tensor) {
            (Some(slice), ..) => slice.read(self.name, tensor, self.dtype, self.shape, shared),
            (None, Some(shared), StoredBytes::File(file)) => {
                let bytes = shared.read_to_vec(self.name, file)?;
                StoredBytes::Memory(&bytes).tensor(self.dtype, self.shape)
            }
            (None, ..) => tensor.tensor(self.dtype, self.shape),
        }
    }
}
