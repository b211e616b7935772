//! Matrices whose weights stay quantized in memory: products with them, their rows as an embedding, their values.
//!
//! All formats share one layout, made for a warp in which each lane reads 32 columns.
//! The bits of a row's elements lie in **planes**, each in the order of the columns, so that every load is aligned:
//!
//! | plane  | for each 32 columns (a group) |
//! | ------ | ----------------------------- |
//! | low    | the low 2, 4 or 8 bits of q |
//! | high   | the 1 or 2 bits above them, or nothing |
//! | scales | the scales of the group; for `Int8` and `Fp8`, one f32 per row instead |
//! | supers | two f16 for each 256 columns, which multiply the scales, or nothing |
//!
//! A value is scale · (q - zero) - min.
//! The ggml formats keep the bytes of their files, with two exceptions.
//! The 12 bytes of scales of Q3_K, Q4_K and Q5_K become 16.
//! The one super-scale of Q3_K and Q6_K is followed by two unused bytes.
//!
//! The q of a group are eight *quads* of four columns each, numbered 0 to 7. Column i of quad j has:
//! - 4 low bits: byte 4 (j / 2) + i; its low half if j is even.
//! - 2 low bits, or 2 high bits: byte 4 (j / 4) + i, from bit 2 (j mod 4) on.
//! - 1 high bit: byte i, bit j.
//! - 8 bits: byte 4 j + i.

#[cfg(feature = "cuda")]
mod arguments;
mod format;
mod matrix;
mod quantized_matrix;
pub(crate) mod quantized_ops;
mod reference;

pub use format::{Format, GROUP_COLUMNS, PlaneBytes, SUPERBLOCK_COLUMNS};
pub use matrix::Matrix;
pub use quantized_matrix::{InputRounding, QuantizedMatrix};
pub use reference::{E4M3_MAX, pack};
