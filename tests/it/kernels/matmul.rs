//! Tests of matrix products with float weights.

use candle_core::{CudaDevice, DType, Device, Tensor};
use inferno::kernels::SumOrder;
use inferno::kernels::activation::{Activation, gated_halves};
use inferno::kernels::launch::{HostMailbox, multiprocessors};
use inferno::kernels::matmul::dense_wgmma::{LogitsOutput, matmul_gated, matmul_terms, term_count};
use inferno::kernels::matmul::{dense_few_tokens, dense_wgmma, matmul_best, matmul_f32, matmul_rounded};
use inferno::kernels::sampling::{BEST_LOGITS_COLUMNS, queue_best};

use super::{assert_close, to_device};
use crate::harness::{Need, TestCase};
use crate::support::{DTYPES, DTYPES_OF_16_BITS, Random, gpu, gpu_case, on_gpu, values};

/// The rows and columns of a weight matrix.
type MatrixSize = (usize, usize);

/// Like [`MatrixSize`], but without a number of rows, the matrix has [`rows_of_several_tiles`].
type MatrixSizeOfTiles = (Option<usize>, usize);

/// Returns a number of rows with which each thread block of `dense_wgmma` computes several tiles.
fn rows_of_several_tiles(cuda: &CudaDevice) -> usize {
    600 * multiprocessors(cuda).unwrap() + 16
}

/// Returns each size with its name.
fn named(sizes: &[MatrixSize]) -> impl Iterator<Item = (String, MatrixSize)> {
    sizes.iter().map(|&(rows, columns)| (format!("{rows}x{columns}"), (rows, columns)))
}

/// Returns a size with its name.
fn named_of_tiles((rows, columns): MatrixSizeOfTiles) -> (String, MatrixSizeOfTiles) {
    let name = rows.map_or("several_tiles".to_string(), |rows| rows.to_string());
    (format!("{name}x{columns}"), (rows, columns))
}

/// The cases cover several warps or one warp per 16 rows, a last thread block with fewer rows, fewer tiles of 64
/// columns than warps that share them, and more columns than the input buffers hold.
/// The last two cases are unsupported: 40 rows are not a multiple of 16, and 65,536 rows are too many.
fn sizes_for_few_tokens() -> Vec<TestCase<(MatrixSize, DType)>> {
    let sizes =
        [(16, 64), (5120, 2880), (2880, 4096), (4112, 64), (28_672, 192), (4096, 14_336), (40, 64), (65_536, 64)];
    on_gpu(named(&sizes), &DTYPES_OF_16_BITS)
}

#[test(each = sizes_for_few_tokens)]
fn products_of_few_tokens_match_their_reference(((rows, columns), dtype): (MatrixSize, DType)) {
    let device = gpu();
    let Device::Cuda(cuda) = &device else { panic!("{device:?} is not a GPU") };
    let mut noise = Random((rows + columns) as u64);
    let (weight, x) = (noise.tensor(&[rows, columns], dtype), noise.tensor(&[9, columns], dtype));
    let want = matmul_f32(&x, &weight, SumOrder::Fastest).unwrap();
    let (x, weight) = (to_device(&x, &device, dtype), to_device(&weight, &device, dtype));
    for tokens in [1, 2, 5, 8, 9] {
        let (x, want) = (x.narrow(0, 0, tokens).unwrap(), want.narrow(0, 0, tokens).unwrap());
        let what = format!("{tokens} tokens");
        let supported = dense_few_tokens::is_supported(cuda, &x, &weight).unwrap();
        assert_eq!(supported, tokens < 9 && rows % 16 == 0 && rows < 65_536, "{what}");
        match dense_few_tokens::matmul_few_tokens(cuda, &x, &weight) {
            Ok(got) => assert_close(&what, &got, &want, 1e-5),
            Err(error) => assert!(!supported, "{what}: {error}"),
        }
    }
}

/// The cases cover matrices of gpt-oss-20b and Llama-3.1-8B, several tiles per thread block, one or more terms, terms
/// that add up different numbers of columns, fewer columns than a stage holds, and incomplete tiles.
/// The last case is unsupported: the size of a row of 100 columns is not a multiple of 16 bytes.
fn sizes_for_several_tokens() -> Vec<TestCase<(MatrixSizeOfTiles, DType)>> {
    let sizes = [
        (Some(5120), 2880),
        (Some(2880), 4096),
        (Some(4096), 14_336),
        (Some(28_672), 192),
        (None, 136),
        (Some(130), 2888),
        (Some(1), 64),
        (Some(304), 8),
        (Some(64), 100),
    ];
    on_gpu(sizes.map(named_of_tiles), &DTYPES_OF_16_BITS)
}

#[test(each = sizes_for_several_tokens)]
fn products_of_several_tokens_match_their_reference(((rows, columns), dtype): (MatrixSizeOfTiles, DType)) {
    let device = gpu();
    let Device::Cuda(cuda) = &device else { panic!("{device:?} is not a GPU") };
    let rows = rows.unwrap_or_else(|| rows_of_several_tiles(cuda));
    let mut noise = Random((rows + columns) as u64);
    // With small weights, products of gate and up values do not overflow f16.
    let weight = (noise.tensor(&[rows, columns], dtype) * (1.0 / 64.0)).unwrap();
    let x = noise.tensor(&[129, columns], dtype);
    let want = matmul_f32(&x, &weight, SumOrder::Fastest).unwrap();
    let (x, weight) = (to_device(&x, &device, dtype), to_device(&weight, &device, dtype));
    let tolerance = 1e-5 * (columns as f32 / 4096.0).max(1.0);
    for tokens in [1, 2, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 96, 97, 128, 129] {
        let (x, want) = (x.narrow(0, 0, tokens).unwrap(), want.narrow(0, 0, tokens).unwrap());
        let what = format!("{tokens} tokens");
        // Only Hopper GPUs can run these kernels.
        let is_hopper = cuda.cuda_stream().context().compute_capability().unwrap() == (9, 0);
        let supported = dense_wgmma::is_supported(cuda, &x, &weight).unwrap();
        assert_eq!(supported, is_hopper && tokens <= 128 && columns != 100, "{what}");
        match matmul_terms(cuda, &x, &weight, None) {
            Ok(terms) => {
                assert_eq!(terms.dim(0).unwrap(), term_count(cuda, rows, columns).unwrap(), "{what}");
                assert_close(&what, &terms.sum(0).unwrap(), &want, tolerance);
            }
            Err(error) => assert!(!supported, "{what}: {error}"),
        }
        let supported = dense_wgmma::is_gated_supported(cuda, &x, &weight).unwrap();
        assert_eq!(supported, is_hopper && tokens <= 128 && columns != 100 && rows % 16 == 0, "{what}");
        for activation in [Activation::Silu, Activation::GeluTanh] {
            match matmul_gated(cuda, &x, &weight, activation) {
                Ok(got) => {
                    let want = gated_halves(&want, activation, dtype).unwrap().to_dtype(DType::F32).unwrap();
                    let rounding = if dtype == DType::BF16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
                    let what = format!("{what}, {activation:?}");
                    assert_close(&what, &got.to_dtype(DType::F32).unwrap(), &want, tolerance + rounding);
                }
                Err(error) => assert!(!supported, "{what}, {activation:?}: {error}"),
            }
        }
    }
}

/// The cases cover several tiles per thread block, fewer thread blocks than candidates per token (see
/// `BEST_LOGITS_CANDIDATES`), and incomplete tiles. Each case also has the id of the token of the first row.
/// Only Hopper GPUs can run these kernels.
fn sizes_for_logits() -> Vec<TestCase<((MatrixSizeOfTiles, usize), DType)>> {
    let sizes = [((Some(1), 64), 0), ((Some(130), 2888), 7), ((Some(304), 8), 100_000), ((None, 136), 0)];
    let named = sizes.map(|(size, first_token)| (named_of_tiles(size).0, (size, first_token)));
    let cases = on_gpu(named, &DTYPES_OF_16_BITS);
    cases.into_iter().map(|case| TestCase { need: Some(Need::Hopper), ..case }).collect()
}

/// The inputs are small integers, so the products are exact, and a token can have several equal largest logits.
/// The lowest id of these logits must be chosen.
#[test(each = sizes_for_logits)]
fn kernels_for_logits_also_find_the_largest_logits(
    (((rows, columns), first_token), dtype): ((MatrixSizeOfTiles, usize), DType),
) {
    let device = gpu();
    let Device::Cuda(cuda) = &device else { panic!("{device:?} is not a GPU") };
    let rows = rows.unwrap_or_else(|| rows_of_several_tiles(cuda));
    let mut noise = Random((rows * 7 + columns) as u64);
    // All logits of weight row `rows / 2` and of the second input token are NaN. NaN must never be chosen.
    // If all logits of a token are NaN, the chosen id must be `u32::MAX`.
    let mut integers = |rows, nan_row| {
        let mut numbers = values(&noise.tensor(&[rows, columns], DType::F32).round().unwrap());
        numbers[nan_row * columns] = f32::NAN;
        Tensor::from_vec(numbers, (rows, columns), &Device::Cpu).unwrap()
    };
    let (weight, x) = (integers(rows, rows / 2), integers(128, 1));
    let want = matmul_f32(&x, &weight, SumOrder::Fastest).unwrap();
    let (x, weight) = (to_device(&x, &device, dtype), to_device(&weight, &device, dtype));
    for tokens in [2, 8, 16, 17, 32, 50, 64, 65, 96, 100, 128] {
        let what = format!("{tokens} tokens");
        let (x, want) = (x.narrow(0, 0, tokens).unwrap(), want.narrow(0, 0, tokens).unwrap());
        for skips in [0u32, 1] {
            let logits = Tensor::full(-7.5f32, (tokens, rows), &device).unwrap();
            let skips_logits = &Tensor::new(&[skips], &device).unwrap();
            let best = &Tensor::zeros((tokens, BEST_LOGITS_COLUMNS), DType::F32, &device).unwrap();
            let output = LogitsOutput { logits: &logits, best, skips_logits, first_token };
            assert!(!matmul_best(&x, &weight, SumOrder::Fixed, &output).unwrap(), "{what}");
            assert!(matmul_best(&x, &weight, SumOrder::Fastest, &output).unwrap(), "{what}");
            let expected = if skips == 0 { values(&want) } else { vec![-7.5; tokens * rows] };
            let is_same = |(got, want): (f32, f32)| got == want || got.is_nan() && want.is_nan();
            assert!(values(&logits).into_iter().zip(expected).all(is_same), "{what}, skips_logits = {skips}");
            let chosen = Tensor::zeros(tokens, DType::U32, &device).unwrap();
            let mailbox = HostMailbox::new(cuda, tokens).unwrap();
            queue_best(best, &chosen, mailbox.slots_from(0)).unwrap();
            let lowest_id_of_largest = |row: Vec<f32>| {
                let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let id = row.iter().position(|&logit| logit == largest);
                id.map_or(u32::MAX, |id| (first_token + id) as u32)
            };
            let expected: Vec<u32> = want.to_vec2().unwrap().into_iter().map(lowest_id_of_largest).collect();
            assert_eq!(chosen.to_vec1::<u32>().unwrap(), expected, "{what}, skips_logits = {skips}");
        }
    }
}

/// The cases are the routers of gpt-oss-20b, gpt-oss-120b and Qwen3-30B-A3B, and sizes that fill only part of a tile.
/// The last case has too many rows for the kernel `f32_few_rows`.
fn sizes_with_few_rows() -> Vec<TestCase<MatrixSize>> {
    let sizes = [(32, 2880), (128, 2880), (128, 2048), (1, 16), (33, 144), (257, 64)];
    named(&sizes).map(|(name, size)| gpu_case(name, size)).collect()
}

#[test(each = sizes_with_few_rows)]
fn products_with_few_rows_match_their_reference((rows, columns): MatrixSize) {
    let device = gpu();
    let mut noise = Random((rows + columns) as u64);
    let (weight, x) = (noise.tensor(&[rows, columns], DType::F32), noise.tensor(&[4100, columns], DType::F32));
    let want = matmul_f32(&x, &weight, SumOrder::Fastest).unwrap();
    let (x, weight) = (x.to_device(&device).unwrap(), weight.to_device(&device).unwrap());
    for tokens in [1, 15, 16, 17, 600, 4100] {
        let got = matmul_f32(&x.narrow(0, 0, tokens).unwrap(), &weight, SumOrder::Fastest).unwrap();
        assert_close(&format!("{tokens} tokens"), &got, &want.narrow(0, 0, tokens).unwrap(), 1e-5);
    }
}

/// The cases are matrix sizes of gpt-oss-20b and Llama-3.1-8B, one GPU's half of a matrix, and unusual sizes.
fn sizes_for_any_number_of_tokens() -> Vec<TestCase<(MatrixSize, DType)>> {
    let sizes = [(5120, 2880), (2880, 4096), (4096, 14_336), (2880, 2048), (33, 72), (257, 100)];
    on_gpu(named(&sizes), &DTYPES_OF_16_BITS)
}

/// cuBLASLt proposes an algorithm for one number of tokens per size class (see `size_class`). The algorithm must also
/// be correct for the other numbers in the class, so the test covers many numbers of tokens.
#[test(each = sizes_for_any_number_of_tokens)]
fn products_of_any_number_of_tokens_match_their_reference(((rows, columns), dtype): (MatrixSize, DType)) {
    let device = gpu();
    let mut noise = Random((rows * 3 + columns) as u64);
    let (weight, x) = (noise.tensor(&[rows, columns], dtype), noise.tensor(&[520, columns], dtype));
    let want = matmul_f32(&x, &weight, SumOrder::Fastest).unwrap();
    let tolerance = 1e-5 * (columns as f32 / 4096.0).max(1.0);
    let rounded = want.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
    let (x, weight) = (to_device(&x, &device, dtype), to_device(&weight, &device, dtype));
    for tokens in (1..=80).chain([100, 129, 250, 257, 321, 511, 513, 520]) {
        let x = x.narrow(0, 0, tokens).unwrap();
        let what = format!("{tokens} tokens");
        let first = |want: &Tensor| want.narrow(0, 0, tokens).unwrap();
        // Tensor cores round sums toward zero, so the error grows with the number of columns.
        let got = matmul_f32(&x, &weight, SumOrder::Fastest).unwrap();
        assert_close(&format!("matmul_f32, {what}"), &got, &first(&want), tolerance);
        let got = matmul_rounded(&x, &weight, SumOrder::Fastest).unwrap().to_dtype(DType::F32).unwrap();
        // If `got` and `rounded` are rounded in opposite directions, they differ by one unit in the last place.
        let tolerance = if dtype == DType::BF16 { 1e-2 } else { 1.3e-3 };
        assert_close(&format!("matmul_rounded, {what}"), &got, &first(&rounded), tolerance);
    }
}

/// The cases are matrix sizes of gpt-oss-20b and Llama-3.1-8B, and two unusual sizes.
fn sizes_in_fixed_order() -> Vec<TestCase<(MatrixSize, DType)>> {
    let sizes = [(5120, 2880), (2880, 4096), (201_088, 2880), (28_672, 4096), (4096, 14_336), (33, 72), (33, 80)];
    on_gpu(named(&sizes), &DTYPES)
}

/// With `SumOrder::Fixed`, the matrix product of a token has the same bits in a step of any size.
#[test(each = sizes_in_fixed_order)]
fn products_in_fixed_order_do_not_depend_on_other_tokens(((rows, columns), dtype): (MatrixSize, DType)) {
    let device = gpu();
    let mut noise = Random(rows as u64);
    let weight = to_device(&noise.tensor(&[rows, columns], DType::F32), &device, dtype);
    let x = to_device(&noise.tensor(&[200, columns], DType::F32), &device, dtype);
    let product = |first: usize, tokens: usize| {
        let product = matmul_f32(&x.narrow(0, first, tokens).unwrap(), &weight, SumOrder::Fixed).unwrap();
        values(&product.narrow(0, 0, 1).unwrap())
    };
    for first in [0, 63, 130] {
        let alone = product(first, 1);
        for tokens in [2, 7, 64, 65, 70] {
            assert!(
                product(first, tokens) == alone,
                "token {first} in a batch of {tokens} differs from the token alone"
            );
        }
    }
    // Token 130 is row 130 of the input here, but row 0 in `product(130, 1)`. The row must not matter.
    let all = values(&matmul_f32(&x, &weight, SumOrder::Fixed).unwrap().narrow(0, 130, 1).unwrap());
    assert!(all == product(130, 1), "token 130 of 200 differs from the same token alone");
}
