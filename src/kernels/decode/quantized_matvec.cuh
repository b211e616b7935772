// Loads the input vector of decode kernels with quantized weights into a QuantizedInput in shared memory.
// If the checkpoint requires quantized activations, first quantizes the vector to 8 bits.
#pragma once
#include "decode/normed_vector.cuh"
#include "headers/block_sum.cuh"
#include "quantized/input.cuh"
#include "quantized/stream.cuh"

// The number of groups (32 columns each) that a lane has in flight per row.
// QUANTIZED_DEPTH_2 is for strips of two rows, and QUANTIZED_DEPTH_1 is for strips of one row.
// In both cases, a lane has four groups in flight.
constexpr int QUANTIZED_DEPTH_2 = 2, QUANTIZED_DEPTH_1 = 4;

// Stores norm(x) / scale in `input` and returns the scale.
// Quantizes norm(x) / scale to 8 bits unless `quantization.mode` is QUANTIZATION_NONE.
// The caller multiplies the dot products by the scale.
__device__ __forceinline__ float load_normed(const QuantizedInput& input, const NormedVector& vector,
                                             QuantizationArgs quantization, float* scratch) {
    const int columns = vector.columns;
    const auto quad = [=](int i) {
        if (4 * i >= columns) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        return __ldcg(reinterpret_cast<const float4*>(vector.x) + i);
    };
    const auto weighted = [=](int i, float4 a) {
        if (4 * i >= columns) return a;
        const float4 w = __ldg(reinterpret_cast<const float4*>(vector.norm) + i);
        return make_float4(a.x * w.x, a.y * w.y, a.z * w.z, a.w * w.w);
    };
    float squares = 0.0f, largest = 0.0f;
    const auto add_squares = [&](float4 a) { squares += a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w; };
    if (quantization.mode == QUANTIZATION_NONE) {
        input.fill<false>([&](int i) {
            const float4 a = quad(i);
            add_squares(a);
            return weighted(i, a);
        });
        return rsqrtf(block_sum(squares, scratch) / columns + vector.eps);
    }
    for (int i = threadIdx.x; i < columns / 4; i += blockDim.x) {
        const float4 a = quad(i);
        add_squares(a);
        largest = max_magnitude(largest, max_magnitude(weighted(i, a)));
    }
    const float rms = rsqrtf(block_sum(squares, scratch) / columns + vector.eps);
    return fill_quantized(input, [&](int i) { return weighted(i, quad(i)); }, largest, rms, quantization, scratch);
}

// Stores y / scale in `input` and returns the scale.
// Quantizes y / scale to 8 bits unless `quantization.mode` is QUANTIZATION_NONE, for which the scale is 1.
// The caller multiplies the dot products by the scale.
template <typename T>
__device__ __forceinline__ float load_vector(const QuantizedInput& input, const T* y, int columns,
                                             QuantizationArgs quantization, float* scratch) {
    const auto quad = [=](int i) {
        if (4 * i >= columns) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const uint2 two = __ldcg(reinterpret_cast<const uint2*>(y) + i);
        const T* four = reinterpret_cast<const T*>(&two);
        return make_float4(to_float(four[0]), to_float(four[1]), to_float(four[2]), to_float(four[3]));
    };
    if (quantization.mode == QUANTIZATION_NONE) {
        input.fill<false>(quad);
        __syncthreads();
        return 1.0f;
    }
    float largest = 0.0f;
    for (int i = threadIdx.x; i < columns / 4; i += blockDim.x)
        largest = max_magnitude(largest, max_magnitude(quad(i)));
    return fill_quantized(input, quad, largest, 1.0f, quantization, scratch);
}
