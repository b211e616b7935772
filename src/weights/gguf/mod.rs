//! GGUF files, versions 2 and 3, little-endian: metadata and tensors, in one file or split into parts.
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
//! - `header`, `metadata`, `cursor`: parse the header of one file
//! - `part`, `split`, `checkpoint`: open one file or all parts of a split model, and give access to their tensors
//! - `model`, `model_tensor`, `mapping`, `experts`, `tensor_names`: present the file as a checkpoint whose tensors have
//!   their Hugging Face names
//! - `architectures`, `layout`: the supported architectures, and how their files differ from Hugging Face checkpoints
//! - `config`, `config_fields`, `keys`: convert metadata to the fields of config.json and generation_config.json
//! - `vocabulary`: the vocabulary and the chat template
//! - `remote`: reads the headers of files on a hub
//! - `limits`: limits on the contents of files

mod architectures;
mod checkpoint;
mod config;
mod config_fields;
mod cursor;
mod experts;
mod header;
mod keys;
mod layout;
pub mod limits;
mod mapping;
mod metadata;
mod model;
mod model_tensor;
mod part;
mod remote;
mod split;
mod tensor_names;
mod vocabulary;

pub use checkpoint::{GgufCheckpoint, GgufTensorView};
pub use header::{GgufHeader, GgufTensorInfo};
pub use metadata::{Array, GgufMetadata, Value, ValueType};
pub use model::GgufModel;
pub use remote::ReadRange;
pub use vocabulary::{chat_template, vocabulary};
