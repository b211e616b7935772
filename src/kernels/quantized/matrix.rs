//! The weight of a layer, quantized or not.

use candle_core::{Device, Result, Tensor, bail};

use super::format::Format;
use super::quantized_matrix::{InputRounding, QuantizedMatrix};
#[cfg(feature = "cuda")]
use super::quantized_ops;
use crate::kernels::matmul::matmul_f32;

/// The weight of a layer: floats, or matrices of equal width, one below the other.
#[derive(Clone, Debug)]
pub enum Matrix {
    /// `[R, C]`
    Dense(Tensor),
    /// Quantized parts that one kernel can multiply with.
    Quantized(Vec<QuantizedMatrix>),
    /// Parts that need different kernels.
    Mixed(Vec<Matrix>),
}

impl Matrix {
    /// (R, C)
    pub fn dims(&self) -> (usize, usize) {
        match self {
            Self::Dense(weight) => (weight.dims()[0], weight.dims()[1]),
            Self::Quantized(parts) => (parts.iter().map(|part| part.dims().0).sum(), parts[0].dims().1),
            Self::Mixed(parts) => (parts.iter().map(|part| part.dims().0).sum(), parts[0].dims().1),
        }
    }

    pub fn device(&self) -> &Device {
        match self {
            Self::Dense(weight) => weight.device(),
            Self::Quantized(parts) => parts[0].device(),
            Self::Mixed(parts) => parts[0].device(),
        }
    }

    pub fn bytes(&self) -> u64 {
        match self {
            Self::Dense(weight) => crate::kernels::bytes(weight),
            Self::Quantized(parts) => parts.iter().map(QuantizedMatrix::bytes).sum(),
            Self::Mixed(parts) => parts.iter().map(Matrix::bytes).sum(),
        }
    }

    /// Returns the format of a quantized matrix; `None` for floats and for several formats.
    pub fn format(&self) -> Option<Format> {
        match self {
            Self::Quantized(parts) => {
                Some(parts[0].format).filter(|first| parts.iter().all(|part| part.format == *first))
            }
            _ => None,
        }
    }

    /// Returns how the input of a product is rounded; `None` for floats and if the parts differ.
    pub fn input_rounding(&self) -> Option<InputRounding> {
        match self {
            Self::Quantized(parts) => {
                Some(parts[0].input_rounding).filter(|first| parts.iter().all(|part| part.input_rounding == *first))
            }
            _ => None,
        }
    }

    /// Returns rows `first` to `first + rows`, which share memory with this matrix.
    /// Fails for a matrix of several parts.
    pub fn rows(&self, first: usize, rows: usize) -> Result<Self> {
        Ok(match self {
            Self::Dense(weight) => Self::Dense(weight.narrow(0, first, rows)?),
            Self::Quantized(parts) if parts.len() == 1 => Self::Quantized(vec![parts[0].rows(first, rows)?]),
            _ => bail!("cannot take rows of a matrix in several parts"),
        })
    }

    /// Returns x · Wᵀ, f32 \[T, R\]. x \[T, C\] has the dtype of a dense weight.
    pub fn matmul(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(weight) => matmul_f32(x, weight),
            Self::Quantized(parts) => match self.device() {
                #[cfg(feature = "cuda")]
                Device::Cuda(device) => quantized_ops::matmul(device, parts, x),
                _ => {
                    let products = parts.iter().map(|part| part.matmul(x)).collect::<Result<Vec<_>>>()?;
                    Tensor::cat(&products, 1)
                }
            },
            Self::Mixed(parts) => Tensor::cat(&parts.iter().map(|part| part.matmul(x)).collect::<Result<Vec<_>>>()?, 1),
        }
    }

    /// Returns the rows for ids u32 \[T\], multiplied by `scale`, as f32 \[T, C\].
    /// Every id must be below R; a GPU does not check it.
    pub fn embed(&self, ids: &Tensor, scale: f32) -> Result<Tensor> {
        match self {
            Self::Dense(table) => crate::kernels::rows::embed(table, ids, scale),
            Self::Quantized(parts) if parts.len() == 1 => parts[0].embed(ids, scale),
            _ => bail!("cannot use a matrix in several parts as an embedding"),
        }
    }
}
