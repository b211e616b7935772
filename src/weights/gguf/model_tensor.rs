//! How a tensor of the model is made from tensors of a GGUF file.

use safetensors::tensor::Dtype;

use crate::weights::ggml::GgmlType;
use crate::weights::tensor_info::TensorInfo;

/// A tensor of the model, and the tensors of the file that it is made from.
pub struct ModelTensor {
    pub info: TensorInfo,
    /// Names in the file. All sources have the same shape.
    pub sources: Vec<String>,
    pub rows: RowMapping,
    pub transform: Transform,
}

/// Which row of which source becomes a row of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowMapping {
    /// The same row of the only source.
    Identity,
    /// Heads of this many rows. In the file, the rows of a head's two halves alternate.
    InterleavedHalves(usize),
    /// This many rows of each source in turn.
    RoundRobin(usize),
}

/// What is done to the rows of the sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transform {
    None,
    /// The source is a vector; its elements are the rows.
    Vector,
    /// Subtracts one: the file stores a norm as w + 1.
    MinusOne,
    /// Transposes one matrix or a stack of them.
    Transposed,
    /// Takes the elements of MXFP4 blocks, four bits each.
    Mxfp4Elements,
    /// Takes the scales of MXFP4 blocks.
    Mxfp4Scales,
}

/// Returns the dtype that a tensor of this type is loaded as by default.
pub fn default_dtype(ggml_type: GgmlType) -> Dtype {
    match ggml_type {
        GgmlType::F16 => Dtype::F16,
        GgmlType::Bf16 => Dtype::BF16,
        _ => Dtype::F32,
    }
}
