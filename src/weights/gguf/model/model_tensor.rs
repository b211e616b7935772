//! The tensors of a model and the GGUF tensors that they are built from.

use safetensors::tensor::Dtype;

use crate::weights::ggml::GgmlType;
use crate::weights::tensor_info::TensorInfo;

/// A tensor of the model and the GGUF tensors that it is built from.
pub struct ModelTensor {
    pub info: TensorInfo,
    /// The names of the GGUF tensors. All sources have the same shape.
    pub sources: Vec<String>,
    pub rows: RowMapping,
    pub transform: Transform,
}

/// The mapping from the rows of a tensor to the rows of its sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowMapping {
    /// Row i of the tensor is row i of its only source.
    Identity,
    /// The file alternates rows from the first and the second half of each head. Holds the number of rows per head.
    InterleavedHalves(usize),
    /// The tensor takes rows from each source tensor in turn. Holds the number of rows per turn.
    RoundRobin(usize),
}

/// How loading changes the values or the layout of the source rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transform {
    None,
    /// Treats each element of the source as one row, so that the row mapping reorders the elements of a bias.
    /// The bias is a vector, or has the shape `[experts, rows]`.
    Vector,
    /// Subtracts 1, because the file stores each norm weight as the Hugging Face value plus 1.
    MinusOne,
    /// Transposes a matrix, or each matrix of a stack.
    Transposed,
    /// Extracts the 4-bit elements of MXFP4 blocks.
    Mxfp4Elements,
    /// Extracts the scales of MXFP4 blocks.
    Mxfp4Scales,
}

/// Returns the dtype that [`TensorInfo`] reports for a tensor of a ggml type: F32 if the type is quantized.
/// For the MXFP4 experts of gpt-oss, `experts.rs` replaces this dtype with U8.
pub fn default_dtype(ggml_type: GgmlType) -> Dtype {
    match ggml_type {
        GgmlType::F16 => Dtype::F16,
        GgmlType::Bf16 => Dtype::BF16,
        _ => Dtype::F32,
    }
}
