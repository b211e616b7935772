//! Selects the kernel for the matrix products of routed experts with MXFP4 tiles.

use candle_core::Result;
use candle_core::cuda_backend::CudaDevice;

use super::expert_few_pairs::FewPairsKernel;
use super::tiles::Mxfp4Tiles;
use crate::kernels::SumOrder;
use crate::kernels::constants::{
    EXPERT_LARGE_TILE_K_STEPS, EXPERT_LARGE_TILE_PAIRS, EXPERT_LARGE_TILE_STAGES, EXPERT_MEDIUM_TILE_K_STEPS,
    EXPERT_MEDIUM_TILE_PAIRS, EXPERT_MEDIUM_TILE_STAGES, EXPERT_MMA_ROW_TILES, EXPERT_MMA_STAGES, EXPERT_MMA_THREADS,
    EXPERT_SMALL_TILE_K_STEPS, EXPERT_SMALL_TILE_PAIRS, EXPERT_SMALL_TILE_STAGES, EXPERT_WGMMA_ROW_TILES,
    EXPERT_WGMMA_THREADS, EXPERT_WGMMA_TILE_BYTES, MXFP4_TILE_BYTES, MXFP4_TILE_SCALE_BYTES,
};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, module, multiprocessors, runs_wgmma};

/// If `expert_mlp.cu` runs with wgmma, `expert_few_pairs.cu` is used instead for at most this many pairs per expert on
/// average. Measured on an H200 and an H100 (`docs/history/benchmarks.md`, "wgmma from four pairs per expert on").
const FEW_PAIRS_PER_EXPERT: usize = 3;

/// The same limit if `expert_mlp.cu` runs with mma.sync. Not measured since the wgmma kernels exist.
/// If a tile of `expert_few_pairs.cu` has room for fewer than twice as many pairs, the limit is lower (see `choose`).
const FEW_PAIRS_PER_EXPERT_WITH_MMA: usize = 5;

/// A kernel for the matrix products of all experts with MXFP4 tiles.
/// A thread block can process several output tiles, so the grid depends only on the kernel and the GPU.
#[derive(Clone, Copy)]
pub(super) enum ProductKernel {
    /// A kernel from `expert_few_pairs.cu`.
    ExpertFewPairs(FewPairsKernel),
    /// A kernel from `expert_mlp.cu`. `name` is the suffix of the kernel's name, such as `large_tile`.
    /// `stage_k_steps` is the number of K steps per stage of a wgmma kernel, and `None` for a kernel with mma.sync.
    ExpertMlp { name: &'static str, shape: LaunchShape, stage_k_steps: Option<usize> },
}

impl ProductKernel {
    /// Chooses the kernel based on the average number of pairs per expert, the sizes of the experts, the GPU and the
    /// order of additions.
    /// `gate_up` are the fused gate and up weights.
    pub fn choose(device: &CudaDevice, pairs: usize, gate_up: &Mxfp4Tiles, sum_order: SumOrder) -> Result<Self> {
        let experts = gate_up.dims().0;
        let multiprocessors = multiprocessors(device)?;
        // The kernels in `expert_mlp.cu` always add the products of a row in the same order.
        // The kernels in `expert_few_pairs.cu` divide the sums of some rows among warps, depending on the routing.
        if sum_order == SumOrder::Fastest
            && let Some(kernel) = FewPairsKernel::choose(device, gate_up)?
        {
            // If an expert has more pairs than fit in a tile, its weights are read again for the next tile.
            // Some experts have more pairs than the average, so a tile must have room for twice the average.
            let tuned_limit = if runs_wgmma(device) { FEW_PAIRS_PER_EXPERT } else { FEW_PAIRS_PER_EXPERT_WITH_MMA };
            let limit = tuned_limit.min(kernel.max_pairs / 2);
            if pairs <= limit * experts {
                return Ok(Self::ExpertFewPairs(kernel));
            }
        }
        let wgmma = |tile: WgmmaTile| Self::ExpertMlp {
            name: tile.name,
            shape: LaunchShape::linear(tile.blocks * multiprocessors, EXPERT_WGMMA_THREADS)
                .with_shared_bytes(tile.shared_bytes()),
            stage_k_steps: Some(tile.stage_k_steps),
        };
        let mma = |name, pairs, blocks| Self::ExpertMlp {
            name,
            shape: LaunchShape::linear(blocks * multiprocessors, EXPERT_MMA_THREADS)
                .with_shared_bytes(mma_shared_bytes(pairs)),
            stage_k_steps: None,
        };
        Ok(match (runs_wgmma(device), pairs) {
            (true, pairs) if pairs <= 24 * experts => wgmma(SMALL_TILE),
            (true, pairs) if pairs <= 80 * experts => wgmma(MEDIUM_TILE),
            (true, _) => wgmma(LARGE_TILE),
            (false, pairs) if pairs <= 24 * experts => mma("t32", 32, 2),
            (false, pairs) if pairs <= 48 * experts => mma("t64", 64, 2),
            (false, _) => mma("t128", 128, 1),
        })
    }

    /// Returns the first two arguments of the kernel: the blocks and the scales of the weights.
    pub fn weight_arguments(self, tiles: &Mxfp4Tiles) -> Result<Arguments> {
        match self {
            // A box of a tensor map contains the tiles that the kernel copies for one stage of its ring buffer.
            Self::ExpertMlp { stage_k_steps: Some(k_steps), .. } => {
                let [blocks, scales] = tiles.tensor_maps(EXPERT_WGMMA_ROW_TILES, k_steps)?;
                Ok(Arguments::new().value(blocks, [tiles.blocks()]).value(scales, [tiles.scales()]))
            }
            _ => Arguments::new().tensor(tiles.blocks())?.tensor(tiles.scales()),
        }
    }

    /// Returns the launch for `product`, which is `gate_up` or `down`.
    pub fn launch(self, product: &str, dtype: &str, arguments: Arguments) -> Launch {
        match self {
            Self::ExpertFewPairs(kernel) => kernel.launch(product, dtype, arguments),
            Self::ExpertMlp { name, shape, .. } => {
                let kernel = format!("expert_{product}_{dtype}_{name}");
                Launch::new(module!("expert_mlp"), kernel, shape, arguments)
            }
        }
    }
}

/// Returns the size in bytes of the shared memory that an mma.sync kernel with tiles of up to `pairs` pairs needs.
///
/// A pipeline stage holds 64 columns of `pairs` rows of x or h, and `EXPERT_MMA_ROW_TILES` weight tiles with their
/// scales.
const fn mma_shared_bytes(pairs: usize) -> usize {
    let weight_bytes = EXPERT_MMA_ROW_TILES * (MXFP4_TILE_BYTES + MXFP4_TILE_SCALE_BYTES);
    EXPERT_MMA_STAGES * (pairs * 128 + weight_bytes)
}

/// A wgmma kernel and its token tiles. The values match a `WgmmaShape` in `expert_product_wgmma.cuh`.
#[derive(Clone, Copy)]
struct WgmmaTile {
    /// The suffix of the kernel's name.
    name: &'static str,
    /// The maximum number of pairs per tile.
    pairs: usize,
    /// Stages of the ring buffer.
    stages: usize,
    /// K steps of 64 columns per stage.
    stage_k_steps: usize,
    /// Thread blocks per multiprocessor.
    blocks: usize,
}

const SMALL_TILE: WgmmaTile = WgmmaTile {
    name: "small_tile",
    pairs: EXPERT_SMALL_TILE_PAIRS,
    stages: EXPERT_SMALL_TILE_STAGES,
    stage_k_steps: EXPERT_SMALL_TILE_K_STEPS,
    blocks: 2,
};
const MEDIUM_TILE: WgmmaTile = WgmmaTile {
    name: "medium_tile",
    pairs: EXPERT_MEDIUM_TILE_PAIRS,
    stages: EXPERT_MEDIUM_TILE_STAGES,
    stage_k_steps: EXPERT_MEDIUM_TILE_K_STEPS,
    blocks: 1,
};
const LARGE_TILE: WgmmaTile = WgmmaTile {
    name: "large_tile",
    pairs: EXPERT_LARGE_TILE_PAIRS,
    stages: EXPERT_LARGE_TILE_STAGES,
    stage_k_steps: EXPERT_LARGE_TILE_K_STEPS,
    blocks: 1,
};

impl WgmmaTile {
    /// Returns the size in bytes of the shared memory that the kernel needs.
    ///
    /// A stage of the ring buffer (`Stage` in `expert_product_wgmma.cuh`) holds `stage_k_steps` K steps of 64 columns
    /// of x or h and of the weights, two barriers and an `OutputTile`.
    /// The ring buffer and its stages are aligned to 1024 bytes.
    const fn shared_bytes(self) -> usize {
        let weight_bytes = EXPERT_WGMMA_ROW_TILES * (MXFP4_TILE_BYTES + MXFP4_TILE_SCALE_BYTES);
        let stage_bytes = self.stage_k_steps * (self.pairs * 128 + weight_bytes) + 16 + EXPERT_WGMMA_TILE_BYTES;
        self.stages * stage_bytes.next_multiple_of(1024) + 1024
    }
}
