// Products of f32 matrices with few weight rows, such as routers.
#include "constants.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"
#include "headers/tf32.cuh"

// Computes y = x·wᵀ. A block computes F32_FEW_ROWS_TOKENS tokens × F32_FEW_ROWS_TILE rows.
// The warps of a block divide the columns.
//   x: f32 [tokens, columns]; w: f32 [rows, columns]; y: f32 [tokens, rows]; columns is a multiple of 16
//   grid: (ceil(tokens / F32_FEW_ROWS_TOKENS), ceil(rows / F32_FEW_ROWS_TILE)); block: 32 · F32_FEW_ROWS_WARPS
//   bytes moved: x once per F32_FEW_ROWS_TILE rows and w once per F32_FEW_ROWS_TOKENS tokens, mostly from L2; y once
extern "C" __global__ void __launch_bounds__(32 * F32_FEW_ROWS_WARPS)
    f32_few_rows(const float* x, const float* w, float* y, int tokens, int rows, int columns) {
    constexpr int COLUMNS = F32_FEW_ROWS_TILE / 8, WARPS = F32_FEW_ROWS_WARPS;
    static_assert(F32_FEW_ROWS_TOKENS == 16, "F32_FEW_ROWS_TOKENS must be 16, because an MMA multiplies 16 tokens");
    __shared__ float partial[WARPS][F32_FEW_ROWS_TOKENS][F32_FEW_ROWS_TILE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int first_token = blockIdx.x * F32_FEW_ROWS_TOKENS, first_row = blockIdx.y * F32_FEW_ROWS_TILE;
    pdl_wait();
    pdl_launch_dependents();

    // 1. Each warp multiplies every WARPS-th group of 16 columns.
    // Lane 4g + t holds columns 4t to 4t + 3 of its rows, as multiply_add_pairs expects.
    // Past the last token or weight row, a lane reads the last one again, and does not store the sums.
    // Past the last group, a lane prefetches the last group again, and does not use it.
    const int groups = columns / 16;
    const auto row_of = [&](const float* matrix, int row, int group) {
        return reinterpret_cast<const float4*>(matrix + (size_t)row * columns)[min(group, groups - 1) * 4 + t];
    };
    float4 next[2];  // the values of x for the next group, loaded early to hide the latency
    const auto load_x = [&](int group) __attribute__((always_inline)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) next[half] = row_of(x, min(first_token + half * 8 + g, tokens - 1), group);
    };
    float sums[COLUMNS][4] = {};
    load_x(warp);
    for (int group = warp; group < groups; group += WARPS) {
        float4 weights[COLUMNS];
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) weights[n] = row_of(w, min(first_row + n * 8 + g, rows - 1), group);
        Tf32Pair a[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float4 v = next[half];
            a[half][0] = split_tf32(v.x), a[half][1] = split_tf32(v.y), a[half][2] = split_tf32(v.z),
            a[half][3] = split_tf32(v.w);
        }
        load_x(group + WARPS);
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            const float4 v = weights[n];
            const Tf32Pair b[4] = {split_tf32(v.x), split_tf32(v.y), split_tf32(v.z), split_tf32(v.w)};
            multiply_add_pairs(sums[n], a, b);
        }
    }

    // 2. Add up the partial sums of all warps.
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) partial[warp][i / 2 * 8 + g][n * 8 + t * 2 + i % 2] = sums[n][i];
    __syncthreads();
    for (int i = threadIdx.x; i < F32_FEW_ROWS_TOKENS * F32_FEW_ROWS_TILE; i += blockDim.x) {
        const int token = first_token + i / F32_FEW_ROWS_TILE, row = first_row + i % F32_FEW_ROWS_TILE;
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < WARPS; ++part) sum += partial[part][i / F32_FEW_ROWS_TILE][i % F32_FEW_ROWS_TILE];
        if (token < tokens && row < rows) y[(size_t)token * rows + row] = sum;
    }
}
