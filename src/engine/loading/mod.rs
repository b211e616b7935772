//! Loads a model and plans its memory.
//!
//! - `load`: reads the config, checks that the model fits, and loads it; `load_ranks`: loads the part of each rank
//! - `memory`: the memory plan of one rank; `rank_memory`: the plans of all ranks together;
//!   `memory_limit`: how much of each device's memory the engine may use
//! - `info`: the properties of the loaded model, and the load times

mod info;
mod load;
mod load_ranks;
pub mod memory;
mod memory_limit;
mod rank_memory;

pub use info::{LoadTimes, ModelInfo};
pub use load::{LoadOptions, load};
pub use memory_limit::MemoryLimit;
