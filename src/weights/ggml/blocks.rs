//! One block of each type: `bytes` are exactly one block, `values` exactly its elements.
//!
//! d is a block's scale, m or dmin what is added or subtracted, q the small integers. Quarters and halves of a block
//! lie in different bits of the same bytes, so that bytes next to each other hold elements next to each other.

pub fn f32(bytes: &[u8], values: &mut [f32]) {
    values[0] = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
}

pub fn f16(bytes: &[u8], values: &mut [f32]) {
    values[0] = half(bytes, 0);
}

pub fn bf16(bytes: &[u8], values: &mut [f32]) {
    values[0] = f32::from_bits(u32::from(short(bytes, 0)) << 16);
}

/// d, 16 bytes of nibbles.
pub fn q4_0(bytes: &[u8], values: &mut [f32]) {
    let d = half(bytes, 0);
    for (i, value) in values.iter_mut().enumerate() {
        *value = d * (f32::from(nibble(&bytes[2..], i)) - 8.0);
    }
}

/// d, m, 16 bytes of nibbles.
pub fn q4_1(bytes: &[u8], values: &mut [f32]) {
    let (d, m) = (half(bytes, 0), half(bytes, 2));
    for (i, value) in values.iter_mut().enumerate() {
        *value = d * f32::from(nibble(&bytes[4..], i)) + m;
    }
}

/// d, 32 fifth bits, 16 bytes of nibbles.
pub fn q5_0(bytes: &[u8], values: &mut [f32]) {
    let (d, high) = (half(bytes, 0), &bytes[2..6]);
    for (i, value) in values.iter_mut().enumerate() {
        let q = nibble(&bytes[6..], i) | bit(high, i) << 4;
        *value = d * (f32::from(q) - 16.0);
    }
}

/// d, m, 32 fifth bits, 16 bytes of nibbles.
pub fn q5_1(bytes: &[u8], values: &mut [f32]) {
    let (d, m, high) = (half(bytes, 0), half(bytes, 2), &bytes[4..8]);
    for (i, value) in values.iter_mut().enumerate() {
        let q = nibble(&bytes[8..], i) | bit(high, i) << 4;
        *value = d * f32::from(q) + m;
    }
}

/// d, 32 signed bytes.
pub fn q8_0(bytes: &[u8], values: &mut [f32]) {
    let d = half(bytes, 0);
    for (value, q) in values.iter_mut().zip(&bytes[2..]) {
        *value = f32::from(*q as i8) * d;
    }
}

/// 16 bytes of (scale, min) nibbles, one for 16 elements; 64 bytes of two bits; d; dmin.
pub fn q2_k(bytes: &[u8], values: &mut [f32]) {
    let (scales, low, d, dmin) = (&bytes[..16], &bytes[16..80], half(bytes, 80), half(bytes, 82));
    for (i, value) in values.iter_mut().enumerate() {
        let scale = scales[i / 16];
        let (d, m) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
        *value = d * f32::from(two_bits(low, i)) - m;
    }
}

/// 256 third bits, 64 bytes of two bits, 16 scales of 6 bits in 12 bytes, d.
pub fn q3_k(bytes: &[u8], values: &mut [f32]) {
    let (high, low, scales, d) = (&bytes[..32], &bytes[32..96], &bytes[96..108], half(bytes, 108));
    for (i, value) in values.iter_mut().enumerate() {
        let scale = q3_k_scale(scales, i / 16);
        // A third bit that is not set takes four away.
        let q = f32::from(two_bits(low, i)) - if high[i % 32] >> (i / 32) & 1 == 0 { 4.0 } else { 0.0 };
        *value = d * (f32::from(scale) - 32.0) * q;
    }
}

/// d, dmin, 8 pairs of scales of 6 bits in 12 bytes, 128 bytes of nibbles.
pub fn q4_k(bytes: &[u8], values: &mut [f32]) {
    let (d, dmin, scales, low) = (half(bytes, 0), half(bytes, 2), &bytes[4..16], &bytes[16..]);
    for (i, value) in values.iter_mut().enumerate() {
        let (scale, min) = scale_and_min(scales, i / 32);
        let (d, m) = (d * f32::from(scale), dmin * f32::from(min));
        *value = d * f32::from(nibble(&low[32 * (i / 64)..][..32], i % 64)) - m;
    }
}

/// As Q4_K, with 256 fifth bits before the nibbles.
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

/// 128 bytes of nibbles, 64 bytes of two higher bits, 16 signed scales, d.
pub fn q6_k(bytes: &[u8], values: &mut [f32]) {
    let (low, high, scales, d) = (&bytes[..128], &bytes[128..192], &bytes[192..208], half(bytes, 208));
    for (i, value) in values.iter_mut().enumerate() {
        let q = nibble(&low[64 * (i / 128)..][..64], i % 128) | two_bits(high, i) << 4;
        *value = d * f32::from(scales[i / 16] as i8) * (f32::from(q) - 32.0);
    }
}

/// Twice E2M1 by nibble. ggml's table holds integers, so its -0 is 0.
const TWICE_E2M1: [f32; 16] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

/// An E8M0 scale, 16 bytes of nibbles: the low ones are the first half, whereas in safetensors files of gpt-oss they
/// are the even elements.
pub fn mxfp4(bytes: &[u8], values: &mut [f32]) {
    // Half of 2^(e - 127), for the doubled values. The smallest two are subnormal; 255, NaN by the standard, is 2^127.
    let e = u32::from(bytes[0]);
    let d = f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 });
    for (i, value) in values.iter_mut().enumerate() {
        *value = d * TWICE_E2M1[usize::from(nibble(&bytes[1..], i))];
    }
}

/// The s-th of 16 scales: four bits lie in the first eight bytes, two in the last four.
fn q3_k_scale(scales: &[u8], s: usize) -> u8 {
    (scales[s % 8] >> (4 * (s / 8))) & 15 | ((scales[8 + s % 4] >> (2 * (s / 4))) & 3) << 4
}

/// The i-th of nibbles of which the first half lies in the low bits.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    if i < bytes.len() { bytes[i] & 15 } else { bytes[i - bytes.len()] >> 4 }
}

/// The i-th of 256 pairs of bits: 32 bytes hold four times 32 of them, the lowest bits first.
fn two_bits(bytes: &[u8], i: usize) -> u8 {
    bytes[32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32)) & 3
}

fn bit(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 8] >> (i % 8) & 1
}

/// The s-th of 8 scales and mins: the first four in the low 6 bits of a byte each, of the others 4 bits in the last
/// bytes and 2 in the high bits of the first ones.
fn scale_and_min(scales: &[u8], s: usize) -> (u8, u8) {
    if s < 4 {
        return (scales[s] & 63, scales[s + 4] & 63);
    }
    let low = scales[s + 4];
    (low & 15 | scales[s - 4] >> 6 << 4, low >> 4 | scales[s] >> 6 << 4)
}

fn short(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// The f16 at a byte.
fn half(bytes: &[u8], at: usize) -> f32 {
    let bits = short(bytes, at);
    let (sign, exponent, fraction) = (u32::from(bits >> 15) << 31, u32::from(bits >> 10 & 31), u32::from(bits & 1023));
    let magnitude = match exponent {
        // Subnormal: a multiple of 2^-24.
        0 => (fraction as f32 * 2f32.powi(-24)).to_bits(),
        31 => 0x7f80_0000 | fraction << 13,
        _ => (exponent + 112) << 23 | fraction << 13,
    };
    f32::from_bits(sign | magnitude)
}

/// Elements 32 · `chunk` and on of a block as small unsigned integers, signed bytes of Q8_0, and what their scales are
/// made of: f16 scale and min; of the K types a byte for each 16 elements, Q4_K and Q5_K a scale and a min. With the
/// block's own scales, which stay where they are, that is all of it.
pub fn split(ggml_type: super::GgmlType, bytes: &[u8], chunk: usize, scales: &mut [u8]) -> [u8; 32] {
    use super::GgmlType as Type;
    match ggml_type {
        Type::Q2K => scales.copy_from_slice(&bytes[2 * chunk..][..2]),
        Type::Q6K => scales.copy_from_slice(&bytes[192 + 2 * chunk..][..2]),
        Type::Q3K => {
            for (i, scale) in scales.iter_mut().enumerate() {
                *scale = q3_k_scale(&bytes[96..108], 2 * chunk + i).wrapping_sub(32);
            }
        }
        Type::Q4K | Type::Q5K => (scales[0], scales[1]) = scale_and_min(&bytes[4..16], chunk),
        _ => scales.copy_from_slice(&bytes[..scales.len()]),
    }
    let mut q = [0; 32];
    match ggml_type {
        Type::Q4_0 => nibbles(&bytes[2..], &mut q),
        Type::Q4_1 => nibbles(&bytes[4..], &mut q),
        Type::Q5_0 => {
            nibbles(&bytes[6..], &mut q);
            set(&mut q, |i| bit(&bytes[2..6], i) << 4);
        }
        Type::Q5_1 => {
            nibbles(&bytes[8..], &mut q);
            set(&mut q, |i| bit(&bytes[4..8], i) << 4);
        }
        Type::Q8_0 => q.copy_from_slice(&bytes[2..34]),
        Type::Q2K => pairs(&bytes[16..80], chunk, 0, &mut q),
        Type::Q3K => {
            pairs(&bytes[32..96], chunk, 0, &mut q);
            set(&mut q, |i| (bytes[i] >> chunk & 1) << 2);
        }
        Type::Q4K => half_of_nibbles(&bytes[16 + 32 * (chunk / 2)..], chunk % 2, &mut q),
        Type::Q5K => {
            half_of_nibbles(&bytes[48 + 32 * (chunk / 2)..], chunk % 2, &mut q);
            set(&mut q, |i| (bytes[16 + i] >> chunk & 1) << 4);
        }
        Type::Q6K => {
            half_of_nibbles(&bytes[64 * (chunk / 4) + 32 * (chunk % 2)..], chunk / 2 % 2, &mut q);
            pairs(&bytes[128..192], chunk, 4, &mut q);
        }
        Type::F32 | Type::F16 | Type::Bf16 | Type::Mxfp4 => {}
    }
    q
}

fn set(q: &mut [u8; 32], bits: impl Fn(usize) -> u8) {
    q.iter_mut().enumerate().for_each(|(i, q)| *q |= bits(i));
}

/// 32 nibbles of 16 bytes, first the low ones.
fn nibbles(bytes: &[u8], q: &mut [u8; 32]) {
    let (low, high) = q.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

/// The low or the high nibbles of 32 bytes.
fn half_of_nibbles(bytes: &[u8], half: usize, q: &mut [u8; 32]) {
    q.iter_mut().zip(bytes).for_each(|(q, byte)| *q = byte >> (4 * half) & 15);
}

/// Pairs of bits 32 · `chunk` and on of 256, moved up by `shift`.
fn pairs(bytes: &[u8], chunk: usize, shift: usize, q: &mut [u8; 32]) {
    let bytes = &bytes[32 * (chunk / 4)..][..32];
    q.iter_mut().zip(bytes).for_each(|(q, byte)| *q |= (byte >> (2 * (chunk % 4)) & 3) << shift);
}
