//! RMSNorm (arXiv 1910.07467): x / sqrt(mean(x²) + eps) · w, computed in f32.

use anyhow::Result;
use candle_core::{DType, Tensor};

use crate::kernels;
use crate::weights::Weights;

pub struct RmsNorm {
    pub(crate) weight: Tensor,
    pub(crate) eps: f32,
}

impl RmsNorm {
    /// `weight` \[C\].
    pub fn load(weights: &Weights, size: usize, eps: f64) -> Result<Self> {
        Ok(Self { weight: weights.float_as("weight", &[size], DType::F32)?, eps: eps as f32 })
    }

    /// Bytes of the weight.
    pub fn bytes(&self) -> u64 {
        kernels::bytes(&self.weight)
    }

    /// x + y, f32 \[T, C\], and its norm in `dtype`.
    pub fn add(&self, x: &Tensor, y: Option<&Tensor>, dtype: DType) -> Result<(Tensor, Tensor)> {
        Ok(kernels::norm::add_norm(x, y, &self.weight, self.eps, dtype)?)
    }
}
