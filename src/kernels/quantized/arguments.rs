//! Weights as kernel arguments, whether quantized or not.

use candle_core::{Result, bail};

use super::cuda::RawParts;
use super::{Matrix, QuantizedMatrix};
use crate::kernels::launch::Arguments;

impl Arguments {
    /// Adds a weight: the address of an unquantized one, or the parts of a quantized one by value.
    pub fn matrix(self, matrix: &Matrix) -> Result<Self> {
        match matrix {
            Matrix::Dense(weight) => self.tensor(weight),
            Matrix::Quantized(parts) => self.parts(parts),
            Matrix::Mixed(_) => bail!("no kernel takes a weight with quantized and unquantized parts"),
        }
    }

    /// Adds two weights of one kind: two addresses, or the parts of both as one value.
    pub fn pair(self, first: &Matrix, second: &Matrix) -> Result<Self> {
        match (first, second) {
            (Matrix::Dense(first), Matrix::Dense(second)) => self.tensor(first)?.tensor(second),
            (Matrix::Quantized(first), Matrix::Quantized(second)) => self.parts(&[first.as_slice(), second].concat()),
            _ => bail!("no kernel takes a quantized and an unquantized weight together"),
        }
    }

    /// Adds how a kernel rounds the input of a product with a quantized weight. Adds nothing for an unquantized weight.
    pub fn rounding(self, matrix: &Matrix) -> Result<Self> {
        let Matrix::Quantized(parts) = matrix else { return Ok(self) };
        let rounding = parts[0].input_rounding;
        if parts.iter().any(|part| part.input_rounding != rounding) {
            bail!("the parts of a weight round their input in different ways");
        }
        let (kind, scale) = rounding.arguments();
        Ok(self.int(kind).float(scale))
    }

    /// Adds quantized matrices by value.
    pub fn parts(self, parts: &[QuantizedMatrix]) -> Result<Self> {
        Ok(self.value(RawParts::new(parts)?, parts.iter().flat_map(QuantizedMatrix::tensors)))
    }
}
