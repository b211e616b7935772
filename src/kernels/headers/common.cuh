// Helpers for kernels: bit patterns of f32 values, conversions between storage types and f32, operations of a warp,
// and a macro that defines one kernel per dtype.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

// Bit masks and bit patterns of f32 values. The magnitude is every bit except the sign.
constexpr uint32_t F32_SIGN = 0x80000000u, F32_MAGNITUDE = 0x7fffffffu;
constexpr uint32_t F32_INFINITY = 0x7f800000u;  // infinity; also the mask of the exponent
constexpr uint32_t F32_NAN = 0x7fc00000u;

// The mask of a warp's lanes in shuffles, votes and reductions in which all lanes take part.
constexpr uint32_t ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

// Converts the two 16-bit values of type T in `word` to f32, the lower half first.
template <typename T> __device__ __forceinline__ float2 unpack(uint32_t word);
template <> __device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t word) {
    // The bits of a bf16 value are the high half of the bits of the equal f32 value.
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack<__half>(uint32_t word) {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

// Returns `value`, which must be the same in all lanes of the warp. The shuffle tells the compiler that all
// lanes agree, so that the compiler can use uniform registers and branches.
template <typename T> __device__ __forceinline__ T warp_uniform(T value) { return __shfl_sync(ALL_LANES, value, 0); }

// Returns the sum of `x` over the lanes of the warp. All lanes get the same sum.
template <typename T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// Returns the maximum of `x` over the lanes of the warp. All lanes get the same maximum.
template <typename T> __device__ __forceinline__ T warp_max(T x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x = max(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

// Returns the sum of `x` over this lane and all lower lanes.
template <typename T> __device__ __forceinline__ T warp_prefix_sum(T x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const T other = __shfl_up_sync(ALL_LANES, x, offset);
        if (lane >= offset) x += other;
    }
    return x;
}

// Templates cannot have extern "C" names, so .cu files use macros to define one kernel per type.
// FOR_EACH_DTYPE(DEFINE) expands DEFINE(type, suffix) for the dtypes f32, f16 and bf16.
#define FOR_EACH_DTYPE(DEFINE)                                                                                         \
    DEFINE(float, f32)                                                                                                 \
    DEFINE(__half, f16)                                                                                                \
    DEFINE(__nv_bfloat16, bf16)
