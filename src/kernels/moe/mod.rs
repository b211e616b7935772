//! Mixture of experts: the choice of experts and the products with their weights.

#[cfg(feature = "cuda")]
pub mod expert_mlp;
pub mod experts;
pub mod topk;
