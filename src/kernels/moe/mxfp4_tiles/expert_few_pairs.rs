//! Matrix products of routed experts with MXFP4 tiles, for few pairs per expert (`expert_few_pairs.cu`).
//! `product_kernel` has the limit.

use candle_core::Result;
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;

use super::tiles::Mxfp4Tiles;
use crate::kernels::constants::{EXPERT_FEW_PAIRS_K_STEPS, EXPERT_FEW_PAIRS_THREADS, MXFP4_TILE_COLUMNS};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, max_shared_bytes, module, multiprocessors};

/// Mirrors `Sizes` in `expert_few_pairs.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawSizes {
    rows: i32,
    columns: i32,
    tiled_rows: i32,
    experts: i32,
    chosen: i32,
    max_pairs: i32,
}

const _: () = assert!(size_of::<RawSizes>() == 24);
// SAFETY: the struct has C layout and contains only integers.
unsafe impl DeviceRepr for RawSizes {}

/// The tile size and the launch shape of the kernels in `expert_few_pairs.cu`.
#[derive(Clone, Copy)]
pub(super) struct FewPairsKernel {
    /// The maximum number of pairs per tile. An expert with more pairs has several tiles.
    pub max_pairs: usize,
    shape: LaunchShape,
}

impl FewPairsKernel {
    /// Chooses the largest tile for which a thread block has enough shared memory on this GPU.
    /// Returns `None` if no tile fits, or if the kernels do not support the sizes of the experts.
    /// `gate_up` are the fused gate and up weights.
    pub fn choose(device: &CudaDevice, gate_up: &Mxfp4Tiles) -> Result<Option<Self>> {
        let (_, gate_up_rows, hidden) = gate_up.dims();
        let intermediate = gate_up_rows / 2;
        let bundle_columns = MXFP4_TILE_COLUMNS * EXPERT_FEW_PAIRS_K_STEPS;
        let is_supported = |columns: usize| columns > 0 && columns.is_multiple_of(bundle_columns);
        if !is_supported(hidden) || !is_supported(intermediate) {
            return Ok(None);
        }
        let (limit, blocks) = (max_shared_bytes(device)?, multiprocessors(device)?);
        let columns = hidden.max(intermediate);
        let max_pairs = [24, 16, 8].into_iter().find(|&pairs| shared_bytes(pairs, columns) <= limit);
        Ok(max_pairs.map(|max_pairs| Self {
            max_pairs,
            shape: LaunchShape::linear(blocks, EXPERT_FEW_PAIRS_THREADS)
                .with_shared_bytes(shared_bytes(max_pairs, columns)),
        }))
    }

    /// Adds the sizes of the product with all matrices in `tiles`.
    /// h has `tiled_rows` rows, and each token has `chosen` experts.
    pub fn add_sizes(
        self,
        arguments: Arguments,
        tiles: &Mxfp4Tiles,
        tiled_rows: usize,
        chosen: usize,
    ) -> Result<Arguments> {
        let (experts, rows, columns) = tiles.dims();
        let sizes = RawSizes {
            rows: i32::try_from(rows)?,
            columns: i32::try_from(columns)?,
            tiled_rows: i32::try_from(tiled_rows)?,
            experts: i32::try_from(experts)?,
            chosen: i32::try_from(chosen)?,
            max_pairs: i32::try_from(self.max_pairs)?,
        };
        Ok(arguments.value(sizes, []))
    }

    /// Returns the launch for `product`, which is `gate_up` or `down`.
    pub fn launch(self, product: &str, dtype: &str, arguments: Arguments) -> Launch {
        Launch::new(module!("expert_few_pairs"), format!("expert_few_pairs_{product}_{dtype}"), self.shape, arguments)
    }
}

/// Returns the size in bytes of the shared memory that a thread block needs.
/// The shared memory holds the 16-bit rows of x or h, and each warp's f32 partial sums of 32 weight rows.
fn shared_bytes(pairs: usize, columns: usize) -> usize {
    pairs * (2 * columns + EXPERT_FEW_PAIRS_THREADS / 32 * 32 * 4)
}
