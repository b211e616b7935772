// Products of f32 matrices with few weight rows, such as routers.
//
// Tensor cores read TF32 values: f32 values of which only the first 11 significant bits count.
// Each f32 value is therefore split into a sum high + low. The product of two f32 values is computed as
// high · high + high · low + low · high, with a relative error of about 2^-20.
// The error includes the missing term low · low.
#include "constants.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"
#include "headers/tensor_core.cuh"

struct Tf32Pair {
    uint32_t high, low;
};

// Splits a value. `high` has at most 11 significant bits. `low` has at most 13, of which tensor cores read 11.
__device__ __forceinline__ Tf32Pair split(float value) {
    constexpr uint32_t TF32_BITS = 0xffffe000u;
    const uint32_t high = __float_as_uint(value) & TF32_BITS;
    return {high, __float_as_uint(value - __uint_as_float(high))};
}

// Computes y = x·wᵀ. A block computes FEW_ROWS_TOKENS tokens × FEW_ROWS_TILE rows. Its warps divide the columns.
//   x: f32 [tokens, columns]; w: f32 [rows, columns]; y: f32 [tokens, rows]; columns is a multiple of 16
//   grid: (ceil(tokens / FEW_ROWS_TOKENS), ceil(rows / FEW_ROWS_TILE)); block: 32 · FEW_ROWS_WARPS
//   bytes moved: x once per FEW_ROWS_TILE rows and w once per FEW_ROWS_TOKENS tokens, mostly from L2; y once
extern "C" __global__ void __launch_bounds__(32 * FEW_ROWS_WARPS)
    few_rows(const float* x, const float* w, float* y, int tokens, int rows, int columns) {
    constexpr int COLUMNS = FEW_ROWS_TILE / 8, WARPS = FEW_ROWS_WARPS;
    static_assert(FEW_ROWS_TOKENS == 16, "an MMA multiplies 16 tokens");
    __shared__ float partial[WARPS][FEW_ROWS_TOKENS][FEW_ROWS_TILE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int first_token = blockIdx.x * FEW_ROWS_TOKENS, first_row = blockIdx.y * FEW_ROWS_TILE;
    pdl_wait();
    pdl_launch_dependents();

    // 1. Each warp multiplies every WARPS-th group of 16 columns.
    // Lane 4g + t holds columns 4t to 4t + 3 of its rows. An MMA multiplies 8 columns, of which a lane holds two.
    // The MMAs with i = 0 multiply the first two columns of each lane, and the MMAs with i = 2 the other two.
    // Past the last token or weight row, a lane reads the last one again, and does not store the sums.
    // Past the last group, a lane prefetches the last group again, and does not use it.
    const int groups = columns / 16;
    const auto row_of = [&](const float* matrix, int row, int group) {
        return reinterpret_cast<const float4*>(matrix + (size_t)row * columns)[min(group, groups - 1) * 4 + t];
    };
    float4 next[2];  // the values of x for the next group, which take long to load
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
            a[half][0] = split(v.x), a[half][1] = split(v.y), a[half][2] = split(v.z), a[half][3] = split(v.w);
        }
        load_x(group + WARPS);
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            const float4 v = weights[n];
            const Tf32Pair b[4] = {split(v.x), split(v.y), split(v.z), split(v.w)};
            // Tensor cores round sums toward zero. Adding up only the products of one group there keeps errors small.
            float d[4] = {};
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const uint32_t high[4] = {a[0][i].high, a[1][i].high, a[0][i + 1].high, a[1][i + 1].high};
                const uint32_t low[4] = {a[0][i].low, a[1][i].low, a[0][i + 1].low, a[1][i + 1].low};
                multiply_add_tf32(d, low, b[i].high, b[i + 1].high);
                multiply_add_tf32(d, high, b[i].low, b[i + 1].low);
                multiply_add_tf32(d, high, b[i].high, b[i + 1].high);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[n][i] += d[i];
        }
    }

    // 2. Add up the partial sums of all warps.
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) partial[warp][i / 2 * 8 + g][n * 8 + t * 2 + i % 2] = sums[n][i];
    __syncthreads();
    for (int i = threadIdx.x; i < FEW_ROWS_TOKENS * FEW_ROWS_TILE; i += blockDim.x) {
        const int token = first_token + i / FEW_ROWS_TILE, row = first_row + i % FEW_ROWS_TILE;
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < WARPS; ++part) sum += partial[part][i / FEW_ROWS_TILE][i % FEW_ROWS_TILE];
        if (token < tokens && row < rows) y[(size_t)token * rows + row] = sum;
    }
}
