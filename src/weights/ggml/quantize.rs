//! Floats to blocks of the K types, as ggml does it without an importance matrix: `quantize_row_q2_K_ref` and its kin in
//! `ggml/src/ggml-quants.c`. candle has those of an older ggml. The order of operations is kept, so that
//! blocks are the same.

use half::f16;

use super::{GgmlType, SUPER_BLOCK};

/// To the nearest of the integers from one to another, halves to even: as `round_ties_even`, which is a call where processors
/// older than SSE 4.1 must be served. From 2^23 on there is nothing between the integers.
fn nearest(value: f32, from: f32, to: f32) -> f32 {
    const INTEGERS: f32 = 12_582_912.0;
    value.clamp(from, to) + INTEGERS - INTEGERS
}

/// Groups of less are nothing.
const NOTHING: f32 = 1e-15;

/// The block that stands for 256 finite values; false for a type that is not made here.
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

/// Codes with a scale and a minimum for each group, which are codes themselves.
struct TwoLevels {
    d: f16,
    dmin: f16,
    scales: [u8; 16],
    mins: [u8; 16],
    codes: [u8; SUPER_BLOCK],
}

impl TwoLevels {
    /// Groups of so many values, codes up to `most`, scales and minima up to `levels`. `fit` finds a group's scale and minimum.
    fn new(x: &[f32], group: usize, most: f32, levels: f32, fit: impl Fn(&[f32]) -> (f32, f32)) -> Self {
        let fits: Vec<(f32, f32)> = x.chunks_exact(group).map(fit).collect();
        let largest = |of: fn(&(f32, f32)) -> f32| fits.iter().map(of).fold(0.0, f32::max);
        let (max_scale, max_min) = (largest(|fit| fit.0), largest(|fit| fit.1));
        let code = |value: f32, max: f32| match max > 0.0 {
            true => nearest(levels / max * value, 0.0, levels) as u8,
            false => 0,
        };
        let (d, dmin) = (f16::from_f32(max_scale / levels), f16::from_f32(max_min / levels));
        let (mut scales, mut mins, mut codes) = ([0; 16], [0; 16], [0; SUPER_BLOCK]);
        for (index, ((x, codes), (scale, min))) in
            x.chunks_exact(group).zip(codes.chunks_exact_mut(group)).zip(&fits).enumerate()
        {
            (scales[index], mins[index]) = (code(*scale, max_scale), code(*min, max_min));
            let (scale, min) = (d.to_f32() * f32::from(scales[index]), dmin.to_f32() * f32::from(mins[index]));
            if scale == 0.0 {
                continue;
            }
            for (code, x) in codes.iter_mut().zip(x) {
                *code = nearest((x + min) / scale, 0.0, most) as u8;
            }
        }
        Self { d, dmin, scales, mins, codes }
    }

    /// Eight groups of 32, whose scales and minima have 6 bits.
    fn of_32(x: &[f32], most: f32, first: f32, steps: u8) -> Self {
        Self::new(x, 32, most, 63.0, |x| {
            let squares = x.iter().fold(0.0, |sum, x| sum + x * x);
            let mean = (squares / 32f32).sqrt();
            fit_affine(x, |x| mean + x.abs(), most, (first, steps), |error| error * error)
        })
    }

    /// Scales and minima as Q4_K and Q5_K pack them into 12 bytes.
    fn pack_scales(&self, to: &mut [u8]) {
        for i in 0..4 {
            let (scale, min) = (self.scales[i + 4], self.mins[i + 4]);
            to[i] = self.scales[i] | scale >> 4 << 6;
            to[i + 4] = self.mins[i] | min >> 4 << 6;
            to[i + 8] = scale & 15 | min << 4;
        }
    }

    fn head(&self) -> [u8; 4] {
        let ([a, b], [c, d]) = (self.d.to_le_bytes(), self.dmin.to_le_bytes());
        [a, b, c, d]
    }
}

/// The scale and the minimum, both positive, of code · scale - minimum, by weighted least squares for each of several first
/// guesses: those with which the codes would reach up to `most` + `first` + 0.1 · step.
fn fit_affine(
    x: &[f32],
    weight: impl Fn(f32) -> f32,
    most: f32,
    (first, steps): (f32, u8),
    cost: impl Fn(f32) -> f32,
) -> (f32, f32) {
    let mut weights = [0.0; 32];
    let (mut min, mut max, mut sum_w, mut sum_x) = (x[0], x[0], 0.0, 0.0);
    for (&x, w) in x.iter().zip(&mut weights) {
        (min, max) = (if x < min { x } else { min }, if x > max { x } else { max });
        *w = weight(x);
        let w = *w;
        sum_w += w;
        sum_x += w * x;
    }
    let min = if min > 0.0 { 0.0 } else { min };
    let code = |inverse: f32, min: f32, x: f32| nearest(inverse * (x - min), 0.0, most);
    let inverse = most / (max - min);
    if max == min || !inverse.is_finite() {
        return (0.0, -min);
    }
    // Of codes that are made with one pair and read with another.
    let error = |inverse: f32, from: f32, (scale, min): (f32, f32)| {
        let error = |(&x, w): (&f32, f32)| w * cost(scale * code(inverse, from, x) + min - x);
        x.iter().zip(weights).map(error).fold(0.0, |sum, error| sum + error)
    };
    let mut best = (1.0 / inverse, min);
    let mut least = error(inverse, min, best);
    for step in 0..=steps {
        // Each guess begins where the best one so far does.
        let min = best.1;
        let inverse = (first + 0.1 * f32::from(step) + most) / (max - min);
        let (mut sum_l, mut sum_l2, mut sum_xl) = (0.0, 0.0, 0.0);
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
        let mut found =
            ((sum_w * sum_xl - sum_x * sum_l) / determinant, (sum_l2 * sum_x - sum_l * sum_xl) / determinant);
        if found.1 > 0.0 {
            found = (sum_xl / sum_l2, 0.0);
        }
        let now = error(inverse, min, found);
        if now < least {
            (least, best) = (now, found);
        }
    }
    (best.0, -best.1)
}

/// Two bits each: four quarters of 128 codes in one byte.
fn pack_quarters(codes: &[u8], to: &mut [u8]) {
    for (codes, to) in codes.chunks_exact(128).zip(to.chunks_exact_mut(32)) {
        for (i, byte) in to.iter_mut().enumerate() {
            *byte = codes[i] | codes[i + 32] << 2 | codes[i + 64] << 4 | codes[i + 96] << 6;
        }
    }
}

fn q2_k(x: &[f32], block: &mut [u8]) {
    let found = TwoLevels::new(x, 16, 3.0, 15.0, |x| fit_affine(x, f32::abs, 3.0, (-0.5, 15), f32::abs));
    for (i, to) in block[..16].iter_mut().enumerate() {
        *to = found.scales[i] | found.mins[i] << 4;
    }
    pack_quarters(&found.codes, &mut block[16..80]);
    block[80..84].copy_from_slice(&found.head());
}

fn q4_k(x: &[f32], block: &mut [u8]) {
    let found = TwoLevels::of_32(x, 15.0, -1.0, 20);
    block[..4].copy_from_slice(&found.head());
    found.pack_scales(&mut block[4..16]);
    for (codes, to) in found.codes.chunks_exact(64).zip(block[16..144].chunks_exact_mut(32)) {
        to.iter_mut().enumerate().for_each(|(i, byte)| *byte = codes[i] | codes[i + 32] << 4);
    }
}

fn q5_k(x: &[f32], block: &mut [u8]) {
    let found = TwoLevels::of_32(x, 31.0, -0.5, 15);
    block[..4].copy_from_slice(&found.head());
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
    let largest = scales.iter().fold(0.0f32, |most, scale| if scale.abs() > most.abs() { *scale } else { most });
    let (high, rest) = block.split_at_mut(32);
    let (low, rest) = rest.split_at_mut(64);
    let (packed, d) = rest.split_at_mut(12);
    high.fill(0);
    packed.fill(0);
    let inverse = -32.0 / largest;
    let some = if inverse.is_finite() { x } else { &[] };
    let super_scale = if inverse.is_finite() { f16::from_f32(1.0 / inverse) } else { f16::ZERO };
    d.copy_from_slice(&super_scale.to_le_bytes());
    for (j, (x, codes)) in some.chunks_exact(16).zip(codes.chunks_exact_mut(16)).enumerate() {
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
    let largest = scales.iter().fold(0.0f32, |most, scale| if scale.abs() > most.abs() { *scale } else { most });
    block.fill(0);
    if largest.abs() < NOTHING {
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

/// The scale of 16 values and their codes, of -32 to 31, plus 32 (`make_qx_quants`): of several guesses the one that leaves the
/// least error, weighted by squares.
fn fit_q6(x: &[f32], codes: &mut [u8]) -> f32 {
    let max = x.iter().fold(0.0f32, |max, x| if x.abs() > max.abs() { *x } else { max });
    if max.abs() < NOTHING {
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
    let mut most = scale * sum_lx;
    for step in (-9i8..=9).filter(|&step| step != 0) {
        let inverse = -(32.0 + 0.1 * f32::from(step)) / max;
        let (sum_lx, sum_l2) = sums(inverse);
        if sum_l2 > 0.0 && sum_lx * sum_lx > most * sum_l2 {
            (best, scale) = (inverse, sum_lx / sum_l2);
            most = scale * sum_lx;
        }
    }
    codes.iter_mut().zip(x).for_each(|(to, &x)| *to = (code(best, x) + 32.0) as u8);
    scale
}

/// The scale of 16 values and their codes, of -4 to 3, plus 4 (`make_q3_quants`).
fn fit_q3(x: &[f32], codes: &mut [u8]) -> f32 {
    let max = x.iter().fold(0.0f32, |max, x| if x.abs() > max.abs() { *x } else { max });
    if max.abs() < NOTHING {
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
