//! The layers that all families share, run eagerly with candle ops and the ops of `kernels`, on any device.

pub mod attention;
pub mod decoder;
pub mod decoder_config;
pub mod kv_cache;
pub(crate) mod layer;
pub mod linear;
pub mod mlp;
pub mod moe;
pub mod norm;
pub mod pass;
pub mod rope;
