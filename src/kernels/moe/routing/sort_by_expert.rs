//! Sorts (token, expert) pairs by expert on the GPU (`sort_by_expert.cu`).

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor, bail};

use crate::kernels::constants::{MAX_EXPERTS, SORT_BY_EXPERT_THREADS};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, module};
use crate::kernels::scratch;

/// The maximum number of pairs that a thread block sorts, unless this would take more than [`MAX_BLOCKS`] blocks.
/// Every block counts all pairs, so the blocks do more work in total with smaller shares.
const PAIRS_PER_BLOCK: usize = 2048;
/// The maximum number of thread blocks.
const MAX_BLOCKS: usize = 32;

/// The indices of (token, expert) pairs, sorted by expert.
/// `sorted[offsets[e] .. offsets[e + 1]]` are the pairs of expert e, in any order.
pub(in crate::kernels::moe) struct SortedPairs {
    /// The indices of the pairs: u32 `[pairs]`.
    pub sorted: Tensor,
    /// The index in `sorted` of each expert's first pair, then the number of pairs: u32 `[experts + 1]`.
    pub offsets: Tensor,
    /// The row of each pair in a tiled tensor (`mxfp4_tiles/tiles.cuh`): u32 `[pairs]`.
    pub rows: Tensor,
}

/// Sorts (token, expert) pairs by expert. `ids` are the chosen experts, u32 `[tokens, chosen]`.
/// An id that is not less than `experts` counts as the last expert.
pub(in crate::kernels::moe) fn sort_by_expert(
    device: &CudaDevice,
    ids: &Tensor,
    experts: usize,
) -> Result<SortedPairs> {
    if !(1..=MAX_EXPERTS).contains(&experts) {
        bail!("cannot sort pairs: there are {experts} experts, expected 1 to {MAX_EXPERTS}");
    }
    let pairs = ids.elem_count();
    // SAFETY: the kernel writes all pairs, all offsets and all rows.
    let empty = |count: usize| unsafe { scratch::empty(count, ids.dtype(), ids.device()) };
    let sorted = empty(pairs)?;
    let offsets = empty(experts + 1)?;
    let rows = empty(pairs)?;
    let arguments =
        Arguments::new().tensor(ids)?.tensor(&sorted)?.tensor(&offsets)?.tensor(&rows)?.int(pairs).int(experts);
    let shape = LaunchShape::linear(pairs.div_ceil(PAIRS_PER_BLOCK).clamp(1, MAX_BLOCKS), SORT_BY_EXPERT_THREADS);
    let launch = Launch::new(module!("sort_by_expert"), "sort_by_expert", shape, arguments);
    // SAFETY: the tensors have the sizes that the kernel expects. The kernel replaces ids past the last expert.
    // Overlap: all threads call `pdl_wait` before they access device memory.
    unsafe { launch.overlapping().enqueue(device)? };
    Ok(SortedPairs { sorted, offsets, rows })
}
