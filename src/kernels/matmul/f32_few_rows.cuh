// Products of f32 matrices with few weight rows, such as routers, on tensor cores.
#pragma once
#include "constants.cuh"
#include "headers/common.cuh"
#include "headers/tf32.cuh"

// The partial sums of one warp in shared memory: [tokens][weight rows and padding], for TILES tiles of tokens.
template <int TILES> using PartialSums = float[F32_FEW_ROWS_TOKENS * TILES][F32_FEW_ROWS_STRIDE];

// Computes x·wᵀ for F32_FEW_ROWS_TOKENS · TILES tokens from `first_token` on, and for F32_FEW_ROWS_TILE weight rows
// from `first_row` on. Each of the F32_FEW_ROWS_WARPS warps of the block multiplies a part of the columns, and stores
// its sums in partial[warp]. The sums of tokens and rows past the last one are undefined. After a __syncthreads(), the
// caller gets the products from `sum_of_warps`. The result for a token does not depend on TILES or on other tokens.
//   x: f32 [tokens, columns]; w: f32 [rows, columns]; columns is a multiple of 16
template <int TILES>
__device__ __forceinline__ void multiply_few_rows(const float* x, const float* w, int first_token, int tokens,
                                                  int first_row, int rows, int columns, PartialSums<TILES>* partial) {
    constexpr int COLUMNS = F32_FEW_ROWS_TILE / 8;
    static_assert(F32_FEW_ROWS_TOKENS == 16, "F32_FEW_ROWS_TOKENS must be 16, because an MMA multiplies 16 tokens");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    // Each warp multiplies every F32_FEW_ROWS_WARPS-th column tile of 16 columns.
    // Lane 4g + t holds columns 4t to 4t + 3 of the tile for each of its rows, as multiply_add_pairs expects.
    // Past the last token or weight row, a lane reads the last one again.
    // Past the last column tile, a lane prefetches the last one again, and does not use it.
    const int column_tiles = columns / 16;
    const auto row_of = [&](const float* matrix, int row, int tile) {
        return reinterpret_cast<const float4*>(matrix + (size_t)row * columns)[min(tile, column_tiles - 1) * 4 + t];
    };
    float4 next[2 * TILES];  // the values of x for the next column tile, loaded early to hide the latency
    const auto load_x = [&](int tile) __attribute__((always_inline)) {
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) next[i] = row_of(x, min(first_token + i * 8 + g, tokens - 1), tile);
    };
    float sums[TILES][1][COLUMNS][4] = {};
    load_x(warp);
    for (int tile = warp; tile < column_tiles; tile += F32_FEW_ROWS_WARPS) {
        float4 weights[COLUMNS];
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) weights[n] = row_of(w, min(first_row + n * 8 + g, rows - 1), tile);
        Tf32Pair a[TILES][1][2][4], b[COLUMNS][4];
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) split_tf32(a[i / 2][0][i % 2], next[i]);
        load_x(tile + F32_FEW_ROWS_WARPS);
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) split_tf32(b[n], weights[n]);
#pragma unroll
        for (int i = 0; i < TILES; ++i) multiply_add_pairs(sums[i], a[i], b);
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float* to = &partial[warp][16 * i + 8 * half + g][8 * n + 2 * t];
                *reinterpret_cast<float2*>(to) = make_float2(sums[i][0][n][2 * half], sums[i][0][n][2 * half + 1]);
            }
}

// Returns the product of a token and a weight row. Adds the partial sums of all warps in the order of the warps.
template <int TILES>
__device__ __forceinline__ float sum_of_warps(const PartialSums<TILES>* partial, int token, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < F32_FEW_ROWS_WARPS; ++warp) sum += partial[warp][token][row];
    return sum;
}
