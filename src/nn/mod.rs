//! The layers from which the families build their decoders.
//! They run eagerly on any device, using ops from candle and `kernels`.

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
pub mod rope;
