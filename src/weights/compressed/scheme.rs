//! [`Scheme`]: how the weights and the inputs of a linear layer are quantized.

use crate::kernels::quantized;

/// The quantization scheme of a linear layer. Quantization is always symmetric: value = code · scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheme {
    pub code_type: CodeType,
    pub weight_scales: WeightScales,
    pub activations: Activations,
    /// Whether four 8-bit codes are packed into each 32-bit word.
    pub is_packed: bool,
}

/// The type of the quantized values (codes).
/// A code is the value divided by the scale, rounded half to even, and clamped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeType {
    /// Codes from -128 to 127. A per-token scale is the token's largest magnitude divided by 127.5, so -128 can occur.
    /// A value that is 127.5 times the scale rounds to 128 and is clamped to 127.
    Int8,
    /// E4M3 codes with magnitudes up to 448 and no infinities.
    /// A per-token scale is the token's largest magnitude divided by 448.
    Fp8,
}

impl CodeType {
    /// Returns the format of the loaded weight matrix.
    pub fn weight_format(self) -> quantized::WeightFormat {
        match self {
            Self::Int8 => quantized::WeightFormat::Int8,
            Self::Fp8 => quantized::WeightFormat::Fp8,
        }
    }
}

/// The granularity of the weight scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightScales {
    PerTensor,
    /// One scale per row of the matrix `[out, in]`.
    PerChannel,
}

/// The quantization of a linear layer's input. Input codes have the same [`CodeType`] as weight codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// Only the weights of the layer are quantized.
    Unquantized,
    /// Each token has its own input scale, computed at run time and at least the smallest positive normal f32.
    PerToken,
    /// All tokens use the `input_scale` of the layer in the checkpoint.
    Static,
}
