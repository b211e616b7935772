//! RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450), computed in f32.
//!
//! RMSNorm is x / sqrt(mean(x²) + eps) · w. LayerNorm first subtracts the mean of x, and finally adds a bias.
//!
//! The norms use `kernels::norm`. Unlike candle_nn's norms, it first adds the output of attention or of an MLP to
//! the residual stream, and casts the normalized sum to a given dtype. The weights are f32 in every compute dtype.

use anyhow::Result;
use candle_core::{DType, Tensor};

use crate::kernels;
use crate::kernels::norm::Addend;
use crate::weights::Weights;

/// The kind of norm that a model uses, and its epsilon.
#[derive(Clone, Copy, Debug)]
pub struct NormConfig {
    pub kind: NormKind,
    pub eps: f64,
}

/// The kinds of norms of the supported families.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// RMSNorm: x / sqrt(mean(x²) + eps) · w.
    Rms,
    /// RMSNorm. Safetensors files store each weight w as w - 1 (Gemma), and [`Norm::load`] adds 1.
    /// GGUF files store w. Reading these files subtracts 1, so that `Norm::load` can always add 1.
    RmsOffByOne,
    /// LayerNorm with a bias.
    Layer,
}

impl NormConfig {
    pub fn rms(eps: f64) -> Self {
        Self { kind: NormKind::Rms, eps }
    }
}

/// A norm over the last dimension.
pub struct Norm {
    /// The weight, f32 `[size]`.
    pub(crate) weight: Tensor,
    /// The bias of a LayerNorm, f32 `[size]`.
    pub(crate) bias: Option<Tensor>,
    pub(crate) eps: f32,
}

impl Norm {
    /// Loads `weight` and, for a LayerNorm, `bias`. Both have the shape `[size]`.
    pub fn load(weights: &Weights, size: usize, config: NormConfig) -> Result<Self> {
        let weight = weights.float_as("weight", &[size], DType::F32)?;
        let bias = match config.kind {
            NormKind::Layer => Some(weights.float_as("bias", &[size], DType::F32)?),
            NormKind::Rms | NormKind::RmsOffByOne => None,
        };
        let weight = if config.kind == NormKind::RmsOffByOne { (weight + 1.0)? } else { weight };
        Ok(Self { weight, bias, eps: config.eps as f32 })
    }

    /// Returns the size of the weight and the bias in bytes.
    pub fn bytes(&self) -> u64 {
        kernels::bytes(&self.weight) + self.bias.as_ref().map_or(0, kernels::bytes)
    }

    /// Returns the sum x + y, f32 `[tokens, hidden]`, and the normalized sum, in `dtype`. Without y, the sum is x.
    pub fn add_norm(&self, x: &Tensor, y: Option<Addend>, dtype: DType) -> Result<(Tensor, Tensor)> {
        Ok(kernels::norm::add_norm(x, y, &self.weight, self.bias.as_ref(), self.eps, dtype)?)
    }

    /// Normalizes x `[tokens, hidden]`. Input and output are f32.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (_, normed) = self.add_norm(x, None, DType::F32)?;
        Ok(normed)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn largest_difference(a: &Tensor, b: &Tensor) -> f32 {
        (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap()
    }

    #[test]
    fn norms_agree_with_candle_nn() {
        let value = |i: i64| ((i * 37 % 101) as f32 - 50.0) / 17.0;
        let tensor = |shape: &[usize], start: i64| {
            let count = shape.iter().product::<usize>() as i64;
            Tensor::from_iter((start..start + count).map(value), &Device::Cpu).unwrap().reshape(shape).unwrap()
        };
        let x = tensor(&[5, 24], 0);
        let weight = tensor(&[24], 7);
        let bias = tensor(&[24], 90);
        let eps = 1e-5;

        let rms = Norm { weight: weight.clone(), bias: None, eps };
        let expected = candle_nn::ops::rms_norm(&x, &weight, eps).unwrap();
        assert!(largest_difference(&rms.forward(&x).unwrap(), &expected) < 1e-5);

        let layer = Norm { weight: weight.clone(), bias: Some(bias.clone()), eps };
        let expected = candle_nn::ops::layer_norm(&x, &weight, &bias, eps).unwrap();
        assert!(largest_difference(&layer.forward(&x).unwrap(), &expected) < 1e-5);
    }
}
