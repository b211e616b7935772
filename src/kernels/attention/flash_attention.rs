//! Launches the kernels for attention on tensor cores (`flash_attention.cu`). `tile_kernel` chooses a kernel.
//!
//! A row is one query head of one token. For each KV head, the rows of a sequence are divided into row tiles.
//! Each row tile is computed by one thread block, or by several that divide its keys: the partitions of the row tile.

use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, Tensor, bail};

use super::inputs::AttentionInputs;
use super::mask::AttentionMask;
use super::paged::{CachedLayer, QueryLayout};
use super::shape::AttentionShape;
use super::tile_kernel::{GpuLimits, RowCounts, TileKernel, fixed_partitions};
use crate::kernels::SumOrder;
use crate::kernels::constants::FLASH_HEAD_DIMS;
use crate::kernels::launch::{
    Arguments, Launch, LaunchShape, address, dtype_suffix, kernel_size, max_shared_bytes, module, multiprocessors,
    optional_address,
};
use crate::kernels::scratch;

/// A flash attention kernel and its launch shape, chosen for some or all queries of a pass.
pub struct FlashAttention {
    tile_name: &'static str,
    kernel_name: String,
    launch_shape: LaunchShape,
    /// The minimum number of key tiles per partition. The last partition of a row tile can have fewer.
    min_tiles: usize,
    shape: AttentionShape,
    dtype: DType,
    mask: AttentionMask,
    rows: LaunchRows,
    /// The number of f32 scratch elements for the partial results of partitions. 0 if the keys are not partitioned.
    pub partials: usize,
    /// The number of u32 counters of finished partitions. 0 if the keys are not partitioned.
    pub arrivals: usize,
}

/// The grid of a launch, for one KV head.
struct TileGrid {
    row_tiles: usize,
    /// The maximum number of partitions per row tile.
    partitions: usize,
}

/// The rows that a launch computes.
enum LaunchRows {
    /// All rows. Each sequence has `tokens` new tokens.
    Uniform { tokens: usize },
    /// The rows in a list of row tiles, u32 `[tiles, 4]` (see [`QueryLayout::row_tiles`]).
    Listed(Tensor),
}

/// The tensors of one flash attention launch. All tensors must be contiguous.
pub struct FlashTensors<'t> {
    /// The queries: bf16 or f16 `[tokens, heads, head_dim]`.
    pub q: &'t Tensor,
    /// The cached keys and values, in the dtype of `q`.
    pub layer: CachedLayer<'t>,
    /// The attention sinks, one logit per head: f32 `[heads]`. `None` for attention without sinks.
    pub sinks: Option<&'t Tensor>,
    /// The position of each token: u32 `[tokens]`. The positions of a sequence are consecutive.
    pub positions: &'t Tensor,
    /// The block table of each sequence: u32 `[sequences, blocks]`.
    pub tables: &'t Tensor,
    /// The output: `[tokens, heads, head_dim]` in the dtype of `q`.
    pub out: &'t Tensor,
    /// Scratch memory for partial results: at least [`FlashAttention::partials`] elements, f32.
    pub partials: &'t Tensor,
    /// Counters of finished partitions: at least [`FlashAttention::arrivals`] elements, u32.
    /// All counters must be zero before the launch. The kernel resets them to zero.
    pub arrivals: &'t Tensor,
}

/// Mirrors `FlashArguments` in `flash_attention.cu`.
/// The tensors are device addresses, or 0 for tensors that are `None`.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawArguments {
    q: u64,
    k: u64,
    v: u64,
    sinks: u64,
    out: u64,
    positions: u64,
    tables: u64,
    row_tiles: u64,
    partials: u64,
    arrivals: u64,
    table_blocks: i32,
    tokens: i32,
    heads: i32,
    kv_heads: i32,
    window: i32,
    min_tiles: i32,
    scale: f32,
    softcap: f32,
}

const _: () = assert!(size_of::<RawArguments>() == 10 * 8 + 8 * 4);
// SAFETY: the struct has C layout and contains only numbers.
unsafe impl DeviceRepr for RawArguments {}

/// Computes attention for all queries of a pass into `out`. The caller, [`super::attention`], has checked the inputs.
pub(super) fn attention(device: &CudaDevice, inputs: AttentionInputs, out: &Tensor) -> Result<()> {
    let AttentionInputs { q, layer, queries, blocks, sinks, mask, sum_order } = inputs;
    for flash in FlashAttention::for_pass(device, q, layer, queries, mask, sum_order)? {
        // SAFETY: the kernel reads only partial results that it has written itself.
        let partials = &unsafe { scratch::empty(flash.partials.max(1), DType::F32, q.device())? };
        let arrivals = &queries.counters(flash.arrivals.max(1))?;
        let (positions, tables) = (queries.positions(), &blocks.tables);
        let tensors = FlashTensors { q, layer, sinks, positions, tables, out, partials, arrivals };
        // SAFETY: `launch` and `AttentionShape::of_inputs` have checked shapes and dtypes.
        // `PassBlocks::new` or `BatchGraph::next_inputs` has checked that the tables map positions to blocks of the
        // cache.
        // Overlap: the previous kernel is `split_qkv` or the other attention launch. Neither writes data that this
        // kernel reads before `pdl_wait` (see `FlashAttention::launch`). Blocks that exit without `pdl_wait` write
        // nothing.
        unsafe { flash.launch(&tensors)?.overlapping().enqueue(device)? };
    }
    Ok(())
}

impl FlashAttention {
    /// Chooses the kernel for sequences that have `tokens` new tokens each.
    ///
    /// Fails if q and `layer` do not match, if no kernel supports their shapes and dtype, if the number of tokens in q
    /// is not a multiple of `tokens`, or if the GPU has too little shared memory.
    /// The kernels support bf16 and f16, and the head sizes in [`FLASH_HEAD_DIMS`].
    pub fn new(
        device: &CudaDevice,
        q: &Tensor,
        layer: CachedLayer,
        tokens: usize,
        mask: AttentionMask,
    ) -> Result<Self> {
        let shape = AttentionShape::of_tensors(q, layer, None)?;
        let (heads_per_kv, sequences) = (shape.heads / shape.kv_heads, shape.tokens / tokens.max(1));
        if tokens == 0 || sequences * tokens != shape.tokens {
            bail!(
                "cannot compute attention: {} tokens are not a multiple of {tokens} tokens per sequence",
                shape.tokens
            );
        }
        let rows = tokens * heads_per_kv;
        let counts = RowCounts::of_sequences(std::iter::repeat_n(rows, sequences));
        let gpu = gpu_limits(device)?;
        let dtype = q.dtype();
        let kernel = choose_kernel(gpu, shape, dtype, mask, counts)?;
        let row_tiles = sequences * rows.div_ceil(kernel.rows);
        let grid = TileGrid { row_tiles, partitions: kernel.partitions(gpu, shape.kv_heads, row_tiles, mask) };
        Self::with_kernel(shape, dtype, mask, kernel, LaunchRows::Uniform { tokens }, grid)
    }

    /// Chooses the kernels for all queries of a pass.
    ///
    /// Returns one kernel if all sequences have the same number of new tokens.
    /// Otherwise, the sequences with few new tokens, as in decoding, get a kernel of their own.
    ///
    /// Fails if no kernel supports the tensors, as in [`new`](Self::new). With [`SumOrder::Fixed`], also fails unless
    /// each sequence has exactly one new token.
    pub fn for_pass(
        device: &CudaDevice,
        q: &Tensor,
        layer: CachedLayer,
        queries: &QueryLayout,
        mask: AttentionMask,
        sum_order: SumOrder,
    ) -> Result<Vec<Self>> {
        if sum_order == SumOrder::Fixed {
            return Ok(vec![Self::with_fixed_order(device, q, layer, queries, mask)?]);
        }
        if let Some(tokens) = queries.uniform_tokens() {
            return Ok(vec![Self::new(device, q, layer, tokens, mask)?]);
        }
        let shape = AttentionShape::of_tensors(q, layer, None)?;
        let heads_per_kv = shape.heads / shape.kv_heads;
        let gpu = gpu_limits(device)?;
        let dtype = q.dtype();
        let mut launches = Vec::with_capacity(2);
        for has_few_rows in [true, false] {
            let spans = queries.spans().iter().filter(|span| span.has_few_rows(heads_per_kv) == has_few_rows);
            let counts = RowCounts::of_sequences(spans.map(|span| span.tokens * heads_per_kv));
            if counts.total == 0 {
                continue;
            }
            let kernel = choose_kernel(gpu, shape, dtype, mask, counts)?;
            let tiles = queries.row_tiles(heads_per_kv, kernel.rows, has_few_rows)?;
            let row_tiles = tiles.dim(0)?;
            let partitions = kernel.partitions(gpu, shape.kv_heads, row_tiles, mask);
            let (rows, grid) = (LaunchRows::Listed(tiles), TileGrid { row_tiles, partitions });
            launches.push(Self::with_kernel(shape, dtype, mask, kernel, rows, grid)?);
        }
        Ok(launches)
    }

    /// Chooses a kernel with which the output of a sequence does not depend on the other sequences in the pass.
    /// Fails unless each sequence has exactly one new token.
    fn with_fixed_order(
        device: &CudaDevice,
        q: &Tensor,
        layer: CachedLayer,
        queries: &QueryLayout,
        mask: AttentionMask,
    ) -> Result<Self> {
        let shape = AttentionShape::of_tensors(q, layer, None)?;
        if queries.uniform_tokens() != Some(1) {
            bail!("cannot compute attention: a fixed summation order requires one token per sequence");
        }
        let Some(kernel) = TileKernel::for_fixed_order(gpu_limits(device)?, shape.head_dim) else {
            return too_little_shared_memory(shape.head_dim);
        };
        let row_tiles = shape.tokens * (shape.heads / shape.kv_heads).div_ceil(kernel.rows);
        let (rows, grid) =
            (LaunchRows::Uniform { tokens: 1 }, TileGrid { row_tiles, partitions: fixed_partitions(mask) });
        Self::with_kernel(shape, q.dtype(), mask, kernel, rows, grid)
    }

    /// Creates a launch of `kernel` with the given grid.
    fn with_kernel(
        shape: AttentionShape,
        dtype: DType,
        mask: AttentionMask,
        kernel: TileKernel,
        rows: LaunchRows,
        TileGrid { row_tiles, partitions }: TileGrid,
    ) -> Result<Self> {
        let AttentionShape { kv_heads, head_dim, .. } = shape;
        let is_partitioned = partitions > 1;
        Ok(Self {
            tile_name: kernel.name,
            kernel_name: format!("flash_attention_{}_{head_dim}_{}", kernel.name, dtype_suffix(dtype)?),
            launch_shape: LaunchShape::new((kv_heads, row_tiles, partitions), kernel.threads)
                .with_shared_bytes(kernel.shared_bytes),
            min_tiles: kernel.min_partition_tiles(),
            shape,
            dtype,
            mask,
            rows,
            partials: if is_partitioned { row_tiles * kv_heads * partitions * kernel.rows * (head_dim + 2) } else { 0 },
            arrivals: if is_partitioned { row_tiles * kv_heads } else { 0 },
        })
    }

    /// Returns the part of the kernel's name that identifies its `TileKernel`, such as `16_rows_batch`.
    pub fn tile_name(&self) -> &'static str {
        self.tile_name
    }

    /// Returns a launch of the kernel on `tensors`.
    /// Fails if a tensor has the wrong shape or dtype, or is not contiguous.
    ///
    /// The caller guarantees that the block tables cover all positions and contain only blocks of the cache.
    ///
    /// While the previous kernel is still running, an [`overlapping`](Launch::overlapping) launch can read the sinks,
    /// the positions, the tables, the list of row tiles, and the keys and values of earlier steps.
    /// The caller guarantees that all of this data was written before the previous kernel started.
    pub fn launch(&self, tensors: &FlashTensors) -> Result<Launch> {
        self.check(tensors)?;
        let FlashTensors { q, layer: CachedLayer { k, v }, sinks, positions, tables, out, partials, arrivals } =
            *tensors;
        let (row_tiles, tokens) = match &self.rows {
            LaunchRows::Uniform { tokens } => (None, *tokens),
            LaunchRows::Listed(tiles) => (Some(tiles), 0),
        };
        let raw = RawArguments {
            q: address(q)?,
            k: address(k)?,
            v: address(v)?,
            sinks: optional_address(sinks)?,
            out: address(out)?,
            positions: address(positions)?,
            tables: address(tables)?,
            row_tiles: optional_address(row_tiles)?,
            partials: address(partials)?,
            arrivals: address(arrivals)?,
            table_blocks: kernel_size(tables.dim(1)?)?,
            tokens: kernel_size(tokens)?,
            heads: kernel_size(self.shape.heads)?,
            kv_heads: kernel_size(self.shape.kv_heads)?,
            window: kernel_size(self.mask.window.unwrap_or(0))?,
            min_tiles: kernel_size(self.min_tiles)?,
            scale: self.mask.scale,
            softcap: self.mask.softcap.unwrap_or(0.0),
        };
        let used = [q, k, v, out, positions, tables, partials, arrivals].into_iter().chain(sinks).chain(row_tiles);
        let arguments = Arguments::new().value(raw, used);
        Ok(Launch::new(module!("flash_attention"), &self.kernel_name, self.launch_shape, arguments))
    }

    /// Checks the shapes and dtypes of all tensors except the list of row tiles.
    /// With such a list, the number of sequences is not known here, so the number of block tables is not checked.
    fn check(&self, tensors: &FlashTensors) -> Result<()> {
        let FlashTensors { q, layer, sinks, positions, tables, out, partials, arrivals } = *tensors;
        let shape = AttentionShape::of_tensors(q, layer, sinks)?;
        let has_dtype = q.dtype() == self.dtype && out.dtype() == self.dtype;
        if shape != self.shape || out.dims() != q.dims() || !has_dtype {
            let q_dtype = q.dtype();
            let out_dtype = out.dtype();
            let out = out.dims();
            bail!(
                "cannot compute attention: expected {:?}, got {shape:?} with q {q_dtype:?} \
                 and out {out:?} {out_dtype:?}",
                self.shape
            );
        }
        let is_u32 = positions.dtype() == DType::U32 && tables.dtype() == DType::U32;
        let sequences = match &self.rows {
            LaunchRows::Uniform { tokens } => shape.tokens / tokens,
            LaunchRows::Listed(_) => 1,
        };
        if !is_u32 || positions.elem_count() < shape.tokens || tables.dims2()?.0 < sequences {
            let (positions, tables) = (positions.shape(), tables.shape());
            bail!(
                "cannot compute attention: positions {positions:?} and tables {tables:?} must be U32 \
                 and match {shape:?}"
            );
        }
        let is_scratch = |tensor: &Tensor, dtype, count| tensor.dtype() == dtype && tensor.elem_count() >= count;
        if !is_scratch(partials, DType::F32, self.partials) || !is_scratch(arrivals, DType::U32, self.arrivals) {
            bail!("cannot compute attention: `partials` or `arrivals` is too small or has the wrong dtype");
        }
        Ok(())
    }
}

fn gpu_limits(device: &CudaDevice) -> Result<GpuLimits> {
    Ok(GpuLimits { multiprocessors: multiprocessors(device)?, max_shared_bytes: max_shared_bytes(device)? })
}

/// Chooses the kernel for a launch with these numbers of rows. Fails if no kernel supports the launch.
fn choose_kernel(
    gpu: GpuLimits,
    shape: AttentionShape,
    dtype: DType,
    mask: AttentionMask,
    rows: RowCounts,
) -> Result<TileKernel> {
    let AttentionShape { kv_heads, head_dim, .. } = shape;
    if !matches!(dtype, DType::BF16 | DType::F16) || !FLASH_HEAD_DIMS.contains(&head_dim) {
        bail!("cannot compute attention: there is no flash attention kernel for head size {head_dim} in {dtype:?}");
    }
    match TileKernel::choose(gpu, head_dim, kv_heads, mask, rows) {
        Some(kernel) => Ok(kernel),
        None => too_little_shared_memory(head_dim),
    }
}

fn too_little_shared_memory<T>(head_dim: usize) -> Result<T> {
    bail!("cannot compute attention: this GPU has too little shared memory for head size {head_dim}")
}
