//! y = x·Wᵀ + b.

use anyhow::Result;
use candle_core::{DType, Tensor};

use crate::kernels::{self, quantized::Matrix, rows::add_bias};
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
    /// `[out, in]`
    pub(crate) weight: Matrix,
    /// f32 `[out]`
    pub(crate) bias: Option<Tensor>,
}

impl Linear {
    /// `weight` \[out, in\] and, `With` a bias, `bias` \[out\].
    pub fn load(weights: &Weights, input: usize, output: usize, bias: Bias) -> Result<Self> {
        Self::load_stacked(&[(weights.clone(), output)], input, bias)
    }

    /// The same with a weight of floats in a dtype of the caller's choice, which inputs must have too.
    pub fn load_as(weights: &Weights, input: usize, output: usize, bias: Bias, dtype: DType) -> Result<Self> {
        let weight = Matrix::Dense(weights.float_as("weight", &[output, input], dtype)?);
        let bias = (bias == Bias::With).then(|| weights.float_as("bias", &[output], DType::F32)).transpose()?;
        Ok(Self { weight, bias })
    }

    /// Several projections of one input as one: `parts` are their places and sizes.
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

    /// `weight` \[in, out\], stored the other way round (GPT-2's `Conv1D`), and `bias` \[out\].
    pub fn load_transposed(weights: &Weights, input: usize, output: usize) -> Result<Self> {
        let weight = match weights.transposed("weight", output, input)? {
            Some(weight) => weight,
            None => Matrix::Dense(weights.float("weight", &[input, output])?.t()?.contiguous()?),
        };
        Ok(Self { weight, bias: Some(weights.float_as("bias", &[output], DType::F32)?) })
    }

    /// Rows `first` to `first + rows` of the weight, as a layer without a bias that shares its memory.
    pub fn rows(&self, first: usize, rows: usize) -> Result<Self> {
        Ok(Self { weight: self.weight.rows(first, rows)?, bias: None })
    }

    /// A layer on a weight \[out, in\] that another layer owns: tied embeddings.
    pub fn tied(weight: Matrix) -> Self {
        Self { weight, bias: None }
    }

    /// Bytes of weight and bias.
    pub fn bytes(&self) -> u64 {
        self.weight.bytes() + self.bias.as_ref().map_or(0, kernels::bytes)
    }

    /// The product alone, without the bias.
    pub fn product(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.weight.matmul(x)?)
    }

    /// x \[T, in\], of the weight's dtype where that is of floats → \[T, out\] f32.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.product(x)?;
        Ok(match &self.bias {
            Some(bias) => add_bias(&y, bias)?,
            None => y,
        })
    }
}
