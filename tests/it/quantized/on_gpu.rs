//! Tests that the GPU kernels for quantized matrices produce the same results as the CPU, up to rounding.

use candle_core::{DType, Device, Tensor};
use inferno::kernels::SumOrder;
use inferno::kernels::matrix::Matrix;
use inferno::kernels::moe::experts::{ExpertWeights, expert_matmul};
use inferno::kernels::quantized::{InputQuantization, QuantizedMatrix, WeightFormat};
use inferno::weights::ggml::GgmlType;

use super::{floats, from_blocks, random_matrix};
use crate::harness::{Need, TestCase};
use crate::support::{gpu, relative_error, values};

/// The number of experts in the tests of expert products. It divides the rows of all [`SHAPES`].
const EXPERTS: usize = 29;

/// The rows and columns of the matrices.
///
/// cuBLASLt needs a multiple of 16 rows for 8-bit products. 4640 and 464 are such multiples, 4611 is not.
/// 4640 and 4611 rows are more than the warps of a `quantized_matvec` grid multiply at once (4224 on an H200).
/// In a row of 256 columns, each lane of a warp multiplies at most one group of 32 columns.
/// In a row of 4608 columns, each lane multiplies several groups.
const SHAPES: [(usize, usize); 3] = [(EXPERTS * 159, 256), (EXPERTS * 160, 1536), (EXPERTS * 16, 4608)];

/// Returns one test case for each format.
fn formats() -> Vec<TestCase<WeightFormat>> {
    let case = |format| TestCase { name: format!("{format:?}").to_lowercase(), need: Some(Need::Gpu), value: format };
    WeightFormat::ALL.map(case).into()
}

/// Returns a matrix of random values in `format` on the CPU, and the same matrix on the GPU.
fn on_cpu_and_gpu(format: WeightFormat, rows: usize, columns: usize, gpu: &Device) -> [QuantizedMatrix; 2] {
    [&Device::Cpu, gpu].map(|device| random_matrix(format, rows, columns, device))
}

/// Returns random inputs `[tokens, columns]` on the CPU.
fn inputs(tokens: usize, columns: usize, dtype: DType, seed: u64) -> Tensor {
    let x = Tensor::from_vec(floats(tokens * columns, seed), (tokens, columns), &Device::Cpu).unwrap();
    x.to_dtype(dtype).unwrap()
}

/// Returns the product of `x` and a matrix, computed on the device of the matrix.
fn product(matrix: &QuantizedMatrix, x: &Tensor, rounding: InputQuantization) -> Vec<f32> {
    let matrix = matrix.clone().with_input_quantization(rounding);
    values(&matrix.matmul(&x.to_device(matrix.device()).unwrap()).unwrap())
}

/// Returns the kinds of input quantization to test with weights in `format`.
fn roundings(format: WeightFormat) -> Vec<InputQuantization> {
    match format {
        WeightFormat::Int8 => {
            vec![InputQuantization::None, InputQuantization::Int8PerToken, InputQuantization::Int8Static(0.01)]
        }
        WeightFormat::Fp8 => {
            vec![InputQuantization::None, InputQuantization::Fp8PerToken, InputQuantization::Fp8Static(0.01)]
        }
        _ => vec![InputQuantization::None],
    }
}

#[test(each = formats)]
fn dequantized_values_and_embedding_rows_equal_those_of_the_cpu(format: WeightFormat) {
    let gpu = gpu();
    for (rows, columns) in SHAPES {
        let [here, there] = on_cpu_and_gpu(format, rows, columns, &gpu);
        let want = values(&here.dequantize(DType::F32).unwrap());
        assert_eq!(values(&there.dequantize(DType::F32).unwrap()), want, "{rows} rows");
        let ids = Tensor::new(&[2u32, 0, rows as u32 - 1], &Device::Cpu).unwrap();
        let got = there.embed(&ids.to_device(&gpu).unwrap(), 0.5).unwrap();
        assert_eq!(values(&got), values(&here.embed(&ids, 0.5).unwrap()), "{rows} rows");
        let past_the_end = Tensor::new(&[rows as u32, 0, u32::MAX], &gpu).unwrap();
        let last = Tensor::new(&[rows as u32 - 1, 0, rows as u32 - 1], &Device::Cpu).unwrap();
        let got = there.embed(&past_the_end, 0.5).unwrap();
        assert_eq!(values(&got), values(&here.embed(&last, 0.5).unwrap()), "{rows} rows, ids past the last row");
    }
}

/// Divides the rows of a matrix among the experts. Each token has two experts.
#[test(each = formats)]
fn expert_products_match_the_cpu(format: WeightFormat) {
    let gpu = gpu();
    for (rows, columns) in SHAPES {
        let matrices = on_cpu_and_gpu(format, rows, columns, &gpu);
        for tokens in [3, 50] {
            let ids: Vec<u32> = (0..2 * tokens as u32).map(|i| i * 7 % EXPERTS as u32).collect();
            let ids = Tensor::from_vec(ids, (tokens, 2), &Device::Cpu).unwrap();
            let x = inputs(tokens, columns, DType::F16, 9);
            for rounding in roundings(format) {
                let [want, got] = matrices.each_ref().map(|matrix| {
                    let [x, ids] = [&x, &ids].map(|tensor| tensor.to_device(matrix.device()).unwrap());
                    let experts = ExpertWeights::Quantized(matrix.clone().with_input_quantization(rounding), EXPERTS);
                    let product =
                        |ids: &Tensor| values(&expert_matmul(&x, &experts, None, ids, SumOrder::Fastest).unwrap());
                    if matrix.device().is_cuda() {
                        let all = |id: u32| Tensor::from_vec(vec![id; 2 * tokens], (tokens, 2), &gpu).unwrap();
                        let want = product(&all(EXPERTS as u32 - 1));
                        assert_eq!(product(&all(u32::MAX)), want, "ids past the last expert");
                    }
                    product(&ids)
                });
                let error = relative_error(&got, &want);
                assert!(error < 2e-3, "{rows} rows, {tokens} tokens, {rounding:?}: relative error {error:e}");
            }
        }
    }
}

/// Returns the largest relative error of a product, which depends on the kernel that computes it.
/// `has_aligned_rows` is whether the number of rows is a multiple of 16, as 8-bit products require.
fn tolerance(rounding: InputQuantization, has_aligned_rows: bool, dtype: DType, tokens: usize) -> f32 {
    use InputQuantization::{Fp8PerToken, Fp8Static, Int8PerToken, Int8Static};
    match (rounding, has_aligned_rows, dtype, tokens) {
        // `quantized_matvec` multiplies exact weights by inputs that it quantizes to 16 bits.
        // If the weights are FP8, the inputs are exact.
        (_, _, _, 1) => 5e-5,
        // 8-bit products: tensor cores add up int8 products exactly, but FP8 products only to about 13 bits.
        (Int8PerToken | Int8Static(_), true, _, _) => 2e-5,
        (Fp8PerToken | Fp8Static(_), true, DType::F32, 9..) => 3e-3,
        (Fp8PerToken | Fp8Static(_), true, _, 33..) => 3e-3,
        // `quantized_matvec`, one token at a time.
        (_, _, DType::F32, ..=8) => 5e-5,
        // The weights are rounded to the dtype of the input.
        (_, _, DType::F32, _) => 1e-5,
        (InputQuantization::None, _, DType::F16, _) | (_, _, DType::F16, 129..) => 1e-3,
        (InputQuantization::None, ..) | (_, _, _, 129..) => 4e-3,
        // With 8-bit inputs, `matmul_few_tokens` multiplies 8-bit values, which are exact in f16 and bf16.
        // It applies the scales to the sums.
        _ => 2e-5,
    }
}

#[test(each = formats)]
fn products_match_the_cpu(format: WeightFormat) {
    let gpu = gpu();
    for (rows, columns) in SHAPES {
        let [here, there] = on_cpu_and_gpu(format, rows, columns, &gpu);
        // 3, 9, 24 and 100 tokens select every tile size of `matmul_few_tokens`. 100 tokens need two tiles of 64.
        // 300 tokens are too many for `matmul_few_tokens`.
        let mut token_counts = vec![1, 3, 9, 24, 100];
        token_counts.extend((rows < 1000).then_some(300));
        let dtypes = [DType::F32, DType::BF16, DType::F16];
        for (tokens, dtype) in token_counts.into_iter().flat_map(|tokens| dtypes.map(|dtype| (tokens, dtype))) {
            let x = inputs(tokens, columns, dtype, 5);
            for rounding in roundings(format) {
                let error = relative_error(&product(&there, &x, rounding), &product(&here, &x, rounding));
                let tolerance = tolerance(rounding, rows % 16 == 0, dtype, tokens);
                assert!(
                    error < tolerance,
                    "{rows} rows, {tokens} tokens, {dtype:?}, {rounding:?}: relative error {error:e} of {tolerance:e}"
                );
            }
        }
    }
}

fn eight_bit_formats() -> Vec<TestCase<WeightFormat>> {
    formats().into_iter().filter(|case| matches!(case.value, WeightFormat::Int8 | WeightFormat::Fp8)).collect()
}

/// Tests rows whose length is not a multiple of the group size, which is 32.
/// Also tests NaN inputs, which must make all outputs of the same token NaN, but no other outputs.
#[test(each = eight_bit_formats)]
fn products_at_the_edges_match_the_cpu(format: WeightFormat) {
    let (gpu, rows) = (gpu(), 48);
    // With 40 and 104 columns, the rows of x are aligned to 16 bytes, as `matmul_few_tokens` requires.
    // It then computes the products with 3 and with 40 tokens, unless they are 8-bit products.
    for columns in [36, 40, 100, 104] {
        let [here, there] = on_cpu_and_gpu(format, rows, columns, &gpu);
        for tokens in [1, 3, 40] {
            let x = inputs(tokens, columns, DType::F16, 5);
            let mut broken = values(&x);
            broken[columns - 1] = f32::NAN;
            let broken = Tensor::from_vec(broken, (tokens, columns), &Device::Cpu).unwrap();
            let broken = broken.to_dtype(DType::F16).unwrap();
            for rounding in roundings(format) {
                let what = format!("{tokens} tokens, {columns} columns, {rounding:?}");
                let error = relative_error(&product(&there, &x, rounding), &product(&here, &x, rounding));
                assert!(error < 3e-3, "{what}: relative error {error:e}");
                let got = product(&there, &broken, rounding);
                assert!(got[..rows].iter().all(|value| value.is_nan()), "{what}: a NaN input has a non-NaN output");
                assert!(got[rows..].iter().all(|value| value.is_finite()), "{what}: a NaN spread to another token");
            }
        }
    }
}

/// Multiplies a stack of three matrices with different formats and row counts.
/// With up to 128 tokens, one launch multiplies the whole stack.
#[test(gpu)]
fn stacked_formats_match_the_cpu() {
    let (gpu, columns) = (gpu(), 768);
    let stack = |device: &Device| {
        let matrices = [(GgmlType::Q4K, 100), (GgmlType::Q6K, 64), (GgmlType::Q8_0, 333)];
        Matrix::Quantized(matrices.map(|(of, rows)| from_blocks(of, rows, columns, device).0).into())
    };
    for tokens in [2, 16, 31, 64, 129] {
        let x = inputs(tokens, columns, DType::BF16, 5);
        let want = stack(&Device::Cpu).matmul(&x, SumOrder::Fastest).unwrap();
        let got = stack(&gpu).matmul(&x.to_device(&gpu).unwrap(), SumOrder::Fastest).unwrap();
        let error = relative_error(&values(&got), &values(&want));
        assert!(error < 4e-3, "{tokens} tokens: relative error {error:e}");
        let again = stack(&gpu).matmul(&x.to_device(&gpu).unwrap(), SumOrder::Fastest).unwrap();
        assert_eq!(values(&got), values(&again), "{tokens} tokens: the same product has two different results");
    }
}
