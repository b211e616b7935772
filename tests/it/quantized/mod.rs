//! Tests of quantized matrices.
//!
//! - Dequantized values equal the values of the original blocks.
//! - Matrix products equal the products with the dequantized matrix, up to rounding.
//! - The GPU kernels produce the same results as the CPU, up to rounding (`on_gpu`).
//! - The error of quantizing floats is bounded.

use candle_core::{DType, Device, Tensor};
use float8::F8E4M3;
use inferno::kernels::SumOrder;
use inferno::kernels::moe::experts::{ExpertWeights, expert_matmul};
use inferno::kernels::quantized::{InputQuantization, QuantizedMatrix, WeightFormat};
use inferno::weights::ggml::GgmlType;
use inferno::weights::quantized::{MatrixRows, QuantizationTarget, weight_format};
use inferno::weights::{RowBuffer, StoredBytes, StoredRows};

use crate::harness::TestCase;
use crate::support::{Random, cases, relative_error, values};

mod on_gpu;
mod perplexity;

const BLOCKS: [GgmlType; 10] = [
    GgmlType::Q4_0,
    GgmlType::Q4_1,
    GgmlType::Q5_0,
    GgmlType::Q5_1,
    GgmlType::Q8_0,
    GgmlType::Q2K,
    GgmlType::Q3K,
    GgmlType::Q4K,
    GgmlType::Q5K,
    GgmlType::Q6K,
];

/// Returns random numbers in [-2, 2).
fn floats(count: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    (0..count).map(|_| f32::from(random.next() as i16) / 16384.0).collect()
}

/// Returns numbers in [-2, 2) for which the errors of ggml's quantizers were measured.
///
/// Do not replace this xorshift generator. The errors are known only for the numbers that it generates.
fn floats_with_known_errors(count: usize) -> Vec<f32> {
    let mut state = 11u64.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next_byte = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..count).map(|_| f32::from(i16::from_le_bytes([next_byte(), next_byte()])) / 16384.0).collect()
}

/// Returns blocks of random bits, with scales and minima of realistic magnitudes.
fn blocks(ggml_type: GgmlType, count: usize) -> Vec<u8> {
    let mut random = Random(ggml_type.id().into());
    let mut bytes: Vec<u8> = (0..count * ggml_type.block_bytes()).map(|_| random.next() as u8).collect();
    let halves: &[usize] = match ggml_type {
        GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 => &[0],
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => &[0, 2],
        GgmlType::Q2K => &[80, 82],
        GgmlType::Q3K => &[108],
        _ => &[208],
    };
    for block in bytes.chunks_exact_mut(ggml_type.block_bytes()) {
        for at in halves {
            // Set the exponent of an f16 scale or minimum of the block to -7 or -6. Keep the sign.
            block[at + 1] = block[at + 1] & 0x84 | 0x20;
        }
    }
    bytes
}

/// Returns a matrix of random blocks and its dequantized values.
fn from_blocks(ggml_type: GgmlType, rows: usize, columns: usize, device: &Device) -> (QuantizedMatrix, Vec<f32>) {
    let bytes = blocks(ggml_type, rows * columns / ggml_type.block_length());
    let stored = StoredRows { bytes: StoredBytes::Memory(&bytes), row_bytes: bytes.len() / rows };
    let matrix_rows = MatrixRows::from_blocks(ggml_type, rows, columns, stored).unwrap();
    let matrix = MatrixRows::build(&[&matrix_rows], device, &|| {}).unwrap();
    let mut values = vec![0.0; rows * columns];
    ggml_type.dequantize(&bytes, &mut values).unwrap();
    (matrix, values)
}

/// Quantizes `values` to a matrix with `columns` columns.
fn quantized_floats(quantize: QuantizationTarget, values: &[f32], columns: usize, device: &Device) -> QuantizedMatrix {
    let row = |row: usize, _: &mut RowBuffer, to: &mut [f32]| {
        to.copy_from_slice(&values[row * columns..][..columns]);
        Ok(())
    };
    MatrixRows::build(
        &[&MatrixRows::from_floats(quantize, values.len() / columns, columns, row).unwrap()],
        device,
        &|| {},
    )
    .unwrap()
}

/// Returns a matrix of random values in `format`.
fn random_matrix(format: WeightFormat, rows: usize, columns: usize, device: &Device) -> QuantizedMatrix {
    let quantized = |target| quantized_floats(target, &floats(rows * columns, 7), columns, device);
    let matrix = match format {
        WeightFormat::Int8 => quantized(QuantizationTarget::Int8),
        WeightFormat::Fp8 => quantized(QuantizationTarget::Fp8),
        _ => {
            let ggml_type = BLOCKS.into_iter().find(|of| weight_format(*of) == Some(format)).unwrap();
            from_blocks(ggml_type, rows, columns, device).0
        }
    };
    assert_eq!(matrix.format, format);
    matrix
}

/// Returns one matrix of random values in each format.
fn matrices_of_each_format(rows: usize, columns: usize, device: &Device) -> [QuantizedMatrix; 12] {
    WeightFormat::ALL.map(|format| random_matrix(format, rows, columns, device))
}

fn block_types() -> Vec<TestCase<GgmlType>> {
    cases(BLOCKS)
}

#[test(each = block_types)]
fn values_equal_those_of_the_blocks_bit_by_bit(ggml_type: GgmlType) {
    let (rows, columns) = (3, 512);
    let (matrix, want) = from_blocks(ggml_type, rows, columns, &Device::Cpu);
    let got = values(&matrix.dequantize(DType::F32).unwrap());
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&got), bits(&want));
    // A K-quant block has 256 values. It takes up to 6 bytes more in memory than in the file: 4 for unpacked scales and
    // 2 for padding.
    let file_bytes = rows * columns / ggml_type.block_length() * ggml_type.block_bytes();
    let limit = file_bytes + rows * columns / 256 * 6;
    assert!(matrix.bytes() as usize <= limit, "{} bytes in memory, {file_bytes} bytes in the file", matrix.bytes());
}

#[test]
fn products_and_rows_match_the_dequantized_matrix() {
    let x = Tensor::from_vec(floats(5 * 512, 3), (5, 512), &Device::Cpu).unwrap();
    let ids = Tensor::new(&[2u32, 0, 6], &Device::Cpu).unwrap();
    for matrix in matrices_of_each_format(7, 512, &Device::Cpu) {
        let dense = matrix.dequantize(DType::F32).unwrap();
        let want = x.matmul(&dense.t().unwrap()).unwrap();
        let error = relative_error(&values(&matrix.matmul(&x).unwrap()), &values(&want));
        assert!(error < 1e-6, "{:?}: relative error {error:e}", matrix.format);
        let want = (dense.index_select(&ids, 0).unwrap() * 3.0).unwrap();
        assert_eq!(values(&matrix.embed(&ids, 3.0).unwrap()), values(&want), "{:?}", matrix.format);
        let part = matrix.rows(2, 4).unwrap().dequantize(DType::F32).unwrap();
        assert_eq!(values(&part), values(&dense.narrow(0, 2, 4).unwrap()), "{:?}", matrix.format);
    }
}

#[test]
fn matrices_are_stacked_in_order() {
    let (bytes, columns) = (blocks(GgmlType::Q6K, 10), 256);
    let of = |first: usize, rows: usize| {
        let bytes = &bytes[first * 210..];
        let stored = StoredRows { bytes: StoredBytes::Memory(bytes), row_bytes: 210 };
        MatrixRows::from_blocks(GgmlType::Q6K, rows, columns, stored).unwrap()
    };
    let whole = MatrixRows::build(&[&of(0, 10)], &Device::Cpu, &|| {}).unwrap();
    let stacked = MatrixRows::build(&[&of(0, 3), &of(3, 1), &of(4, 6)], &Device::Cpu, &|| {}).unwrap();
    let all = |matrix: &QuantizedMatrix| values(&matrix.dequantize(DType::F32).unwrap());
    assert_eq!(all(&whole), all(&stacked));
}

/// The formats that `--quantize` supports.
const TARGETS: [&str; 12] =
    ["q8_0", "int8", "q6_k", "fp8", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "q3_k", "q2_k"];

/// Returns a case for each format that `--quantize` supports.
fn targets() -> Vec<TestCase<&'static str>> {
    cases(TARGETS)
}

/// Returns the largest allowed quantization error, relative to the largest magnitude in a row.
fn error_limit(target: &str) -> f32 {
    // Allows for the rounding of the scales.
    const ROUNDED_SCALES: f32 = 1.1;
    match target {
        // Half a quantization step.
        "q8_0" | "int8" => ROUNDED_SCALES / 127.0 / 2.0,
        "fp8" => ROUNDED_SCALES / 28.0,
        "q5_1" => ROUNDED_SCALES / 31.0,
        "q4_1" => ROUNDED_SCALES / 15.0,
        // These formats have one more negative code than positive codes, so they cannot represent both the minimum and
        // the maximum. The limit is the step with which the highest code represents the largest magnitude.
        "q6_k" => ROUNDED_SCALES / 31.0,
        "q5_0" => ROUNDED_SCALES / 15.0,
        "q4_0" => ROUNDED_SCALES / 7.0,
        "q3_k" => ROUNDED_SCALES / 3.0,
        // These formats fit a group by least squares, which is less exact for the extremes. For the numbers of
        // `floats_with_known_errors`, the relative errors of ggml are 0.0481 and 0.0745.
        "q5_k" => 0.0482,
        "q4_k" => 0.0746,
        // This format also fits by least squares. The limit is three quarters of a step.
        "q2_k" => ROUNDED_SCALES / 2.0,
        _ => panic!("no limit for {target}"),
    }
}

#[test(each = targets)]
fn quantization_error_is_bounded(target: &'static str) {
    let (rows, columns) = (4, 512);
    let original = floats_with_known_errors(rows * columns);
    let matrix = quantized_floats(target.parse().unwrap(), &original, columns, &Device::Cpu);
    let got = values(&matrix.dequantize(DType::F32).unwrap());
    let worst = got.iter().zip(&original).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    // The largest magnitude in a row is about 2.
    let (error, limit) = (worst / 2.0, error_limit(target));
    assert!(error <= limit, "relative error {error}, limit {limit}");
    assert!(error > 0.0, "the quantization changes nothing");
}

/// If the row length is not a multiple of the block length, the matrix uses another format or stays unquantized.
/// int8 has no blocks, so it supports every row length.
#[test]
fn quantization_format_depends_on_the_row_length() {
    let format = |name: &str, columns| name.parse::<QuantizationTarget>().unwrap().weight_format(columns);
    assert_eq!(format("q4_k", 320), Some(WeightFormat::Q5_0));
    assert_eq!(format("q2_k", 320), Some(WeightFormat::Q4_0));
    assert_eq!(format("q6_k", 320), Some(WeightFormat::Q8_0));
    assert_eq!(format("q8_0", 100), None);
    assert_eq!(format("int8", 100), Some(WeightFormat::Int8));
}

#[test]
fn names_of_quantization_formats_are_parsed_and_displayed() {
    for name in TARGETS {
        assert_eq!(name.parse::<QuantizationTarget>().unwrap().to_string(), name);
    }
    assert!("q9".parse::<QuantizationTarget>().unwrap_err().contains("q8_0, q6_k"));
}

/// Tests rows of equal values, including values that are too small for an f16 scale.
#[test(each = targets)]
fn constant_and_tiny_rows_are_quantized_to_finite_values(target: &'static str) {
    for value in [0.0, -0.0, 1e-40, -3e-20, 1.0, -1.0] {
        let matrix = quantized_floats(target.parse().unwrap(), &[value; 512], 512, &Device::Cpu);
        let got = values(&matrix.dequantize(DType::F32).unwrap());
        assert!(got.iter().all(|got| got.is_finite()), "{value:e} becomes {got:?}");
        let worst = got.iter().map(|got| (got - value).abs()).fold(0.0, f32::max);
        assert!(worst <= value.abs() / 15.0 + 1e-15, "{value:e} becomes {}", got[0]);
    }
}

#[test]
fn e4m3_rounds_to_the_nearest_value() {
    let all: Vec<(u8, f32)> = (0..=255u8).map(|byte| (byte, F8E4M3::from_bits(byte).to_f32())).collect();
    assert_eq!(
        (F8E4M3::from_bits(0x7e).to_f32(), F8E4M3::from_bits(1).to_f32(), F8E4M3::from_bits(0x38).to_f32()),
        (448.0, 2f32.powi(-9), 1.0)
    );
    assert!(F8E4M3::from_bits(0x7f).to_f32().is_nan() && F8E4M3::from_bits(0xff).to_f32().is_nan());
    for &(byte, value) in all.iter().filter(|(_, value)| !value.is_nan()) {
        assert_eq!(F8E4M3::from_f32(value).to_bits(), byte, "{value}");
    }
    let finite: Vec<(u8, f32)> = all.into_iter().filter(|(byte, value)| !value.is_nan() && *byte < 128).collect();
    for two in finite.windows(2) {
        let ((low, a), (high, b)) = (two[0], two[1]);
        let middle = (a + b) / 2.0;
        assert_eq!(
            F8E4M3::from_f32(middle).to_bits(),
            if low % 2 == 0 { low } else { high },
            "wrong rounding of the value halfway between {a} and {b}"
        );
        assert_eq!(F8E4M3::from_f32(middle + (b - a) / 64.0).to_bits(), high);
        assert_eq!(F8E4M3::from_f32(middle - (b - a) / 64.0).to_bits(), low);
    }
    assert_eq!((F8E4M3::from_f32(1e9).to_bits(), F8E4M3::from_f32(-460.0).to_bits()), (0x7e, 0xfe));
    assert_eq!(F8E4M3::from_f32(f32::NAN).to_bits() & 127, 127);
}

#[test]
fn inputs_are_rounded_as_configured() {
    let weight = quantized_floats(QuantizationTarget::Int8, &floats(3 * 64, 1), 64, &Device::Cpu);
    let x = floats(2 * 64, 2);
    let product = |matrix: &QuantizedMatrix, x: &[f32]| {
        values(&matrix.matmul(&Tensor::from_slice(x, (2, 64), &Device::Cpu).unwrap()).unwrap())
    };
    let by_hand = |round: &dyn Fn(f32, f32) -> f32| {
        let rows = x.chunks_exact(64).flat_map(|row| {
            let max = row.iter().fold(0.0f32, |max, value| max.max(value.abs()));
            row.iter().map(move |value| round(*value, max))
        });
        product(&weight, &rows.collect::<Vec<_>>())
    };
    let int8 = by_hand(&|value, max| (value / (max / 127.5)).round_ties_even().clamp(-128.0, 127.0) * (max / 127.5));
    let fp8 = by_hand(&|value, max| F8E4M3::from_f32(value / (max / 448.0)).to_f32() * (max / 448.0));
    let fixed = by_hand(&|value, _| F8E4M3::from_f32(value / 0.25).to_f32() * 0.25);
    for (rounding, want) in [
        (InputQuantization::Int8PerToken, int8),
        (InputQuantization::Fp8PerToken, fp8),
        (InputQuantization::Fp8Static(0.25), fixed),
    ] {
        let got = product(&weight.clone().with_input_quantization(rounding), &x);
        assert!(relative_error(&got, &want) < 1e-6, "{rounding:?}");
        assert!(relative_error(&got, &product(&weight, &x)) > 1e-4, "{rounding:?} rounds nothing");
    }
}

#[test]
fn expert_products_use_the_chosen_experts() {
    let (experts, rows, columns) = (5, 3, 512);
    let ids = Tensor::new(&[[4u32, 0], [2, 4], [1, 1]], &Device::Cpu).unwrap();
    for matrix in matrices_of_each_format(experts * rows, columns, &Device::Cpu) {
        let dense = matrix.dequantize(DType::F32).unwrap().reshape((experts, rows, columns)).unwrap();
        for shape in [vec![3, columns], vec![3, 2, columns]] {
            let x = Tensor::from_vec(floats(shape.iter().product(), 4), shape, &Device::Cpu).unwrap();
            let product = |weights| values(&expert_matmul(&x, &weights, None, &ids, SumOrder::Fastest).unwrap());
            let got = product(ExpertWeights::Quantized(matrix.clone(), experts));
            let error = relative_error(&got, &product(ExpertWeights::Dense(dense.clone())));
            assert!(error < 5e-6, "{:?}: relative error {error:e}", matrix.format);
        }
    }
}
