//! Mixture of experts: routing and matrix products.
//!
//! A *pair* is a token and one of its chosen experts. T tokens with N experts each make T·N pairs.

pub mod experts;
#[cfg(feature = "cuda")]
pub mod experts_gemm;
pub mod grouped_gemm;
pub mod mxfp4;
#[cfg(feature = "cuda")]
mod sort_by_expert;
pub mod topk;

pub use crate::kernels::constants::{MAX_CHOSEN_EXPERTS, MAX_EXPERTS};
