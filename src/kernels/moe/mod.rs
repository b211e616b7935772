//! Mixture of experts: routing and matrix products.
//!
//! A *pair* is a token and one of its chosen experts. There are tokens · chosen pairs.

#[cfg(feature = "cuda")]
mod expert_few;
#[cfg(feature = "cuda")]
pub mod expert_mlp;
pub mod expert_usage;
pub mod experts;
pub mod grouped_gemm;
pub mod mxfp4;
#[cfg(feature = "cuda")]
pub mod mxfp4_tiles;
#[cfg(feature = "cuda")]
mod product_kernel;
#[cfg(feature = "cuda")]
pub mod route;
#[cfg(feature = "cuda")]
mod sort_by_expert;
pub mod topk;

pub use crate::kernels::constants::{MAX_CHOSEN_EXPERTS, MAX_EXPERTS};
