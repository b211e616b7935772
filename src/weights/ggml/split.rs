//! Splits ggml blocks into quantized integers and scales, for the memory layout of the kernels.

use super::blocks::{bit, q3_k_scale, scale_and_min};
use super::types::GgmlType;

/// Returns the quantized integers of one group of 32 elements and writes their scales to `scales`.
///
/// `bytes` is one block, and `group` is the index of the group in the block.
/// The integers are unsigned, except for the signed bytes of Q8_0.
/// F32, F16, BF16 and MXFP4 are not supported: for them, all integers are 0.
///
/// The bytes in `scales` depend on the ggml type:
/// - Q2_K: one byte per 16 elements, with the scale in the low nibble and the minimum in the high nibble.
/// - Q3_K and Q6_K: one byte per 16 elements, with the signed scale.
/// - Q4_K and Q5_K: one byte for the scale of the group, and one byte for its minimum.
/// - Other types: the f16 scale of the block, followed by the f16 minimum if the type has a minimum.
///
/// For K-quants, the caller writes the f16 super-scales (`d` and `dmin`), because they apply to the whole block.
pub fn split_group(ggml_type: GgmlType, bytes: &[u8], group: usize, scales: &mut [u8]) -> [u8; 32] {
    match ggml_type {
        GgmlType::Q2K => scales.copy_from_slice(&bytes[2 * group..][..2]),
        GgmlType::Q6K => scales.copy_from_slice(&bytes[192 + 2 * group..][..2]),
        GgmlType::Q3K => {
            for (i, scale) in scales.iter_mut().enumerate() {
                *scale = q3_k_scale(&bytes[96..108], 2 * group + i).wrapping_sub(32);
            }
        }
        GgmlType::Q4K | GgmlType::Q5K => (scales[0], scales[1]) = scale_and_min(&bytes[4..16], group),
        _ => scales.copy_from_slice(&bytes[..scales.len()]),
    }
    let mut q = [0; 32];
    match ggml_type {
        GgmlType::Q4_0 => nibbles(&bytes[2..], &mut q),
        GgmlType::Q4_1 => nibbles(&bytes[4..], &mut q),
        GgmlType::Q5_0 => {
            nibbles(&bytes[6..], &mut q);
            set(&mut q, |i| bit(&bytes[2..6], i) << 4);
        }
        GgmlType::Q5_1 => {
            nibbles(&bytes[8..], &mut q);
            set(&mut q, |i| bit(&bytes[4..8], i) << 4);
        }
        GgmlType::Q8_0 => q.copy_from_slice(&bytes[2..34]),
        GgmlType::Q2K => pairs(&bytes[16..80], group, 0, &mut q),
        GgmlType::Q3K => {
            pairs(&bytes[32..96], group, 0, &mut q);
            set(&mut q, |i| (bytes[i] >> group & 1) << 2);
        }
        GgmlType::Q4K => half_of_nibbles(&bytes[16 + 32 * (group / 2)..], group % 2, &mut q),
        GgmlType::Q5K => {
            half_of_nibbles(&bytes[48 + 32 * (group / 2)..], group % 2, &mut q);
            set(&mut q, |i| (bytes[16 + i] >> group & 1) << 4);
        }
        GgmlType::Q6K => {
            half_of_nibbles(&bytes[64 * (group / 4) + 32 * (group % 2)..], group / 2 % 2, &mut q);
            pairs(&bytes[128..192], group, 4, &mut q);
        }
        GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16 | GgmlType::Mxfp4 => {}
    }
    q
}

/// ORs `bits(i)` into integer `i` of `q`.
fn set(q: &mut [u8; 32], bits: impl Fn(usize) -> u8) {
    q.iter_mut().enumerate().for_each(|(i, q)| *q |= bits(i));
}

/// Unpacks 32 nibbles from 16 bytes, low nibbles first.
fn nibbles(bytes: &[u8], q: &mut [u8; 32]) {
    let (low, high) = q.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

/// Unpacks the low nibbles (`half` = 0) or the high nibbles (`half` = 1) of 32 bytes.
fn half_of_nibbles(bytes: &[u8], half: usize, q: &mut [u8; 32]) {
    q.iter_mut().zip(bytes).for_each(|(q, byte)| *q = byte >> (4 * half) & 15);
}

/// Unpacks the 2-bit values of one group of 32, shifts them left by `shift`, and ORs them into `q`.
fn pairs(bytes: &[u8], group: usize, shift: usize, q: &mut [u8; 32]) {
    let bytes = &bytes[32 * (group / 4)..][..32];
    q.iter_mut().zip(bytes).for_each(|(q, byte)| *q |= (byte >> (2 * (group % 4)) & 3) << shift);
}
