//! Matrix products of routed experts with bf16 or f16 weights on a GPU, for at least 64 (token, expert) pairs
//! (`grouped_gemm.cu`).

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::expert_operands::ExpertInputs;
use super::routing::sort_by_expert::{SortedPairs, sort_by_expert};
use crate::kernels::constants::{GROUPED_GEMM_COLUMNS, GROUPED_GEMM_ROWS, GROUPED_GEMM_STAGES, GROUPED_GEMM_THREADS};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module};
use crate::kernels::scratch;

/// Computes [`expert_matmul`](super::experts::expert_matmul) for float weights. Returns `[tokens, chosen, rows]`.
///
/// `weights` is `[experts, rows, columns]`, in the dtype of x (bf16 or f16). `columns` is a multiple of 8.
///
/// # Safety
/// The inputs must have the shapes and dtypes that `expert_matmul` checks.
pub(super) unsafe fn grouped_gemm(device: &CudaDevice, weights: &Tensor, inputs: ExpertInputs) -> Result<Tensor> {
    let ExpertInputs { x, bias, ids, pairs_per_x } = inputs;
    let (experts, rows, columns) = weights.dims3()?;
    let pairs = ids.elem_count();
    // SAFETY: the kernel writes every element of `out`.
    let out = unsafe { scratch::empty(inputs.output_shape(rows)?, x.dtype(), x.device())? };
    let SortedPairs { sorted, offsets, .. } = sort_by_expert(device, ids, experts)?;
    let arguments = Arguments::new()
        .tensor(weights)?
        .optional(bias)?
        .tensor(x)?
        .tensor(&sorted)?
        .tensor(&offsets)?
        .tensor(&out)?
        .int(rows)
        .int(columns)
        .int(pairs_per_x)
        .int(experts);
    let tile_pairs = if pairs > 96 * experts { 128 } else { 64 };
    let grid = (rows.div_ceil(GROUPED_GEMM_ROWS), pairs.div_ceil(tile_pairs) + experts, 1);
    let row_bytes = GROUPED_GEMM_COLUMNS * x.dtype().size_in_bytes();
    let shape = LaunchShape::new(grid, GROUPED_GEMM_THREADS)
        .with_shared_bytes(GROUPED_GEMM_STAGES * (tile_pairs + GROUPED_GEMM_ROWS) * row_bytes);
    let kernel = format!("grouped_gemm_{tile_pairs}_{}", dtype_suffix(x.dtype())?);
    // SAFETY: the caller guarantees valid shapes, and `sort_by_expert` lists only existing experts. The grid covers the
    // maximum number of tiles.
    unsafe { Launch::new(module!("grouped_gemm"), kernel, shape, arguments).enqueue(device)? };
    Ok(out)
}
