// Quantized matrices in the layout of `quantized/mod.rs`: loading and dequantizing a group.
// A *group* is 32 consecutive columns of a row.
#pragma once
#include <cuda_fp8.h>

#include "constants.cuh"
#include "headers/common.cuh"
#include "headers/streaming_loads.cuh"

enum WeightFormat {
    Q4_0 = FORMAT_Q4_0,
    Q4_1 = FORMAT_Q4_1,
    Q5_0 = FORMAT_Q5_0,
    Q5_1 = FORMAT_Q5_1,
    Q8_0 = FORMAT_Q8_0,
    Q2_K = FORMAT_Q2_K,
    Q3_K = FORMAT_Q3_K,
    Q4_K = FORMAT_Q4_K,
    Q5_K = FORMAT_Q5_K,
    Q6_K = FORMAT_Q6_K,
    INT8 = FORMAT_INT8,
    FP8 = FORMAT_FP8,
};

// A quantized matrix, or a range of its rows. Planes that the format lacks are null.
struct QuantizedMatrix {
    const uint8_t *low, *high, *scales, *supers;
    int format, rows;
};

// Vertically stacked matrices with the same number of columns. In the stack, matrix m ends before row row_ends[m].
struct QuantizedStack {
    QuantizedMatrix matrices[MAX_STACKED_MATRICES];
    int row_ends[MAX_STACKED_MATRICES];
};
// The last bytes can be padding.
static_assert(sizeof(QuantizedStack) == (MAX_STACKED_MATRICES * 44 + 7) / 8 * 8, "QuantizedStack must match RawStack");

// The layout of weight format F, and how an element is computed from its quantized value q.
//   low: bytes per group for the low bits of q
//   high: bytes per group for the high bits of q, or 0 if there is no high plane
//   scales: bytes per group for scales and mins, or 0 if each row has a single f32 scale
//   zero: the zero point, which is subtracted from q
//   has_half_scales: whether each half of a group has its own scale
//   has_mins: whether a min is subtracted from the product of scale and q
//   has_supers: whether scales and mins are integers that are multiplied by the super-scales of their superblock
template <int F> struct FormatLayout {
    static constexpr bool has_row_scale = F == INT8 || F == FP8, has_supers = F >= Q2_K && F <= Q6_K;
    static constexpr int low = F == Q2_K || F == Q3_K ? 8 : F == Q8_0 || has_row_scale ? 32 : 16;
    static constexpr int high = F == Q6_K ? 8 : F == Q5_0 || F == Q5_1 || F == Q5_K || F == Q3_K ? 4 : 0;
    static constexpr int scales = has_row_scale ? 0 : F == Q4_1 || F == Q5_1 ? 4 : 2;
    static constexpr int zero = F == Q4_0 ? 8 : F == Q5_0 ? 16 : F == Q3_K ? 4 : F == Q6_K ? 32 : 0;
    static constexpr bool has_half_scales = F == Q2_K || F == Q3_K || F == Q6_K;
    static constexpr bool has_mins = F == Q4_1 || F == Q5_1 || F == Q2_K || F == Q4_K || F == Q5_K;
};

// Masks for the low 1, 2 or 4 bits of each byte.
// A shift and a mask extract the bits of one quad, four quantized values, from a word that holds several quads.
constexpr uint32_t LOW_BIT = 0x01010101u, LOW_2_BITS = 0x03030303u, LOW_4_BITS = 0x0f0f0f0fu;

// One quantized group in registers.
// `words` contains the words of the low plane, followed by the words of the high plane.
struct RawGroup {
    uint32_t words[8], scales, supers;
};

template <int F> __device__ __forceinline__ void load_scales(RawGroup& raw, const QuantizedMatrix& m, size_t group) {
    using L = FormatLayout<F>;
    if constexpr (L::scales == 4) raw.scales = __ldg(reinterpret_cast<const uint32_t*>(m.scales) + group);
    if constexpr (L::scales == 2) raw.scales = __ldg(reinterpret_cast<const unsigned short*>(m.scales) + group);
    if constexpr (L::has_supers) raw.supers = __ldg(reinterpret_cast<const uint32_t*>(m.supers) + group / 8);
}

// Loads a group of a matrix. Groups are numbered from the start of the matrix, row after row.
template <int F> __device__ __forceinline__ void load_group(RawGroup& raw, const QuantizedMatrix& m, size_t group) {
    using L = FormatLayout<F>;
    const uint8_t* low = m.low + group * L::low;
    if constexpr (L::low == 8) {
        const uint2 v = load_stream_8(low);
        raw.words[0] = v.x;
        raw.words[1] = v.y;
    } else {
        const uint4 v = load_stream_16(low);
        raw.words[0] = v.x;
        raw.words[1] = v.y;
        raw.words[2] = v.z;
        raw.words[3] = v.w;
    }
    if constexpr (L::low == 32) {
        const uint4 v = load_stream_16(low + 16);
        raw.words[4] = v.x;
        raw.words[5] = v.y;
        raw.words[6] = v.z;
        raw.words[7] = v.w;
    }
    constexpr int high_word = L::low / 4;
    if constexpr (L::high == 4) raw.words[high_word] = load_stream_4(m.high + group * 4);
    if constexpr (L::high == 8) {
        const uint2 v = load_stream_8(m.high + group * 8);
        raw.words[high_word] = v.x;
        raw.words[high_word + 1] = v.y;
    }
    load_scales<F>(raw, m, group);
}

// Returns the quantized values q of quad j (columns 4j to 4j + 3), one byte each. Byte c belongs to column 4j + c.
// A word of the low plane holds 1, 2 or 4 consecutive quads. The first quad is in the low bits of each byte.
// The high plane has the same order, in a single word (1 bit per value) or in two words (2 bits per value).
template <int F> __device__ __forceinline__ uint32_t quad(const RawGroup& raw, int j) {
    using L = FormatLayout<F>;
    if constexpr (L::low == 32) return raw.words[j];
    constexpr int bits = L::low == 8 ? 2 : 4;  // per value in the low plane
    constexpr int high_word = L::low / 4;
    uint32_t q;
    if constexpr (L::low == 16)
        q = raw.words[j / 2] >> (4 * (j % 2)) & LOW_4_BITS;
    else
        q = raw.words[j / 4] >> (2 * (j % 4)) & LOW_2_BITS;
    if constexpr (L::high == 4) q |= (raw.words[high_word] >> j & LOW_BIT) << bits;
    if constexpr (L::high == 8) q |= (raw.words[high_word + j / 4] >> (2 * (j % 4)) & LOW_2_BITS) << bits;
    return q;
}

// Returns a word with one byte for each hex digit of `selector`. The last digit chooses the lowest byte.
// Digits 0 to 3 choose the bytes of `a`, and digits 4 to 7 choose the bytes of `b`, from the lowest byte up.
__device__ __forceinline__ uint32_t select_bytes(uint32_t a, uint32_t b, int selector) {
    return __byte_perm(a, b, selector);
}

// Converts four quantized values to floats and subtracts the zero point of the format.
template <int F> __device__ __forceinline__ float4 to_floats(uint32_t q) {
    if constexpr (F == FP8) {
        const auto pair = [](uint32_t two) {
            return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3)));
        };
        const float2 a = pair(q & 0xffff), b = pair(q >> 16);
        return make_float4(a.x, a.y, b.x, b.y);
    }
    // 2^23 as a float has the bits 0x4b000000, and its last mantissa bit is worth 1.
    // Replacing the low byte of 0x4b000000 with q therefore gives the float 2^23 + q.
    // If q is signed, flipping its highest bit adds 128, so that q is not negative. `offset` includes this 128.
    constexpr bool is_signed = FormatLayout<F>::low == 32;
    constexpr uint32_t TWO_TO_23_BITS = 0x4b000000u;
    constexpr float TWO_TO_23 = 8388608.0f;
    constexpr float offset = TWO_TO_23 + (is_signed ? 128 : FormatLayout<F>::zero);
    if constexpr (is_signed) q ^= 0x80808080u;
    // In the selectors, digits 4 and 7 choose the bytes 0x00 and 0x4b of the float 2^23.
    const auto one = [=](int selector) { return __uint_as_float(select_bytes(q, TWO_TO_23_BITS, selector)) - offset; };
    return make_float4(one(0x7440), one(0x7441), one(0x7442), one(0x7443));
}

// The scale and the min of each half of a group.
// In formats with row scales, `scale` is 1, and the caller applies the row scale.
struct Scaling {
    float scale[2], min[2];
};
template <int F> __device__ __forceinline__ Scaling scaling(const RawGroup& raw) {
    const float2 super = __half22float2(*reinterpret_cast<const __half2*>(&raw.supers));
    // In K formats, `raw.scales` has two bytes per group.
    // In Q3_K and Q6_K, the two bytes are the signed scales of the two halves of the group.
    // In Q4_K and Q5_K, the two bytes are the scale and the min of the whole group.
    // In Q2_K, each half has one byte, with the scale in the low four bits and the min in the high four bits.
    const int first = raw.scales & 0xff, second = raw.scales >> 8 & 0xff;
    if constexpr (FormatLayout<F>::has_row_scale) return {{1.0f, 1.0f}, {0.0f, 0.0f}};
    if constexpr (F == Q2_K)
        return {{super.x * (first & 15), super.x * (second & 15)}, {super.y * (first >> 4), super.y * (second >> 4)}};
    if constexpr (F == Q3_K || F == Q6_K) return {{super.x * (int8_t)first, super.x * (int8_t)second}, {0.0f, 0.0f}};
    if constexpr (F == Q4_K || F == Q5_K) {
        const float s = super.x * first, m = super.y * second;
        return {{s, s}, {m, m}};
    }
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&raw.scales));
    const float m = FormatLayout<F>::has_mins ? -pair.y : 0.0f;
    return {{pair.x, pair.x}, {m, m}};
}

// The dequantized values of two consecutive quads.
struct EightValues {
    float4 first, second;
};
// Dequantizes columns 8p to 8p + 7 of a group (quads 2p and 2p + 1). `groups` is the number of groups per row.
template <int F>
__device__ __forceinline__ EightValues dequantize8(const QuantizedMatrix& m, int row, int group, int p, int groups) {
    using L = FormatLayout<F>;
    const size_t at = (size_t)row * groups + group;
    const uint8_t* low = m.low + at * L::low;
    constexpr int bits = L::low == 8 ? 2 : 4;
    uint32_t first, second;
    if constexpr (L::low == 32) {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(low) + p);
        first = two.x;
        second = two.y;
    } else if constexpr (L::low == 16) {
        const uint32_t w = __ldg(reinterpret_cast<const uint32_t*>(low) + p);
        first = w & LOW_4_BITS;
        second = w >> 4 & LOW_4_BITS;
    } else {
        const uint32_t w = __ldg(reinterpret_cast<const uint32_t*>(low) + p / 2) >> (4 * (p % 2));
        first = w & LOW_2_BITS;
        second = w >> 2 & LOW_2_BITS;
    }
    if constexpr (L::high == 4) {
        const uint32_t h = __ldg(reinterpret_cast<const uint32_t*>(m.high + at * 4)) >> (2 * p);
        first |= (h & LOW_BIT) << bits;
        second |= (h >> 1 & LOW_BIT) << bits;
    }
    if constexpr (L::high == 8) {
        const uint32_t h = __ldg(reinterpret_cast<const uint32_t*>(m.high + at * 8) + p / 2) >> (4 * (p % 2));
        first |= (h & LOW_2_BITS) << bits;
        second |= (h >> 2 & LOW_2_BITS) << bits;
    }
    RawGroup raw;
    load_scales<F>(raw, m, at);
    const Scaling s = scaling<F>(raw);
    const float scale = L::has_row_scale ? __ldg(reinterpret_cast<const float*>(m.scales) + row) : s.scale[p / 2],
                min = s.min[p / 2];
    // Do not use fma: the CPU code rounds the product before it subtracts the min, and tests require equal values.
    const auto value = [=](float q) { return __fsub_rn(__fmul_rn(scale, q), min); };
    const auto four = [=](float4 q) { return make_float4(value(q.x), value(q.y), value(q.z), value(q.w)); };
    return {four(to_floats<F>(first)), four(to_floats<F>(second))};
}

// A weight format as a compile-time constant. with_format passes the constant for `format` to `then`.
template <int F> struct FormatConstant {
    static constexpr int value = F;
};
template <class Then> __device__ __forceinline__ void with_format(int format, Then then) {
    switch (format) {
        case Q4_0: return then(FormatConstant<Q4_0>());
        case Q4_1: return then(FormatConstant<Q4_1>());
        case Q5_0: return then(FormatConstant<Q5_0>());
        case Q5_1: return then(FormatConstant<Q5_1>());
        case Q8_0: return then(FormatConstant<Q8_0>());
        case Q2_K: return then(FormatConstant<Q2_K>());
        case Q3_K: return then(FormatConstant<Q3_K>());
        case Q4_K: return then(FormatConstant<Q4_K>());
        case Q5_K: return then(FormatConstant<Q5_K>());
        case Q6_K: return then(FormatConstant<Q6_K>());
        case INT8: return then(FormatConstant<INT8>());
        case FP8: return then(FormatConstant<FP8>());
    }
}
