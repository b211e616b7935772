//! Quantizes floats to K-quant blocks (Q2_K to Q6_K) without an importance matrix.
//!
//! Source: the `quantize_row_*_ref` functions in `ggml/src/ggml-quants.c` of ggml-org/llama.cpp.
//! The order of operations is the same as in ggml, so the blocks dequantize to the same values as ggml's.
//! Only codes without an effect can differ: those of a group whose quantized scale is 0.
//! candle's ports of these functions are not used, because they follow an older version of ggml.

use half::f16;

use super::types::{GgmlType, SUPER_BLOCK};

/// Clamps a value to a range and rounds it to the nearest integer, with ties to even.
///
/// Adding 1.5 · 2^23 rounds the value, because an f32 of that magnitude has no fractional bits.
/// `f32::round_ties_even` is slower: it compiles to a function call on targets without SSE 4.1.
fn nearest(value: f32, min: f32, max: f32) -> f32 {
    const ROUNDING: f32 = 12_582_912.0;
    value.clamp(min, max) + ROUNDING - ROUNDING
}

/// In Q3_K and Q6_K, groups whose largest magnitude is below this limit are quantized as zeros.
/// A Q6_K block whose largest group scale is below the limit is also quantized as zeros.
/// ggml names this limit `GROUP_MAX_EPS`.
const SMALLEST_MAGNITUDE: f32 = 1e-15;

/// Quantizes 256 finite values to one block. Returns false if the type is not a K-quant.
pub fn quantize(ggml_type: GgmlType, values: &[f32], block: &mut [u8]) -> bool {
    match ggml_type {
        GgmlType::Q2K => q2_k(values, block),
        GgmlType::Q3K => q3_k(values, block),
        GgmlType::Q4K => q4_k(values, block),
        GgmlType::Q5K => q5_k(values, block),
        GgmlType::Q6K => q6_k(values, block),
        _ => return false,
    }
    true
}

/// A Q2_K, Q4_K or Q5_K block before packing. Each group in the block has its own quantized scale and minimum.
struct TwoLevels {
    d: f16,
    dmin: f16,
    scales: [u8; 16],
    mins: [u8; 16],
    codes: [u8; SUPER_BLOCK],
}

impl TwoLevels {
    /// Quantizes the values `x` to codes from 0 to `max_code`, in groups of `group` values.
    /// The scales and the negated minimums that `fit` returns are quantized to integers from 0 to `levels`.
    fn new(x: &[f32], group: usize, max_code: f32, levels: f32, fit: impl Fn(&[f32]) -> Affine) -> Self {
        let fits: Vec<Affine> = x.chunks_exact(group).map(fit).collect();
        let largest = |number: fn(&Affine) -> f32| fits.iter().map(number).fold(0.0, f32::max);
        let (max_scale, max_min) = (largest(|fit| fit.scale), largest(|fit| -fit.min));
        let code = |value: f32, max: f32| if max > 0.0 { nearest(levels / max * value, 0.0, levels) as u8 } else { 0 };
        let (d, dmin) = (f16::from_f32(max_scale / levels), f16::from_f32(max_min / levels));
        let mut scales = [0; 16];
        let mut mins = [0; 16];
        let mut codes = [0; SUPER_BLOCK];
        for (index, ((x, codes), fit)) in
            x.chunks_exact(group).zip(codes.chunks_exact_mut(group)).zip(&fits).enumerate()
        {
            (scales[index], mins[index]) = (code(fit.scale, max_scale), code(-fit.min, max_min));
            let (scale, min) = (d.to_f32() * f32::from(scales[index]), dmin.to_f32() * f32::from(mins[index]));
            if scale == 0.0 {
                continue;
            }
            for (code, x) in codes.iter_mut().zip(x) {
                *code = nearest((x + min) / scale, 0.0, max_code) as u8;
            }
        }
        Self { d, dmin, scales, mins, codes }
    }

    /// Quantizes eight groups of 32 values, with 6-bit scales and minimums.
    fn with_groups_of_32(x: &[f32], max_code: f32, attempts: Attempts) -> Self {
        Self::new(x, 32, max_code, 63.0, |x| {
            let squares = x.iter().fold(0.0, |sum, x| sum + x * x);
            let mean = (squares / 32f32).sqrt();
            fit_affine(x, |x| mean + x.abs(), max_code, attempts, |error| error * error)
        })
    }

    /// Packs the scales and minimums into 12 bytes, in the layout of Q4_K and Q5_K.
    fn pack_scales(&self, to: &mut [u8]) {
        for i in 0..4 {
            let (scale, min) = (self.scales[i + 4], self.mins[i + 4]);
            to[i] = self.scales[i] | scale >> 4 << 6;
            to[i + 4] = self.mins[i] | min >> 4 << 6;
            to[i + 8] = scale & 15 | min << 4;
        }
    }

    /// Returns `d` and `dmin` as little-endian bytes.
    fn header(&self) -> [u8; 4] {
        let ([a, b], [c, d]) = (self.d.to_le_bytes(), self.dmin.to_le_bytes());
        [a, b, c, d]
    }
}

/// The function `code * scale + min`, from which a group of values is dequantized.
#[derive(Clone, Copy)]
struct Affine {
    /// At least 0.
    scale: f32,
    /// At most 0. A block stores the negated minimum.
    min: f32,
}

/// The attempts of [`fit_affine`] after the first one: one for each step from 0 to `steps`.
#[derive(Clone, Copy)]
struct Attempts {
    /// What the attempt of step 0 adds to the largest code. Each further step adds 0.1 more.
    first: f32,
    steps: u8,
}

/// Fits an affine function to the values `x`.
/// Returns a scale of 0 if the values are all equal and not positive, or differ too little for a finite inverse scale.
///
/// In the first attempt, `min` is the smallest value (or 0 if all values are positive), and `scale` is
/// `(max - min) / max_code`, where `max` is the largest value.
/// Another attempt follows for each `step` of `attempts`:
/// 1. Compute codes with the best `min` so far and the scale `(max - min) / (max_code + first + 0.1 * step)`.
/// 2. Compute the `scale` and the `min` that fit these codes best, by weighted least squares.
///
/// The result is the attempt with the smallest sum of `weight(value) * cost(error)` over the values.
fn fit_affine(
    x: &[f32],
    weight: impl Fn(f32) -> f32,
    max_code: f32,
    Attempts { first, steps }: Attempts,
    cost: impl Fn(f32) -> f32,
) -> Affine {
    let mut weights = [0.0; 32];
    let mut min = x[0];
    let mut max = x[0];
    let mut sum_w = 0.0;
    let mut sum_x = 0.0;
    for (&x, w) in x.iter().zip(&mut weights) {
        (min, max) = (if x < min { x } else { min }, if x > max { x } else { max });
        *w = weight(x);
        let w = *w;
        sum_w += w;
        sum_x += w * x;
    }
    let min = if min > 0.0 { 0.0 } else { min };
    let code = |inverse: f32, min: f32, x: f32| nearest(inverse * (x - min), 0.0, max_code);
    let inverse = max_code / (max - min);
    if max == min || !inverse.is_finite() {
        return Affine { scale: 0.0, min };
    }
    // Returns the weighted quantization error. The values are quantized with the inverse scale `inverse`
    // and the minimum `from`, and dequantized with `scale` and `min`.
    let error = |inverse: f32, from: f32, Affine { scale, min }: Affine| {
        let error = |(&x, w): (&f32, f32)| w * cost(scale * code(inverse, from, x) + min - x);
        x.iter().zip(weights).map(error).fold(0.0, |sum, error| sum + error)
    };
    let mut best = Affine { scale: 1.0 / inverse, min };
    let mut least = error(inverse, min, best);
    for step in 0..=steps {
        // As in ggml, each attempt starts from the best `min` of the earlier attempts.
        let min = best.min;
        let inverse = (first + 0.1 * f32::from(step) + max_code) / (max - min);
        let mut sum_l = 0.0;
        let mut sum_l2 = 0.0;
        let mut sum_xl = 0.0;
        for (&x, w) in x.iter().zip(weights) {
            let l = code(inverse, min, x);
            sum_l += w * l;
            sum_l2 += w * l * l;
            sum_xl += w * l * x;
        }
        let determinant = sum_w * sum_l2 - sum_l * sum_l;
        if determinant <= 0.0 {
            continue;
        }
        let mut found = Affine {
            scale: (sum_w * sum_xl - sum_x * sum_l) / determinant,
            min: (sum_l2 * sum_x - sum_l * sum_xl) / determinant,
        };
        if found.min > 0.0 {
            found = Affine { scale: sum_xl / sum_l2, min: 0.0 };
        }
        let now = error(inverse, min, found);
        if now < least {
            (least, best) = (now, found);
        }
    }
    best
}

/// Packs 2-bit codes in runs of 128. Each byte holds one code from each quarter of a run.
fn pack_quarters(codes: &[u8], to: &mut [u8]) {
    for (codes, to) in codes.chunks_exact(128).zip(to.chunks_exact_mut(32)) {
        for (i, byte) in to.iter_mut().enumerate() {
            *byte = codes[i] | codes[i + 32] << 2 | codes[i + 64] << 4 | codes[i + 96] << 6;
        }
    }
}

fn q2_k(x: &[f32], block: &mut [u8]) {
    let found = TwoLevels::new(x, 16, 3.0, 15.0, |x| {
        fit_affine(x, f32::abs, 3.0, Attempts { first: -0.5, steps: 15 }, f32::abs)
    });
    for (i, to) in block[..16].iter_mut().enumerate() {
        *to = found.scales[i] | found.mins[i] << 4;
    }
    pack_quarters(&found.codes, &mut block[16..80]);
    block[80..84].copy_from_slice(&found.header());
}

fn q4_k(x: &[f32], block: &mut [u8]) {
    let found = TwoLevels::with_groups_of_32(x, 15.0, Attempts { first: -1.0, steps: 20 });
    block[..4].copy_from_slice(&found.header());
    found.pack_scales(&mut block[4..16]);
    for (codes, to) in found.codes.chunks_exact(64).zip(block[16..144].chunks_exact_mut(32)) {
        to.iter_mut().enumerate().for_each(|(i, byte)| *byte = codes[i] | codes[i + 32] << 4);
    }
}

fn q5_k(x: &[f32], block: &mut [u8]) {
    let found = TwoLevels::with_groups_of_32(x, 31.0, Attempts { first: -0.5, steps: 15 });
    block[..4].copy_from_slice(&found.header());
    found.pack_scales(&mut block[4..16]);
    let (high, low) = block[16..176].split_at_mut(32);
    high.fill(0);
    for (index, (codes, low)) in found.codes.chunks_exact(64).zip(low.chunks_exact_mut(32)).enumerate() {
        for i in 0..32 {
            let (a, b) = (codes[i], codes[i + 32]);
            high[i] |= (a >> 4 | b >> 4 << 1) << (2 * index);
            low[i] = a & 15 | b << 4;
        }
    }
}

fn q3_k(x: &[f32], block: &mut [u8]) {
    let mut codes = [0u8; SUPER_BLOCK];
    let mut scales = [0f32; 16];
    for ((x, codes), scale) in x.chunks_exact(16).zip(codes.chunks_exact_mut(16)).zip(&mut scales) {
        *scale = fit_q3(x, codes);
    }
    let largest = scales.iter().fold(0.0f32, |max, scale| if scale.abs() > max.abs() { *scale } else { max });
    let (high, rest) = block.split_at_mut(32);
    let (low, rest) = rest.split_at_mut(64);
    let (packed, d) = rest.split_at_mut(12);
    high.fill(0);
    packed.fill(0);
    let inverse = -32.0 / largest;
    let nonzero = if inverse.is_finite() { x } else { &[] };
    let super_scale = if inverse.is_finite() { f16::from_f32(1.0 / inverse) } else { f16::ZERO };
    d.copy_from_slice(&super_scale.to_le_bytes());
    for (j, (x, codes)) in nonzero.chunks_exact(16).zip(codes.chunks_exact_mut(16)).enumerate() {
        let scale = nearest(inverse * scales[j], -32.0, 31.0);
        let bits = (scale as i8 + 32) as u8;
        packed[j % 8] |= (bits & 15) << (4 * (j / 8));
        packed[8 + j % 4] |= bits >> 4 << (2 * (j / 4));
        let scale = super_scale.to_f32() * scale;
        if scale != 0.0 {
            for (code, x) in codes.iter_mut().zip(x) {
                *code = (nearest(x / scale, -4.0, 3.0) + 4.0) as u8;
            }
        }
    }
    for (j, code) in codes.iter_mut().enumerate() {
        high[j % 32] |= (*code >> 2) << (j / 32);
        *code &= 3;
    }
    pack_quarters(&codes, low);
}

fn q6_k(x: &[f32], block: &mut [u8]) {
    let mut codes = [0u8; SUPER_BLOCK];
    let mut scales = [0f32; 16];
    for ((x, codes), scale) in x.chunks_exact(16).zip(codes.chunks_exact_mut(16)).zip(&mut scales) {
        *scale = fit_q6(x, codes);
    }
    let largest = scales.iter().fold(0.0f32, |max, scale| if scale.abs() > max.abs() { *scale } else { max });
    block.fill(0);
    if largest.abs() < SMALLEST_MAGNITUDE {
        return;
    }
    let inverse = -128.0 / largest;
    let super_scale = f16::from_f32(1.0 / inverse);
    block[208..210].copy_from_slice(&super_scale.to_le_bytes());
    for (j, (x, codes)) in x.chunks_exact(16).zip(codes.chunks_exact_mut(16)).enumerate() {
        let scale = nearest(inverse * scales[j], -128.0, 127.0);
        block[192 + j] = scale as i8 as u8;
        let scale = super_scale.to_f32() * scale;
        if scale != 0.0 {
            for (code, x) in codes.iter_mut().zip(x) {
                *code = (nearest(x / scale, -32.0, 31.0) + 32.0) as u8;
            }
        }
    }
    let (low, high) = block[..192].split_at_mut(128);
    for ((codes, low), high) in codes.chunks_exact(128).zip(low.chunks_exact_mut(64)).zip(high.chunks_exact_mut(32)) {
        for i in 0..32 {
            let [a, b, c, d] = [0, 32, 64, 96].map(|quarter| codes[quarter + i]);
            (low[i], low[i + 32]) = (a & 15 | c << 4, b & 15 | d << 4);
            high[i] = a >> 4 | b >> 4 << 2 | c >> 4 << 4 | d >> 4 << 6;
        }
    }
}

/// Quantizes 16 values to codes from -32 to 31 and returns their scale (`make_qx_quants` in ggml).
///
/// Tries 19 scales and keeps the one with the smallest squared error. Each error is weighted by the squared value.
/// Writes each code plus 32 to `codes`.
/// If all magnitudes are below [`SMALLEST_MAGNITUDE`], returns 0 and leaves `codes` unchanged.
fn fit_q6(x: &[f32], codes: &mut [u8]) -> f32 {
    let max = x.iter().fold(0.0f32, |max, x| if x.abs() > max.abs() { *x } else { max });
    if max.abs() < SMALLEST_MAGNITUDE {
        return 0.0;
    }
    let code = |inverse: f32, x: f32| nearest(inverse * x, -32.0, 31.0);
    let sums = |inverse: f32| {
        x.iter().fold((0f32, 0f32), |(sum_lx, sum_l2), &x| {
            let (l, w) = (code(inverse, x), x * x);
            (sum_lx + w * x * l, sum_l2 + w * l * l)
        })
    };
    let mut best = -32.0 / max;
    let (sum_lx, sum_l2) = sums(best);
    let mut scale = if sum_l2 != 0.0 { sum_lx / sum_l2 } else { 0.0 };
    let mut best_score = scale * sum_lx;
    for step in (-9i8..=9).filter(|&step| step != 0) {
        let inverse = -(32.0 + 0.1 * f32::from(step)) / max;
        let (sum_lx, sum_l2) = sums(inverse);
        if sum_l2 > 0.0 && sum_lx * sum_lx > best_score * sum_l2 {
            (best, scale) = (inverse, sum_lx / sum_l2);
            best_score = scale * sum_lx;
        }
    }
    codes.iter_mut().zip(x).for_each(|(to, &x)| *to = (code(best, x) + 32.0) as u8);
    scale
}

/// Quantizes 16 values to codes from -4 to 3 and returns their scale (`make_q3_quants` in ggml).
///
/// Writes each code plus 4 to `codes`.
/// If all magnitudes are below [`SMALLEST_MAGNITUDE`], returns 0 and leaves `codes` unchanged.
fn fit_q3(x: &[f32], codes: &mut [u8]) -> f32 {
    let max = x.iter().fold(0.0f32, |max, x| if x.abs() > max.abs() { *x } else { max });
    if max.abs() < SMALLEST_MAGNITUDE {
        return 0.0;
    }
    let code = |value: f32| nearest(value, -4.0, 3.0);
    let (mut sum_lx, mut sum_l2) = (0f32, 0f32);
    let mut l = [0f32; 16];
    for (l, &x) in l.iter_mut().zip(x) {
        *l = code(-4.0 / max * x);
        let w = x * x;
        sum_lx += w * x * *l;
        sum_l2 += w * *l * *l;
    }
    for _ in 0..5 {
        let mut changed = false;
        for (l, &x) in l.iter_mut().zip(x) {
            let w = x * x;
            let (without_lx, without_l2) = (sum_lx - w * x * *l, sum_l2 - w * *l * *l);
            if without_lx <= 0.0 {
                continue;
            }
            let new = code(x * without_l2 / without_lx);
            let (new_lx, new_l2) = (without_lx + w * x * new, without_l2 + w * new * new);
            if new != *l && new_l2 > 0.0 && new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2 {
                (*l, sum_lx, sum_l2, changed) = (new, new_lx, new_l2, true);
            }
        }
        if !changed {
            break;
        }
    }
    codes.iter_mut().zip(l).for_each(|(code, l)| *code = (l + 4.0) as u8);
    if sum_l2 > 0.0 { sum_lx / sum_l2 } else { 0.0 }
}
