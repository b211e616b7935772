//! safetensors files: the tensors of a model in one file or in shards.
//!
//! - `checkpoint`: the open files of a model to load
//! - `header`: reads headers without loading a model

mod checkpoint;
pub mod header;

pub use checkpoint::{SafetensorsCheckpoint, TensorView, module, stacked_name};
