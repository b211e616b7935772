//! CPU operations on quantized matrices. Tests compare all of them except [`pack`] with the CUDA kernels.

use candle_core::{Result, Tensor};
use float8::F8E4M3;

use super::format::{GROUP_COLUMNS, WeightFormat};
use super::quantized_matrix::{InputQuantization, QuantizedMatrix};
use crate::kernels::constants::E4M3_MAX;
use crate::kernels::elements;

/// Returns the dot product of two slices. Adds to eight partial sums, so that the compiler can vectorize the loop.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    for (a, b) in a.iter().zip(b) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

/// Calls `then` with the planes of `matrix`, which must be in host memory.
pub fn with_host_planes<R>(matrix: &QuantizedMatrix, then: impl FnOnce(&HostPlanes) -> Result<R>) -> Result<R> {
    let guards = matrix.planes.each_ref().map(|plane| plane.as_ref().map(Tensor::storage_and_layout));
    let mut planes = [&[][..]; 4];
    for (plane, guard) in planes.iter_mut().zip(&guards) {
        if let Some((storage, layout)) = guard {
            *plane = elements::<u8>(storage, layout)?;
        }
    }
    then(&HostPlanes { format: matrix.format, row_bytes: matrix.format.row_bytes(matrix.columns), planes })
}

/// The planes of a matrix in host memory.
pub struct HostPlanes<'p> {
    pub format: WeightFormat,
    pub row_bytes: [usize; 4],
    pub planes: [&'p [u8]; 4],
}

impl HostPlanes<'_> {
    /// Dequantizes row `row` into `values`, which holds one f32 per column.
    pub fn row(&self, row: usize, values: &mut [f32]) {
        let [low, high, scales, supers] =
            std::array::from_fn(|i| &self.planes[i][row * self.row_bytes[i]..][..self.row_bytes[i]]);
        let bytes = self.format.plane_bytes();
        for (group, values) in values.chunks_mut(GROUP_COLUMNS).enumerate() {
            let padded = |plane: &'_ [u8], bytes: usize| -> [u8; 32] {
                let mut padded = [0; 32];
                padded[..bytes].copy_from_slice(&plane[group * bytes..][..bytes]);
                padded
            };
            let q = unpack(&padded(low, bytes.low), bytes.low, &padded(high, bytes.high), bytes.high);
            let supers = supers.get(group / 8 * 4..).unwrap_or(&[]);
            let scales = &scales[if bytes.scales == 0 { 0 } else { group * bytes.scales }..];
            let scaling = Scaling::read(self.format, scales, supers);
            for (i, value) in values.iter_mut().enumerate() {
                *value = scaling.value(self.format, q[i], i);
            }
        }
    }
}

/// Unpacks the 32 quantized values of a group. `low` and `high` are the group's bytes in the low and high planes, each
/// padded to 32 bytes. `low_bytes` and `high_bytes` are their numbers without padding.
fn unpack(low: &[u8; 32], low_bytes: usize, high: &[u8; 32], high_bytes: usize) -> [u8; 32] {
    let two = |plane: &[u8; 32], j: usize, i: usize| plane[4 * (j / 4) + i] >> (2 * (j % 4)) & 3;
    std::array::from_fn(|column| {
        let (j, i) = (column / 4, column % 4);
        let (q, bits) = match low_bytes {
            8 => (two(low, j, i), 2),
            16 => (low[4 * (j / 2) + i] >> (4 * (j % 2)) & 15, 4),
            _ => (low[column], 8),
        };
        match high_bytes {
            0 => q,
            4 => q | (high[i] >> j & 1) << bits,
            _ => q | two(high, j, i) << bits,
        }
    })
}

/// Packs the 32 quantized values of a group into the bytes of the low and high planes.
///
/// The lengths of `low` and `high` must be those that [`WeightFormat::plane_bytes`] returns for the format.
pub fn pack(q: &[u8; 32], low: &mut [u8], high: &mut [u8]) {
    let (quads, _) = q.as_chunks::<4>();
    let two = |plane: &mut [u8], shift: usize| {
        for (half, word) in plane.chunks_exact_mut(4).enumerate() {
            for (i, byte) in word.iter_mut().enumerate() {
                let bits = |j: usize| (quads[4 * half + j][i] >> shift & 3) << (2 * j);
                *byte = bits(0) | bits(1) | bits(2) | bits(3);
            }
        }
    };
    let bits = match low.len() {
        8 => {
            two(low, 0);
            2
        }
        16 => {
            for (w, word) in low.chunks_exact_mut(4).enumerate() {
                for (i, byte) in word.iter_mut().enumerate() {
                    *byte = quads[2 * w][i] & 15 | quads[2 * w + 1][i] << 4;
                }
            }
            4
        }
        _ => {
            low.copy_from_slice(q);
            8
        }
    };
    match high.len() {
        0 => {}
        4 => {
            for (i, byte) in high.iter_mut().enumerate() {
                *byte = (0..8).fold(0, |byte, j| byte | (quads[j][i] >> bits & 1) << j);
            }
        }
        _ => two(high, bits),
    }
}

/// The scale and min of each half of a group, and the zero point. A half has 16 columns.
/// In formats with one scale and min for a whole group or row, both halves have the same scale and min.
struct Scaling {
    scales: [f32; 2],
    mins: [f32; 2],
    zero: f32,
}

impl Scaling {
    fn read(format: WeightFormat, scales: &[u8], supers: &[u8]) -> Self {
        let half = |bytes: &[u8], i: usize| half::f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32();
        let zero = match format {
            WeightFormat::Q4_0 => 8.0,
            WeightFormat::Q5_0 => 16.0,
            WeightFormat::Q3K => 4.0,
            WeightFormat::Q6K => 32.0,
            _ => 0.0,
        };
        let byte = |i: usize| f32::from(scales[i]);
        let signed = |i: usize| f32::from(scales[i] as i8);
        let mut mins = [0.0; 2];
        let scales = match format {
            WeightFormat::Q4_0 | WeightFormat::Q5_0 | WeightFormat::Q8_0 => [half(scales, 0); 2],
            WeightFormat::Q4_1 | WeightFormat::Q5_1 => {
                mins = [-half(scales, 1); 2];
                [half(scales, 0); 2]
            }
            WeightFormat::Q2K => {
                let (d, dmin) = (half(supers, 0), half(supers, 1));
                mins = [0, 1].map(|i| dmin * f32::from(scales[i] >> 4));
                [0, 1].map(|i| d * f32::from(scales[i] & 15))
            }
            WeightFormat::Q3K | WeightFormat::Q6K => [half(supers, 0) * signed(0), half(supers, 0) * signed(1)],
            WeightFormat::Q4K | WeightFormat::Q5K => {
                mins = [half(supers, 1) * byte(1); 2];
                [half(supers, 0) * byte(0); 2]
            }
            WeightFormat::Int8 | WeightFormat::Fp8 => {
                [f32::from_le_bytes([scales[0], scales[1], scales[2], scales[3]]); 2]
            }
        };
        Self { scales, mins, zero }
    }

    fn value(&self, format: WeightFormat, q: u8, column: usize) -> f32 {
        let q = match format {
            WeightFormat::Q8_0 | WeightFormat::Int8 => f32::from(q as i8),
            WeightFormat::Fp8 => F8E4M3::from_bits(q).to_f32(),
            _ => f32::from(q) - self.zero,
        };
        self.scales[column / 16] * q - self.mins[column / 16]
    }
}

/// Quantizes `x`, f32 `[tokens, columns]`, and returns the dequantized values.
/// With [`InputQuantization::None`], returns `x` unchanged.
pub fn round_input(x: &Tensor, quantization: InputQuantization) -> Result<Tensor> {
    if quantization == InputQuantization::None {
        return Ok(x.clone());
    }
    let (_, columns) = x.dims2()?;
    let mut values: Vec<f32> = x.flatten_all()?.to_vec1()?;
    for row in values.chunks_exact_mut(columns) {
        let largest = row.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        let scale = match quantization {
            InputQuantization::Int8PerToken => largest / 127.5,
            InputQuantization::Fp8Static(scale) | InputQuantization::Int8Static(scale) => scale,
            _ => largest / E4M3_MAX,
        }
        .max(f32::MIN_POSITIVE);
        for value in row {
            *value = scale
                * match quantization {
                    InputQuantization::Int8PerToken | InputQuantization::Int8Static(_) => {
                        (*value / scale).round_ties_even().clamp(-128.0, 127.0)
                    }
                    _ => F8E4M3::from_f32(*value / scale).to_f32(),
                };
        }
    }
    Tensor::from_vec(values, x.dims(), x.device())
}
