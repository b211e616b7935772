// The 8-bit quantization of activations, to int8 or E4M3.
#pragma once
#include <cuda_fp8.h>

#include "constants.cuh"
#include "headers/common.cuh"

// The smallest normal f32 value. quantization_scale returns at least this value, so that a vector of zeros is not
// divided by zero.
constexpr float F32_MIN_NORMAL = 1.17549435e-38f;

__device__ __forceinline__ bool quantizes_to_int8(int quantization) {
    return quantization == QUANTIZATION_INT8_PER_TOKEN || quantization == QUANTIZATION_INT8_STATIC;
}

__device__ __forceinline__ float round_to_e4m3(float v) {
    const __nv_fp8_storage_t byte = __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3)));
}
// Rounds a value to an 8-bit integer or to E4M3. The caller has divided the value by its scale.
__device__ __forceinline__ float quantize_scaled(float v, int quantization) {
    return quantizes_to_int8(quantization) ? fminf(fmaxf(rintf(v), -128.0f), 127.0f) : round_to_e4m3(v);
}
// Returns the scale for quantizing a vector to 8 bits. `largest` is the largest magnitude in the vector.
// In static modes, the scale is `static_scale`. In per-token modes, it maps `largest` to 127.5 (int8) or 448 (E4M3).
// Scales below F32_MIN_NORMAL are raised to F32_MIN_NORMAL. If `largest` is NaN or infinite, the scale is NaN.
__device__ __forceinline__ float quantization_scale(float largest, int quantization, float static_scale) {
    // Integers from -128 to 127 span 255 intervals, so an interval is 2 · largest / 255.
    const float scale = quantization == QUANTIZATION_INT8_PER_TOKEN  ? largest / 127.5f
                        : quantization == QUANTIZATION_FP8_PER_TOKEN ? largest / E4M3_MAX
                                                                     : static_scale;
    // A NaN in the vector would be lost in int8, and an infinity would be clamped to a finite value.
    // With a NaN scale, every value or dot product that is multiplied by the scale is NaN.
    return !isfinite(largest) ? __uint_as_float(F32_NAN) : scale < F32_MIN_NORMAL ? F32_MIN_NORMAL : scale;
}

// How to quantize the input vector. `mode` is a QUANTIZATION_ constant. Only the static modes use `static_scale`.
struct QuantizationArgs {
    int mode;
    float static_scale;
};

// Returns the larger magnitude. Magnitudes are compared as integers, so NaN counts as the largest magnitude.
__device__ __forceinline__ float max_magnitude(float a, float b) {
    return __uint_as_float(max(__float_as_uint(a) & F32_MAGNITUDE, __float_as_uint(b) & F32_MAGNITUDE));
}
__device__ __forceinline__ float max_magnitude(float4 v) {
    return max_magnitude(max_magnitude(v.x, v.y), max_magnitude(v.z, v.w));
}

// Returns the largest magnitude that any thread of the block passes as `value`. Every thread receives the result.
// `scratch` is shared memory with one float per warp.
__device__ __forceinline__ float block_max_magnitude(float value, float* scratch) {
    for (int offset = 16; offset > 0; offset /= 2)
        value = max_magnitude(value, __shfl_xor_sync(ALL_LANES, value, offset));
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    float largest = 0.0f;
    for (int w = 0; w < blockDim.x / 32; ++w) largest = max_magnitude(largest, scratch[w]);
    return largest;
}
