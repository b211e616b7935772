// Products of f32 values on tensor cores.
//
// Tensor cores read TF32 values: f32 values of which only the first 11 significant bits count.
// Each f32 value is therefore split into a sum high + low. The product of two f32 values is computed as
// high · high + high · low + low · high, without low · low. The relative error is about 2^-20.
#pragma once
#include "headers/tensor_core.cuh"

struct Tf32Pair {
    uint32_t high, low;
};

// Splits a value into high + low, with at most 11 and 13 significant bits. Tensor cores read only 11 bits of `low`.
__device__ __forceinline__ Tf32Pair split_tf32(float value) {
    constexpr uint32_t TF32_BITS = 0xffffe000u;
    const uint32_t high = __float_as_uint(value) & TF32_BITS;
    return {high, __float_as_uint(value - __uint_as_float(high))};
}

__device__ __forceinline__ void split_tf32(Tf32Pair (&to)[4], const float4& from) {
    to[0] = split_tf32(from.x);
    to[1] = split_tf32(from.y);
    to[2] = split_tf32(from.z);
    to[3] = split_tf32(from.w);
}

// Computes sums[m][n] += a[m]·b[n] for all m and n, in f32. Each a[m] is a 16 x 16 matrix, and each b[n] is a 16 x 8
// matrix, both split by split_tf32. Each sums[m][n] is a 16 x 8 matrix.
// In lane 4g + t, a[m][h] has columns 4t to 4t + 3 of row 8h + g, and b[n] has rows 4t to 4t + 3 of column g.
// sums[m][n] has the layout of d in multiply_add_tf32.
template <int M, int N>
__device__ __forceinline__ void multiply_add_pairs(float (&sums)[M][N][4], const Tf32Pair (&a)[M][2][4],
                                                   const Tf32Pair (&b)[N][4]) {
    // Tensor cores round sums toward zero. To keep errors small, tensor cores add up only the products of one call.
    // Ordinary additions, which round to nearest, then add these sums to `sums`.
    float d[M][N][4] = {};
    // An MMA waits for the previous MMA that adds to the same tile of d. The loops below therefore switch to another
    // tile after each MMA, if there is one.
    const auto multiply = [&](auto a_word, auto b_word, int i) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            const Tf32Pair* upper = a[m][0] + i;  // rows g
            const Tf32Pair* lower = a[m][1] + i;  // rows 8 + g
            const uint32_t words[4] = {a_word(upper[0]), a_word(lower[0]), a_word(upper[1]), a_word(lower[1])};
#pragma unroll
            for (int n = 0; n < N; ++n) multiply_add_tf32(d[m][n], words, b_word(b[n][i]), b_word(b[n][i + 1]));
        }
    };
    const auto high = [](const Tf32Pair& pair) { return pair.high; };
    const auto low = [](const Tf32Pair& pair) { return pair.low; };
    // One MMA multiplies 8 columns of a. A lane holds two of these columns for each of its rows.
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        multiply(low, high, i);
        multiply(high, low, i);
        multiply(high, high, i);
    }
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] += d[m][n][i];
}
