//! Loads a model and plans its memory.
//!
//! - `load`: loads the tokenizer and the model at the same time; `options`: the options for loading
//! - `on_device`: checks that the model fits, and loads it onto the devices; `load_ranks`: loads the part of each rank
//! - `memory`: the memory plan of one rank; `rank_memory`: the plans of all ranks together;
//!   `memory_limit`: how much of each device's memory the engine may use
//! - `info`: the properties of the loaded model, and the load times
//! - `fingerprint`: identifies the files and the settings that determine keys and values

mod fingerprint;
mod info;
mod load;
mod load_ranks;
pub mod memory;
mod memory_limit;
mod on_device;
mod options;
mod rank_memory;

pub use info::{LoadTimes, ModelInfo};
pub use load::load;
pub use memory_limit::MemoryLimit;
pub use options::LoadOptions;
