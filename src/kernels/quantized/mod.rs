//! Matrices that stay quantized in memory, and their operations: matrix products, embedding lookup, dequantization.
//!
//! All formats share one scheme: a matrix is stored in up to four *planes*.
//! A *group* is 32 consecutive columns of a row. A *superblock*, which only the K formats (Q2_K to Q6_K) have, is eight
//! consecutive groups.
//!
//! | plane  | contents |
//! | ------ | -------- |
//! | low    | per group: the low 2, 4 or 8 bits of each quantized value `q` |
//! | high   | per group, in some formats: the next 1 or 2 bits of each `q` |
//! | scales | per group: its scales, and in some formats its mins; in `Int8` and `Fp8`: one f32 scale per row |
//! | supers | per superblock: an f16 super-scale for the scales, then one for the mins |
//!
//! In each plane, the number of bytes per group or superblock is a power of two, so loads are aligned.
//!
//! The value of an element is `scale · (q - zero) - min`, where `zero` is the zero point of the format.
//! In the K formats, `scale` and `min` are integers from the `scales` plane, multiplied by their super-scales.
//! In Q4_1 and Q5_1, the `scales` plane holds `-min`, as in ggml.
//! In `Fp8`, `q` is an E4M3 value. In all other formats, `q` is an integer.
//!
//! The ggml formats (all except `Int8` and `Fp8`) take as many bytes as in GGUF files, with two exceptions:
//! - In Q3_K, Q4_K and Q5_K, the scales of a superblock, with the mins if there are any, take 16 bytes instead of 12.
//! - Q3_K and Q6_K have no super-scale for mins. The two bytes for it are unused.
//!
//! A group consists of eight *quads* of four consecutive columns. Quads are numbered 0 to 7.
//! In `low` and `high`, the bits of column `i` (0 to 3) in quad `j` have these positions within the bytes of the group
//! (divisions round down):
//! - 4 low bits: byte `4 · (j / 2) + i`, in the low nibble if `j` is even, in the high nibble if `j` is odd
//! - 2 low bits or 2 high bits: byte `4 · (j / 4) + i`, starting at bit `2 · (j mod 4)`
//! - 1 high bit: bit `j` of byte `i`
//! - 8 low bits: byte `4 · j + i`

#[cfg(feature = "cuda")]
mod arguments;
mod format;
#[cfg(feature = "cuda")]
mod input_quantization;
mod matrix_ops;
#[cfg(feature = "cuda")]
mod quantized_few_tokens;
mod quantized_matrix;
#[cfg(feature = "cuda")]
pub(crate) mod quantized_ops;
mod reference;

pub use crate::kernels::constants::E4M3_MAX;
pub use format::{GROUP_COLUMNS, PlaneBytes, SUPERBLOCK_COLUMNS, WeightFormat};
#[cfg(feature = "cuda")]
pub(crate) use input_quantization::fake_quantize;
pub use quantized_matrix::{InputQuantization, QuantizedMatrix};
pub use reference::pack;
