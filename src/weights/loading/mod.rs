//! Loads the tensors of a checkpoint to a device, for the layers in `nn`.
//!
//! - `builder`: configures how the weights are loaded
//! - `loader`, `matrix`, `mxfp4`: load tensors, matrices and the experts of gpt-oss
//! - `progress`: records the loaded tensors
//! - `unused`: finds tensors that the model does not use

mod builder;
mod loader;
mod matrix;
pub mod mxfp4;
mod progress;
mod unused;

pub use builder::WeightsBuilder;
pub use loader::Weights;
pub use progress::LoadProgress;
