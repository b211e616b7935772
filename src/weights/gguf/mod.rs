//! GGUF files, versions 2 and 3, little-endian: metadata and tensors, in one file or split into parts.
//!
//! Source: the format's definition (ggml-org/ggml, `docs/gguf.md`).
//! We parse the format ourselves,
//! because candle's parser panics on an alignment of 0 and trusts the counts in a file.
//! This parser checks every number against the file's size before it uses the number, so a hostile file is an error.
//! Strings and arrays stay in the mapped file until a caller asks for them.
//! The limits in [`limits`] bound the memory for a header: some 60 bytes per key and 200 per tensor.

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
pub use header::{GgufTensorInfo, Header};
pub use metadata::{Array, Metadata, Value, ValueType};
pub use model::GgufModel;
pub use remote::{MAX_HEADER_BYTES, ReadRange};
pub use vocabulary::{chat_template, vocabulary};
