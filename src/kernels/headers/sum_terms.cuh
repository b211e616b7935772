// Adds up the terms of a matrix product (see dense_wgmma.cu).
#pragma once

#include "constants.cuh"

__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float add(float a, float b) { return a + b; }

// Returns load(0) + load(1) + ... + load(terms - 1), added from left to right.
// `terms` is at most MAX_PRODUCT_TERMS. If SEVERAL_TERMS is false, `terms` must be 1, and a thread needs fewer
// registers. All loads are in flight at the same time. A loop of `terms` iterations would wait for each load before the
// next one.
template <bool SEVERAL_TERMS, typename Load> __device__ __forceinline__ auto sum_terms(int terms, Load&& load) {
    constexpr int MAX_TERMS = SEVERAL_TERMS ? MAX_PRODUCT_TERMS : 1;
    decltype(load(0)) values[MAX_TERMS];
#pragma unroll
    for (int term = 0; term < MAX_TERMS; ++term)
        if (term == 0 || term < terms) values[term] = load(term);
    auto sum = values[0];
#pragma unroll
    for (int term = 1; term < MAX_TERMS; ++term)
        if (term < terms) sum = add(sum, values[term]);
    return sum;
}
