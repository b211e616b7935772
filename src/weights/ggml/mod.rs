//! The element types of GGUF files: the sizes of their blocks, dequantization and quantization, in plain Rust.
//! Tests compare the kernels with this code.
//!
//! Source: the block layouts of ggml (ggml-org/llama.cpp,
//! `ggml/src/ggml-common.h`) and the arithmetic of `gguf-py/gguf/quants.py`.
//! The order of the roundings is the same, so the results are equal bit by bit.

mod blocks;
mod dequantize;
mod quantize;
mod split;
mod types;

pub use quantize::quantize;
pub use split::split_group;
pub use types::GgmlType;
