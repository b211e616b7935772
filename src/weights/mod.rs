//! Opens checkpoints and loads their tensors by Hugging Face name.
//! The dtype and shape of each tensor are checked before use.

mod checkpoint;
pub mod compressed;
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
mod safetensors;
mod safetensors_header;
mod source;
mod tensor_info;
mod unused;

pub use checkpoint::Checkpoint;
pub use inventory::{Inventory, WeightsSummary};
pub use loader::Weights;
pub use progress::LoadProgress;
pub use source::{ByteRange, RowBuffer, RowSource, Source, StoredBytes, StoredRows};
pub use tensor_info::TensorInfo;
