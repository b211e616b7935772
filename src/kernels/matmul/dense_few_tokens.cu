// The matrix product y = x·Wᵀ for up to DENSE_FEW_TOKENS_MAX tokens.
// Reading W takes most of the time, so the kernel keeps many reads in flight.
//   w: T [rows, columns]; multiples of DENSE_FEW_TOKENS_ROWS and of DENSE_FEW_TOKENS_COLUMNS, respectively
//   x: T [tokens, columns]
//   y: f32 [tokens, rows]
//   block_tiles: the number of row tiles per thread block; a row tile is DENSE_FEW_TOKENS_ROWS rows of W
//   tile_warps: the number of warps that share the columns of a row tile
//   grid: ceil(rows / DENSE_FEW_TOKENS_ROWS / block_tiles); block: 32 · tile_warps · block_tiles
//   bytes moved: W and y once; every block also reads all of x, mostly from L2
//
// Each warp multiplies every `tile_warps`-th column tile of one row tile by x.
// A column tile has DENSE_FEW_TOKENS_COLUMNS columns. A piece is 16 bytes of a row: eight adjacent columns.
// A lane passes to mma.sync only pieces of W that it has copied itself, so the copies of W need no barrier.
// Of its 16 columns, mma.sync expects columns 2i, 2i + 1, 2i + 8 and 2i + 9 in the lanes with lane % 4 = i.
// A lane passes four adjacent columns instead. This is correct because mma.sync adds the products of all columns, and
// the columns of W and x have the same order.
#include "constants.cuh"
#include "headers/async_copy.cuh"
#include "headers/barrier.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"
#include "headers/tensor_core.cuh"

constexpr int TOKENS = DENSE_FEW_TOKENS_MAX, ROWS = DENSE_FEW_TOKENS_ROWS, COLUMNS = DENSE_FEW_TOKENS_COLUMNS;
constexpr int PIECE_COLUMNS = 8, TILE_PIECES = COLUMNS / PIECE_COLUMNS, STAGES = DENSE_FEW_TOKENS_STAGES;
// The number of 16-byte pieces of W that a lane copies per tile.
constexpr int LANE_PIECES = ROWS * TILE_PIECES / 32, STAGE_PIECES = LANE_PIECES * 32;
// The inputs of INPUT_TILES column tiles fill one of two buffers: [tile][half of the tile][token][piece of the half].
constexpr int INPUT_TILES = DENSE_FEW_TOKENS_INPUT_TILES, INPUT_PIECES = INPUT_TILES * TILE_PIECES * TOKENS;
static_assert(TOKENS == 8 && ROWS == 16 && TILE_PIECES == 8, "the code below assumes these sizes");

template <typename T>
__device__ void dense_few_tokens(const T* w, const T* x, float* y, int rows, int columns, int tokens, int block_tiles,
                                 int tile_warps) {
    // Eight consecutive lanes access the 16-byte pieces of one aligned 128-byte line, which avoids bank conflicts.
    extern __shared__ __align__(128) uint4 shared[];
    __shared__ uint64_t barriers[2];  // each counts the threads whose copies to one input buffer have completed

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4;
    uint4* const inputs = shared;
    uint4* const weights = shared + 2 * INPUT_PIECES + warp * STAGES * STAGE_PIECES + lane;
    const int first_tile = blockIdx.x * block_tiles, first_column_tile = warp % tile_warps;
    const int warp_row = (first_tile + warp / tile_warps) * ROWS;
    const bool has_rows = warp_row < rows;
    const T* const lane_row = w + (size_t)(warp_row + quad) * columns + lane % 4 * PIECE_COLUMNS;
    const int column_tiles = columns / COLUMNS;
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&barriers[0]), blockDim.x);
        barrier_init(shared_address(&barriers[1]), blockDim.x);
    }

    // 1. Start copying the first weights before pdl_wait(), because no running kernel writes weights.
    int next_column_tile = first_column_tile;
    const auto copy_weights = [&](int stage) {
        if (has_rows && next_column_tile < column_tiles) {
#pragma unroll
            for (int i = 0; i < LANE_PIECES; ++i) {
                // Pieces 0 and 1 of a lane are in row `quad`, one in each half of the tile.
                // Pieces 2 and 3 of a lane are in the same columns of row `quad` + 8.
                const T* from =
                    lane_row + (size_t)(i / 2 * 8) * columns + next_column_tile * COLUMNS + i % 2 * (COLUMNS / 2);
                copy_async_or_zero(shared_address(weights + stage * STAGE_PIECES + i * 32), from, true);
            }
        }
        next_column_tile += tile_warps;
        commit_copies();
    };
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) copy_weights(stage);
    __syncthreads();  // wait until the barriers are initialized
    pdl_wait();
    pdl_launch_dependents();

    // 2. Multiply W by the input tiles in one buffer while the next input tiles are copied to the other buffer.
    const auto copy_inputs = [&](int first, int buffer) {
        for (int i = threadIdx.x; i < INPUT_PIECES; i += blockDim.x) {
            const int token = i % 32 / 4, column = first * COLUMNS + (i / 32 * 4 + i % 4) * PIECE_COLUMNS;
            if (column >= columns) break;
            const bool is_token = token < tokens;
            copy_async_or_zero(shared_address(inputs + buffer * INPUT_PIECES + i),
                               is_token ? x + (size_t)token * columns + column : x, is_token);
        }
        barrier_arrive_after_copies(shared_address(&barriers[buffer]));
    };
    copy_inputs(0, 0);
    float sums[4] = {};
    int column_tile = first_column_tile, stage = 0;
    for (int first = 0, index = 0; first < column_tiles; first += INPUT_TILES, ++index) {
        const int buffer = index % 2, end = min(first + INPUT_TILES, column_tiles);
        if (end < column_tiles) {
            __syncthreads();  // wait until all warps have finished reading the other buffer
            copy_inputs(end, 1 - buffer);
        }
        barrier_wait(shared_address(&barriers[buffer]), index / 2 % 2);
        const uint4* const x_pieces = inputs + buffer * INPUT_PIECES + lane;
        for (; column_tile < end; column_tile += tile_warps) {
            wait_for_copies<STAGES - 1>();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4* const pieces = weights + stage * STAGE_PIECES + half * 32;
                const uint4 top = pieces[0], bottom = pieces[2 * 32],
                            b = x_pieces[((column_tile - first) * 2 + half) * 32];
                const uint32_t left[4] = {top.x, bottom.x, top.y, bottom.y};
                const uint32_t right[4] = {top.z, bottom.z, top.w, bottom.w};
                multiply_add<T>(sums, left, b.x, b.y);
                multiply_add<T>(sums, right, b.z, b.w);
            }
            copy_weights(stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
    }
    wait_for_copies<0>();
    __syncthreads();

    // 3. Add up the partial sums of the warps that share a row tile.
    float* const partial = reinterpret_cast<float*>(shared);  // [warp][token][row]
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int token = lane % 4 * 2 + i % 2, row = quad + i / 2 * 8;
        partial[(warp * TOKENS + token) * ROWS + row] = sums[i];
    }
    __syncthreads();
    // The 16 lanes of half a warp add up the partial sums of one token, each for one row of the row tile.
    const int row = lane % ROWS;
    for (int tile = warp; tile < block_tiles; tile += blockDim.x / 32) {
        const int y_row = (first_tile + tile) * ROWS + row;
        if (y_row >= rows) break;
        for (int token = lane / ROWS; token < tokens; token += 2) {
            float sum = 0.0f;
            for (int w = 0; w < tile_warps; ++w)
                sum += partial[((tile * tile_warps + w) * TOKENS + token) * ROWS + row];
            y[(size_t)token * rows + y_row] = sum;
        }
    }
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * DENSE_FEW_TOKENS_WARPS)                                          \
        dense_few_tokens_##SUFFIX(const T* w, const T* x, float* y, int rows, int columns, int tokens,                 \
                                  int block_tiles, int tile_warps) {                                                   \
        dense_few_tokens<T>(w, x, y, rows, columns, tokens, block_tiles, tile_warps);                                  \
    }
DEFINE(__half, f16)
DEFINE(__nv_bfloat16, bf16)
