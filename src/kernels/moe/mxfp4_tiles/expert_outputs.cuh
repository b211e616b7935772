// The weighted sum of a token's expert outputs.
#pragma once
#include "headers/common.cuh"

// Computes sum += Σ weights[token, c] · y[token, c] over c, for the 8 columns of segment `segment`.
//   y: T [tokens, chosen, 8 · segments]
//   weights: f32 [tokens, chosen]
template <typename T>
__device__ __forceinline__ void add_outputs(float2 (&sum)[4], const T* y, const float* weights, int token, int segment,
                                            int segments, int chosen) {
#pragma unroll 4
    for (int c = 0; c < chosen; ++c) {
        const size_t pair = (size_t)token * chosen + c;
        const float weight = weights[pair];
        const uint4 packed = reinterpret_cast<const uint4*>(y)[pair * segments + segment];
        const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float2 value = unpack<T>(words[k]);
            sum[k].x += weight * value.x;
            sum[k].y += weight * value.y;
        }
    }
}
