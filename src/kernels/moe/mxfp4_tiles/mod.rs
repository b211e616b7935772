//! The MLP of routed experts with MXFP4 weights in tiles, for GPUs.
//!
//! `expert_mlp` runs the MLP, `product_kernel` selects the kernels of its matrix products, and `tiles` has the weights.

mod expert_few_pairs;
pub mod expert_mlp;
mod product_kernel;
mod tiles;

pub use tiles::{Mxfp4Tiles, RowOrder};
