//! RMSNorm (arXiv 1910.07467): x / sqrt(mean(x²) + eps) · w; and LayerNorm (arXiv 1607.06450), which takes the mean from x
//! first and adds a bias last. Both are computed in f32.

use anyhow::Result;
use candle_core::{DType, Tensor};

use crate::kernels;
use crate::weights::Weights;

/// How a model's norms are.
#[derive(Clone, Copy, Debug)]
pub struct NormConfig {
    pub kind: NormKind,
    pub eps: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    Rms,
    /// RMSNorm whose checkpoints hold w - 1 (Gemma).
    RmsOffByOne,
    /// LayerNorm with a bias.
    Layer,
}

impl NormConfig {
    pub fn rms(eps: f64) -> Self {
        Self { kind: NormKind::Rms, eps }
    }
}

pub struct Norm {
    /// f32 `[C]`
    pub(crate) weight: Tensor,
    /// f32 `[C]`, of a LayerNorm.
    pub(crate) bias: Option<Tensor>,
    pub(crate) eps: f32,
}

impl Norm {
    /// `weight` \[C\] and, for a LayerNorm, `bias` \[C\].
    pub fn load(weights: &Weights, size: usize, config: NormConfig) -> Result<Self> {
        let weight = weights.float_as("weight", &[size], DType::F32)?;
        let bias = match config.kind {
            NormKind::Layer => Some(weights.float_as("bias", &[size], DType::F32)?),
            NormKind::Rms | NormKind::RmsOffByOne => None,
        };
        let weight = if config.kind == NormKind::RmsOffByOne { (weight + 1.0)? } else { weight };
        Ok(Self { weight, bias, eps: config.eps as f32 })
    }

    /// Bytes of weight and bias.
    pub fn bytes(&self) -> u64 {
        kernels::bytes(&self.weight) + self.bias.as_ref().map_or(0, kernels::bytes)
    }

    /// x + y, f32 \[T, C\], and its norm in `dtype`.
    pub fn add(&self, x: &Tensor, y: Option<&Tensor>, dtype: DType) -> Result<(Tensor, Tensor)> {
        Ok(kernels::norm::add_norm(x, y, &self.weight, self.bias.as_ref(), self.eps, dtype)?)
    }

    /// The norm of x, f32 \[T, C\], in f32.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.add(x, None, DType::F32)?.1)
    }
}
