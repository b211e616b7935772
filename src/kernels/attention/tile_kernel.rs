//! [`TileKernel`]: the choice of a flash attention kernel, and the number of partitions of its row tiles.
//!
//! The module `flash_attention` explains rows, row tiles and partitions. `flash_attention.cu` contains the kernels.

use super::mask::AttentionMask;
use super::paged::MAX_FEW_ROWS;
use crate::kernels::constants::{
    FLASH_DECODE_ROWS, FLASH_HEAD_DIMS, FLASH_LARGE_BATCH_HALF_TILES, FLASH_LARGE_BATCH_QUARTER_TILES,
    FLASH_LARGE_BATCH_TILES, FLASH_LARGE_PREFILL_ROWS, FLASH_LARGE_PREFILL_TILES, FLASH_SMALL_BATCH_TILES,
    FLASH_SMALL_PREFILL_ROWS, FLASH_SMALL_PREFILL_TILES,
};

/// The maximum number of partitions per row tile.
/// The last partition to finish combines the partial results of all partitions. This takes longer with more partitions.
const MAX_PARTITIONS: usize = 64;

/// The maximum number of partitions per row tile with [`SumOrder::Fixed`](crate::kernels::SumOrder::Fixed), unless the
/// layer has a small sliding window (see [`MAX_UNPARTITIONED_WINDOW`]). With `Fastest`, the maximum depends on the
/// number of row tiles, so other sequences in the pass can change the summation order of a row.
const FIXED_PARTITIONS: usize = 4;

/// The largest sliding window, in keys, for which the keys of a row tile are not divided among thread blocks.
/// With so few keys, combining the partial results would take longer than the partitions save.
const MAX_UNPARTITIONED_WINDOW: usize = 256;

/// The number of 128-row thread blocks per multiprocessor that fill the GPU.
const FULL_GPU_BLOCKS: usize = 2;

/// In a large batch without a small sliding window, the kernel's thread blocks on a multiprocessor must together use at
/// least this percentage of the shared memory that the blocks of any other `LargeBatch` kernel use.
const MIN_SHARED_PERCENT: usize = 75;

/// In a large batch without a small sliding window, a kernel with smaller key tiles is chosen if the batch has at least
/// this percentage of the thread blocks that fit on the GPU. With 64 sequences of 600 keys, smaller tiles took 23 µs
/// instead of 25, and with 128 sequences 43 µs instead of 45 (H200, 2026-11-29, `docs/history/benchmarks.md`).
const FULL_GPU_PERCENT: usize = 90;

/// The minimum number of keys per partition in a small batch. One sequence decoded 726, 711 and 704 tokens/s after
/// 1,024 tokens with at least 128, 512 and 1,024 keys per partition (H200, 2026-11-29, `docs/history/benchmarks.md`).
const SMALL_BATCH_PARTITION_KEYS: usize = 128;

/// The minimum number of keys per partition in a large batch.
const LARGE_BATCH_PARTITION_KEYS: usize = 1024;

/// The minimum number of key tiles per partition with 64-row and 128-row tiles.
const PREFILL_PARTITION_TILES: usize = 4;

/// The properties of a GPU that determine which kernel is fastest.
#[derive(Clone, Copy, Debug)]
pub(super) struct GpuLimits {
    pub multiprocessors: usize,
    /// The maximum shared memory per thread block, in bytes.
    pub max_shared_bytes: usize,
}

/// The numbers of rows of a launch, all per KV head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RowCounts {
    /// The number of rows of the sequence with the most rows.
    pub longest: usize,
    /// The number of row tiles if each tile has [`FLASH_DECODE_ROWS`] rows.
    pub decode_tiles: usize,
    /// The number of rows of all sequences.
    pub total: usize,
}

impl RowCounts {
    /// Counts the rows of sequences. `rows` yields the number of rows of each sequence.
    pub fn of_sequences(rows: impl Iterator<Item = usize>) -> Self {
        rows.fold(Self::default(), |counts, rows| Self {
            longest: counts.longest.max(rows),
            decode_tiles: counts.decode_tiles + rows.div_ceil(FLASH_DECODE_ROWS),
            total: counts.total + rows,
        })
    }
}

/// A flash attention kernel, with the sizes of its tiles and thread blocks.
#[derive(Clone, Copy)]
pub(super) struct TileKernel {
    queries: QueryKind,
    /// The part of the kernel's name that tells the kernels for a head size and a dtype apart.
    pub name: &'static str,
    /// Rows per row tile.
    pub rows: usize,
    /// Keys per key tile.
    keys: usize,
    pub threads: usize,
    pub shared_bytes: usize,
}

/// The kind of queries for which a [`TileKernel`] is fast.
#[derive(Clone, Copy, PartialEq)]
enum QueryKind {
    /// Few rows per sequence, as in decoding, in a small batch. Its 16-row tiles do not outnumber the multiprocessors.
    SmallBatch,
    /// Few rows per sequence, in a large batch.
    LargeBatch,
    /// Many rows per sequence, as in prompts, but not enough to fill the GPU with 128-row tiles.
    /// Also replaces `SmallBatch` and `LargePrefill` if their kernels need more shared memory than the GPU has.
    SmallPrefill,
    /// Many rows per sequence, and enough to fill the GPU with 128-row tiles.
    LargePrefill,
}

impl TileKernel {
    /// Chooses the kernel for queries with these numbers of rows.
    /// Returns `None` if no kernel supports the head size, or if the GPU has too little shared memory.
    ///
    /// A thread block computes one row tile of one KV head. The choice depends on the longest sequence, and on the
    /// number of thread blocks if each row tile has [`FLASH_DECODE_ROWS`] rows, which is 16:
    ///
    /// | rows of the longest sequence | 16-row thread blocks | kernel |
    /// | --- | --- | --- |
    /// | more than [`MAX_FEW_ROWS`] | any number | `LargePrefill` if its blocks fill the GPU, else `SmallPrefill` |
    /// | up to [`MAX_FEW_ROWS`] | up to one per multiprocessor | `SmallBatch` |
    /// | up to [`MAX_FEW_ROWS`] | more, small window | the first `LargeBatch` one whose blocks all run at once |
    /// | up to [`MAX_FEW_ROWS`] | more, otherwise | the first `LargeBatch` one that uses the shared memory well |
    ///
    /// If `LargePrefill` or `SmallBatch` needs more shared memory than the GPU has, `SmallPrefill` replaces it.
    pub fn choose(
        gpu: GpuLimits,
        head_dim: usize,
        kv_heads: usize,
        mask: AttentionMask,
        rows: RowCounts,
    ) -> Option<Self> {
        let fills_gpu =
            kv_heads * rows.total.div_ceil(FLASH_LARGE_PREFILL_ROWS) >= FULL_GPU_BLOCKS * gpu.multiprocessors;
        let decode_blocks = kv_heads * rows.decode_tiles;
        let mut kernels = Self::that_fit(gpu, head_dim);
        if rows.longest > MAX_FEW_ROWS {
            return kernels.find(|kernel| {
                kernel.queries == QueryKind::LargePrefill && fills_gpu || kernel.queries == QueryKind::SmallPrefill
            });
        }
        if decode_blocks <= gpu.multiprocessors {
            return kernels.find(|kernel| matches!(kernel.queries, QueryKind::SmallBatch | QueryKind::SmallPrefill));
        }
        let batch: Vec<Self> = kernels.filter(|kernel| kernel.queries == QueryKind::LargeBatch).collect();
        let fitting = |kernel: &Self| kernel.blocks_per_multiprocessor(gpu) * gpu.multiprocessors;
        if has_small_window(mask) {
            // With few keys, starting takes up much of a thread block's time.
            // Take the first kernel with which all thread blocks run at the same time, otherwise the last one.
            return batch.iter().find(|kernel| decode_blocks <= fitting(kernel)).or(batch.last()).copied();
        }
        // Thread blocks with many warps finish sequences with many keys sooner.
        // Take the kernel with the most warps, unless it leaves much of the shared memory unused.
        let used = |kernel: &Self| kernel.shared_bytes * kernel.blocks_per_multiprocessor(gpu);
        let most = batch.iter().map(used).max()?;
        let first = batch.iter().position(|kernel| 100 * used(kernel) >= MIN_SHARED_PERCENT * most)?;
        // If the next kernel has as many warps, its key tiles are smaller.
        // It is then faster if its thread blocks nearly fill the GPU.
        let is_faster = |next: &&Self| {
            next.threads == batch[first].threads && 100 * decode_blocks >= FULL_GPU_PERCENT * fitting(next)
        };
        batch.get(first + 1).filter(is_faster).or(batch.get(first)).copied()
    }

    /// Returns a 16-row kernel for a fixed summation order. The choice depends only on the GPU and the head size.
    /// If the GPU has enough shared memory, this is the kernel for small batches.
    /// Otherwise, it is the first one for large batches that fits.
    /// Returns `None` if there is no such kernel.
    pub fn for_fixed_order(gpu: GpuLimits, head_dim: usize) -> Option<Self> {
        let kernel = Self::that_fit(gpu, head_dim).next().filter(|kernel| kernel.rows == FLASH_DECODE_ROWS)?;
        Some(Self { queries: QueryKind::SmallBatch, ..kernel })
    }

    /// Returns the kernels for a head size that need no more shared memory than the GPU has.
    /// There are none if no kernel supports the head size.
    /// [`choose`](Self::choose) and [`for_fixed_order`](Self::for_fixed_order) search the kernels in this order.
    fn that_fit(gpu: GpuLimits, head_dim: usize) -> impl Iterator<Item = Self> {
        let index = FLASH_HEAD_DIMS.iter().position(|&dim| dim == head_dim);
        let kernels = index.map(Self::of_head_dim).into_iter().flatten();
        kernels.filter(move |kernel| kernel.shared_bytes <= gpu.max_shared_bytes)
    }

    /// Returns the kernels for a head size. `index` is its index in [`FLASH_HEAD_DIMS`].
    fn of_head_dim(index: usize) -> [Self; 6] {
        let kernel = |queries, name, rows, sizes: [[usize; 3]; 6]| {
            let [keys, warps, shared_bytes] = sizes[index];
            Self { queries, name, rows, keys, threads: 32 * warps, shared_bytes }
        };
        [
            kernel(QueryKind::SmallBatch, "16_rows", FLASH_DECODE_ROWS, FLASH_SMALL_BATCH_TILES),
            kernel(QueryKind::LargeBatch, "16_rows_batch", FLASH_DECODE_ROWS, FLASH_LARGE_BATCH_TILES),
            kernel(QueryKind::LargeBatch, "16_rows_batch_half", FLASH_DECODE_ROWS, FLASH_LARGE_BATCH_HALF_TILES),
            kernel(QueryKind::LargeBatch, "16_rows_batch_quarter", FLASH_DECODE_ROWS, FLASH_LARGE_BATCH_QUARTER_TILES),
            kernel(QueryKind::LargePrefill, "128_rows", FLASH_LARGE_PREFILL_ROWS, FLASH_LARGE_PREFILL_TILES),
            kernel(QueryKind::SmallPrefill, "64_rows", FLASH_SMALL_PREFILL_ROWS, FLASH_SMALL_PREFILL_TILES),
        ]
    }

    /// Returns the maximum number of partitions per row tile, for `row_tiles` row tiles per KV head.
    pub fn partitions(&self, gpu: GpuLimits, kv_heads: usize, row_tiles: usize, mask: AttentionMask) -> usize {
        // If there are too few row tiles to fill the GPU, partition the keys of each row tile.
        // `choose` selects 128-row tiles only if they fill the GPU, so their keys are not partitioned.
        // In a large batch, sequences can have very different numbers of keys. To balance the work, the partitions
        // create up to twice as many thread blocks as fit on the GPU at the same time.
        let blocks_per_multiprocessor = match self.queries {
            QueryKind::SmallBatch => 1,
            QueryKind::LargeBatch => 2 * self.blocks_per_multiprocessor(gpu),
            QueryKind::SmallPrefill => 2,
            QueryKind::LargePrefill => 0,
        };
        limit_partitions(mask, blocks_per_multiprocessor * gpu.multiprocessors / (kv_heads * row_tiles))
    }

    /// Returns the minimum number of key tiles per partition. The last partition of a row tile can have fewer.
    /// With fewer keys per partition, combining the results of the partitions takes longer than the partitions save.
    pub fn min_partition_tiles(&self) -> usize {
        match self.queries {
            QueryKind::SmallBatch => SMALL_BATCH_PARTITION_KEYS.div_ceil(self.keys),
            QueryKind::LargeBatch => LARGE_BATCH_PARTITION_KEYS.div_ceil(self.keys),
            QueryKind::SmallPrefill | QueryKind::LargePrefill => PREFILL_PARTITION_TILES,
        }
    }

    /// Returns the number of thread blocks whose shared memory fits on a multiprocessor.
    fn blocks_per_multiprocessor(&self, gpu: GpuLimits) -> usize {
        // CUDA reserves RESERVED bytes for each block. A multiprocessor has RESERVED bytes more than one block may use.
        // All callers pass 16-row kernels, which have at most STATIC bytes of static shared memory.
        const RESERVED: usize = 1024;
        const STATIC: usize = 128;
        (gpu.max_shared_bytes + RESERVED) / (self.shared_bytes + STATIC + RESERVED)
    }
}

/// Returns the maximum number of partitions per row tile with [`SumOrder::Fixed`](crate::kernels::SumOrder::Fixed).
pub(super) fn fixed_partitions(mask: AttentionMask) -> usize {
    limit_partitions(mask, FIXED_PARTITIONS)
}

/// Returns the maximum number of partitions per row tile: 1 if the layer has a small sliding window, otherwise
/// `wanted`, limited to the range from 1 to [`MAX_PARTITIONS`].
fn limit_partitions(mask: AttentionMask, wanted: usize) -> usize {
    if has_small_window(mask) { 1 } else { wanted.clamp(1, MAX_PARTITIONS) }
}

/// Returns whether the mask has a sliding window of at most [`MAX_UNPARTITIONED_WINDOW`] keys.
fn has_small_window(mask: AttentionMask) -> bool {
    mask.window.is_some_and(|window| window <= MAX_UNPARTITIONED_WINDOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: GpuLimits = GpuLimits { multiprocessors: 132, max_shared_bytes: 232_448 };
    const RTX_4090: GpuLimits = GpuLimits { multiprocessors: 128, max_shared_bytes: 101_376 };
    const ALL: AttentionMask = AttentionMask { window: None, scale: 1.0, softcap: None };
    const WINDOW: AttentionMask = AttentionMask { window: Some(128), ..ALL };

    #[test]
    fn the_kernel_and_its_partitions_depend_on_the_rows_the_mask_and_the_gpu() {
        // Each case: the GPU, head size, KV heads, mask, number of sequences, and rows per sequence and KV head.
        // Then the name of the kernel, the maximum number of partitions, and the minimum number of key tiles per
        // partition.
        for (gpu, head_dim, kv_heads, mask, sequences, rows, name, partitions, min_tiles) in [
            (H200, 64, 1, ALL, 1, 8, "16_rows", 64, 4),
            (H200, 64, 8, ALL, 1, 8, "16_rows", 16, 4),
            (H200, 64, 8, ALL, 16, 8, "16_rows", 1, 4),
            (H200, 64, 8, WINDOW, 16, 8, "16_rows", 1, 4),
            (H200, 64, 8, ALL, 17, 8, "16_rows_batch", 3, 32),
            (H200, 64, 8, ALL, 59, 8, "16_rows_batch", 1, 32),
            (H200, 64, 8, ALL, 60, 8, "16_rows_batch_half", 2, 64),
            (H200, 64, 8, ALL, 128, 8, "16_rows_batch_half", 1, 64),
            (H200, 64, 8, WINDOW, 33, 8, "16_rows_batch", 1, 32),
            (H200, 64, 8, WINDOW, 34, 8, "16_rows_batch_half", 1, 64),
            (H200, 64, 8, WINDOW, 66, 8, "16_rows_batch_half", 1, 64),
            (H200, 64, 8, WINDOW, 67, 8, "16_rows_batch_quarter", 1, 32),
            (H200, 64, 8, WINDOW, 256, 8, "16_rows_batch_quarter", 1, 32),
            (H200, 64, 8, ALL, 1, 32, "16_rows", 8, 4),
            (H200, 64, 8, ALL, 1, 33, "64_rows", 33, 4),
            (H200, 128, 8, ALL, 1, 2048, "64_rows", 1, 4),
            (H200, 128, 8, ALL, 1, 4096, "64_rows", 1, 4),
            (H200, 128, 8, ALL, 1, 4097, "128_rows", 1, 4),
            (H200, 128, 8, WINDOW, 1, 2048, "64_rows", 1, 4),
            (H200, 256, 4, ALL, 200, 8, "16_rows_batch", 1, 64),
            (H200, 128, 8, ALL, 64, 4, "16_rows_batch", 1, 64),
            (RTX_4090, 64, 8, ALL, 1, 8, "64_rows", 32, 4),
            (RTX_4090, 64, 8, ALL, 32, 8, "16_rows_batch_quarter", 3, 32),
            (RTX_4090, 128, 8, ALL, 17, 4, "16_rows_batch_quarter", 5, 64),
            (RTX_4090, 128, 8, ALL, 64, 4, "16_rows_batch_quarter", 1, 64),
            (RTX_4090, 128, 8, ALL, 1, 4096, "128_rows", 1, 4),
            (RTX_4090, 256, 4, ALL, 1, 4096, "64_rows", 1, 4),
            (RTX_4090, 256, 4, ALL, 1, 8, "64_rows", 64, 4),
            (RTX_4090, 256, 4, ALL, 64, 8, "16_rows_batch_quarter", 1, 64),
            (RTX_4090, 80, 8, ALL, 1, 8, "16_rows", 16, 8),
        ] {
            let counts = RowCounts::of_sequences(std::iter::repeat_n(rows, sequences));
            let case = format!("{gpu:?}, head size {head_dim}, {kv_heads} KV heads, {mask:?}, {counts:?}");
            let kernel = TileKernel::choose(gpu, head_dim, kv_heads, mask, counts).expect(&case);
            let row_tiles = sequences * rows.div_ceil(kernel.rows);
            let found = (kernel.name, kernel.partitions(gpu, kv_heads, row_tiles, mask), kernel.min_partition_tiles());
            assert_eq!(found, (name, partitions, min_tiles), "{case}");
        }
    }

    #[test]
    fn unsupported_head_sizes_and_gpus_with_too_little_shared_memory_have_no_kernel() {
        let counts = RowCounts::of_sequences([8].into_iter());
        let tiny = GpuLimits { max_shared_bytes: 49_152, ..RTX_4090 };
        for (gpu, head_dim) in [(H200, 40), (tiny, 256)] {
            assert!(TileKernel::choose(gpu, head_dim, 8, ALL, counts).is_none(), "{gpu:?}, head size {head_dim}");
            assert!(TileKernel::for_fixed_order(gpu, head_dim).is_none(), "{gpu:?}, head size {head_dim}");
        }
    }

    #[test]
    fn with_a_fixed_order_only_the_gpu_the_head_size_and_the_window_matter() {
        for (gpu, head_dim, name) in [
            (H200, 64, "16_rows"),
            (H200, 256, "16_rows"),
            (RTX_4090, 64, "16_rows_batch_half"),
            (RTX_4090, 80, "16_rows"),
        ] {
            let kernel = TileKernel::for_fixed_order(gpu, head_dim).expect(name);
            assert_eq!(
                (kernel.name, kernel.min_partition_tiles()),
                (name, 128 / kernel.keys),
                "{gpu:?}, head size {head_dim}"
            );
        }
        assert_eq!((fixed_partitions(ALL), fixed_partitions(WINDOW)), (4, 1));
    }

    #[test]
    fn row_counts_are_the_maximum_and_the_sums_over_the_sequences() {
        let counts = RowCounts::of_sequences([8, 40, 16].into_iter());
        assert_eq!(counts, RowCounts { longest: 40, decode_tiles: 1 + 3 + 1, total: 64 });
    }
}
