//! The element types of GGUF files: block sizes, dequantization, and quantization to K-quants on the CPU.
//! In tests, the dequantized blocks are the reference for matrices in the memory layout of the kernels.
//!
//! Source: ggml-org/llama.cpp, `ggml/src/ggml-common.h` (block layouts) and `gguf-py/gguf/quants.py`.
//! Dequantization uses the same order of operations as `quants.py`, so both give bit-identical results.

mod blocks;
mod dequantize;
mod quantize;
mod split;
mod types;

pub use blocks::super_scales;
pub use quantize::quantize;
pub use split::split_group;
pub use types::GgmlType;
