//! RMSNorm (arXiv 1910.07467): x / sqrt(mean(x²) + eps) · w, computed in f32.

use anyhow::Result;
use candle_core::{DType, Tensor};

use crate::kernels;
use crate::weights::Weights;

pub struct RmsNorm {
    weight: Tensor,
    eps: f32,
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

    /// x \[.., C\] f32 → the same.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(candle_nn::ops::rms_norm(x, &self.weight, self.eps)?)
    }
}
