//! The linear layer, y = x·Wᵀ + b.

use std::ops::Range;

use anyhow::Result;
use candle_core::{DType, Tensor};

use super::residual::{PartialForm, PartialOutput, PartialRows};
use crate::kernels::activation::{Activation, gated_halves};
#[cfg(feature = "cuda")]
use crate::kernels::matmul::size_class::size_classes;
use crate::kernels::{self, SumOrder, matrix::Matrix, rows::add_bias};
use crate::weights::Weights;

pub(super) use crate::weights::inventory::SHARE_COLUMNS;

/// Returns this rank's rows of a matrix that stacks gate_proj and up_proj, in this order.
/// `share` is the rank's part of the intermediate size.
pub(super) fn gate_up_rows(share: &Range<usize>, intermediate_size: usize) -> [Range<usize>; 2] {
    [share.clone(), intermediate_size + share.start..intermediate_size + share.end]
}

/// Whether a projection has a bias. For safetensors files, the model family or config.json decides.
/// GGUF metadata does not say which projections have a bias. If the models of a family differ, the tensors of the first
/// layer in the GGUF file therefore decide.
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

/// A linear layer: y = x · weightᵀ + bias, from `[tokens, in]` to `[tokens, out]`.
pub struct Linear {
    /// The weight matrix, `[out, in]`.
    pub(crate) weight: Matrix,
    /// The bias, f32 `[out]`.
    pub(crate) bias: Option<Tensor>,
}

impl Linear {
    /// Loads `weight`, with shape `[out, in]`. If the layer has a bias, also loads `bias`, with shape `[out]`.
    pub fn load(weights: &Weights, input: usize, output: usize, bias: Bias) -> Result<Self> {
        Self::load_stacked(&[(weights.clone(), output)], input, bias)
    }

    /// Loads a layer whose weight is converted to the float type `dtype`, never quantized. Inputs must have this dtype.
    pub fn load_with_dtype(weights: &Weights, input: usize, output: usize, bias: Bias, dtype: DType) -> Result<Self> {
        let weight = Matrix::Dense(weights.float_as("weight", &[output, input], dtype)?);
        let bias = (bias == Bias::With).then(|| weights.float_as("bias", &[output], DType::F32)).transpose()?;
        Ok(Self { weight, bias })
    }

    /// Loads several projections of the same input as one layer. `stack` has their weights and output sizes.
    pub fn load_stacked(stack: &[(Weights, usize)], input: usize, bias: Bias) -> Result<Self> {
        let weight = Weights::matrix(stack, "weight", input)?;
        let biases = match bias {
            Bias::Without => Vec::new(),
            Bias::With => {
                let load = |(weights, output): &(Weights, usize)| weights.vector("bias", *output, DType::F32);
                stack.iter().map(load).collect::<Result<Vec<_>>>()?
            }
        };
        let bias = match biases.as_slice() {
            [] => None,
            [bias] => Some(bias.clone()),
            several => Some(Tensor::cat(several, 0)?),
        };
        Ok(Self { weight, bias })
    }

    /// Loads a GPT-2 `Conv1D` layer. The weight is stored transposed, `[in, out]`. There is always a bias, `[out]`.
    pub fn load_transposed(weights: &Weights, input: usize, output: usize) -> Result<Self> {
        let weight = weights.transposed("weight", output, input)?;
        Ok(Self { weight, bias: Some(weights.vector("bias", output, DType::F32)?) })
    }

    /// Returns a layer with only `rows` outputs, starting at output `first`. Both layers share memory.
    pub fn rows(&self, first: usize, rows: usize) -> Result<Self> {
        let bias = self.bias.as_ref().map(|bias| bias.narrow(0, first, rows)).transpose()?;
        Ok(Self { weight: self.weight.rows(first, rows)?, bias })
    }

    /// Creates an output head from the embedding `[vocab, hidden]`, or from this rank's rows of it.
    pub fn tied(weight: Matrix) -> Self {
        Self { weight, bias: None }
    }

    /// Returns the size of the weight and the bias in bytes.
    pub fn bytes(&self) -> u64 {
        self.weight.bytes() + self.bias.as_ref().map_or(0, kernels::bytes)
    }

    /// Maps x `[tokens, in]` to this rank's partial result: x·Wᵀ, where x and W have only this rank's columns.
    /// `form` determines the dtype, and whether the product may consist of several terms.
    /// The result includes the bias as a separate vector, which is not yet added.
    pub(super) fn forward_partial(
        &self,
        x: &Tensor,
        sum_order: SumOrder,
        form: PartialForm,
    ) -> Result<PartialOutput<'_>> {
        let rows = match form {
            PartialForm::F32 => PartialRows::Summed(self.weight.matmul(x, sum_order)?),
            PartialForm::ProductTerms => PartialRows::ProductTerms(self.weight.matmul_terms(x, sum_order)?),
            PartialForm::Rounded => PartialRows::Summed(self.weight.matmul_rounded(x, sum_order)?),
        };
        Ok(PartialOutput { rows, bias: self.bias.as_ref() })
    }

    /// Calls `run(x)` with zeros for each size class of up to `tokens` tokens, to load the kernels that `run` launches.
    /// x has the dtype of the weight if the weight is dense, and otherwise `dtype`.
    #[cfg(feature = "cuda")]
    pub(super) fn load_kernels(&self, tokens: usize, dtype: DType, run: impl Fn(&Tensor) -> Result<()>) -> Result<()> {
        let dtype = match &self.weight {
            Matrix::Dense(weight) => weight.dtype(),
            Matrix::Quantized(_) | Matrix::Concatenated(_) => dtype,
        };
        let (rows, columns) = self.weight.dims();
        if rows == 0 || columns == 0 {
            return Ok(());
        }
        for class in size_classes(tokens) {
            // The token count of the largest class can exceed `tokens`, but memory is planned only for `tokens` tokens.
            let tokens = class.min(tokens);
            let x = Tensor::zeros((tokens, columns), dtype, self.weight.device())?;
            run(&x)?;
        }
        Ok(())
    }

    /// Returns x·Wᵀ without the bias, as f32 `[terms, tokens, out]`. The product is the sum over the terms.
    pub fn matmul_terms(&self, x: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
        Ok(self.weight.matmul_terms(x, sum_order)?)
    }

    /// Maps x `[tokens, in]` to activation(gate) · up, `[tokens, out / 2]` in `dtype`.
    /// gate is the first half of the columns of x·Wᵀ + b, and up is the second half.
    /// x has the same dtype as in [`forward`](Self::forward).
    pub fn forward_gated(
        &self,
        x: &Tensor,
        activation: Activation,
        dtype: DType,
        sum_order: SumOrder,
    ) -> Result<Tensor> {
        Ok(match self.bias {
            None => self.weight.matmul_gated(x, activation, dtype, sum_order)?,
            Some(_) => gated_halves(&self.forward(x, sum_order)?, activation, dtype)?,
        })
    }

    /// Maps x `[tokens, in]` to x·Wᵀ + b, f32 `[tokens, out]`.
    /// x must have the dtype of the dense matrices of the weight. If all are quantized, x may have any float dtype.
    pub fn forward(&self, x: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
        self.forward_into(x, sum_order, None)
    }

    /// Like [`forward`](Self::forward), but may write the result to `out`, f32 `[tokens, out]`, and return `out`.
    pub(super) fn forward_into(&self, x: &Tensor, sum_order: SumOrder, out: Option<&Tensor>) -> Result<Tensor> {
        self.add_bias(self.weight.matmul_into(x, sum_order, out)?)
    }

    fn add_bias(&self, y: Tensor) -> Result<Tensor> {
        Ok(match &self.bias {
            Some(bias) => add_bias(&y, bias)?,
            None => y,
        })
    }
}
