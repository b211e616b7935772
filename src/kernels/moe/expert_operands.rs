//! The operands of `expert_matmul`: the weights of all experts, and the inputs of its kernels.

use candle_core::{Result, Tensor};

use super::mxfp4::mxfp4_dims;
#[cfg(feature = "cuda")]
use super::mxfp4_tiles::Mxfp4Tiles;
use crate::kernels::bytes;
use crate::kernels::matrix::Matrix;
use crate::kernels::quantized::QuantizedMatrix;

/// The weight matrices of all experts, each `[rows, columns]`.
#[derive(Clone, Debug)]
pub enum ExpertWeights {
    /// MXFP4 weights: blocks u8 `[experts, rows, columns / 32, 16]` and scales u8 `[experts, rows, columns / 32]`.
    Mxfp4 { blocks: Tensor, scales: Tensor },
    /// Float weights: `[experts, rows, columns]` in the compute dtype.
    Dense(Tensor),
    /// Quantized weights: one matrix `[experts * rows, columns]`, and the number of experts.
    Quantized(QuantizedMatrix, usize),
    /// MXFP4 weights repacked for tensor cores.
    /// Used on a GPU if the compute dtype is bf16 or f16 and no scale is NaN or exceeds 2.
    #[cfg(feature = "cuda")]
    Mxfp4Tiles(Mxfp4Tiles),
}

impl ExpertWeights {
    /// Returns the dimensions of the weights, `(experts, rows, columns)`.
    pub fn dims(&self) -> Result<(usize, usize, usize)> {
        match self {
            ExpertWeights::Mxfp4 { blocks, scales } => mxfp4_dims(blocks, scales),
            ExpertWeights::Dense(weights) => weights.dims3(),
            ExpertWeights::Quantized(matrix, experts) => {
                let (rows, columns) = matrix.dims();
                Ok((*experts, rows / experts, columns))
            }
            #[cfg(feature = "cuda")]
            ExpertWeights::Mxfp4Tiles(tiles) => Ok(tiles.dims()),
        }
    }

    /// Returns the weights of all experts as one matrix `[experts * rows, columns]`, or `None` for MXFP4 weights.
    pub fn as_matrix(&self) -> Result<Option<Matrix>> {
        Ok(match self {
            ExpertWeights::Dense(weights) => Some(Matrix::Dense(weights.flatten(0, 1)?)),
            ExpertWeights::Quantized(matrix, _) => Some(Matrix::Quantized(vec![matrix.clone()])),
            _ => None,
        })
    }

    /// Returns the size of the weights on the device, in bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            ExpertWeights::Mxfp4 { blocks, scales } => bytes(blocks) + bytes(scales),
            ExpertWeights::Dense(weights) => bytes(weights),
            ExpertWeights::Quantized(matrix, _) => matrix.bytes(),
            #[cfg(feature = "cuda")]
            ExpertWeights::Mxfp4Tiles(tiles) => tiles.bytes(),
        }
    }
}

/// The inputs of `expert_matmul` without the weights, for the kernels.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy)]
pub(super) struct ExpertInputs<'t> {
    pub x: &'t Tensor,
    pub bias: Option<&'t Tensor>,
    pub ids: &'t Tensor,
    /// The number of consecutive ids that share a row of x: `chosen`, or 1 if x has three dimensions.
    pub pairs_per_x: usize,
}

#[cfg(feature = "cuda")]
impl ExpertInputs<'_> {
    /// Returns the shape of the product with weights of `rows` rows, `(tokens, chosen, rows)`.
    pub fn output_shape(&self, rows: usize) -> Result<(usize, usize, usize)> {
        let (tokens, chosen) = self.ids.dims2()?;
        Ok((tokens, chosen, rows))
    }
}
