//! Computes the router logits and chooses the experts of each token in a single kernel (`choose_experts.cu`).

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use crate::kernels::constants::{F32_FEW_ROWS_STRIDE, F32_FEW_ROWS_TILE, F32_FEW_ROWS_TOKENS, F32_FEW_ROWS_WARPS};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, module, multiprocessors};
use crate::kernels::matmul::f32_few_rows;
use crate::kernels::scratch;

/// The maximum number of experts for which a block routes two tiles of tokens.
/// The partial sums and logits of two tiles must fit in the shared memory of a block, which is 99 KB on some GPUs.
const MAX_EXPERTS_OF_TWO_TILES: usize = 128;

/// Returns whether [`choose_experts`] supports a router with the weights `weight` and the inputs `x`,
/// and is faster than separate kernels that compute logits and choose experts.
///
/// A block computes the logits of a tile of tokens for all experts, one tile of experts after another.
/// In `f32_few_rows`, each tile of experts has blocks of its own.
/// Separate kernels are faster if the busiest multiprocessor then computes fewer tiles.
pub(super) fn is_fastest(device: &CudaDevice, x: &Tensor, weight: &Tensor) -> Result<bool> {
    let multiprocessors = multiprocessors(device)?;
    let token_tiles = x.dim(0)?.div_ceil(F32_FEW_ROWS_TOKENS);
    let expert_tiles = weight.dim(0)?.div_ceil(F32_FEW_ROWS_TILE);
    let keeps_all_busy =
        expert_tiles * token_tiles.div_ceil(multiprocessors) <= (expert_tiles * token_tiles).div_ceil(multiprocessors);
    Ok(keeps_all_busy && f32_few_rows::is_supported(x, weight)?)
}

/// Returns the chosen experts of each token, u32 `[tokens, chosen]`, and their routing weights, f32 `[tokens, chosen]`.
/// The results for a token do not depend on the other tokens.
/// The caller has checked all shapes and dtypes, and that [`is_fastest`] returns true.
pub(super) fn choose_experts(
    device: &CudaDevice,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    chosen: usize,
) -> Result<(Tensor, Tensor)> {
    let ((tokens, columns), (experts, _)) = (x.dims2()?, weight.dims2()?);
    // SAFETY: the kernel writes every element.
    let empty = |dtype| unsafe { scratch::empty((tokens, chosen), dtype, x.device()) };
    let (ids, weights) = (empty(DType::U32)?, empty(DType::F32)?);
    let arguments = Arguments::new()
        .tensor(x)?
        .tensor(weight)?
        .optional(bias)?
        .tensor(&ids)?
        .tensor(&weights)?
        .int(tokens)
        .int(columns)
        .int(experts)
        .int(chosen);
    // With more tiles of tokens than multiprocessors, two tiles per block are faster.
    let has_more_tiles = tokens > F32_FEW_ROWS_TOKENS * multiprocessors(device)?;
    let tiles = if has_more_tiles && experts <= MAX_EXPERTS_OF_TWO_TILES { 2 } else { 1 };
    let tokens_of_block = tiles * F32_FEW_ROWS_TOKENS;
    let floats_per_token = F32_FEW_ROWS_WARPS * F32_FEW_ROWS_STRIDE + experts.next_multiple_of(F32_FEW_ROWS_TILE);
    let shape = LaunchShape::linear(tokens.div_ceil(tokens_of_block), 32 * F32_FEW_ROWS_WARPS)
        .with_shared_bytes(tokens_of_block * floats_per_token * 4);
    let kernel = format!("choose_experts_{tiles}");
    // SAFETY: the caller has checked all shapes and dtypes.
    // Overlap: all threads call `pdl_wait` before they access device memory.
    unsafe { Launch::new(module!("choose_experts"), kernel, shape, arguments).overlapping().enqueue(device)? };
    Ok((ids, weights))
}
