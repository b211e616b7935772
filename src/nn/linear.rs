//! The linear layer, y = x·Wᵀ + b.

use anyhow::Result;
use candle_core::{DType, Tensor};

use crate::kernels::{self, quantized::Matrix, rows::add_bias};
use crate::weights::Weights;

/// Whether a projection has a bias. config.json decides this, not the tensors that a file has.
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
    /// `[out, in]`
    pub(crate) weight: Matrix,
    /// f32 `[out]`
    pub(crate) bias: Option<Tensor>,
}

impl Linear {
    /// Loads `weight` \[out, in\] and, if there is a bias, `bias` \[out\].
    pub fn load(weights: &Weights, input: usize, output: usize, bias: Bias) -> Result<Self> {
        Self::load_stacked(&[(weights.clone(), output)], input, bias)
    }

    /// Loads a float weight in the given dtype. Inputs must have that dtype too.
    pub fn load_with_dtype(weights: &Weights, input: usize, output: usize, bias: Bias, dtype: DType) -> Result<Self> {
        let weight = Matrix::Dense(weights.float_as("weight", &[output, input], dtype)?);
        let bias = (bias == Bias::With).then(|| weights.float_as("bias", &[output], DType::F32)).transpose()?;
        Ok(Self { weight, bias })
    }

    /// Loads several projections of one input as one layer. `parts` are their weights and output sizes.
    pub fn load_stacked(parts: &[(Weights, usize)], input: usize, bias: Bias) -> Result<Self> {
        let weight = Weights::matrix(parts, "weight", input)?;
        let biases = match bias {
            Bias::Without => Vec::new(),
            Bias::With => {
                let load = |(weights, output): &(Weights, usize)| weights.float_as("bias", &[*output], DType::F32);
                parts.iter().map(load).collect::<Result<Vec<_>>>()?
            }
        };
        let bias = match biases.as_slice() {
            [] => None,
            [bias] => Some(bias.clone()),
            several => Some(Tensor::cat(several, 0)?),
        };
        Ok(Self { weight, bias })
    }

    /// Loads `weight`, stored transposed as \[in, out\] (GPT-2's `Conv1D`), and `bias` \[out\].
    pub fn load_transposed(weights: &Weights, input: usize, output: usize) -> Result<Self> {
        let weight = match weights.transposed("weight", output, input)? {
            Some(weight) => weight,
            None => Matrix::Dense(weights.float("weight", &[input, output])?.t()?.contiguous()?),
        };
        Ok(Self { weight, bias: Some(weights.float_as("bias", &[output], DType::F32)?) })
    }

    /// Returns `rows` rows of the weight, from row `first` on, as a layer without a bias that shares their memory.
    pub fn rows(&self, first: usize, rows: usize) -> Result<Self> {
        Ok(Self { weight: self.weight.rows(first, rows)?, bias: None })
    }

    /// Returns a layer that shares its weight \[out, in\] with the embedding.
    pub fn tied(weight: Matrix) -> Self {
        Self { weight, bias: None }
    }

    /// Returns the bytes of weight and bias.
    pub fn bytes(&self) -> u64 {
        self.weight.bytes() + self.bias.as_ref().map_or(0, kernels::bytes)
    }

    /// Returns x·Wᵀ, without the bias.
    pub fn matmul(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.weight.matmul(x)?)
    }

    /// Maps x \[T, in\] to \[T, out\] f32. If the weight is not quantized, x must have its dtype.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.matmul(x)?;
        Ok(match &self.bias {
            Some(bias) => add_bias(&y, bias)?,
            None => y,
        })
    }
}
