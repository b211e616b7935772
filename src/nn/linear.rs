//! y = x·Wᵀ + b.

use anyhow::Result;
use candle_core::Tensor;

use crate::weights::Weights;

/// Whether a projection has a bias; the config says, not the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    With,
    Without,
}

impl From<bool> for Bias {
    fn from(with: bool) -> Self {
        if with { Bias::With } else { Bias::Without }
    }
}

pub struct Linear {
    /// [out, in]
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// `weight` [out, in] and, `With` a bias, `bias` [out].
    pub fn load(weights: &Weights, input: usize, output: usize, bias: Bias) -> Result<Self> {
        let weight = weights.float("weight", &[output, input])?;
        let bias = (bias == Bias::With).then(|| weights.float("bias", &[output])).transpose()?;
        Ok(Self { weight, bias })
    }

    /// A layer on a weight [out, in] that another layer owns: tied embeddings.
    pub fn tied(weight: Tensor) -> Self {
        Self { weight, bias: None }
    }

    /// x [T, in] → [T, out].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = x.matmul(&self.weight.t()?)?;
        Ok(match &self.bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        })
    }
}
