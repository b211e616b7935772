//! The part of a tensor that a rank loads, when several ranks run a model together.

use std::borrow::Cow;
use std::ops::Range;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

use super::source::StoredBytes;

/// The part of each tensor that [`Weights`](super::Weights) load: some of its rows or some of its columns.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub axis: Axis,
    /// The ranges of rows or columns, in the order in which they are loaded.
    pub ranges: Vec<Range<usize>>,
    /// The number of rows or columns in the file.
    pub total: usize,
}

/// A dimension of a matrix `[rows, columns]`. Rows are the outputs of a linear layer, and columns are its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axis {
    Rows,
    Columns,
}

impl Part {
    /// Returns the ranges of a tensor to load, or `None` if the tensor does not have the divided dimension.
    /// In that case, the whole tensor is loaded.
    /// `rows` and `columns` are the indices of the row dimension and the column dimension.
    pub fn slice(&self, rows: Option<usize>, columns: Option<usize>) -> Option<Slice> {
        let dim = if self.axis == Axis::Rows { rows? } else { columns? };
        Some(Slice { dim, ranges: self.ranges.clone(), total: self.total })
    }
}

/// Ranges in one dimension of a tensor.
#[derive(Clone, Debug)]
pub(super) struct Slice {
    pub dim: usize,
    pub ranges: Vec<Range<usize>>,
    /// The size of the dimension in the file.
    pub total: usize,
}

impl Slice {
    /// Returns these ranges in units of `size` elements. The ranges must consist of whole units.
    pub fn in_units(&self, size: usize) -> Self {
        let ranges = self.ranges.iter().map(|range| range.start / size..range.end.div_ceil(size)).collect();
        Self { dim: self.dim, ranges, total: self.total / size }
    }

    /// Returns the shape of the whole tensor. `shape` is the shape of the part.
    pub fn stored_shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut stored = shape.to_vec();
        stored[self.dim] = self.total;
        stored
    }

    /// Returns the part of a whole tensor in host memory.
    pub fn of(&self, whole: &Tensor) -> Result<Tensor> {
        let parts = self.ranges.iter().map(|range| whole.narrow(self.dim, range.start, range.len()));
        let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
        Ok(match parts.as_slice() {
            [part] => part.force_contiguous()?,
            several => Tensor::cat(several, self.dim)?,
        })
    }

    /// Reads the part of a tensor to host memory. `shape` is the shape of the part.
    pub fn read(&self, bytes: &StoredBytes, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let stored = self.stored_shape(shape);
        let outer: usize = stored[..self.dim].iter().product();
        let inner = stored[self.dim + 1..].iter().product::<usize>() * dtype.size_in_bytes();
        let mut part = Vec::new();
        for index in 0..outer {
            let start = index * self.total * inner;
            // If a single row or column is short, one read of the whole dimension is faster than many short reads.
            if inner < MIN_READ_BYTES {
                let all = bytes.read_range(start, self.total * inner)?;
                self.ranges.iter().for_each(|range| part.extend(&all[range.start * inner..range.end * inner]));
                continue;
            }
            for range in &self.ranges {
                part.extend_from_slice(&bytes.read_range(start + range.start * inner, range.len() * inner)?);
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

/// If one row or column of a slice has fewer bytes than this, the whole dimension is read at once.
const MIN_READ_BYTES: usize = 4096;

impl StoredBytes<'_> {
    /// Returns `bytes` bytes at the offset `start`.
    fn read_range(&self, start: usize, bytes: usize) -> Result<Cow<'_, [u8]>> {
        Ok(match self {
            Self::File(range) => range.source.read_to_vec(range.start + start as u64, bytes)?.into(),
            Self::Memory(all) => (&all[start..start + bytes]).into(),
        })
    }
}
