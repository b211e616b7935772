//! Matrices whose weights stay quantized in memory: matrix products, embedding lookup and dequantization.
//!
//! All formats share one memory layout, in which each lane of a warp reads a group of 32 columns at a time.
//! The bits of each quantized integer `q` are split across **planes**.
//! Each plane stores the groups of a row in order, so loads are aligned.
//!
//! | plane  | contents for each group of 32 columns |
//! | ------ | ------------------------------------- |
//! | low    | the low 2, 4 or 8 bits of each `q` |
//! | high   | the next 1 or 2 bits of each `q`, in some formats |
//! | scales | the scales of the group; `Int8` and `Fp8` have one f32 per row instead |
//! | supers | two f16 factors per 256 columns for scales and mins, in the K formats |
//!
//! The value of an element is `scale · (q - zero) - min`.
//! The ggml formats take as many bytes as in GGUF files, with two exceptions in each block of 256 columns:
//! - The 12 scale bytes of Q3_K, Q4_K and Q5_K become 16 bytes.
//! - The single super-scale of Q3_K and Q6_K is followed by two unused bytes.
//!
//! A group consists of eight *quads* of four columns, numbered 0 to 7.
//! The bits of column `i` in quad `j` have these positions within the group:
//! - 4 low bits: byte `4 · (j / 2) + i`, in the low half if `j` is even and in the high half if `j` is odd
//! - 2 low bits or 2 high bits: byte `4 · (j / 4) + i`, starting at bit `2 · (j mod 4)`
//! - 1 high bit: bit `j` of byte `i`
//! - 8 low bits: byte `4 · j + i`

#[cfg(feature = "cuda")]
mod arguments;
mod format;
mod matrix;
mod quantized_matrix;
pub(crate) mod quantized_ops;
mod reference;

pub use format::{GROUP_COLUMNS, PlaneBytes, SUPERBLOCK_COLUMNS, WeightFormat};
pub use matrix::Matrix;
pub use quantized_matrix::{InputRounding, QuantizedMatrix};
pub use reference::{E4M3_MAX, pack};
