//! The layers that the families share, in candle ops and our kernels: the eager executor, on any device.

pub mod attention;
pub mod decoder;
pub mod kv_cache;
pub mod linear;
pub mod mlp;
pub mod norm;
pub mod rope;
pub mod routed;
