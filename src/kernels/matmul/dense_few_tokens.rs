//! Products of dense matrices and few tokens on tensor cores (`dense_few_tokens.cu`).

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use crate::kernels::constants::{
    DENSE_FEW_TOKENS_COLUMNS, DENSE_FEW_TOKENS_INPUT_TILES, DENSE_FEW_TOKENS_MAX, DENSE_FEW_TOKENS_ROWS,
    DENSE_FEW_TOKENS_STAGES, DENSE_FEW_TOKENS_WARPS,
};
use crate::kernels::launch::{
    Arguments, Launch, LaunchShape, address, dtype_suffix, max_shared_bytes, module, multiprocessors,
};
use crate::kernels::scratch;

/// How the dense_few_tokens kernel divides a matrix among thread blocks and warps.
struct WorkDivision {
    /// Row tiles per thread block. A row tile is [`DENSE_FEW_TOKENS_ROWS`] rows.
    block_tiles: usize,
    /// Warps that share the columns of a row tile.
    tile_warps: usize,
    /// Shared memory per thread block, in bytes.
    shared_bytes: usize,
}

impl WorkDivision {
    /// Divides a matrix of `rows` rows so that each multiprocessor has at most one thread block.
    /// Returns `None` if a thread block would have no row tiles, or more than [`DENSE_FEW_TOKENS_WARPS`].
    fn new(device: &CudaDevice, rows: usize, element_bytes: usize) -> Result<Option<Self>> {
        let block_tiles = (rows / DENSE_FEW_TOKENS_ROWS).div_ceil(multiprocessors(device)?);
        let tile_warps = DENSE_FEW_TOKENS_WARPS.checked_div(block_tiles).unwrap_or(0);
        if tile_warps == 0 {
            return Ok(None);
        }
        let tile_bytes = |rows| rows * DENSE_FEW_TOKENS_COLUMNS * element_bytes;
        let input_bytes = 2 * DENSE_FEW_TOKENS_INPUT_TILES * tile_bytes(DENSE_FEW_TOKENS_MAX);
        let weight_bytes = block_tiles * tile_warps * DENSE_FEW_TOKENS_STAGES * tile_bytes(DENSE_FEW_TOKENS_ROWS);
        Ok(Some(Self { block_tiles, tile_warps, shared_bytes: input_bytes + weight_bytes }))
    }
}

/// Returns whether the dense_few_tokens kernel supports x·wᵀ on this GPU.
/// x and w must be contiguous, and must have the same dtype and the same number of columns.
pub fn is_supported(device: &CudaDevice, x: &Tensor, w: &Tensor) -> Result<bool> {
    let ((tokens, _), (rows, columns)) = (x.dims2()?, w.dims2()?);
    let fits = match WorkDivision::new(device, rows, w.dtype().size_in_bytes())? {
        Some(division) => division.shared_bytes <= max_shared_bytes(device)?,
        None => false,
    };
    Ok(fits
        && (1..=DENSE_FEW_TOKENS_MAX).contains(&tokens)
        && matches!(w.dtype(), DType::F16 | DType::BF16)
        && rows.is_multiple_of(DENSE_FEW_TOKENS_ROWS)
        && columns > 0
        && columns.is_multiple_of(DENSE_FEW_TOKENS_COLUMNS)
        // The kernel copies 16 bytes at a time, from addresses that must be multiples of 16 bytes.
        && address(x)?.is_multiple_of(16)
        && address(w)?.is_multiple_of(16))
}

/// Computes x·wᵀ with the dense_few_tokens kernel. Returns f32 `[tokens, rows]`.
///
/// x `[tokens, columns]` and w `[rows, columns]` have the same dtype. Fails unless [`is_supported`] returns true.
/// The previous kernel must not write w, because this kernel reads w before it waits for the previous kernel.
pub fn matmul_few_tokens(device: &CudaDevice, x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let ((tokens, columns), (rows, w_columns)) = (x.dims2()?, w.dims2()?);
    let division = WorkDivision::new(device, rows, w.dtype().size_in_bytes())?.filter(|_| columns == w_columns);
    let (Some(division), true) = (division, is_supported(device, x, w)? && x.dtype() == w.dtype()) else {
        bail!(
            "cannot multiply in the kernel for few tokens: unsupported inputs: x {:?} {:?}, w {:?} {:?}",
            x.dtype(),
            x.dims(),
            w.dtype(),
            w.dims()
        );
    };
    let WorkDivision { block_tiles, tile_warps, shared_bytes } = division;
    // SAFETY: the kernel writes every element of `y`.
    let y = unsafe { scratch::empty((tokens, rows), DType::F32, x.device())? };
    let arguments = Arguments::new()
        .tensor(w)?
        .tensor(x)?
        .tensor(&y)?
        .int(rows)
        .int(columns)
        .int(tokens)
        .int(block_tiles)
        .int(tile_warps);
    let blocks = (rows / DENSE_FEW_TOKENS_ROWS).div_ceil(block_tiles);
    let shape = LaunchShape::linear(blocks, 32 * block_tiles * tile_warps).with_shared_bytes(shared_bytes);
    let kernel = format!("dense_few_tokens_{}", dtype_suffix(x.dtype())?);
    let launch = Launch::new(module!("dense_few_tokens"), kernel, shape, arguments);
    // SAFETY: the shapes are checked above.
    // Overlap: all threads call `pdl_wait`. Before, they read only w, which no kernel writes after loading.
    unsafe { launch.overlapping().enqueue(device)? };
    Ok(y)
}
