//! The element types of GGUF files: block sizes, dequantization and quantization in plain Rust.
//! Tests use this code as the reference for the kernels.
//!
//! Source: ggml-org/llama.cpp, block layouts from `ggml/src/ggml-common.h`
//! and arithmetic from `gguf-py/gguf/quants.py`.
//! Rounding happens in the same order, so the results are bit-identical.

mod blocks;
mod dequantize;
mod quantize;
mod split;
mod types;

pub use quantize::quantize;
pub use split::split_group;
pub use types::GgmlType;
