//! Products of f32 matrices with few weight rows, such as routers, on tensor cores (`f32_few_rows.cu`).
//!
//! cuBLAS could compute these products, but loading its f32 kernels would delay the first prompt by about 0.1 s.
//! On an H200, `f32_few_rows` was also faster than cuBLAS (2026-11-28, `docs/history/benchmarks.md`).

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use crate::kernels::constants::{F32_FEW_ROWS_TILE, F32_FEW_ROWS_TOKENS, F32_FEW_ROWS_WARPS};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, address, module};
use crate::kernels::scratch;

/// The maximum number of weight rows.
/// With many rows, the kernel would be slow, because it reads x again for every [`F32_FEW_ROWS_TILE`] rows.
const MAX_ROWS: usize = 8 * F32_FEW_ROWS_TILE;

/// Returns whether [`matmul_few_rows`] supports x·wᵀ. x and w must have the same number of columns.
pub fn is_supported(x: &Tensor, w: &Tensor) -> Result<bool> {
    let (rows, columns) = w.dims2()?;
    if !x.is_contiguous() || !w.is_contiguous() {
        return Ok(false);
    }
    // A lane reads four f32 columns (16 bytes) at a time, and a warp multiplies tiles of 16 columns.
    let is_aligned = |tensor| Ok::<_, candle_core::Error>(address(tensor)?.is_multiple_of(16));
    let are_f32 = x.dtype() == DType::F32 && w.dtype() == DType::F32;
    let fits = are_f32 && (1..=MAX_ROWS).contains(&rows) && columns > 0 && columns.is_multiple_of(16);
    Ok(fits && is_aligned(x)? && is_aligned(w)?)
}

/// Computes x·wᵀ, f32 `[tokens, rows]`. x `[tokens, columns]` and w `[rows, columns]` are f32.
/// The order of additions does not depend on the number of tokens. Fails unless [`is_supported`] returns true.
pub fn matmul_few_rows(device: &CudaDevice, x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let ((tokens, columns), (rows, w_columns)) = (x.dims2()?, w.dims2()?);
    if columns != w_columns || !is_supported(x, w)? {
        bail!(
            "cannot multiply in the kernel for few weight rows: unsupported inputs: x {:?} {:?}, w {:?} {:?}",
            x.dtype(),
            x.dims(),
            w.dtype(),
            w.dims()
        );
    }
    // SAFETY: the kernel writes every element of `y`.
    let y = unsafe { scratch::empty((tokens, rows), DType::F32, x.device())? };
    let grid = (tokens.div_ceil(F32_FEW_ROWS_TOKENS), rows.div_ceil(F32_FEW_ROWS_TILE), 1);
    let shape = LaunchShape::new(grid, 32 * F32_FEW_ROWS_WARPS);
    let arguments = Arguments::new().tensor(x)?.tensor(w)?.tensor(&y)?.int(tokens).int(rows).int(columns);
    let launch = Launch::new(module!("f32_few_rows"), "f32_few_rows", shape, arguments);
    // SAFETY: the shapes and dtypes are checked above.
    // Overlap: all threads call `pdl_wait` before they access device memory.
    unsafe { launch.overlapping().enqueue(device)? };
    Ok(y)
}
