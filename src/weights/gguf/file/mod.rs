//! Opens GGUF files: parses their headers, and gives access to their metadata and tensors under their GGUF names.
//!
//! - `header`, `metadata`, `cursor`: parse the header of one file
//! - `shard`: opens one file of a model
//! - `shards`: opens all files of a sharded model
//! - `remote`: reads the headers of files on a hub
//! - `checkpoint`: the metadata and the tensors of a model

mod checkpoint;
mod cursor;
mod header;
mod metadata;
mod remote;
mod shard;
mod shards;

pub use checkpoint::{GgufCheckpoint, GgufTensorView};
pub use header::{GgufHeader, GgufTensorInfo};
pub use metadata::{Array, GgufMetadata, Value, ValueType};
pub use remote::ReadRange;
