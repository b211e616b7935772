// The input vector of a product with a quantized matrix.
//
// With FP8 weights, the input vector is stored as floats, and the products are computed in floating point.
// With all other weights, the input vector is quantized to 16-bit integers with one scale per group.
// Input values that are already 8-bit integers are stored exactly.
// Otherwise, the largest magnitude in a group keeps 15 significant bits, compared to 8 in bf16.
// dp4a multiplies bytes, so the high and low bytes of the integers are stored separately. All dp4a results are exact.
// With integer inputs, the products use floating point only to apply scales and mins, and to add up the groups.
#pragma once
#include "quantized/format.cuh"
#include "quantized/input_quantization.cuh"

// The largest integer of a quantized input: high byte 127 (the largest signed byte), low byte 0.
constexpr float MAX_QUANTIZED_INPUT = 127 * 256;

// The input vector in shared memory. Its layout avoids bank conflicts when the lanes of a warp read consecutive groups.
// Layout of an input vector that is stored as integers:
//   pieces[0][g], pieces[1][g]: the high bytes of columns 0 to 15 and columns 16 to 31 of group g
//   pieces[2][g], pieces[3][g]: the low bytes of the same columns (integer = 256 · high + low, both signed)
//   scales[g]: the scale of group g
//   sums[g]: the sum of the integers in each half of group g
// Layout of an input vector that is stored as floats, for FP8 weights: pieces[j][g] is quad j of group g.
struct QuantizedInput {
    uint4* pieces;
    float* scales;
    int2* sums;
    int groups, stride;
    bool is_float;

    __device__ __forceinline__ QuantizedInput(void* shared, const QuantizedStack& weights, int groups)
        : pieces(reinterpret_cast<uint4*>(shared)),
          groups(groups),
          stride(groups + 1),
          is_float(weights.matrices[0].format == FP8) {
        sums = reinterpret_cast<int2*>(pieces + 4 * stride);
        scales = reinterpret_cast<float*>(sums + groups);
    }

    __device__ __forceinline__ float4 quad(int j, int group) const {
        return reinterpret_cast<const float4*>(pieces)[j * stride + group];
    }

    // Stores the input vector. quad(i) returns columns 4i to 4i + 3, with zeros past the last column.
    // If `is_float` is true, stores the values unchanged, and INTEGERS has no effect.
    // Otherwise, quantizes each group to 16-bit integers with one scale.
    // With INTEGERS, all values must already be integers of at most MAX_QUANTIZED_INPUT in magnitude.
    // The scale is then 1, and the integers are stored exactly.
    // All threads of the block must call this function and then __syncthreads().
    template <bool INTEGERS, class Quad> __device__ __forceinline__ void fill(Quad quad) const {
        // The number of quads is rounded up to whole warps, because all lanes of a warp take part in the shuffles.
        for (int i = threadIdx.x; i < (8 * groups + 31) / 32 * 32; i += blockDim.x) {
            const int group = i / 8, j = i % 8;
            const bool is_inside = group < groups;
            const float4 v = is_inside ? quad(i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (is_float) {
                if (is_inside) reinterpret_cast<float4*>(pieces)[j * stride + group] = v;
                continue;
            }
            float scale = 1.0f, inverse = 1.0f;
            if (!INTEGERS) {
                // Magnitudes are compared as integers, so NaN counts as the largest magnitude.
                const auto bits = [](float x) { return __float_as_uint(x) & F32_MAGNITUDE; };
                uint32_t largest = max(max(bits(v.x), bits(v.y)), max(bits(v.z), bits(v.w)));
#pragma unroll
                for (int offset = 1; offset < 8; offset *= 2)
                    largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, offset));
                scale =
                    largest < F32_INFINITY ? __uint_as_float(largest) / MAX_QUANTIZED_INPUT : __uint_as_float(F32_NAN);
                inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
            }
            const int q[4] = {__float2int_rn(v.x * inverse), __float2int_rn(v.y * inverse),
                              __float2int_rn(v.z * inverse), __float2int_rn(v.w * inverse)};
            int sum = q[0] + q[1] + q[2] + q[3];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            if (!is_inside) continue;
            // The low byte is signed. If it is negative, adding 128 before the shift makes the high byte one larger.
            // 256 · high + low is therefore exactly q.
            uint32_t high = 0, low = 0;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                high |= (uint32_t)(q[c] + 128 >> 8 & 0xff) << (8 * c);
                low |= (uint32_t)(q[c] & 0xff) << (8 * c);
            }
            uint32_t* words = reinterpret_cast<uint32_t*>(pieces + (j / 4) * stride + group) + j % 4;
            words[0] = high;
            words[8 * stride] = low;  // the low bytes are two pieces (8 · stride words) further
            if (j % 4 == 0) reinterpret_cast<int*>(sums + group)[j / 4] = sum;
            if (j == 0) scales[group] = scale;
        }
    }
};

// Quantizes factor · quad(i) to 8 bits for every quad i, stores the results in `input`, and returns the scale.
// The caller multiplies the dot products by the scale.
// `largest` is the largest magnitude in this thread's share of the quads, without `factor`.
// Together, the shares of the block's threads must cover all quads.
template <class Quad>
__device__ __forceinline__ float fill_quantized(const QuantizedInput& input, Quad quad, float largest, float factor,
                                                QuantizationArgs quantization, float* scratch) {
    const float scale = quantization_scale(block_max_magnitude(largest, scratch) * factor, quantization.mode,
                                           quantization.static_scale);
    const auto round = [=](float x) { return quantize_scaled(x * factor / scale, quantization.mode); };
    input.fill<true>([&](int i) {
        const float4 a = quad(i);
        return make_float4(round(a.x), round(a.y), round(a.z), round(a.w));
    });
    __syncthreads();
    return scale;
}
