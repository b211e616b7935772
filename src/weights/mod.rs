//! Opens checkpoints and loads their tensors by Hugging Face name.
//! The dtype and shape of each tensor are checked before use.
//!
//! [Internal](crate#stable-api): can change in any release.
//!
//! - `checkpoint`: the tensors of a model under their Hugging Face names, from `safetensors` or `gguf` files
//! - `safetensors/`, `gguf/`: the two file formats
//! - `ggml/`, `compressed/`: the quantized formats of GGUF and of compressed-tensors
//! - `tensor_info`, `tensor_kind`: the dtype, the shape and the kind of a tensor
//! - `tensor_table`: what a model does with each tensor, as its family declares
//! - `inventory/`: the tensors of a checkpoint, their sizes in the files and in memory, and how ranks divide them
//! - `loading/`: loads tensors, matrices and the experts of gpt-oss for the layers in `nn`
//! - `reading/`: reads the bytes of files, ahead of requests, in parts, or together with other ranks
//! - `quantized/`: converts quantized rows and floats to the memory format of the kernels

mod checkpoint;
pub mod compressed;
pub mod ggml;
pub mod gguf;
pub mod inventory;
mod loading;
pub mod quantized;
mod reading;
mod safetensors;
mod tensor_info;
mod tensor_kind;
pub mod tensor_table;

pub use checkpoint::Checkpoint;
pub use inventory::{Inventory, WeightsSummary};
pub use loading::{LoadProgress, Weights, WeightsBuilder, mxfp4};
pub use reading::{
    ByteRange, PartReader, ReadAheadOptions, ReadAheadReader, ReadRequest, Residency, RowBuffer, RowSource,
    StoredBytes, StoredRows, WeightsFile,
};
pub use tensor_info::{StoredDtype, TensorInfo};
pub use tensor_table::TensorTable;
