//! GGUF files, versions 2 and 3, little-endian: metadata and tensors, in one file or in shards.
//!
//! Source: the format specification (ggml-org/ggml, `docs/gguf.md`).
//!
//! candle's GGUF parser is not used, because it panics on an alignment of 0 and accepts duplicate names and overlapping
//! tensors. inferno's parser checks every count, length and offset before using it, so a malicious file causes an error
//! instead of a panic or a huge allocation.
//!
//! The bytes of the header stay in memory, and a metadata value is read from them whenever it is requested.
//! The constants in [`limits`] bound the memory that a parsed header takes.
//!
//! - `file/`: opens one file, or all shards of a sharded model
//! - `architectures/`: the supported architectures, and how their files differ from Hugging Face checkpoints
//! - `model/`: presents a file as a checkpoint whose tensors have their Hugging Face names
//! - `config`: converts metadata to the fields of config.json and generation_config.json
//! - `vocabulary`: the vocabulary and the chat template
//! - `tensor_names`: the names of layer tensors and of RoPE factors
//! - `limits`: limits on the contents of files

mod architectures;
mod config;
mod file;
pub mod limits;
mod model;
mod tensor_names;
mod vocabulary;

pub use file::{
    Array, GgufCheckpoint, GgufHeader, GgufMetadata, GgufTensorInfo, GgufTensorView, ReadRange, Value, ValueType,
};
pub use model::GgufModel;
pub use vocabulary::{chat_template, vocabulary};
