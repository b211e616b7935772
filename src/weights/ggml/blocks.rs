//! Dequantizes one block of each type. `bytes` is exactly one block, `values` exactly its elements.
//!
//! d is the block's scale, m or dmin its minimum, q a quantized integer.
//! One byte holds bits of elements from different halves or quarters of the block,
//! so that neighboring bytes hold neighboring elements.

use half::f16;

pub fn f32(bytes: &[u8], values: &mut [f32]) {
    values[0] = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
}

pub fn f16(bytes: &[u8], values: &mut [f32]) {
    values[0] = half(bytes, 0);
}

pub fn bf16(bytes: &[u8], values: &mut [f32]) {
    values[0] = f32::from_bits(u32::from(read_u16(bytes, 0)) << 16);
}

/// Layout: d, 16 bytes of nibbles.
pub fn q4_0(bytes: &[u8], values: &mut [f32]) {
    let d = half(bytes, 0);
    for (i, value) in values.iter_mut().enumerate() {
        *value = d * (f32::from(nibble(&bytes[2..], i)) - 8.0);
    }
}

/// Layout: d, m, 16 bytes of nibbles.
pub fn q4_1(bytes: &[u8], values: &mut [f32]) {
    let (d, m) = (half(bytes, 0), half(bytes, 2));
    for (i, value) in values.iter_mut().enumerate() {
        *value = d * f32::from(nibble(&bytes[4..], i)) + m;
    }
}

/// Layout: d, 32 fifth bits, 16 bytes of nibbles.
pub fn q5_0(bytes: &[u8], values: &mut [f32]) {
    let (d, high) = (half(bytes, 0), &bytes[2..6]);
    for (i, value) in values.iter_mut().enumerate() {
        let q = nibble(&bytes[6..], i) | bit(high, i) << 4;
        *value = d * (f32::from(q) - 16.0);
    }
}

/// Layout: d, m, 32 fifth bits, 16 bytes of nibbles.
pub fn q5_1(bytes: &[u8], values: &mut [f32]) {
    let (d, m, high) = (half(bytes, 0), half(bytes, 2), &bytes[4..8]);
    for (i, value) in values.iter_mut().enumerate() {
        let q = nibble(&bytes[8..], i) | bit(high, i) << 4;
        *value = d * f32::from(q) + m;
    }
}

/// Layout: d, 32 signed bytes.
pub fn q8_0(bytes: &[u8], values: &mut [f32]) {
    let d = half(bytes, 0);
    for (value, q) in values.iter_mut().zip(&bytes[2..]) {
        *value = f32::from(*q as i8) * d;
    }
}

/// Layout: 16 bytes, each with the scale and the min of 16 elements as nibbles; 64 bytes of 2-bit integers; d; dmin.
pub fn q2_k(bytes: &[u8], values: &mut [f32]) {
    let (scales, low, d, dmin) = (&bytes[..16], &bytes[16..80], half(bytes, 80), half(bytes, 82));
    for (i, value) in values.iter_mut().enumerate() {
        let scale = scales[i / 16];
        let (d, m) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
        *value = d * f32::from(two_bits(low, i)) - m;
    }
}

/// Layout: 256 third bits, 64 bytes of 2-bit integers, 16 scales of 6 bits in 12 bytes, d.
pub fn q3_k(bytes: &[u8], values: &mut [f32]) {
    let (high, low, scales, d) = (&bytes[..32], &bytes[32..96], &bytes[96..108], half(bytes, 108));
    for (i, value) in values.iter_mut().enumerate() {
        let scale = q3_k_scale(scales, i / 16);
        // A third bit of 0 subtracts four.
        let q = f32::from(two_bits(low, i)) - if high[i % 32] >> (i / 32) & 1 == 0 { 4.0 } else { 0.0 };
        *value = d * (f32::from(scale) - 32.0) * q;
    }
}

/// Layout: d, dmin, 8 scales and 8 mins of 6 bits in 12 bytes, 128 bytes of nibbles.
pub fn q4_k(bytes: &[u8], values: &mut [f32]) {
    let (d, dmin, scales, low) = (half(bytes, 0), half(bytes, 2), &bytes[4..16], &bytes[16..]);
    for (i, value) in values.iter_mut().enumerate() {
        let (scale, min) = scale_and_min(scales, i / 32);
        let (d, m) = (d * f32::from(scale), dmin * f32::from(min));
        *value = d * f32::from(nibble(&low[32 * (i / 64)..][..32], i % 64)) - m;
    }
}

/// Layout: as Q4_K, with 256 fifth bits before the nibbles.
pub fn q5_k(bytes: &[u8], values: &mut [f32]) {
    let (d, dmin, scales) = (half(bytes, 0), half(bytes, 2), &bytes[4..16]);
    let (high, low) = (&bytes[16..48], &bytes[48..]);
    for (i, value) in values.iter_mut().enumerate() {
        let (scale, min) = scale_and_min(scales, i / 32);
        let (d, m) = (d * f32::from(scale), dmin * f32::from(min));
        let q = nibble(&low[32 * (i / 64)..][..32], i % 64) | (high[i % 32] >> (i / 32) & 1) << 4;
        *value = d * f32::from(q) - m;
    }
}

/// Layout: 128 bytes of nibbles, 64 bytes of the two high bits, 16 signed scales, d.
pub fn q6_k(bytes: &[u8], values: &mut [f32]) {
    let (low, high, scales, d) = (&bytes[..128], &bytes[128..192], &bytes[192..208], half(bytes, 208));
    for (i, value) in values.iter_mut().enumerate() {
        let q = nibble(&low[64 * (i / 128)..][..64], i % 128) | two_bits(high, i) << 4;
        *value = d * f32::from(scales[i / 16] as i8) * (f32::from(q) - 32.0);
    }
}

/// Twice the E2M1 value of each nibble. ggml's table holds integers, so -0 becomes 0.
const TWICE_E2M1: [f32; 16] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

/// Layout: an E8M0 scale, 16 bytes of nibbles.
/// The low nibbles are the first 16 elements.
/// In safetensors files of gpt-oss, they are the even elements.
pub fn mxfp4(bytes: &[u8], values: &mut [f32]) {
    // Half of 2^(e - 127), because the table holds doubled values.
    // The two smallest scales are subnormal.
    // ggml reads 255, which is NaN by the standard, as 2^128.
    let e = u32::from(bytes[0]);
    let d = f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 });
    for (i, value) in values.iter_mut().enumerate() {
        *value = d * TWICE_E2M1[usize::from(nibble(&bytes[1..], i))];
    }
}

/// Returns the s-th of 16 scales. The first eight bytes hold four bits of each, the last four bytes hold two.
pub fn q3_k_scale(scales: &[u8], s: usize) -> u8 {
    (scales[s % 8] >> (4 * (s / 8))) & 15 | ((scales[8 + s % 4] >> (2 * (s / 4))) & 3) << 4
}

/// Returns the i-th nibble. The low bits hold the first half, the high bits the second.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    if i < bytes.len() { bytes[i] & 15 } else { bytes[i - bytes.len()] >> 4 }
}

/// Returns the i-th of 256 pairs of bits. Each 32 bytes hold 128 pairs, the lowest bits first.
fn two_bits(bytes: &[u8], i: usize) -> u8 {
    bytes[32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32)) & 3
}

/// Returns the i-th bit.
pub fn bit(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 8] >> (i % 8) & 1
}

/// Returns the s-th of 8 scales and mins, 6 bits each.
/// The first four are the low bits of the first eight bytes.
/// The others have 4 bits in the last four bytes and 2 in the high bits of the first eight.
pub fn scale_and_min(scales: &[u8], s: usize) -> (u8, u8) {
    if s < 4 {
        return (scales[s] & 63, scales[s + 4] & 63);
    }
    let low = scales[s + 4];
    (low & 15 | scales[s - 4] >> 6 << 4, low >> 4 | scales[s] >> 6 << 4)
}

fn read_u16(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes([bytes[offset], bytes[offset + 1]])
}

/// Returns the f16 at an offset as f32.
fn half(bytes: &[u8], offset: usize) -> f32 {
    f16::from_bits(read_u16(bytes, offset)).to_f32_const()
}
