//! Weight matrices of linear layers and embeddings, dense or quantized.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::activation::{Activation, gated_halves};
use super::matmul::{matmul_f32_into, matmul_gated, matmul_rounded, matmul_terms};
#[cfg(feature = "cuda")]
use super::quantized::quantized_ops;
use super::quantized::{InputQuantization, QuantizedMatrix, WeightFormat};
use super::sum_order::SumOrder;

/// The weight matrix of a linear layer or an embedding, dense or quantized.
///
/// It can be a stack of several matrices, such as the query, key and value projections.
/// Stacked matrices have the same number of columns. The rows of the stack are the rows of its matrices, in order.
#[derive(Clone, Debug)]
pub enum Matrix {
    /// A float tensor, `[rows, columns]`.
    Dense(Tensor),
    /// A stack of one or more quantized matrices that a single kernel can process.
    Quantized(Vec<QuantizedMatrix>),
    /// A stack of matrices that cannot all be processed by one kernel.
    Concatenated(Vec<Matrix>),
}

impl Matrix {
    /// Returns the dimensions of the matrix, `(rows, columns)`.
    pub fn dims(&self) -> (usize, usize) {
        match self {
            Self::Dense(weight) => (weight.dims()[0], weight.dims()[1]),
            Self::Quantized(stack) => (stack.iter().map(|matrix| matrix.dims().0).sum(), stack[0].dims().1),
            Self::Concatenated(stack) => (stack.iter().map(|matrix| matrix.dims().0).sum(), stack[0].dims().1),
        }
    }

    pub fn device(&self) -> &Device {
        match self {
            Self::Dense(weight) => weight.device(),
            Self::Quantized(stack) => stack[0].device(),
            Self::Concatenated(stack) => stack[0].device(),
        }
    }

    /// Returns the size of the weights on the device, in bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Dense(weight) => crate::kernels::bytes(weight),
            Self::Quantized(stack) => stack.iter().map(QuantizedMatrix::bytes).sum(),
            Self::Concatenated(stack) => stack.iter().map(Matrix::bytes).sum(),
        }
    }

    /// Returns the quantized format that all matrices of the stack share.
    /// Returns `None` if the matrix is not [`Quantized`](Self::Quantized), or if the formats differ.
    pub fn format(&self) -> Option<WeightFormat> {
        match self {
            Self::Quantized(stack) => {
                Some(stack[0].format).filter(|first| stack.iter().all(|matrix| matrix.format == *first))
            }
            _ => None,
        }
    }

    /// Returns the input quantization that all matrices of the stack share.
    /// Returns `None` if the matrix is not [`Quantized`](Self::Quantized), or if the input quantizations differ.
    pub fn input_quantization(&self) -> Option<InputQuantization> {
        match self {
            Self::Quantized(stack) => Some(stack[0].input_quantization)
                .filter(|first| stack.iter().all(|matrix| matrix.input_quantization == *first)),
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
            Self::Quantized(stack) => {
                let ranges = overlaps(stack.iter().map(|matrix| matrix.dims().0), first..first + rows);
                let selected = ranges.into_iter().map(|(index, range)| stack[index].rows(range.start, range.len()));
                Self::Quantized(selected.collect::<Result<_>>()?)
            }
            Self::Concatenated(stack) => {
                let ranges = overlaps(stack.iter().map(|matrix| matrix.dims().0), first..first + rows);
                let selected = ranges.into_iter().map(|(index, range)| stack[index].rows(range.start, range.len()));
                let mut selected = selected.collect::<Result<Vec<_>>>()?;
                if selected.len() == 1 { selected.remove(0) } else { Self::Concatenated(selected) }
            }
        })
    }

    /// Returns `x · Wᵀ` as f32 `[tokens, rows]`.
    ///
    /// `x` is `[tokens, columns]`, in the dtype of the dense matrices, or in any float dtype if all are quantized.
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
            Self::Quantized(stack) => match self.device() {
                #[cfg(feature = "cuda")]
                Device::Cuda(device) => quantized_ops::matmul(device, stack, x, sum_order),
                _ => {
                    let products = stack.iter().map(|matrix| matrix.matmul(x)).collect::<Result<Vec<_>>>()?;
                    Tensor::cat(&products, 1)
                }
            },
            Self::Concatenated(stack) => {
                Tensor::cat(&stack.iter().map(|matrix| matrix.matmul(x, sum_order)).collect::<Result<Vec<_>>>()?, 1)
            }
        }
    }

    /// Returns x · Wᵀ as terms, f32 `[terms, tokens, rows]`. The product is the sum over the terms.
    pub fn matmul_terms(&self, x: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
        match self {
            Self::Dense(weight) if weight.elem_count() > 0 => matmul_terms(x, weight, sum_order),
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
    /// `ids` are u32 `[tokens]`. If an id is not a row index, this function fails on a CPU. On a GPU, it returns the
    /// last row for this id.
    /// Fails if the matrix is a stack of several matrices.
    pub fn embed(&self, ids: &Tensor, scale: f32) -> Result<Tensor> {
        match self {
            Self::Dense(table) => crate::kernels::rows::embed(table, ids, scale),
            Self::Quantized(stack) if stack.len() == 1 => stack[0].embed(ids, scale),
            _ => bail!("cannot look up embeddings: the matrix is a stack of several matrices"),
        }
    }
}

/// Returns the index of each matrix of a stack that overlaps the rows `selected`, and the selected rows of this matrix.
/// `rows` has the number of rows of each matrix.
fn overlaps(rows: impl Iterator<Item = usize>, selected: Range<usize>) -> Vec<(usize, Range<usize>)> {
    let mut end = 0;
    let overlap = |(index, rows): (usize, usize)| {
        let start = end;
        end += rows;
        let range = selected.start.max(start)..selected.end.min(end);
        (!range.is_empty()).then(|| (index, range.start - start..range.end - start))
    };
    rows.enumerate().filter_map(overlap).collect()
}
