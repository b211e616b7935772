// Products of f32 values on tensor cores.
//
// Tensor cores read TF32 values: f32 values of which only the first 11 significant bits count.
// Each f32 value is therefore split into a sum high + low. The product of two f32 values is computed as
// high · high + high · low + low · high, with a relative error of about 2^-20.
// The error includes the missing term low · low.
#pragma once
#include "headers/tensor_core.cuh"

struct Tf32Pair {
    uint32_t high, low;
};

// Splits a value. `high` has at most 11 significant bits. `low` has at most 13, of which tensor cores read 11.
__device__ __forceinline__ Tf32Pair split_tf32(float value) {
    constexpr uint32_t TF32_BITS = 0xffffe000u;
    const uint32_t high = __float_as_uint(value) & TF32_BITS;
    return {high, __float_as_uint(value - __uint_as_float(high))};
}

// Computes sums += a·b with a [16, 16] and b [16, 8] of f32 values, and sums [16, 8] f32.
// In lane 4g + t, a[h] has columns 4t to 4t + 3 of row 8h + g, and b has rows 4t to 4t + 3 of column g.
// `sums` has the layout of d in multiply_add_tf32.
__device__ __forceinline__ void multiply_add_pairs(float (&sums)[4], const Tf32Pair (&a)[2][4],
                                                   const Tf32Pair (&b)[4]) {
    // Tensor cores round sums toward zero. To keep errors small, tensor cores add up only the products of one call.
    // Ordinary additions, which round to nearest, then add these sums to `sums`.
    float d[4] = {};
    // One MMA multiplies 8 columns of a. A lane holds two of these columns for each of its rows.
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t high[4] = {a[0][i].high, a[1][i].high, a[0][i + 1].high, a[1][i + 1].high};
        const uint32_t low[4] = {a[0][i].low, a[1][i].low, a[0][i + 1].low, a[1][i + 1].low};
        multiply_add_tf32(d, low, b[i].high, b[i + 1].high);
        multiply_add_tf32(d, high, b[i].low, b[i + 1].low);
        multiply_add_tf32(d, high, b[i].high, b[i + 1].high);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += d[i];
}
