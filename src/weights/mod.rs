//! Opens checkpoints and loads their tensors by Hugging Face name.
//! The dtype and shape of each tensor are checked before use.
//!
//! [Internal](crate#stable-api): can change in any release.
//!
//! - `checkpoint`: the tensors of a model under their Hugging Face names, from `safetensors` or `gguf` files
//! - `safetensors/`, `gguf/`: the two file formats
//! - `inventory`: the tensors of a checkpoint and their sizes in the files and in memory
//! - `tensor_info`, `tensor_kind`: the dtype, the shape and the kind of a tensor
//! - `division`: how ranks divide the tensors, computed from the headers
//! - `tensor_table`: what a model does with each tensor, as its family declares
//! - `builder`: configures how the weights are loaded
//! - `loader`, `matrix`, `mxfp4`: load tensors, matrices and the experts of gpt-oss for the layers in `nn`
//! - `reading/`: reads the bytes of files, ahead of requests, in parts, or together with other ranks
//! - `ggml/`, `compressed`: the quantized formats of GGUF and of compressed-tensors
//! - `quantized`: converts quantized rows and floats to the memory format of the kernels
//! - `progress`: records the loaded tensors
//! - `unused`: finds tensors that the model does not use

mod builder;
mod checkpoint;
pub mod compressed;
pub mod division;
pub mod ggml;
pub mod gguf;
pub mod inventory;
mod loader;
mod matrix;
pub mod mxfp4;
mod progress;
pub mod quantized;
mod reading;
mod safetensors;
mod tensor_info;
mod tensor_kind;
pub mod tensor_table;
mod unused;

pub use builder::WeightsBuilder;
pub use checkpoint::Checkpoint;
pub use inventory::{Inventory, WeightsSummary};
pub use loader::Weights;
pub use progress::LoadProgress;
pub use reading::{
    ByteRange, PartReader, ReadAheadOptions, ReadAheadReader, ReadRequest, Residency, RowBuffer, RowSource,
    StoredBytes, StoredRows, WeightsFile,
};
pub use tensor_info::{StoredDtype, TensorInfo};
pub use tensor_table::TensorTable;
