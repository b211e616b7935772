//! Selects and launches the kernels for attention on tensor cores (`flash_attention.cu`).

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use super::mask::AttentionMask;
use super::shape::AttentionShape;
use crate::kernels::constants::{
    FLASH_FEW_KEYS, FLASH_FEW_ROWS, FLASH_FEW_TEAMS, FLASH_HEAD_DIMS, FLASH_MANY_KEYS, FLASH_MANY_ROWS,
    FLASH_MANY_WARPS, FLASH_MEDIUM_KEYS, FLASH_MEDIUM_ROWS, FLASH_MEDIUM_WARPS, FLASH_REGISTER_ELEMENTS,
    FLASH_ROW_PADDING, FLASH_STAGES,
};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, max_shared_bytes, module, multiprocessors};

/// The maximum number of splits. Each split is a block that processes a part of one row tile's keys.
const MAX_SPLITS: usize = 64;

/// The keys of a row tile are not split across blocks if the sliding window has at most this many keys.
const MAX_UNSPLIT_WINDOW: usize = 256;

/// A flash attention kernel and its launch shape, chosen for the sizes of the queries and the KV cache.
pub struct FlashAttention {
    kernel: String,
    launch_shape: LaunchShape,
    shape: AttentionShape,
    dtype: DType,
    mask: AttentionMask,
    /// The number of f32 scratch elements for the partial results of splits, or 0 if keys are not split.
    pub partials: usize,
    /// The number of u32 counters of finished splits: one per row tile and KV head, or 0 if keys are not split.
    pub arrivals: usize,
}

/// The tensors of one launch, all contiguous.
pub struct FlashTensors<'t> {
    /// The queries: bf16 or f16 `[tokens, heads, head_dim]`.
    pub q: &'t Tensor,
    /// The cached keys: `[cache_rows, kv_heads, head_dim]` in the dtype of `q`.
    pub k: &'t Tensor,
    /// The cached values: `[cache_rows, kv_heads, head_dim]` in the dtype of `q`.
    pub v: &'t Tensor,
    /// The sinks: f32 `[heads]`.
    pub sinks: Option<&'t Tensor>,
    /// The positions of the queries: u32 `[tokens]`. The kernel reads only the first element,
    /// which must not exceed [`AttentionMask::position`].
    pub positions: &'t Tensor,
    /// The output: `[tokens, heads, head_dim]` in the dtype of `q`.
    pub out: &'t Tensor,
    /// Scratch memory for partial results: at least [`FlashAttention::partials`] elements, f32.
    pub partials: &'t Tensor,
    /// Counters of finished splits: at least [`FlashAttention::arrivals`] elements, u32.
    /// All counters are zero before and after each launch.
    pub arrivals: &'t Tensor,
}

/// The data that the kernel may read before the previous kernel of a launch list has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EarlyReads {
    /// Nothing.
    None,
    /// The first element of `positions`, and the keys and values of earlier positions.
    /// All of this data must have been written before the previous kernel starts.
    EarlierPositions,
}

impl FlashAttention {
    /// Chooses the kernel. q must be bf16 or f16 and have a head size in [`FLASH_HEAD_DIMS`].
    ///
    /// `mask.position` is the largest position that the first query will have in any launch.
    pub fn new(device: &CudaDevice, q: &Tensor, k: &Tensor, mask: AttentionMask) -> Result<Self> {
        let ((tokens, heads, head_dim), (cache_rows, kv_heads, _)) = (q.dims3()?, k.dims3()?);
        if kv_heads == 0 || heads % kv_heads != 0 {
            bail!("flash_attention: {heads} query heads cannot share {kv_heads} KV heads");
        }
        let Some(tiles) = Tile::for_head_dim(head_dim).filter(|_| matches!(q.dtype(), DType::BF16 | DType::F16)) else {
            bail!("flash_attention has no kernel for head size {head_dim} in {:?}", q.dtype());
        };
        let (max_shared_bytes, multiprocessors) = (max_shared_bytes(device)?, multiprocessors(device)?);
        // Each row is one query head of one token. The row tiles of a KV head contain all query heads that share it.
        let rows = tokens * (heads / kv_heads);
        let [few, medium, many] = tiles;
        let fills_gpu = kv_heads * rows.div_ceil(FLASH_MANY_ROWS) >= 2 * multiprocessors;
        let tile = if rows <= 2 * FLASH_FEW_ROWS && few.shared_bytes <= max_shared_bytes {
            few
        } else if fills_gpu && many.shared_bytes <= max_shared_bytes {
            many
        } else {
            medium
        };
        let row_tiles = rows.div_ceil(tile.rows);
        // If there are too few row tiles to fill the GPU, split the keys of each row tile across several blocks.
        let splits = match tile.rows {
            _ if mask.window.is_some_and(|window| window <= MAX_UNSPLIT_WINDOW) => 1,
            FLASH_FEW_ROWS => multiprocessors / (kv_heads * row_tiles),
            FLASH_MEDIUM_ROWS => 2 * multiprocessors / (kv_heads * row_tiles),
            _ => 1,
        };
        let splits = splits.clamp(1, MAX_SPLITS);
        let is_split = splits > 1;
        Ok(Self {
            kernel: format!("flash_attention_{}_rows_{head_dim}_{}", tile.rows, dtype_suffix(q.dtype())?),
            launch_shape: LaunchShape::new((kv_heads, row_tiles, splits), tile.threads)
                .with_shared_bytes(tile.shared_bytes),
            shape: AttentionShape { tokens, heads, kv_heads, head_dim, cache_rows },
            dtype: q.dtype(),
            mask,
            partials: if is_split { row_tiles * kv_heads * splits * tile.rows * (head_dim + 2) } else { 0 },
            arrivals: if is_split { row_tiles * kv_heads } else { 0 },
        })
    }

    /// Returns the launch of the kernel on `tensors`. Fails if a shape or dtype does not match.
    pub fn launch(&self, tensors: &FlashTensors, early_reads: EarlyReads) -> Result<Launch> {
        self.check(tensors)?;
        let AttentionShape { tokens, heads, kv_heads, cache_rows, .. } = self.shape;
        let arguments = Arguments::new()
            .tensor(tensors.q)?
            .tensor(tensors.k)?
            .tensor(tensors.v)?
            .optional(tensors.sinks)?
            .tensor(tensors.out)?
            .tensor(tensors.positions)?
            .tensor(tensors.partials)?
            .tensor(tensors.arrivals)?
            .int(tokens)
            .int(heads)
            .int(kv_heads)
            .int(cache_rows)
            .int(self.mask.window.unwrap_or(0))
            .float(self.mask.scale)
            .float(self.mask.softcap.unwrap_or(0.0))
            .flag(early_reads == EarlyReads::EarlierPositions);
        Ok(Launch::new(module!("flash_attention"), &self.kernel, self.launch_shape, arguments))
    }

    /// Fails if a shape or dtype differs from those that `new` was called with, or if a scratch buffer is too small.
    fn check(&self, tensors: &FlashTensors) -> Result<()> {
        let FlashTensors { q, k, v, sinks, positions, out, partials, arrivals } = *tensors;
        let shape = AttentionShape::of_inputs(q, k, v, sinks, positions, self.mask)?;
        let has_dtype = q.dtype() == self.dtype && out.dtype() == self.dtype;
        if shape != self.shape || out.dims() != q.dims() || !has_dtype {
            let (q_dtype, out_dtype, out) = (q.dtype(), out.dtype(), out.dims());
            bail!("flash_attention: expected {:?}, got {shape:?} {q_dtype:?}, out {out:?} {out_dtype:?}", self.shape);
        }
        let is_scratch = |tensor: &Tensor, dtype, count| tensor.dtype() == dtype && tensor.elem_count() >= count;
        if !is_scratch(partials, DType::F32, self.partials) || !is_scratch(arrivals, DType::U32, self.arrivals) {
            bail!("flash_attention: a scratch buffer is too small or has the wrong dtype");
        }
        Ok(())
    }

    /// Allocates scratch memory and queues the kernel immediately.
    pub(super) fn enqueue(
        &self,
        device: &CudaDevice,
        (q, k, v): (&Tensor, &Tensor, &Tensor),
        sinks: Option<&Tensor>,
        positions: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        // SAFETY: the kernel writes every partial result before it reads it.
        let partials = &unsafe { Tensor::empty(self.partials.max(1), DType::F32, q.device())? };
        let arrivals = &Tensor::zeros(self.arrivals.max(1), DType::U32, q.device())?;
        let tensors = FlashTensors { q, k, v, sinks, positions, out, partials, arrivals };
        // SAFETY: `launch` checks shapes and dtypes. The kernel wraps positions modulo the number of cache rows.
        unsafe { self.launch(&tensors, EarlyReads::None)?.enqueue(device) }
    }
}

/// The tile that one thread block computes. Must match `Tile` in `flash_attention.cu`.
struct Tile {
    /// Query rows.
    rows: usize,
    /// Threads per block.
    threads: usize,
    shared_bytes: usize,
}

impl Tile {
    /// Returns the tiles of 16, 64 and 128 rows for a head size, or `None` if no kernel supports the head size.
    fn for_head_dim(head_dim: usize) -> Option<[Self; 3]> {
        let index = FLASH_HEAD_DIMS.iter().position(|&dim| dim == head_dim)?;
        let tile = |rows: usize, warps: usize, teams: usize, keys: usize| {
            let rows_of_keys_and_values = teams * FLASH_STAGES * 2 * keys;
            let rows_in_registers = rows / warps / 16 * head_dim <= FLASH_REGISTER_ELEMENTS;
            let rows_in_shared = rows_of_keys_and_values + if rows_in_registers { 0 } else { rows };
            let shared_bytes = 2 * rows_in_shared * (head_dim + FLASH_ROW_PADDING);
            Self { rows, threads: 32 * warps * teams, shared_bytes }
        };
        Some([
            tile(FLASH_FEW_ROWS, 1, FLASH_FEW_TEAMS[index], FLASH_FEW_KEYS[index]),
            tile(FLASH_MEDIUM_ROWS, FLASH_MEDIUM_WARPS, 1, FLASH_MEDIUM_KEYS[index]),
            tile(FLASH_MANY_ROWS, FLASH_MANY_WARPS[index], 1, FLASH_MANY_KEYS[index]),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::Tile;

    #[test]
    fn tiles_have_the_sizes_that_the_kernels_expect() {
        let sizes = |head_dim| Tile::for_head_dim(head_dim).unwrap().map(|tile| (tile.threads, tile.shared_bytes));
        assert_eq!(sizes(64), [(256, 147_456), (128, 36_864), (128, 27_648)]);
        assert_eq!(sizes(128), [(256, 139_264), (128, 69_632), (128, 87_040)]);
        assert_eq!(sizes(256), [(128, 143_616), (128, 67_584), (256, 135_168)]);
        assert!(Tile::for_head_dim(40).is_none());
    }
}
