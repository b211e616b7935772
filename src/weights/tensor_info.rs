//! Describes a tensor by its dtype, shape and size.

use std::fmt;

use candle_core::DType;
use safetensors::tensor::Dtype;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{self, StrDeserializer};

use super::ggml::GgmlType;

/// The dtype, shape and size of one tensor, from the headers of the files.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// The dtype in the file, except that packed int8 weights count as I8.
    /// In GGUF files, the MXFP4 experts of gpt-oss count as U8, and all other quantized tensors as F32.
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    bytes: usize,
}

/// The rows and columns of a matrix `[out, in]`. Stacked matrices count as one matrix with their rows combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    pub rows: usize,
    pub columns: usize,
}

/// The dtype of a tensor in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredDtype {
    /// A dtype of safetensors files. Int8 weights packed in I32 words count as I8, and the MXFP4 experts of gpt-oss in
    /// a GGUF file count as U8.
    Safetensors(Dtype),
    /// A type of GGUF files. A tensor that is built from several GGUF tensors has the type of the first one.
    Ggml(GgmlType),
    /// A dtype that the `safetensors` crate does not know, in lower case. Only the headers of a model that is described
    /// but not loaded can have such a dtype.
    Unknown(String),
}

impl MatrixShape {
    /// Returns the rows and columns of a tensor of shape `shape`, or `None` for a vector or scalar.
    pub(super) fn of(shape: &[usize]) -> Option<Self> {
        match shape {
            [rows @ .., columns] if !rows.is_empty() => Some(Self { rows: rows.iter().product(), columns: *columns }),
            _ => None,
        }
    }
}

impl TensorInfo {
    /// Describes a tensor that takes `bytes` bytes in the file.
    pub(super) fn new(dtype: Dtype, shape: Vec<usize>, bytes: usize) -> Self {
        Self { dtype, shape, bytes }
    }

    /// Returns the size of the tensor in the file, in bytes. A GGUF file may store the tensor in fewer bytes than `dtype`
    /// suggests.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns whether the dtype is a float dtype that can be loaded: F32, F16, BF16 and E4M3.
    pub fn is_float(&self) -> bool {
        matches!(self.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8_E4M3)
    }

    /// Returns whether the dtype is U8. Both safetensors and GGUF checkpoints list packed MXFP4 blocks and scales as U8.
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

impl StoredDtype {
    /// Parses a dtype in the header of a safetensors file, such as `BF16`.
    pub fn from_header(dtype: &str) -> Self {
        let deserializer: StrDeserializer<'_, value::Error> = dtype.into_deserializer();
        Dtype::deserialize(deserializer).map_or_else(|_| Self::Unknown(dtype.to_lowercase()), Self::Safetensors)
    }

    pub fn is_u8(&self) -> bool {
        *self == Self::Safetensors(Dtype::U8)
    }
}

/// Writes the dtype in lower case, such as `bf16`, `f8_e4m3` or `q4_k`.
impl fmt::Display for StoredDtype {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Safetensors(dtype) => f.write_str(&dtype.to_string().to_lowercase()),
            Self::Ggml(ggml_type) => f.write_str(&ggml_type.name().to_lowercase()),
            Self::Unknown(dtype) => f.write_str(dtype),
        }
    }
}
