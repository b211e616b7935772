// Adds up the parts of a matrix product (see dense_wgmma.cu).
#pragma once

#include "constants.cuh"

__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float add(float a, float b) { return a + b; }

// Returns load(0) + load(1) + ... + load(parts - 1), added from left to right.
// `parts` is at most MAX_PRODUCT_PARTS. If SEVERAL is false, `parts` must be 1, and a thread needs fewer registers.
// All loads are in flight at the same time. A loop of `parts` iterations would wait for each load before the next one.
template <bool SEVERAL, typename Load> __device__ __forceinline__ auto sum_parts(int parts, Load&& load) {
    constexpr int MAX_PARTS = SEVERAL ? MAX_PRODUCT_PARTS : 1;
    decltype(load(0)) values[MAX_PARTS];
#pragma unroll
    for (int part = 0; part < MAX_PARTS; ++part)
        if (part == 0 || part < parts) values[part] = load(part);
    auto sum = values[0];
#pragma unroll
    for (int part = 1; part < MAX_PARTS; ++part)
        if (part < parts) sum = add(sum, values[part]);
    return sum;
}
