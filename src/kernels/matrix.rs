//! Weight matrices of linear layers and embeddings, dense or quantized.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::activation::{Activation, gated_halves};
use super::matmul::{matmul_f32_into, matmul_gated, matmul_parts, matmul_rounded};
#[cfg(feature = "cuda")]
use super::quantized::quantized_ops;
use super::quantized::{InputQuantization, QuantizedMatrix, WeightFormat};
use super::sum_order::SumOrder;

/// The weight matrix of a linear layer or an embedding, dense or quantized.
///
/// A matrix can have several parts, such as the query, key and value projections.
/// All parts have the same number of columns. The rows of the matrix are the rows of all parts, in order.
#[derive(Clone, Debug)]
pub enum Matrix {
    /// A float tensor, `[rows, columns]`.
    Dense(Tensor),
    /// One or more quantized parts that a single kernel can process.
    Quantized(Vec<QuantizedMatrix>),
    /// Parts that cannot all be processed by one kernel.
    Concatenated(Vec<Matrix>),
}

impl Matrix {
    /// Returns the dimensions of the matrix, `(rows, columns)`.
    pub fn dims(&self) -> (usize, usize) {
        match self {
            Self::Dense(weight) => (weight.dims()[0], weight.dims()[1]),
            Self::Quantized(parts) => (parts.iter().map(|part| part.dims().0).sum(), parts[0].dims().1),
            Self::Concatenated(parts) => (parts.iter().map(|part| part.dims().0).sum(), parts[0].dims().1),
        }
    }

    pub fn device(&self) -> &Device {
        match self {
            Self::Dense(weight) => weight.device(),
            Self::Quantized(parts) => parts[0].device(),
            Self::Concatenated(parts) => parts[0].device(),
        }
    }

    /// Returns the size of the weights on the device, in bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Dense(weight) => crate::kernels::bytes(weight),
            Self::Quantized(parts) => parts.iter().map(QuantizedMatrix::bytes).sum(),
            Self::Concatenated(parts) => parts.iter().map(Matrix::bytes).sum(),
        }
    }

    /// Returns the quantized format that all parts share.
    /// Returns `None` if the matrix is not [`Quantized`](Self::Quantized), or if the formats differ.
    pub fn format(&self) -> Option<WeightFormat> {
        match self {
            Self::Quantized(parts) => {
                Some(parts[0].format).filter(|first| parts.iter().all(|part| part.format == *first))
            }
            _ => None,
        }
    }

    /// Returns the input quantization that all parts share.
    /// Returns `None` if the matrix is not [`Quantized`](Self::Quantized), or if the parts differ.
    pub fn input_quantization(&self) -> Option<InputQuantization> {
        match self {
            Self::Quantized(parts) => Some(parts[0].input_quantization)
                .filter(|first| parts.iter().all(|part| part.input_quantization == *first)),
            _ => None,
        }
    }

    /// Returns `rows` rows, starting at row `first`. The result shares memory with this matrix.
    /// Fails if `rows` is 0, or if the rows exceed the matrix.
    pub fn rows(&self, first: usize, rows: usize) -> Result<Self> {
        let (all, _) = self.dims();
        if rows == 0 || first + rows > all {
            bail!("cannot select {rows} rows starting at row {first} from a matrix of {all} rows");
        }
        Ok(match self {
            Self::Dense(weight) => Self::Dense(weight.narrow(0, first, rows)?),
            Self::Quantized(parts) => {
                let ranges = overlaps(parts.iter().map(|part| part.dims().0), first..first + rows);
                let selected = ranges.into_iter().map(|(part, range)| parts[part].rows(range.start, range.len()));
                Self::Quantized(selected.collect::<Result<_>>()?)
            }
            Self::Concatenated(parts) => {
                let ranges = overlaps(parts.iter().map(|part| part.dims().0), first..first + rows);
                let selected = ranges.into_iter().map(|(part, range)| parts[part].rows(range.start, range.len()));
                let mut selected = selected.collect::<Result<Vec<_>>>()?;
                if selected.len() == 1 { selected.remove(0) } else { Self::Concatenated(selected) }
            }
        })
    }

    /// Returns `x · Wᵀ` as f32 `[tokens, rows]`.
    ///
    /// `x` is `[tokens, columns]`, in the dtype of the dense parts, or in any float dtype if all parts are quantized.
    /// If a dense matrix has no columns, the product contains only zeros.
    pub fn matmul(&self, x: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
        self.matmul_into(x, sum_order, None)
    }

    /// Like [`matmul`](Self::matmul), but may write the product to `out` and return `out` (see [`matmul_f32_into`]).
    pub fn matmul_into(&self, x: &Tensor, sum_order: SumOrder, out: Option<&Tensor>) -> Result<Tensor> {
        match self {
            Self::Dense(weight) if weight.elem_count() == 0 => {
                Tensor::zeros((x.dim(0)?, weight.dim(0)?), DType::F32, x.device())
            }
            Self::Dense(weight) => matmul_f32_into(x, weight, sum_order, out),
            Self::Quantized(parts) => match self.device() {
                #[cfg(feature = "cuda")]
                Device::Cuda(device) => quantized_ops::matmul(device, parts, x, sum_order),
                _ => {
                    let products = parts.iter().map(|part| part.matmul(x)).collect::<Result<Vec<_>>>()?;
                    Tensor::cat(&products, 1)
                }
            },
            Self::Concatenated(parts) => {
                Tensor::cat(&parts.iter().map(|part| part.matmul(x, sum_order)).collect::<Result<Vec<_>>>()?, 1)
            }
        }
    }

    /// Returns x · Wᵀ as partial sums, f32 `[parts, tokens, rows]`. The product is the sum over these parts.
    /// They divide the columns of the matrix, whereas the parts of the matrix divide its rows.
    pub fn matmul_parts(&self, x: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
        match self {
            Self::Dense(weight) if weight.elem_count() > 0 => matmul_parts(x, weight, sum_order),
            _ => self.matmul(x, sum_order)?.unsqueeze(0),
        }
    }

    /// Returns activation(gate) · up: `[tokens, rows / 2]` in `dtype`.
    /// The first half of the rows computes gate, and the second half computes up.
    pub fn matmul_gated(
        &self,
        x: &Tensor,
        activation: Activation,
        dtype: DType,
        sum_order: SumOrder,
    ) -> Result<Tensor> {
        match self {
            Self::Dense(weight) if weight.elem_count() > 0 && dtype == x.dtype() => {
                matmul_gated(x, weight, activation, sum_order)
            }
            _ => gated_halves(&self.matmul(x, sum_order)?, activation, dtype),
        }
    }

    /// Returns x · Wᵀ for a caller that rounds the product to the dtype of x.
    /// The product is f32, or already in the dtype of x.
    pub fn matmul_rounded(&self, x: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
        match self {
            Self::Dense(weight) if weight.elem_count() > 0 => matmul_rounded(x, weight, sum_order),
            _ => self.matmul(x, sum_order),
        }
    }

    /// Returns the rows `ids` of the matrix, multiplied by `scale`, as f32 `[tokens, columns]`.
    ///
    /// `ids` are u32 `[tokens]`. On a GPU, the caller guarantees that every id is a valid row index.
    /// Fails if the matrix has several parts.
    pub fn embed(&self, ids: &Tensor, scale: f32) -> Result<Tensor> {
        match self {
            Self::Dense(table) => crate::kernels::rows::embed(table, ids, scale),
            Self::Quantized(parts) if parts.len() == 1 => parts[0].embed(ids, scale),
            _ => bail!("cannot look up embeddings: the matrix has several parts"),
        }
    }
}

/// Returns the index of each part that overlaps the rows `selected`, and the range of selected rows within the part.
fn overlaps(part_rows: impl Iterator<Item = usize>, selected: Range<usize>) -> Vec<(usize, Range<usize>)> {
    let mut end = 0;
    let overlap = |(part, rows): (usize, usize)| {
        let start = end;
        end += rows;
        let range = selected.start.max(start)..selected.end.min(end);
        (!range.is_empty()).then(|| (part, range.start - start..range.end - start))
    };
    part_rows.enumerate().filter_map(overlap).collect()
}
