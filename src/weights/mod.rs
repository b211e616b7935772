//! Opens checkpoints and loads their tensors by Hugging Face name.
//! The dtype and shape of each tensor are checked before use.
//!
//! - `checkpoint`: the tensors of a model under their Hugging Face names, from `safetensors` or `gguf` files
//! - `source`: reads bytes of files
//! - `safetensors_header`: reads headers without loading a model
//! - `inventory`, `tensor_info`: the tensors of a checkpoint and their sizes in the files and in memory
//! - `division`: how ranks divide the tensors, computed from the headers
//! - `builder`: chooses how the weights are loaded
//! - `loader`, `matrix`, `mxfp4`: load tensors, matrices and experts for the layers in `nn`
//! - `reader`: the threads of a rank that read
//! - `read_ahead`: reads whole tensors on background threads before they are requested
//! - `part_reader`, `part`: read the part of each tensor that a rank holds
//! - `shared_reads`: reads bytes only once if several ranks need them
//! - `ggml`, `compressed`: the quantized formats of GGUF and of compressed-tensors
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
mod part;
pub mod part_reader;
mod progress;
pub mod quantized;
pub mod read_ahead;
mod reader;
mod safetensors;
mod safetensors_header;
mod shared_reads;
mod source;
mod tensor_info;
mod unused;

pub use builder::WeightsBuilder;
pub use checkpoint::Checkpoint;
pub use inventory::{Inventory, WeightsSummary};
pub use loader::Weights;
pub use progress::LoadProgress;
pub use source::{ByteRange, RowBuffer, RowSource, Source, StoredBytes, StoredRows};
pub use tensor_info::TensorInfo;
