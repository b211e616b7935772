//! Loads the tensors of a checkpoint to a device, for the layers in `nn`.
//!
//! - `builder`: configures how the weights are loaded
//! - `weights`: which tensors are loaded, which part of each, and where to
//! - `loader`, `matrix`, `mxfp4`: load tensors, matrices and the experts of gpt-oss
//! - `progress`: records the loaded tensors
//! - `unused`: finds tensors that the model does not use

mod builder;
mod loader;
mod matrix;
pub mod mxfp4;
mod progress;
mod unused;
mod weights;

pub use builder::WeightsBuilder;
pub use progress::LoadProgress;
pub use weights::Weights;
