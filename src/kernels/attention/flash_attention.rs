//! Selects and launches the kernels for attention on tensor cores (`flash_attention.cu`).
//!
//! A row is one query head of one token. For each KV head, the rows of a sequence are divided into row tiles.
//! Each row tile is computed by one thread block, or by several that divide its keys: the splits of the row tile.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use super::inputs::AttentionInputs;
use super::mask::AttentionMask;
use super::paged::{CachedLayer, Queries};
use super::shape::AttentionShape;
use crate::kernels::SumOrder;
use crate::kernels::constants::{
    FLASH_BATCH_HALF_KEYS, FLASH_BATCH_HALF_TEAMS, FLASH_BATCH_STAGES, FLASH_BATCH_TEAMS, FLASH_FEW_KEYS,
    FLASH_FEW_ROWS, FLASH_FEW_TEAMS, FLASH_HEAD_DIMS, FLASH_MANY_KEYS, FLASH_MANY_ROWS, FLASH_MANY_WARPS,
    FLASH_MEDIUM_KEYS, FLASH_MEDIUM_ROWS, FLASH_MEDIUM_WARPS, FLASH_REGISTER_ELEMENTS, FLASH_ROW_PADDING, FLASH_STAGES,
};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, max_shared_bytes, module, multiprocessors};
use crate::kernels::scratch;

/// The maximum number of splits per row tile.
/// The last split to finish combines the partial results of all splits, which takes longer with more splits.
const MAX_SPLITS: usize = 64;

/// The maximum number of splits per row tile with [`SumOrder::Fixed`], unless the layer has a small sliding window
/// (see [`MAX_UNSPLIT_WINDOW`]). With `Fastest`, the maximum depends on the number of row tiles, so other sequences in
/// the pass can change the summation order of a row.
const FIXED_SPLITS: usize = 4;

/// The largest sliding window, in keys, for which the keys of a row tile are not split across thread blocks.
/// With so few keys, combining the partial results would take longer than the splits save.
const MAX_UNSPLIT_WINDOW: usize = 256;

/// A flash attention kernel and its launch shape, chosen for some or all queries of a pass.
pub struct FlashAttention {
    tile_name: &'static str,
    kernel: String,
    launch_shape: LaunchShape,
    /// The minimum number of key tiles per split. The last split of a row tile can have fewer.
    min_tiles: usize,
    shape: AttentionShape,
    dtype: DType,
    mask: AttentionMask,
    rows: LaunchRows,
    /// The number of f32 scratch elements for the partial results of splits. 0 if the keys are not split.
    pub partials: usize,
    /// The number of u32 counters of finished splits. 0 if the keys are not split.
    pub arrivals: usize,
}

/// The rows that a launch computes.
enum LaunchRows {
    /// All rows. Each sequence has `tokens` new tokens.
    Uniform { tokens: usize },
    /// The rows in a list of row tiles, u32 `[tiles, 4]` (see [`Queries::row_tiles`]).
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
    /// Counters of finished splits: at least [`FlashAttention::arrivals`] elements, u32.
    /// All counters must be zero before the launch. The kernel resets them to zero.
    pub arrivals: &'t Tensor,
}

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
        // `PassBlocks::new` or `BatchGraph::inputs` has checked that the tables map positions to blocks of the cache.
        // The previous kernel is `split_qkv` or the other attention launch. Neither writes data that an overlapping
        // launch reads before `pdl_wait` (see `FlashAttention::launch`).
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
        let (group, sequences) = (shape.heads / shape.kv_heads, shape.tokens / tokens.max(1));
        if tokens == 0 || sequences * tokens != shape.tokens {
            bail!(
                "cannot compute attention: {} tokens are not a multiple of {tokens} tokens per sequence",
                shape.tokens
            );
        }
        let rows = tokens * group;
        let few_tiles = sequences * rows.div_ceil(FLASH_FEW_ROWS);
        let tile = TileKernel::choose(device, q, mask, shape.kv_heads, (rows, few_tiles, sequences * rows))?;
        let row_tiles = sequences * rows.div_ceil(tile.rows);
        Self::with_tiles(device, shape, q.dtype(), mask, tile, LaunchRows::Uniform { tokens }, row_tiles)
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
        queries: &Queries,
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
        let group = shape.heads / shape.kv_heads;
        let mut launches = Vec::with_capacity(2);
        for few in [true, false] {
            let spans = || queries.spans().iter().filter(|span| span.is_few(group) == few);
            let Some(longest) = spans().map(|span| span.tokens * group).max() else { continue };
            let total: usize = spans().map(|span| span.tokens * group).sum();
            let few_tiles = spans().map(|span| (span.tokens * group).div_ceil(FLASH_FEW_ROWS)).sum();
            let tile = TileKernel::choose(device, q, mask, shape.kv_heads, (longest, few_tiles, total))?;
            let tiles = queries.row_tiles(group, tile.rows, few)?;
            let count = tiles.dim(0)?;
            launches.push(Self::with_tiles(device, shape, q.dtype(), mask, tile, LaunchRows::Listed(tiles), count)?);
        }
        Ok(launches)
    }

    /// Chooses a kernel with which the output of a sequence does not depend on the other sequences in the pass.
    /// Fails unless each sequence has exactly one new token.
    fn with_fixed_order(
        device: &CudaDevice,
        q: &Tensor,
        layer: CachedLayer,
        queries: &Queries,
        mask: AttentionMask,
    ) -> Result<Self> {
        let shape = AttentionShape::of_tensors(q, layer, None)?;
        if queries.uniform_tokens() != Some(1) {
            bail!("cannot compute attention: a fixed summation order requires one token per sequence");
        }
        let tile = TileKernel::for_fixed_order(device, q)?;
        let row_tiles = shape.tokens * (shape.heads / shape.kv_heads).div_ceil(tile.rows);
        let rows = LaunchRows::Uniform { tokens: 1 };
        Self::with_splits(shape, q.dtype(), mask, tile, rows, (row_tiles, splits(mask, FIXED_SPLITS)))
    }

    fn with_tiles(
        device: &CudaDevice,
        shape: AttentionShape,
        dtype: DType,
        mask: AttentionMask,
        tile: TileKernel,
        rows: LaunchRows,
        row_tiles: usize,
    ) -> Result<Self> {
        // If there are too few row tiles to fill the GPU, split the keys of each row tile across thread blocks.
        // `TileKernel::choose` selects 128-row tiles only if they fill the GPU, so their keys are not split.
        // In a large batch, sequences can have very different numbers of keys. To balance the work, the splits create
        // up to twice as many thread blocks as fit on the GPU at the same time.
        let blocks_per_multiprocessor = match tile.kind {
            TileKind::Few => 1,
            TileKind::Batch => 2 * tile.blocks_per_multiprocessor(max_shared_bytes(device)?),
            TileKind::Medium => 2,
            TileKind::Many => 0,
        };
        let wanted = blocks_per_multiprocessor * multiprocessors(device)? / (shape.kv_heads * row_tiles);
        Self::with_splits(shape, dtype, mask, tile, rows, (row_tiles, splits(mask, wanted)))
    }

    /// Creates a `FlashAttention` with `row_tiles` row tiles per KV head and up to `splits` splits per row tile.
    fn with_splits(
        shape: AttentionShape,
        dtype: DType,
        mask: AttentionMask,
        tile: TileKernel,
        rows: LaunchRows,
        (row_tiles, splits): (usize, usize),
    ) -> Result<Self> {
        let AttentionShape { kv_heads, head_dim, .. } = shape;
        let is_split = splits > 1;
        Ok(Self {
            tile_name: tile.name,
            kernel: format!("flash_attention_{}_{head_dim}_{}", tile.name, dtype_suffix(dtype)?),
            launch_shape: LaunchShape::new((kv_heads, row_tiles, splits), tile.threads)
                .with_shared_bytes(tile.shared_bytes),
            min_tiles: tile.min_split_keys().div_ceil(tile.keys),
            shape,
            dtype,
            mask,
            rows,
            partials: if is_split { row_tiles * kv_heads * splits * tile.rows * (head_dim + 2) } else { 0 },
            arrivals: if is_split { row_tiles * kv_heads } else { 0 },
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
        let AttentionShape { heads, kv_heads, .. } = self.shape;
        let (tiles, tokens) = match &self.rows {
            LaunchRows::Uniform { tokens } => (None, *tokens),
            LaunchRows::Listed(tiles) => (Some(tiles), 0),
        };
        let arguments = Arguments::new()
            .tensor(tensors.q)?
            .tensor(tensors.layer.k)?
            .tensor(tensors.layer.v)?
            .optional(tensors.sinks)?
            .tensor(tensors.out)?
            .tensor(tensors.positions)?
            .tensor(tensors.tables)?
            .optional(tiles)?
            .tensor(tensors.partials)?
            .tensor(tensors.arrivals)?
            .int(tensors.tables.dim(1)?)
            .int(tokens)
            .int(heads)
            .int(kv_heads)
            .int(self.mask.window.unwrap_or(0))
            .float(self.mask.scale)
            .float(self.mask.softcap.unwrap_or(0.0))
            .int(self.min_tiles);
        Ok(Launch::new(module!("flash_attention"), &self.kernel, self.launch_shape, arguments))
    }

    /// Checks the shapes and dtypes of all tensors except the list of row tiles.
    /// With such a list, the number of sequences is not known here, so the number of block tables is not checked.
    fn check(&self, tensors: &FlashTensors) -> Result<()> {
        let FlashTensors { q, layer, sinks, positions, tables, out, partials, arrivals } = *tensors;
        let shape = AttentionShape::of_tensors(q, layer, sinks)?;
        let has_dtype = q.dtype() == self.dtype && out.dtype() == self.dtype;
        if shape != self.shape || out.dims() != q.dims() || !has_dtype {
            let (q_dtype, out_dtype, out) = (q.dtype(), out.dtype(), out.dims());
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

/// Returns whether the mask has a sliding window of at most [`MAX_UNSPLIT_WINDOW`] keys.
fn has_small_window(mask: AttentionMask) -> bool {
    mask.window.is_some_and(|window| window <= MAX_UNSPLIT_WINDOW)
}

/// Returns the maximum number of splits per row tile: 1 if the layer has a small sliding window, otherwise `wanted`,
/// limited to the range from 1 to [`MAX_SPLITS`].
fn splits(mask: AttentionMask, wanted: usize) -> usize {
    if has_small_window(mask) { 1 } else { wanted.clamp(1, MAX_SPLITS) }
}

/// A flash attention kernel, with the sizes of its tiles and thread blocks.
/// The sizes must match `TileShape` in `flash_attention.cu`.
struct TileKernel {
    kind: TileKind,
    /// The part of the kernel's name that identifies the tile.
    name: &'static str,
    rows: usize,
    /// Keys per key tile.
    keys: usize,
    threads: usize,
    shared_bytes: usize,
}

/// The queries for which a [`TileKernel`] is meant.
#[derive(Clone, Copy, PartialEq)]
enum TileKind {
    /// Few rows per sequence, as in decoding, in a small batch. Its 16-row tiles do not outnumber the multiprocessors.
    Few,
    /// Few rows per sequence, in a large batch.
    Batch,
    /// Many rows per sequence, as in prompts, but not enough to fill the GPU with 128-row tiles.
    /// Also replaces `Few` and `Many` if their kernels need more shared memory than the GPU has.
    Medium,
    /// Many rows per sequence, and enough to fill the GPU with 128-row tiles.
    Many,
}

impl TileKernel {
    /// Chooses the kernel for queries with `total` rows per KV head, and at most `longest` rows in one sequence.
    /// `few_tiles` is the number of row tiles per KV head if each tile has 16 rows.
    fn choose(
        device: &CudaDevice,
        q: &Tensor,
        mask: AttentionMask,
        kv_heads: usize,
        (longest, few_tiles, total): (usize, usize, usize),
    ) -> Result<Self> {
        let (_, _, head_dim) = q.dims3()?;
        if !matches!(q.dtype(), DType::BF16 | DType::F16) || !FLASH_HEAD_DIMS.contains(&head_dim) {
            bail!(
                "cannot compute attention: there is no flash attention kernel for head size {head_dim} in {:?}",
                q.dtype()
            );
        }
        let (max_shared_bytes, multiprocessors) = (max_shared_bytes(device)?, multiprocessors(device)?);
        let fills_gpu = kv_heads * total.div_ceil(FLASH_MANY_ROWS) >= 2 * multiprocessors;
        let few_blocks = kv_heads * few_tiles;
        let mut tiles = Self::for_head_dim(head_dim).into_iter().filter(|tile| tile.shared_bytes <= max_shared_bytes);
        let tile = if longest > 2 * FLASH_FEW_ROWS {
            tiles.find(|tile| tile.kind == TileKind::Many && fills_gpu || tile.kind == TileKind::Medium)
        } else if few_blocks <= multiprocessors {
            tiles.find(|tile| matches!(tile.kind, TileKind::Few | TileKind::Medium))
        } else {
            let fitting = |tile: &Self| tile.blocks_per_multiprocessor(max_shared_bytes) * multiprocessors;
            let batch: Vec<Self> = tiles.filter(|tile| tile.kind == TileKind::Batch).collect();
            let chosen = if has_small_window(mask) {
                // With few keys, starting takes up much of a thread block's time.
                // Take the first tile with which all thread blocks run at the same time, otherwise the last tile.
                batch.iter().position(|tile| few_blocks <= fitting(tile)).unwrap_or(batch.len().saturating_sub(1))
            } else {
                // Thread blocks with many teams finish sequences with many keys sooner. A team is one warp here.
                // Take the tile with the most teams, unless it leaves much of the shared memory unused.
                let used = |tile: &Self| tile.shared_bytes * tile.blocks_per_multiprocessor(max_shared_bytes);
                let most = batch.iter().map(used).max().unwrap_or(0);
                let first = batch.iter().position(|tile| 4 * used(tile) >= 3 * most).unwrap_or(0);
                // If the next tile has as many teams, its key tiles are smaller.
                // It is then faster if its thread blocks nearly fill the GPU.
                let is_faster =
                    |tile: &Self| tile.threads == batch[first].threads && 10 * few_blocks >= 9 * fitting(tile);
                first + batch.get(first + 1).map_or(0, |next| usize::from(is_faster(next)))
            };
            batch.into_iter().nth(chosen)
        };
        match tile {
            Some(tile) => Ok(tile),
            None => bail!("cannot compute attention: this GPU has too little shared memory for head size {head_dim}"),
        }
    }

    /// Returns a 16-row tile for a fixed summation order. The choice depends only on the GPU and the head size.
    /// If the GPU has enough shared memory, the tile is the one for small batches.
    /// Otherwise, the tile is the first one for large batches that fits.
    fn for_fixed_order(device: &CudaDevice, q: &Tensor) -> Result<Self> {
        let (_, _, head_dim) = q.dims3()?;
        let max_shared_bytes = max_shared_bytes(device)?;
        match Self::for_head_dim(head_dim).into_iter().find(|tile| tile.shared_bytes <= max_shared_bytes) {
            Some(tile) if tile.rows == FLASH_FEW_ROWS => Ok(Self { kind: TileKind::Few, ..tile }),
            _ => bail!("cannot compute attention: this GPU has too little shared memory for head size {head_dim}"),
        }
    }

    /// Returns the tiles for a head size. The list is empty if no kernel supports the head size.
    /// [`choose`](Self::choose) and [`for_fixed_order`](Self::for_fixed_order) search the list in this order.
    fn for_head_dim(head_dim: usize) -> Vec<Self> {
        let Some(index) = FLASH_HEAD_DIMS.iter().position(|&dim| dim == head_dim) else { return Vec::new() };
        let tile = |kind, name, rows: usize, warps: usize, (teams, stages): (usize, usize), keys: usize| {
            let rows_of_keys_and_values = teams * stages * 2 * keys;
            let rows_in_registers = rows / warps / 16 * head_dim <= FLASH_REGISTER_ELEMENTS;
            let rows_in_shared = rows_of_keys_and_values + if rows_in_registers { 0 } else { rows };
            let shared_bytes = 2 * rows_in_shared * (head_dim + FLASH_ROW_PADDING);
            Self { kind, name, rows, keys, threads: 32 * warps * teams, shared_bytes }
        };
        let few = |kind, name, shape, keys| tile(kind, name, FLASH_FEW_ROWS, 1, shape, keys);
        let batch = |name, teams, keys| few(TileKind::Batch, name, (teams, FLASH_BATCH_STAGES), keys);
        let (few_keys, many_warps, once) = (FLASH_FEW_KEYS[index], FLASH_MANY_WARPS[index], (1, FLASH_STAGES));
        vec![
            few(TileKind::Few, "16_rows", (FLASH_FEW_TEAMS[index], FLASH_STAGES), few_keys),
            batch("16_rows_batch", FLASH_BATCH_TEAMS, few_keys),
            batch("16_rows_batch_half", FLASH_BATCH_HALF_TEAMS[index], FLASH_BATCH_HALF_KEYS),
            batch("16_rows_batch_quarter", 1, few_keys),
            tile(TileKind::Many, "128_rows", FLASH_MANY_ROWS, many_warps, once, FLASH_MANY_KEYS[index]),
            tile(TileKind::Medium, "64_rows", FLASH_MEDIUM_ROWS, FLASH_MEDIUM_WARPS, once, FLASH_MEDIUM_KEYS[index]),
        ]
    }

    /// Returns the minimum number of keys per split. The last split of a row tile can have fewer.
    /// With fewer keys per split, combining the results of the splits takes longer than the splits save.
    fn min_split_keys(&self) -> usize {
        match self.kind {
            TileKind::Few => 128,
            TileKind::Batch => 1024,
            TileKind::Medium | TileKind::Many => 4 * self.keys,
        }
    }

    /// Returns the number of thread blocks whose shared memory fits on a multiprocessor.
    /// `max_shared_bytes` is the maximum for one thread block.
    fn blocks_per_multiprocessor(&self, max_shared_bytes: usize) -> usize {
        // CUDA reserves RESERVED bytes for each block. A multiprocessor has RESERVED bytes more than one block may use.
        // All callers pass 16-row kernels, which have at most STATIC bytes of static shared memory.
        const RESERVED: usize = 1024;
        const STATIC: usize = 128;
        (max_shared_bytes + RESERVED) / (self.shared_bytes + STATIC + RESERVED)
    }
}

#[cfg(test)]
mod tests {
    use super::TileKernel;

    #[test]
    fn tiles_have_the_sizes_that_the_kernels_expect() {
        let sizes =
            |head_dim| TileKernel::for_head_dim(head_dim).into_iter().map(|tile| (tile.threads, tile.shared_bytes));
        let expected = [(256, 147_456), (128, 110_592), (128, 55_296), (32, 27_648), (128, 27_648), (128, 36_864)];
        assert!(sizes(64).eq(expected));
        let expected = [(256, 139_264), (128, 104_448), (64, 52_224), (32, 26_112), (128, 87_040), (128, 69_632)];
        assert!(sizes(128).eq(expected));
        let expected = [(128, 143_616), (128, 211_200), (64, 109_824), (32, 59_136), (256, 135_168), (128, 67_584)];
        assert!(sizes(256).eq(expected));
        assert!(TileKernel::for_head_dim(40).is_empty());
    }
}
