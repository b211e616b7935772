//! MXFP4 weights in tiles for tensor cores, and the MLP of routed experts that uses them (`expert_mlp.cu`).
//!
//! `selftest` compares this MLP with `expert_matmul` and `clamped_swiglu` on the CPU.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Result, Tensor, bail};

use super::mxfp4::{MXFP4_BLOCK, mxfp4_dims};
use super::sort_by_expert::{SortedPairs, sort_by_expert};
use crate::kernels::constants::{
    EXPERT_MMA_ROW_TILES, EXPERT_MMA_STAGES, EXPERT_MMA_THREADS, EXPERT_NARROW_PAIRS, EXPERT_NARROW_STAGES,
    EXPERT_WGMMA_ROW_TILES, EXPERT_WGMMA_THREADS, EXPERT_WIDE_PAIRS, EXPERT_WIDE_STAGES, MAX_CHOSEN_EXPERTS,
    MAX_EXPERTS, MXFP4_TILE_BYTES, MXFP4_TILE_COLUMNS, MXFP4_TILE_ROWS, MXFP4_TILE_SCALE_BYTES,
};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module, multiprocessors};
use crate::kernels::{bytes, unsupported};

/// MXFP4 matrices in tiles of 16 rows × 64 columns, in the order in which tensor cores read them.
#[derive(Clone, Debug)]
pub struct Mxfp4Tiles {
    /// u8 `[experts, ceil(rows / 16), ceil(columns / 64), 512]`
    blocks: Tensor,
    /// u8 `[experts, ceil(rows / 16), ceil(columns / 64), 32]`
    scales: Tensor,
    rows: usize,
    columns: usize,
}

/// The order of the 16 rows in a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    Plain,
    /// Rows 2g and 2g + 1, which are a gate row and its up row, are stored at g and g + 8.
    Paired,
}

impl Mxfp4Tiles {
    /// Repacks MXFP4 blocks and scales into tiles on the GPU and waits for the result.
    ///
    /// The blocks are u8 `[experts, rows, columns / 32, 16]`, and the scales are u8 `[experts, rows, columns / 32]`.
    ///
    /// Returns `None` if a scale exceeds 2 or is NaN, which the tensor-core kernels do not support.
    /// No known checkpoint contains such a scale.
    pub fn repack(blocks: &Tensor, scales: &Tensor, order: RowOrder) -> Result<Option<Self>> {
        let (experts, rows, columns) = mxfp4_dims(blocks, scales)?;
        let Device::Cuda(device) = blocks.device() else { return unsupported("Mxfp4Tiles::repack", blocks) };
        let (row_tiles, column_tiles) = (rows.div_ceil(MXFP4_TILE_ROWS), columns.div_ceil(MXFP4_TILE_COLUMNS));
        // SAFETY: the kernel writes every byte of every tile.
        let empty =
            |bytes| unsafe { Tensor::empty((experts, row_tiles, column_tiles, bytes), DType::U8, blocks.device()) };
        let tiles = Self { blocks: empty(MXFP4_TILE_BYTES)?, scales: empty(MXFP4_TILE_SCALE_BYTES)?, rows, columns };
        let has_large_scale = Tensor::zeros(1, DType::U32, blocks.device())?;
        let arguments = Arguments::new()
            .tensor(blocks)?
            .tensor(scales)?
            .tensor(&tiles.blocks)?
            .tensor(&tiles.scales)?
            .tensor(&has_large_scale)?
            .int(experts)
            .int(rows)
            .int(columns)
            .flag(order == RowOrder::Paired);
        let shape = LaunchShape::linear((experts * row_tiles * column_tiles).div_ceil(8), 256);
        // SAFETY: `mxfp4_dims` checked blocks and scales; the tiles have the sizes that the kernel expects.
        unsafe { Launch::new(module!("expert_mlp"), "repack_mxfp4", shape, arguments).enqueue(device)? };
        Ok((has_large_scale.to_vec1::<u32>()?[0] == 0).then_some(tiles))
    }

    /// Returns `(experts, rows, columns)`.
    pub fn dims(&self) -> (usize, usize, usize) {
        (self.blocks.dims()[0], self.rows, self.columns)
    }

    pub fn blocks(&self) -> &Tensor {
        &self.blocks
    }

    pub fn scales(&self) -> &Tensor {
        &self.scales
    }

    pub fn bytes(&self) -> u64 {
        bytes(&self.blocks) + bytes(&self.scales)
    }
}

/// The weights and biases of one linear layer, for all experts.
#[derive(Clone, Copy)]
pub struct ExpertLinear<'t> {
    pub tiles: &'t Mxfp4Tiles,
    /// bf16 or f16 `[experts, rows]`
    pub bias: &'t Tensor,
}

/// Returns Σ routing weight · down(clamped_swiglu(gate_up(x))) over each token's chosen experts.
///
/// - x: f32 `[tokens, hidden]`; the first kernel rounds it to the dtype of the biases, which is bf16 or f16
/// - ids: u32 `[tokens, chosen]`; the caller guarantees that each id is less than `experts`
/// - routing_weights: f32 `[tokens, chosen]`
/// - gate_up: `[experts, 2 * intermediate, hidden]` in paired tiles
/// - down: `[experts, hidden, intermediate]` in plain tiles
///
/// The result is f32 `[tokens, hidden]`.
pub fn expert_mlp(
    x: &Tensor,
    ids: &Tensor,
    routing_weights: &Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    limit: f32,
) -> Result<Tensor> {
    let ((tokens, columns), (_, chosen)) = (x.dims2()?, ids.dims2()?);
    let ((experts, up_rows, _), dtype) = (gate_up.tiles.dims(), gate_up.bias.dtype());
    let intermediate = up_rows / 2;
    check_shapes(x, ids, routing_weights, gate_up, down)?;
    let Device::Cuda(device) = x.device() else { return unsupported("expert_mlp", x) };
    let pairs = tokens * chosen;
    // Each expert's rows start at a multiple of 8, so an expert needs up to 7 rows of padding.
    let tiled_rows = pairs + 8 * experts;
    // SAFETY: the kernels below write every element that a later kernel reads.
    let empty = |count: usize, dtype| unsafe { Tensor::empty(count, dtype, x.device()) };
    let gathered = empty(columns.div_ceil(64) * tiled_rows * 64, dtype)?;
    let h = empty(intermediate.div_ceil(64) * tiled_rows * 64, dtype)?;
    let y = empty(pairs * columns, dtype)?;
    // SAFETY: the last kernel writes every element.
    let out = unsafe { Tensor::empty((tokens, columns), DType::F32, x.device())? };
    let suffix = dtype_suffix(dtype)?;

    // 1. Sort the pairs by expert and gather their tokens.
    let SortedPairs { sorted, offsets } = sort_by_expert(device, ids, experts)?;
    let arguments = Arguments::new()
        .tensor(x)?
        .tensor(&sorted)?
        .tensor(&offsets)?
        .tensor(&gathered)?
        .int(columns)
        .int(tiled_rows)
        .int(chosen)
        .int(experts);
    let shape = LaunchShape::linear(pairs.div_ceil(8), 256);
    // SAFETY: all shapes are checked above; all grids cover all elements; the caller guarantees valid ids.
    unsafe {
        Launch::new(module!("expert_mlp"), format!("gather_tokens_{suffix}"), shape, arguments).enqueue(device)?;
    }

    // 2. h = clamped_swiglu(gate_up · x), y = down · h
    let product = ProductKernel::choose(device, pairs, experts)?;
    let arguments = |linear: ExpertLinear, input: &Tensor, output: &Tensor, rows: usize, columns: usize| {
        Ok::<_, candle_core::Error>(
            Arguments::new()
                .tensor(linear.tiles.blocks())?
                .tensor(linear.tiles.scales())?
                .tensor(linear.bias)?
                .tensor(input)?
                .tensor(&sorted)?
                .tensor(&offsets)?
                .tensor(output)?
                .int(rows)
                .int(columns)
                .int(tiled_rows)
                .int(experts),
        )
    };
    let launch = |name: &str, arguments| {
        Launch::new(module!("expert_mlp"), format!("{name}_{suffix}_{}", product.name), product.shape, arguments)
    };
    let up_arguments = arguments(gate_up, &gathered, &h, up_rows, columns)?.float(limit);
    let down_arguments = arguments(down, &h, &y, columns, intermediate)?;
    // SAFETY: as above.
    unsafe {
        launch("expert_gate_up", up_arguments).enqueue(device)?;
        launch("expert_down", down_arguments).enqueue(device)?;
    }

    // 3. Combine the outputs of each token's experts.
    let count = tokens * columns / 8;
    let arguments =
        Arguments::new().tensor(&y)?.tensor(routing_weights)?.tensor(&out)?.int(count).int(columns).int(chosen);
    let shape = LaunchShape::one_thread_each(count);
    // SAFETY: as above.
    unsafe {
        Launch::new(module!("expert_mlp"), format!("expert_combine_{suffix}"), shape, arguments).enqueue(device)?;
    }
    Ok(out)
}

fn check_shapes(
    x: &Tensor,
    ids: &Tensor,
    routing_weights: &Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
) -> Result<()> {
    let ((_, columns), (_, chosen)) = (x.dims2()?, ids.dims2()?);
    let ((experts, up_rows, up_columns), dtype) = (gate_up.tiles.dims(), gate_up.bias.dtype());
    let intermediate = up_rows / 2;
    let tiles_fit = up_columns == columns && down.tiles.dims() == (experts, columns, intermediate);
    let biases_fit = gate_up.bias.dims() == [experts, up_rows] && down.bias.dims() == [experts, columns];
    if !tiles_fit || !biases_fit || down.bias.dtype() != dtype || !matches!(dtype, DType::BF16 | DType::F16) {
        let (gate_up, down) = (gate_up.tiles.dims(), down.tiles.dims());
        bail!("expert_mlp: x {:?}, gate_up {gate_up:?} and down {down:?} do not match", x.dims());
    }
    if ids.dims() != routing_weights.dims()
        || ids.dtype() != DType::U32
        || routing_weights.dtype() != DType::F32
        || x.dtype() != DType::F32
    {
        let (ids_dtype, weights_dtype) = (ids.dtype(), routing_weights.dtype());
        let (ids, weights) = (ids.dims(), routing_weights.dims());
        bail!("expert_mlp: invalid inputs: ids {ids_dtype:?} {ids:?}, routing weights {weights_dtype:?} {weights:?}");
    }
    let are_whole_blocks = columns.is_multiple_of(MXFP4_BLOCK) && intermediate.is_multiple_of(MXFP4_BLOCK);
    if experts > MAX_EXPERTS || chosen > MAX_CHOSEN_EXPERTS || !are_whole_blocks {
        bail!(
            "expert_mlp: unsupported sizes: {chosen} of {experts} experts, hidden size {columns}, intermediate size \
             {intermediate}"
        );
    }
    Ok(())
}

/// A kernel for the matrix products of all experts. Each of its blocks processes several tiles.
struct ProductKernel {
    /// The suffix of the kernel's name.
    name: &'static str,
    shape: LaunchShape,
}

impl ProductKernel {
    /// Chooses the kernel whose tile size suits the number of pairs per expert.
    fn choose(device: &CudaDevice, pairs: usize, experts: usize) -> Result<Self> {
        let multiprocessors = multiprocessors(device)?;
        let capability = device.cuda_stream().context().compute_capability();
        // Only code for sm_90a contains wgmma instructions. Code for sm_90a runs only on compute capability 9.0.
        let has_wgmma = env!("INFERNO_COMPUTE_CAP") == "90" && matches!(capability, Ok((9, 0)));
        let wgmma = |name, pairs, stages| Self {
            name,
            shape: LaunchShape::linear(multiprocessors, EXPERT_WGMMA_THREADS)
                .with_shared_bytes(wgmma_shared_bytes(pairs, stages)),
        };
        let mma = |name, pairs, blocks| Self {
            name,
            shape: LaunchShape::linear(blocks * multiprocessors, EXPERT_MMA_THREADS)
                .with_shared_bytes(mma_shared_bytes(pairs)),
        };
        Ok(match (has_wgmma, pairs) {
            (true, pairs) if pairs <= 80 * experts => wgmma("narrow", EXPERT_NARROW_PAIRS, EXPERT_NARROW_STAGES),
            (true, _) => wgmma("wide", EXPERT_WIDE_PAIRS, EXPERT_WIDE_STAGES),
            (false, pairs) if pairs <= 24 * experts => mma("t32", 32, 2),
            (false, pairs) if pairs <= 48 * experts => mma("t64", 64, 2),
            (false, _) => mma("t128", 128, 1),
        })
    }
}

/// Returns the shared memory of the mma.sync kernels in bytes.
///
/// A stage holds `pairs` rows of x and the weight tiles.
const fn mma_shared_bytes(pairs: usize) -> usize {
    let weight_bytes = EXPERT_MMA_ROW_TILES * (MXFP4_TILE_BYTES + MXFP4_TILE_SCALE_BYTES);
    EXPERT_MMA_STAGES * (pairs * 128 + weight_bytes)
}

/// Returns the shared memory of the wgmma kernels in bytes.
///
/// A stage of the ring buffer holds two steps and two barriers. The ring buffer is aligned to 1024 bytes.
const fn wgmma_shared_bytes(pairs: usize, stages: usize) -> usize {
    let weight_bytes = EXPERT_WGMMA_ROW_TILES * (MXFP4_TILE_BYTES + MXFP4_TILE_SCALE_BYTES);
    stages * (2 * (pairs * 128 + weight_bytes) + 16) + 1024
}
