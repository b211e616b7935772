//! Dequantizes the blocks of each supported ggml type.
//! The function named after a type dequantizes one block, `bytes`, to `values`.
//!
//! In the layouts, `d` is the f16 scale of a block, and `m` is its f16 minimum, which is added.
//! In K-quants, each group of 16 or 32 elements has an integer scale and, except in Q3_K and Q6_K, an integer minimum
//! (min), which is subtracted. There, `d` is the f16 factor of all scales, and `dmin` is the f16 factor of all mins.
//!
//! Each byte of nibbles holds one element from each half of a run of 32, 64 or 128 elements.
//! Each byte of 2-bit integers holds one element from each quarter of a run of 128 elements.
//! Within a half or a quarter, adjacent elements are in adjacent bytes.

use half::f16;

use super::types::GgmlType;

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

/// Layout: d, 4 bytes with the fifth bit of each element, 16 bytes of nibbles.
pub fn q5_0(bytes: &[u8], values: &mut [f32]) {
    let (d, high) = (half(bytes, 0), &bytes[2..6]);
    for (i, value) in values.iter_mut().enumerate() {
        let q = nibble(&bytes[6..], i) | bit(high, i) << 4;
        *value = d * (f32::from(q) - 16.0);
    }
}

/// Layout: d, m, 4 bytes with the fifth bit of each element, 16 bytes of nibbles.
pub fn q5_1(bytes: &[u8], values: &mut [f32]) {
    let d = half(bytes, 0);
    let m = half(bytes, 2);
    let high = &bytes[4..8];
    for (i, value) in values.iter_mut().enumerate() {
        let q = nibble(&bytes[8..], i) | bit(high, i) << 4;
        *value = d * f32::from(q) + m;
    }
}

/// Layout: d, 32 signed 8-bit integers.
pub fn q8_0(bytes: &[u8], values: &mut [f32]) {
    let d = half(bytes, 0);
    for (value, q) in values.iter_mut().zip(&bytes[2..]) {
        *value = f32::from(*q as i8) * d;
    }
}

/// Layout: 16 scale bytes, 64 bytes of 2-bit integers, d, dmin.
/// In each scale byte, the low nibble is the scale of 16 elements, and the high nibble is their min.
pub fn q2_k(bytes: &[u8], values: &mut [f32]) {
    let scales = &bytes[..16];
    let low = &bytes[16..80];
    let d = half(bytes, 80);
    let dmin = half(bytes, 82);
    for (i, value) in values.iter_mut().enumerate() {
        let scale = scales[i / 16];
        let (d, m) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
        *value = d * f32::from(two_bits(low, i)) - m;
    }
}

/// Layout: 32 bytes with the third bit of each element, 64 bytes with the low 2 bits, sixteen 6-bit scales, d.
pub fn q3_k(bytes: &[u8], values: &mut [f32]) {
    let high = &bytes[..32];
    let low = &bytes[32..96];
    let scales = &bytes[96..108];
    let d = half(bytes, 108);
    for (i, value) in values.iter_mut().enumerate() {
        let scale = q3_k_scale(scales, i / 16);
        // A third bit of 0 subtracts 4, so q is -4 to 3.
        let q = f32::from(two_bits(low, i)) - if high[i % 32] >> (i / 32) & 1 == 0 { 4.0 } else { 0.0 };
        *value = d * (f32::from(scale) - 32.0) * q;
    }
}

/// Layout: d, dmin, 12 bytes with eight 6-bit scales and eight 6-bit mins, 128 bytes of nibbles.
pub fn q4_k(bytes: &[u8], values: &mut [f32]) {
    let d = half(bytes, 0);
    let dmin = half(bytes, 2);
    let scales = &bytes[4..16];
    let low = &bytes[16..];
    for (i, value) in values.iter_mut().enumerate() {
        let (scale, min) = scale_and_min(scales, i / 32);
        let (d, m) = (d * f32::from(scale), dmin * f32::from(min));
        *value = d * f32::from(nibble(&low[32 * (i / 64)..][..32], i % 64)) - m;
    }
}

/// Layout: d, dmin, 12 bytes with scales and mins as in Q4_K, 32 bytes with the fifth bit of each element,
/// 128 bytes of nibbles.
pub fn q5_k(bytes: &[u8], values: &mut [f32]) {
    let d = half(bytes, 0);
    let dmin = half(bytes, 2);
    let scales = &bytes[4..16];
    let (high, low) = (&bytes[16..48], &bytes[48..]);
    for (i, value) in values.iter_mut().enumerate() {
        let (scale, min) = scale_and_min(scales, i / 32);
        let (d, m) = (d * f32::from(scale), dmin * f32::from(min));
        let q = nibble(&low[32 * (i / 64)..][..32], i % 64) | (high[i % 32] >> (i / 32) & 1) << 4;
        *value = d * f32::from(q) - m;
    }
}

/// Layout: 128 bytes with the low 4 bits of each element, 64 bytes with the high 2 bits, 16 signed 8-bit scales, d.
pub fn q6_k(bytes: &[u8], values: &mut [f32]) {
    let low = &bytes[..128];
    let high = &bytes[128..192];
    let scales = &bytes[192..208];
    let d = half(bytes, 208);
    for (i, value) in values.iter_mut().enumerate() {
        let q = nibble(&low[64 * (i / 128)..][..64], i % 128) | two_bits(high, i) << 4;
        *value = d * f32::from(scales[i / 16] as i8) * (f32::from(q) - 32.0);
    }
}

/// Twice the E2M1 value of each nibble. -0 becomes 0, as in the integer table of ggml.
const TWICE_E2M1: [f32; 16] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

/// Layout: an E8M0 scale, 16 bytes of nibbles.
/// The low nibbles hold the first 16 elements. In the safetensors files of gpt-oss, they hold the even elements.
pub fn mxfp4(bytes: &[u8], values: &mut [f32]) {
    // d is half of 2^(e - 127), because `TWICE_E2M1` holds doubled values.
    // For e = 0 and e = 1, d is subnormal.
    // As in ggml, e = 255 means the scale 2^128, although the OCP standard for E8M0 defines it as NaN.
    let e = u32::from(bytes[0]);
    let d = f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 });
    for (i, value) in values.iter_mut().enumerate() {
        *value = d * TWICE_E2M1[usize::from(nibble(&bytes[1..], i))];
    }
}

/// Returns the bytes of `d` and, except in Q3_K and Q6_K, of `dmin` in a block of a K-quant.
/// The result is empty for all other types.
pub fn super_scales(ggml_type: GgmlType, block: &[u8]) -> &[u8] {
    match ggml_type {
        GgmlType::Q2K => &block[80..84],
        GgmlType::Q3K => &block[108..110],
        GgmlType::Q4K | GgmlType::Q5K => &block[..4],
        GgmlType::Q6K => &block[208..210],
        _ => &[],
    }
}

/// Returns the Q3_K scale with index `s`, plus 32. A block has 16 scales.
/// The first 8 bytes hold the low 4 bits of all scales, and the last 4 bytes hold the high 2 bits.
pub fn q3_k_scale(scales: &[u8], s: usize) -> u8 {
    (scales[s % 8] >> (4 * (s / 8))) & 15 | ((scales[8 + s % 4] >> (2 * (s / 4))) & 3) << 4
}

/// Returns nibble `i` of `bytes`. The low nibbles of all bytes come first, followed by the high nibbles.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    if i < bytes.len() { bytes[i] & 15 } else { bytes[i - bytes.len()] >> 4 }
}

/// Returns the 2-bit value with index `i` of the 256 values in a block. Each run of 32 bytes holds 128 values.
/// In a run, the lowest 2 bits of the bytes are the first 32 values, the next 2 bits are the next 32, and so on.
fn two_bits(bytes: &[u8], i: usize) -> u8 {
    bytes[32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32)) & 3
}

/// Returns bit `i` of `bytes`, as 0 or 1. Bit 0 is the lowest bit of the first byte.
pub fn bit(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 8] >> (i % 8) & 1
}

/// Returns the scale and the min with index `s` of a Q4_K or Q5_K block, which has 8 of each, with 6 bits each.
/// The first four scales and the first four mins are the low 6 bits of the first 8 bytes.
/// The last four scales and mins have their low 4 bits in the last 4 bytes.
/// Their high 2 bits are the top 2 bits of the first 8 bytes.
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

/// Reads the f16 value at a byte offset and converts it to f32.
fn half(bytes: &[u8], offset: usize) -> f32 {
    f16::from_bits(read_u16(bytes, offset)).to_f32_const()
}
