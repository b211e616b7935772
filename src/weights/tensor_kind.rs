//! What the values of a tensor are, derived from its name and its dtype.

use super::tensor_info::StoredDtype;

/// What the values of a tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorKind {
    /// All tensors that are none of the other kinds.
    Weight,
    /// The bias of a linear layer, or the stacked biases of experts.
    Bias,
    /// The scales of a quantized matrix, except MXFP4.
    WeightScale,
    /// The elements of packed MXFP4 blocks, two in each byte.
    Mxfp4Blocks,
    Mxfp4Scales,
    /// The `weight_shape` of a packed compressed-tensors matrix.
    PackedShape,
    /// Any other tensor that describes how a compressed-tensors checkpoint is quantized (see [`NEVER_LOADED`]).
    NeverLoaded,
}

/// The suffixes of tensors that describe how a compressed-tensors checkpoint is quantized.
/// No family loads them as weights:
/// - activation scales and KV cache scales, which calibration adds
///   (inferno uses only `input_scale`, as a single number)
/// - the shapes and group indices of packed weights
/// - zero points, which are always 0 in symmetric quantization (the only supported kind)
const NEVER_LOADED: [&str; 10] = [
    ".input_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".prob_scale",
    ".prob_output_scale",
    ".weight_shape",
    ".weight_g_idx",
    "_zero_point",
];

impl TensorKind {
    pub fn new(name: &str, dtype: &StoredDtype) -> Self {
        if name.ends_with(".weight_shape") {
            Self::PackedShape
        } else if is_never_loaded(name) {
            Self::NeverLoaded
        } else if name.ends_with("_scale") {
            Self::WeightScale
        } else if dtype.is_u8() && name.ends_with("_blocks") {
            Self::Mxfp4Blocks
        } else if dtype.is_u8() && name.ends_with("_scales") {
            Self::Mxfp4Scales
        } else if name.ends_with("bias") {
            Self::Bias
        } else {
            Self::Weight
        }
    }

    /// Returns true for the two tensors of packed MXFP4 matrices.
    pub fn is_mxfp4(self) -> bool {
        matches!(self, Self::Mxfp4Blocks | Self::Mxfp4Scales)
    }

    /// Returns the number of model parameters in a tensor of this kind with `elements` elements.
    pub fn parameters(self, elements: u64) -> u64 {
        match self {
            Self::Mxfp4Blocks => elements.saturating_mul(2),
            Self::Mxfp4Scales | Self::PackedShape => 0,
            Self::Weight | Self::Bias | Self::WeightScale | Self::NeverLoaded => elements,
        }
    }
}

/// Returns whether `name` ends with one of the suffixes in [`NEVER_LOADED`].
pub fn is_never_loaded(name: &str) -> bool {
    NEVER_LOADED.iter().any(|end| name.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_parameters() {
        for (name, dtype, kind, parameters) in [
            ("mlp.down_proj.weight", "I8", TensorKind::Weight, 6),
            ("mlp.down_proj.weight_scale", "BF16", TensorKind::WeightScale, 6),
            ("mlp.down_proj.weight_shape", "I64", TensorKind::PackedShape, 0),
            ("mlp.down_proj.input_scale", "F32", TensorKind::NeverLoaded, 6),
            ("mlp.down_proj.bias", "F32", TensorKind::Bias, 6),
            ("experts.down_proj_bias", "F32", TensorKind::Bias, 6),
            ("experts.down_proj_blocks", "U8", TensorKind::Mxfp4Blocks, 12),
            ("experts.down_proj_scales", "U8", TensorKind::Mxfp4Scales, 0),
            // Only U8 tensors can be packed MXFP4.
            ("experts.down_proj_blocks", "F32", TensorKind::Weight, 6),
            ("experts.down_proj_scales", "F8_NEW", TensorKind::Weight, 6),
        ] {
            let found = TensorKind::new(name, &StoredDtype::from_header(dtype));
            assert_eq!((found, found.parameters(6)), (kind, parameters), "{name} in {dtype}");
        }
    }
}
