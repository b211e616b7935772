//! Describes a tensor by its dtype, shape and size.

use candle_core::DType;
use safetensors::tensor::Dtype;

/// The dtype, shape and size of one tensor, from the headers of the files.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// The dtype in the file, except that packed int8 weights count as I8.
    /// In GGUF files, the MXFP4 experts of gpt-oss count as U8, and all other quantized tensors as F32.
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    bytes: usize,
}

impl TensorInfo {
    /// Describes a tensor that takes `bytes` bytes in the file.
    pub(super) fn new(dtype: Dtype, shape: Vec<usize>, bytes: usize) -> Self {
        Self { dtype, shape, bytes }
    }

    /// Returns the size of the tensor in the file, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns true for the float dtypes that can be loaded: F32, F16, BF16 and E4M3.
    pub fn is_float(&self) -> bool {
        matches!(self.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8_E4M3)
    }

    /// Returns true for U8 tensors. Both safetensors and GGUF checkpoints list packed MXFP4 blocks and scales as U8.
    pub fn is_packed(&self) -> bool {
        self.dtype == Dtype::U8
    }

    /// Returns the candle dtype for F32, F16, BF16 and U8, the dtypes that can be loaded without conversion.
    /// Returns `None` for all other dtypes.
    pub fn candle_dtype(&self) -> Option<DType> {
        match self.dtype {
            Dtype::F32 => Some(DType::F32),
            Dtype::F16 => Some(DType::F16),
            Dtype::BF16 => Some(DType::BF16),
            Dtype::U8 => Some(DType::U8),
            _ => None,
        }
    }
}

/// Returns the number of model parameters in a tensor, which is usually the number of elements.
/// `is_bytes` is true for tensors of dtype U8.
/// Packed MXFP4 blocks have two parameters per byte. MXFP4 scales and `weight_shape` have no parameters.
pub(super) fn parameter_count(name: &str, is_bytes: bool, elements: u64) -> u64 {
    let has_no_parameters = if is_bytes { name.ends_with("_scales") } else { name.ends_with(".weight_shape") };
    if has_no_parameters {
        0
    } else if is_bytes && name.ends_with("_blocks") {
        elements.saturating_mul(2)
    } else {
        elements
    }
}
