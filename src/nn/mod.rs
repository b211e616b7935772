//! The layers from which the model families build decoders. They run operation by operation, on any device.
//! The decode graph runs fused kernels instead (`kernels::decode`).
//!
//! [Internal](crate#stable-api): can change in any release.
//!
//! - `decoder`, `decoder_config`: the decoder that all families share, and its sizes, options and tensor names
//! - `layer`: a decoder layer: attention, then an MLP
//! - `attention`, `rope`, `mlp`, `moe`, `linear`, `norm`: the parts of a layer
//! - `kv_cache`: the paged KV cache; `pass`: the tokens and tables of one forward pass; `residual`: the residual stream
//! - `product_kernels`: loads the kernels of matrix products before the first step
//! - `checks`: range checks for numbers from config.json or GGUF metadata

pub mod attention;
pub mod checks;
pub mod decoder;
pub mod decoder_config;
pub mod kv_cache;
pub(crate) mod layer;
pub mod linear;
pub mod mlp;
pub mod moe;
pub mod norm;
pub mod pass;
#[cfg(feature = "cuda")]
mod product_kernels;
pub(crate) mod residual;
pub mod rope;
