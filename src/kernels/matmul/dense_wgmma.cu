// The matrix product x·wᵀ for up to DENSE_WGMMA_MAX_TOKENS tokens, for GPUs that run sm_90a code.
// Reading w takes most of the time. If w has few rows, several blocks divide its columns, so that more multiprocessors
// read w. The sums of these blocks are separate terms of the result. The kernel that uses the result adds them up.
//   w: T [rows, columns]; a box of the tensor map has the rows of a tile and DENSE_WGMMA_COLUMNS columns
//     In gated kernels, w consists of the gate rows and then the up rows, and `rows` is the number of gate rows.
//   x: T [tokens, columns]; a box has TOKENS rows and DENSE_WGMMA_COLUMNS columns
//   y: f32 [terms, tokens, rows]; the product is the sum over the terms
//     In gated kernels, y is T [tokens, rows], activation(gate) · up.
//     In kernels for logits, there is one term, and the kernel leaves y unchanged if *skips_logits is not 0.
//   best: Candidate [tokens, BEST_LOGITS_CANDIDATES], the largest logit of each token in each block (only in kernels
//     for logits)
//   first_id: the token id of the first row of w (only in kernels for logits)
//   columns: the number of columns; at least DENSE_WGMMA_COLUMNS · terms if there are several terms
//   tile_rows: rows per tile, or gate rows per tile in gated kernels; a multiple of 8
//   grid: (terms, blocks); block: DENSE_WGMMA_THREADS
//     `blocks` is at most the number of tiles, and at most BEST_LOGITS_CANDIDATES in kernels for logits.
//   bytes moved: the bytes of w, and of y unless y stays unchanged; most reads of x hit L2
//
// A tile is `tile_rows` rows of w. In gated kernels, a tile is `tile_rows` gate rows and the up rows that belong to
// them. If there are more tiles than blocks, a block multiplies several tiles. While it stores the sums of a tile, it
// already copies the next tile.
//
// The last warp copies w and x to a ring buffer. Each of the two warpgroups multiplies 64 rows of a tile by all tokens.
// If a tile has fewer than 128 rows, the warpgroups also compute sums for the missing rows, but do not store them.
// Elements of a box outside w or x are zero, so incomplete tiles need no special case until the sums are stored.
#include "constants.cuh"
#include "headers/activation.cuh"
#include "headers/barrier.cuh"
#include "headers/bulk_copy.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"
#include "headers/shared_memory.cuh"
#include "headers/wgmma.cuh"
#include "sampling/candidate.cuh"

constexpr int ROWS = DENSE_WGMMA_ROWS, COLUMNS = DENSE_WGMMA_COLUMNS, THREADS = DENSE_WGMMA_THREADS;
constexpr int WARPGROUP_ROWS = 64, ROW_BYTES = 128, MULTIPLYING_WARPS = ROWS / WARPGROUP_ROWS * 4;
static_assert(COLUMNS * 2 == ROW_BYTES && THREADS == 32 * (MULTIPLYING_WARPS + 1),
              "the code below assumes these sizes");

// The ring buffer for w and x. A stage holds DENSE_WGMMA_COLUMNS columns of a tile of w and of x.
template <int TOKENS> struct Ring {
    static constexpr int W_BYTES = ROWS * ROW_BYTES, STAGE_BYTES = W_BYTES + TOKENS * ROW_BYTES;
    static constexpr int STAGES = DENSE_WGMMA_RING_BYTES / STAGE_BYTES;
};

// The position of a copy in the tiles of a block: K step `k_step` of tile `tile`, where each tile has `k_steps` K
// steps.
struct Position {
    int k_steps, tile = 0, k_step = 0;
    __device__ __forceinline__ explicit Position(int k_steps) : k_steps(k_steps) {}
    __device__ __forceinline__ void next() {
        if (++k_step == k_steps) {
            k_step = 0;
            ++tile;
        }
    }
};

enum class ProductKind { Plain, Gated, Logits };

// Returns the first row of the block's tile `tile`. A block multiplies every gridDim.y-th tile of w.
__device__ __forceinline__ int first_row_of(int tile, int tile_rows) {
    return (int)(blockIdx.y + tile * gridDim.y) * tile_rows;
}

// Copies w and x to the ring buffer. Each copy fills the part of a stage for w or x, and arrives at a barrier of
// `full`. `w` and `x` are references to kernel parameters, because copy_tensor needs the address of the parameter.
template <int TOKENS, bool GATED> struct Copies {
    const TensorMap &w, &x;
    const uint32_t ring;
    uint64_t* const full;  // the barriers of the stages
    const int first_k_step, tile_rows;

    __device__ __forceinline__ void copy_w(const Position& p, int stage) const {
        const uint32_t to = ring + stage * Ring<TOKENS>::STAGE_BYTES, barrier = shared_address(&full[stage]);
        const int column = (first_k_step + p.k_step) * ROW_BYTES, row = first_row_of(p.tile, tile_rows);
        barrier_expect(barrier, ((GATED ? 2 : 1) * tile_rows + TOKENS) * ROW_BYTES);
        if constexpr (GATED)
            copy_tensor(to, w, column, 0, 0, row / 8, barrier);
        else
            copy_tensor(to, w, column, row, 0, barrier);
    }
    __device__ __forceinline__ void copy_x(const Position& p, int stage) const {
        const uint32_t to = ring + stage * Ring<TOKENS>::STAGE_BYTES + Ring<TOKENS>::W_BYTES;
        copy_tensor(to, x, (first_k_step + p.k_step) * ROW_BYTES, 0, 0, shared_address(&full[stage]));
    }
};

// The arguments that only some kinds of kernels have.
struct KindArguments {
    int activation;
    Candidate* best;
    const uint32_t* skips_logits;
    int first_id;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Computes the products of a tile with all tokens, in the layout of wgmma results.
// `stage` is the ring buffer's stage of the next K step, and `parity` is the parity of its barrier in `full`.
// While the products of one K step run, the products of the next K step are queued.
template <typename T, int TOKENS>
__device__ __forceinline__ void multiply_tile(float (&sums)[TOKENS / 2], uint32_t ring, uint64_t* full, uint64_t* empty,
                                              int k_steps, int& stage, int& parity, int warp, int lane) {
    int previous = -1;
    // If this loop were unrolled, the compiler would insert a wait after each product.
#pragma unroll 1
    for (int k_step = 0; k_step < k_steps; ++k_step) {
        barrier_wait(shared_address(&full[stage]), parity);
        const uint32_t at = ring + stage * Ring<TOKENS>::STAGE_BYTES;
        const uint64_t a = wgmma_descriptor(at + warp / 4 * WARPGROUP_ROWS * ROW_BYTES);
        const uint64_t b = wgmma_descriptor(at + Ring<TOKENS>::W_BYTES);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; ++k) wgmma<T>(sums, a + 2 * k, b + 2 * k);  // 16 columns are 2 · 16 bytes
        wgmma_commit();
        wgmma_wait<1>();
        if (previous >= 0 && lane == 0) barrier_arrive(shared_address(&empty[previous]));
        previous = stage;
        if (++stage == Ring<TOKENS>::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(shared_address(&empty[previous]));
    read_after_wgmma(sums);
}
#endif

// Stores the products of a tile. `to` is the element of y for this lane's first row and first token.
template <ProductKind KIND, int TOKENS, typename Y>
__device__ __forceinline__ void store_tile(const float (&sums)[TOKENS / 2], Y* to, int rows, int first_token,
                                           int tokens, bool stores_row, bool stores_below, int activation) {
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (first_token + 2 * i + j >= tokens) continue;
            Y* const of_token = to + (size_t)j * rows;
            if constexpr (KIND == ProductKind::Gated) {
                if (stores_row) *of_token = from_float<Y>(activate(sums[i + j], activation) * sums[i + j + 2]);
            } else {
                if (stores_row) of_token[0] = sums[i + j];
                if (stores_below) of_token[8] = sums[i + j + 2];
            }
        }
        to += (size_t)8 * rows;
    }
}

// In kernels for logits: compares the logits of this lane in a tile with the largest logits so far.
// The lane has logits of row `row` if `has_row` is true, and of the row 8 rows below if `has_below` is true.
template <int TOKENS>
__device__ __forceinline__ void update_largest(float (&largest)[TOKENS / 4], int (&largest_row)[TOKENS / 4],
                                               const float (&sums)[TOKENS / 2], int row, bool has_row, bool has_below) {
    const auto compare = [&](int t, float logit, int row) {
        if (logit > largest[t]) {
            largest[t] = logit;
            largest_row[t] = row;
        }
    };
#pragma unroll
    for (int t = 0; t < TOKENS / 4; ++t) {
        const int i = t / 2 * 4 + t % 2;
        if (has_row) compare(t, sums[i], row);
        if (has_below) compare(t, sums[i + 2], row + 8);
    }
}

// Waits until all threads of the multiplying warps have arrived. __syncthreads() would wait for the copying warp too.
__device__ __forceinline__ void multiplying_warps_sync() {
    // __syncthreads() uses hardware barrier 0.
    asm volatile("bar.sync 1, %0;" ::"n"(32 * MULTIPLYING_WARPS) : "memory");
}

// Stores the largest logit of each token in all rows of this block.
template <int TOKENS>
__device__ __forceinline__ void store_largest(const float (&largest)[TOKENS / 4], const int (&largest_row)[TOKENS / 4],
                                              int tokens, int warp, int lane, const KindArguments& arguments) {
    __shared__ unsigned long long of_warps[MULTIPLYING_WARPS][TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS / 4; ++t) {
        // The eight lanes with equal lane % 4 have logits of the same tokens.
        unsigned long long key = candidate_key(largest[t], arguments.first_id + largest_row[t]);
        for (int offset = 16; offset >= 4; offset /= 2) key = max(key, __shfl_xor_sync(ALL_LANES, key, offset));
        if (lane < 4) of_warps[warp][t / 2 * 8 + lane * 2 + t % 2] = key;
    }
    multiplying_warps_sync();
    for (int token = threadIdx.x; token < tokens; token += 32 * MULTIPLYING_WARPS) {
        unsigned long long key = 0;
        for (int other = 0; other < MULTIPLYING_WARPS; ++other) key = max(key, of_warps[other][token]);
        store_candidate(arguments.best + (size_t)token * BEST_LOGITS_CANDIDATES, key, blockIdx.y, gridDim.y);
    }
}

// TOKENS is the N of the wgmma instructions (see wgmma.cuh), at least the number of tokens.
template <typename T, int TOKENS, ProductKind KIND, typename Y>
__device__ void dense_wgmma(const TensorMap& w, const TensorMap& x, Y* y, int rows, int columns, int tokens,
                            int tile_rows, const KindArguments& arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr bool GATED = KIND == ProductKind::Gated;
    constexpr int STAGES = Ring<TOKENS>::STAGES;
    extern __shared__ uint8_t shared[];
    __shared__ uint64_t full[STAGES], empty[STAGES];                      // the barriers of each stage
    const uint32_t ring = (shared_address(shared) + 1023) / 1024 * 1024;  // swizzled boxes need this alignment
    const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const int term = blockIdx.x, terms = gridDim.x;
    const int all_k_steps = (columns + COLUMNS - 1) / COLUMNS, first_k_step = all_k_steps * term / terms;
    const int k_steps = all_k_steps * (term + 1) / terms - first_k_step;  // of each tile
    // The number of tiles of this block.
    const int tiles = ((rows + tile_rows - 1) / tile_rows - 1 - blockIdx.y) / gridDim.y + 1;

    // 1. Copy. No running kernel writes w, so the first copies of w start before pdl_wait().
    const Copies<TOKENS, GATED> copies = {w, x, ring, full, first_k_step, tile_rows};
    const int all_copies = tiles * k_steps, early_copies = min(all_copies, STAGES);
    Position next_early_w(k_steps), next(k_steps);
    if (warp == MULTIPLYING_WARPS && elect_lane()) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(shared_address(&full[stage]), 1);
            barrier_init(shared_address(&empty[stage]), MULTIPLYING_WARPS);
        }
        // The fence makes the initialized barriers visible to the bulk copies.
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int i = 0; i < early_copies; ++i, next_early_w.next()) copies.copy_w(next_early_w, i);
    }
    __syncthreads();
    if (warp == MULTIPLYING_WARPS) {
        if (elect_lane()) {
            pdl_wait();
            pdl_launch_dependents();
            for (int i = 0; i < early_copies; ++i, next.next()) copies.copy_x(next, i);
            for (int i = STAGES, stage = 0, parity = 0; i < all_copies; ++i, next.next()) {
                barrier_wait(shared_address(&empty[stage]), parity);
                copies.copy_w(next, stage);
                copies.copy_x(next, stage);
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
        }
        return;
    }

    if constexpr (KIND == ProductKind::Plain) y += (size_t)term * tokens * rows;
    // Only in kernels for logits: for each of this lane's tokens, the largest logit so far in this lane's rows, and the
    // row of that logit.
    float largest[TOKENS / 4];
    int largest_row[TOKENS / 4];
#pragma unroll
    for (int t = 0; t < TOKENS / 4; ++t) {
        largest[t] = -INFINITY;
        largest_row[t] = 0;
    }
    for (int tile = 0, stage = 0, parity = 0; tile < tiles; ++tile) {
        // 2. Multiply.
        float sums[TOKENS / 2] = {};
        multiply_tile<T, TOKENS>(sums, ring, full, empty, k_steps, stage, parity, warp, lane);

        // 3. Store. A store instruction of a warp writes 8 adjacent rows of each of four tokens.
        // Of the 16 rows that a warp multiplies, a lane has row lane / 4 and the row 8 rows below.
        // In gated kernels, these are a gate row and its up row.
        pdl_wait();
        const int first_row = first_row_of(tile, tile_rows), row = warp * (GATED ? 8 : 16) + lane / 4,
                  first_token = lane % 4 * 2;
        const auto is_stored = [&](int row) { return row < tile_rows && first_row + row < rows; };
        const bool stores_row = is_stored(row), stores_below = !GATED && is_stored(row + 8);
        if constexpr (KIND == ProductKind::Logits) {
            update_largest<TOKENS>(largest, largest_row, sums, first_row + row, stores_row, stores_below);
            if (*arguments.skips_logits != 0) continue;
        }
        store_tile<KIND, TOKENS>(sums, y + (size_t)first_token * rows + first_row + row, rows, first_token, tokens,
                                 stores_row, stores_below, arguments.activation);
    }

    // 4. Find the largest logit of each token in all rows of this block.
    if constexpr (KIND == ProductKind::Logits) {
        store_largest<TOKENS>(largest, largest_row, tokens, warp, lane, arguments);
    }
#endif
}

#define DEFINE_PLAIN(T, SUFFIX, TOKENS)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        dense_wgmma_##SUFFIX##_##TOKENS(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,      \
                                        float* y, int rows, int columns, int tokens, int tile_rows) {                  \
        dense_wgmma<T, TOKENS, ProductKind::Plain>(w, x, y, rows, columns, tokens, tile_rows, {});                     \
    }
#define DEFINE_GATED(T, SUFFIX, TOKENS)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        dense_wgmma_gated_##SUFFIX##_##TOKENS(const __grid_constant__ TensorMap w,                                     \
                                              const __grid_constant__ TensorMap x, T* y, int rows, int columns,        \
                                              int tokens, int tile_rows, int activation) {                             \
        dense_wgmma<T, TOKENS, ProductKind::Gated>(w, x, y, rows, columns, tokens, tile_rows, {activation});           \
    }
#define DEFINE_LOGITS(T, SUFFIX, TOKENS)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        dense_wgmma_logits_##SUFFIX##_##TOKENS(const __grid_constant__ TensorMap w,                                    \
                                               const __grid_constant__ TensorMap x, float* y, int rows, int columns,   \
                                               int tokens, int tile_rows, Candidate* best,                             \
                                               const uint32_t* skips_logits, int first_id) {                           \
        dense_wgmma<T, TOKENS, ProductKind::Logits>(w, x, y, rows, columns, tokens, tile_rows,                         \
                                                    {0, best, skips_logits, first_id});                                \
    }
#define DEFINE_KINDS(T, SUFFIX, TOKENS)                                                                                \
    DEFINE_PLAIN(T, SUFFIX, TOKENS)                                                                                    \
    DEFINE_GATED(T, SUFFIX, TOKENS)                                                                                    \
    DEFINE_LOGITS(T, SUFFIX, TOKENS)
#define DEFINE_SIZES(T, SUFFIX)                                                                                        \
    DEFINE_KINDS(T, SUFFIX, 16)                                                                                        \
    DEFINE_KINDS(T, SUFFIX, 32)                                                                                        \
    DEFINE_KINDS(T, SUFFIX, 64)                                                                                        \
    DEFINE_KINDS(T, SUFFIX, 96)                                                                                        \
    DEFINE_KINDS(T, SUFFIX, 128)
static_assert(DENSE_WGMMA_TOKENS[0] == 16 && DENSE_WGMMA_TOKENS[1] == 32 && DENSE_WGMMA_TOKENS[2] == 64 &&
                  DENSE_WGMMA_TOKENS[3] == 96 && DENSE_WGMMA_TOKENS[4] == 128 &&
                  sizeof(DENSE_WGMMA_TOKENS) == 5 * sizeof(int),
              "DEFINE_SIZES must define kernels for DENSE_WGMMA_TOKENS tokens");
DEFINE_SIZES(__half, f16)
DEFINE_SIZES(__nv_bfloat16, bf16)
