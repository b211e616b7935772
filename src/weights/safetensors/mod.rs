//! safetensors files: the tensors of a model in one file or in shards.
//!
//! - `checkpoint`: the open files of a model that is loaded
//! - `header`: reads headers without loading a model

mod checkpoint;
pub mod header;

pub use checkpoint::{SafetensorsCheckpoint, TensorView, module, stacked_name};
