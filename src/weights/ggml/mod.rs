//! The element types of GGUF files: block sizes, dequantization and quantization in plain Rust.
//! Tests use this code as the reference for the kernels.
//!
//! The block layouts are from `ggml/src/ggml-common.h` in ggml-org/llama.cpp.
//! Dequantized values are bit-identical to the results of `gguf-py/gguf/quants.py` in that repository,
//! because the order of operations is the same.

mod blocks;
mod dequantize;
mod quantize;
mod split;
mod types;

pub use quantize::quantize;
pub use split::split_group;
pub use types::GgmlType;
