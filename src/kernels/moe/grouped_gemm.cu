// Matrix products of routed experts with bf16 or f16 weights on tensor cores, for at least 64 (token, expert) pairs.
//   weights: T [experts, rows, columns]; columns is a multiple of 8
//   bias: T [experts, rows] or null
//   x: T [pairs / pairs_per_x, columns]; `pairs_per_x` consecutive pairs share one row of x
//   sorted, offsets: see sort_by_expert.cu
//   out: T [pairs, rows]
// A thread block computes a tile of up to BM pairs of one expert × BN weight rows, BK columns at a time.
// A segment is 16 bytes (8 columns) of a row.
// In shared memory, segment s of row r is at position s ^ (r % 8), so ldmatrix has no bank conflicts. Segments past the
// last column are zeros.
#include "constants.cuh"
#include "headers/async_copy.cuh"
#include "headers/tensor_core.cuh"
#include "moe/work_items.cuh"

constexpr int BN = GROUPED_GEMM_ROWS, BK = GROUPED_GEMM_COLUMNS, STAGES = GROUPED_GEMM_STAGES, ROW_BYTES = 2 * BK;

// Computes one tile of `out` per thread block.
//   grid: (ceil(rows / BN), ceil(pairs / BM) + experts); a block past the last tile exits immediately
//   block: GROUPED_GEMM_THREADS
//   shared memory: STAGES · (BM + BN) · ROW_BYTES
//   bytes moved: an expert's weights once per tile of pairs, mostly from L2 after the first tile
template <typename T, int BM>
__device__ void grouped_gemm(const T* weights, const T* bias, const T* x, const uint32_t* sorted,
                             const uint32_t* offsets, T* out, int rows, int columns, int pairs_per_x, int experts) {
    // A thread block has WM × WN warps. Each warp computes 32 pairs × COLUMNS weight rows.
    constexpr int WM = BM / 32, WN = 8 / WM, COLUMNS = BN / WN, TILES = COLUMNS / 8;
    constexpr int STAGE_BYTES = (BM + BN) * ROW_BYTES;
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ uint32_t pair_of[BM];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    WorkItem item;
    if (!find_work_item(offsets, experts, BM, 1, blockIdx.y, item)) return;
    const int first_pair = item.index * BM, pairs = min(BM, item.pairs - first_pair), first_row = blockIdx.x * BN;
    if (threadIdx.x < BM) pair_of[threadIdx.x] = sorted[item.first + first_pair + min((int)threadIdx.x, pairs - 1)];
    __syncthreads();

    // In each K step, this thread copies segment `segment` of the rows `row`, `row` + 32, ... of x and of the weights.
    // Rows past the last pair or the last weight row become copies of the last row.
    const int segment = threadIdx.x % 8, row = threadIdx.x / 8;
    const T *x_rows[BM / 32], *w_rows[BN / 32];
#pragma unroll
    for (int i = 0; i < BM / 32; ++i)
        x_rows[i] = x + (size_t)(pair_of[row + 32 * i] / pairs_per_x) * columns + 8 * segment;
#pragma unroll
    for (int i = 0; i < BN / 32; ++i) {
        const int expert_row = min(first_row + row + 32 * i, rows - 1);
        w_rows[i] = weights + ((size_t)item.expert * rows + expert_row) * columns + 8 * segment;
    }
    const uint32_t base = shared_address(shared), thread_offset = row * ROW_BYTES + (segment ^ (row & 7)) * 16;
    const int k_steps = (columns + BK - 1) / BK;
    const auto load = [&](int k_step) {
        if (k_step < k_steps) {
            const uint32_t to = base + k_step % STAGES * STAGE_BYTES + thread_offset;
            const bool valid = k_step * BK + 8 * segment < columns;
#pragma unroll
            for (int i = 0; i < BM / 32; ++i)
                copy_async_or_zero(to + i * 32 * ROW_BYTES, x_rows[i] + k_step * BK, valid);
#pragma unroll
            for (int i = 0; i < BN / 32; ++i)
                copy_async_or_zero(to + (BM + i * 32) * ROW_BYTES, w_rows[i] + k_step * BK, valid);
        }
        commit_copies();
    };
#pragma unroll
    for (int k_step = 0; k_step < STAGES - 1; ++k_step) load(k_step);

    float sums[2][TILES][4] = {};
    const int warp_pair = warp % WM * 32, warp_row = warp / WM * COLUMNS;
    // The rows and segments whose addresses this lane passes to ldmatrix.
    // One ldmatrix loads 16 pairs × 16 columns of x, or 16 rows × 16 columns of the weights.
    const int x_row = warp_pair + lane % 16, x_segment = lane / 16;
    const int w_row = warp_row + lane % 8 + lane / 16 * 8, w_segment = lane / 8 % 2;
    for (int k_step = 0; k_step < k_steps; ++k_step) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        load(k_step + STAGES - 1);
        const uint32_t from_x = base + k_step % STAGES * STAGE_BYTES, from_w = from_x + BM * ROW_BYTES;
#pragma unroll
        for (int k = 0; k < BK / 16; ++k) {
            uint32_t a[2][4];
#pragma unroll
            for (int m = 0; m < 2; ++m)
                load_matrices(a[m], from_x + (x_row + 16 * m) * ROW_BYTES + ((2 * k + x_segment) ^ (x_row & 7)) * 16);
#pragma unroll
            for (int n = 0; n < TILES / 2; ++n) {
                uint32_t b[4];
                load_matrices(b, from_w + (w_row + 16 * n) * ROW_BYTES + ((2 * k + w_segment) ^ (w_row & 7)) * 16);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    multiply_add<T>(sums[m][2 * n], a[m], b[0], b[1]);
                    multiply_add<T>(sums[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }
    // A lane holds results of pairs lane / 4 and lane / 4 + 8 of every 16 pairs.
    // For each of these pairs, the lane holds the results of two adjacent weight rows of every 8 weight rows.
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int pair = warp_pair + 16 * m + lane / 4 + 8 * h;
            if (pair >= pairs) continue;
            T* const to = out + (size_t)pair_of[pair] * rows;
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                const int column = first_row + warp_row + 8 * n + lane % 4 * 2;
                const auto value = [&](int i) {
                    const float b = bias ? to_float(bias[(size_t)item.expert * rows + column + i]) : 0.0f;
                    return from_float<T>(sums[m][n][2 * h + i] + b);
                };
                if (rows % 2 == 0 && column < rows) {
                    const T two[2] = {value(0), value(1)};
                    *reinterpret_cast<uint32_t*>(to + column) = *reinterpret_cast<const uint32_t*>(two);
                } else {
                    if (column < rows) to[column] = value(0);
                    if (column + 1 < rows) to[column + 1] = value(1);
                }
            }
        }
    }
}

#define DEFINE_GEMM(T, SUFFIX, BM)                                                                                     \
    extern "C" __global__ void __launch_bounds__(GROUPED_GEMM_THREADS, 2)                                              \
        grouped_gemm_##BM##_##SUFFIX(const T* weights, const T* bias, const T* x, const uint32_t* sorted,              \
                                     const uint32_t* offsets, T* out, int rows, int columns, int pairs_per_x,          \
                                     int experts) {                                                                    \
        grouped_gemm<T, BM>(weights, bias, x, sorted, offsets, out, rows, columns, pairs_per_x, experts);              \
    }
DEFINE_GEMM(__half, f16, 64)
DEFINE_GEMM(__half, f16, 128)
DEFINE_GEMM(__nv_bfloat16, bf16, 64)
DEFINE_GEMM(__nv_bfloat16, bf16, 128)
