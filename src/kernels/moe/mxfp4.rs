//! The MXFP4 format (OCP Microscaling Formats 1.0): 32 E2M1 values share one E8M0 scale.
//!
//! As in openai/gpt-oss-20b, MXFP4 blocks are u8 `[experts, rows, columns / 32, 16]`.
//! The low half of each byte holds the value of an even column, and the high half holds the value of the next column.
//! MXFP4 scales are u8 `[experts, rows, columns / 32]`. A scale is 2^(byte - 127), or NaN if the byte is 255.

use candle_core::{DType, Result, Tensor, bail};

/// The number of values in one MXFP4 block.
pub const MXFP4_BLOCK: usize = 32;

/// All E2M1 values, indexed by their four bits.
pub const E2M1_VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Returns the value of an E8M0 scale: 2^(byte - 127), or NaN for 255.
pub fn e8m0_to_f32(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        _ => f32::from_bits((byte as u32) << 23),
    }
}

/// Returns `(experts, rows, columns)` of MXFP4 weights.
///
/// Fails unless the blocks are u8 `[experts, rows, columns / 32, 16]` and the scales are u8
/// `[experts, rows, columns / 32]`.
pub(super) fn mxfp4_dims(blocks: &Tensor, scales: &Tensor) -> Result<(usize, usize, usize)> {
    let (experts, rows, groups, bytes) = blocks.dims4()?;
    let are_bytes = blocks.dtype() == DType::U8 && scales.dtype() == DType::U8;
    if !are_bytes || bytes != MXFP4_BLOCK / 2 || scales.dims() != [experts, rows, groups] {
        bail!(
            "cannot use MXFP4 weights: blocks {:?} and scales {:?} are not U8 [experts, rows, groups, 16] and \
             U8 [experts, rows, groups]",
            blocks.dims(),
            scales.dims()
        );
    }
    Ok((experts, rows, groups * MXFP4_BLOCK))
}
