//! Matrices that stay quantized in memory. The operations are matrix products, embedding lookup and dequantization.
//!
//! All formats share one memory layout. A *group* is 32 consecutive columns of a row.
//! In matrix products, a lane of a warp reads a group at a time.
//! The bits of each quantized value `q` are split across *planes*.
//! In the planes `low`, `high` and `scales`, the number of bytes per group is a power of two, so loads are aligned.
//! The `supers` plane has 4 bytes per superblock of 256 columns.
//!
//! | plane  | contents for each group of 32 columns, unless the row of the table names another unit |
//! | ------ | ------------------------------------- |
//! | low    | the low 2, 4 or 8 bits of each `q` |
//! | high   | the next 1 or 2 bits of each `q`, in some formats |
//! | scales | the scales of the group, and its mins in some formats; `Int8` and `Fp8` have one f32 per row instead |
//! | supers | in the K formats, for each 256 columns: an f16 super-scale for the scales, then one for the mins |
//!
//! The value of an element is `scale · (q - zero) - min`, where `zero` is the zero point of the format.
//! In `Fp8`, `q` is an E4M3 value. In all other formats, `q` is an integer.
//! The ggml formats (all except `Int8` and `Fp8`) take as many bytes as in GGUF files, with two exceptions:
//! - In Q3_K, Q4_K and Q5_K, the scales and mins of a superblock take 16 bytes instead of 12.
//! - In Q3_K and Q6_K, a superblock has only one super-scale. Two unused bytes follow it.
//!
//! A group consists of eight *quads*, numbered 0 to 7. A quad is four consecutive columns.
//! In each plane, the bits of column `i` (0 to 3) in quad `j` have these positions within the bytes of the group
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
