//! Products of quantized matrices and the inputs of few tokens, on tensor cores (`quantized_few_tokens.cu`).

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use super::input_quantization::quantize_without_scale;
use super::quantized_matrix::{InputQuantization, QuantizedMatrix};
use crate::kernels::SumOrder;
use crate::kernels::constants::{
    QUANTIZED_FEW_TOKENS_COLUMNS, QUANTIZED_FEW_TOKENS_COUNTERS, QUANTIZED_FEW_TOKENS_STAGES,
    QUANTIZED_FEW_TOKENS_THREADS,
};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module, multiprocessors};
use crate::kernels::scratch;

/// The maximum number of tokens for which [`is_fastest`] returns true.
/// For more tokens, it is faster to dequantize the weights and multiply with cuBLASLt.
const MAX_TOKENS: usize = 128;
/// The number of weight rows in a tile: 32 per warp.
const ROWS: usize = QUANTIZED_FEW_TOKENS_THREADS;
/// The maximum number of thread blocks per tile of rows, on average over all tiles.
/// More blocks keep more multiprocessors busy, but the last block of a tile must add the sums of all the tile's blocks.
const MAX_SHARES: usize = 8;

/// Returns the number of tokens per tile, and the number of thread blocks that a multiprocessor can run at once.
fn tile(tokens: usize) -> (usize, usize) {
    match tokens {
        ..=8 => (8, 2),
        9..=16 => (16, 2),
        17..=32 => (32, 2),
        // The sums of 64 tokens take so many registers that a multiprocessor can run only one thread block at a time.
        _ => (64, 1),
    }
}

/// Returns whether `quantized_few_tokens` is usually the fastest way to multiply this number of tokens in f16 or bf16.
pub fn is_fastest(tokens: usize) -> bool {
    (2..=MAX_TOKENS).contains(&tokens)
}

/// Returns whether `quantized_few_tokens` supports these matrices and this input dtype. Does not check the number of
/// tokens.
pub fn is_supported(stack: &[QuantizedMatrix], columns: usize, dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
        // Copies to shared memory must be aligned to 16 bytes, that is, to 8 columns.
        && columns.is_multiple_of(8)
        && stack.iter().all(|matrix| matrix.input_quantization == stack[0].input_quantization)
}

/// Returns `x · Wᵀ` as f32 `[tokens, rows]`, where `W` is the vertical stack of the matrices in `stack`.
///
/// `x` is contiguous, `[tokens, columns]`, in f16 or bf16. [`is_supported`] must return true for the stack.
/// Quantized inputs and the weights of `Int8` and `Fp8` matrices are exact in the dtype of `x`, because their scales
/// are applied to the sums. Weights in other formats are rounded to the dtype of `x`.
pub fn matmul_few_tokens(
    device: &CudaDevice,
    stack: &[QuantizedMatrix],
    x: &Tensor,
    sum_order: SumOrder,
) -> Result<Tensor> {
    let (tokens, columns) = x.dims2()?;
    let (x, scales) = match stack[0].input_quantization {
        InputQuantization::None => (x.clone(), None),
        quantization => {
            let (x, scales) = quantize_without_scale(device, x, quantization)?;
            (x, Some(scales))
        }
    };
    let (tile_tokens, resident) = tile(tokens);
    // The number of blocks determines how the sum of a row is split into partial sums.
    // For a fixed order of additions, the number of blocks must not depend on the number of tokens.
    let resident = if sum_order == SumOrder::Fixed { 1 } else { resident };
    let tiles: usize = stack.iter().map(|matrix| matrix.dims().0.div_ceil(ROWS)).sum();
    let k_steps = tiles * columns.div_ceil(QUANTIZED_FEW_TOKENS_COLUMNS);
    let blocks = (resident * multiprocessors(device)?).min(tiles * MAX_SHARES).min(k_steps);
    let token_tiles = tokens.div_ceil(tile_tokens);
    if blocks * token_tiles > QUANTIZED_FEW_TOKENS_COUNTERS {
        let limit = QUANTIZED_FEW_TOKENS_COUNTERS;
        bail!("cannot multiply {tokens} tokens: {blocks} × {token_tiles} thread blocks exceed the limit of {limit}");
    }
    let stride = stack.iter().map(|matrix| matrix.dims().0).sum();
    // SAFETY: the kernel writes every row and column of `y`.
    let y = unsafe { scratch::empty((tokens, stride), DType::F32, x.device())? };
    // SAFETY: the kernel reads only partial sums that it has written.
    let partials = unsafe { scratch::empty((token_tiles * blocks, 2, ROWS, tile_tokens), DType::F32, x.device())? };
    let arguments = Arguments::new()
        .tensor(&x)?
        .optional(scales.as_ref())?
        .stack(stack)?
        .tensor(&y)?
        .tensor(&partials)?
        .int(stack.len())
        .int(tokens)
        .int(columns)
        .int(stride);
    let stage_bytes = tile_tokens * QUANTIZED_FEW_TOKENS_COLUMNS * 2;
    let shape = LaunchShape::new((blocks, token_tiles, 1), QUANTIZED_FEW_TOKENS_THREADS)
        .with_shared_bytes(QUANTIZED_FEW_TOKENS_STAGES * stage_bytes);
    let kernel = format!("quantized_few_tokens_{tile_tokens}_{}", dtype_suffix(x.dtype())?);
    // SAFETY: `quantized_ops::matmul` checks that all matrices have `columns` columns.
    // `y` has a column for each row of the stack.
    unsafe { Launch::new(module!("quantized_few_tokens"), kernel, shape, arguments).enqueue(device)? };
    Ok(y)
}
