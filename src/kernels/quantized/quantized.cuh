// Quantized matrices in the layout of `quantized/mod.rs`, and products of their rows with one input vector.
//
// A *group* is 32 consecutive columns of a row. In these products, a lane reads one group at a time.
// With FP8 weights, the input vector is stored as floats, and the products are computed in floating point.
// With all other weights, the input vector is quantized to 16-bit integers with one scale per group.
// Input values that are already 8-bit integers are stored exactly.
// Otherwise, the largest magnitude in a group keeps 15 significant bits, compared to 8 in bf16.
// dp4a multiplies bytes, so the high and low bytes of the integers are stored separately. All dp4a results are exact.
// With integer inputs, the products use floating point only to apply scales and mins, and to add up the groups.
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

// The layout of weight format F, and how an element is computed from its quantized value q.
//   low: bytes per group for the low bits of q
//   high: bytes per group for the high bits of q, or 0 if there is no high plane
//   scales: bytes per group for scales and mins, or 0 if each row has a single f32 scale
//   zero: the zero point, which is subtracted from q
//   has_half_scales: whether each half of a group has its own scale
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

// The largest integer of a quantized input: high byte 127 (the largest signed byte), low byte 0.
constexpr float MAX_QUANTIZED_INPUT = 127 * 256;

// The smallest normal f32 value. quantization_scale returns at least this value, so that a vector of zeros is not
// divided by zero.
constexpr float F32_MIN_NORMAL = 1.17549435e-38f;

// One quantized group in registers.
// `words` contains the words of the low plane, followed by the words of the high plane.
struct RawGroup {
    uint32_t words[8], scales, supers;
};

template <int F> __device__ __forceinline__ void load_scales(RawGroup& raw, const QuantizedMatrix& m, size_t group) {
    using L = FormatLayout<F>;
    if (L::scales == 4) raw.scales = __ldg(reinterpret_cast<const uint32_t*>(m.scales) + group);
    if (L::scales == 2) raw.scales = __ldg(reinterpret_cast<const unsigned short*>(m.scales) + group);
    if (L::has_supers) raw.supers = __ldg(reinterpret_cast<const uint32_t*>(m.supers) + group / 8);
}

// Loads a group of a matrix. Groups are numbered from the start of the matrix, row after row.
template <int F> __device__ __forceinline__ void load_group(RawGroup& raw, const QuantizedMatrix& m, size_t group) {
    using L = FormatLayout<F>;
    const uint8_t* low = m.low + group * L::low;
    if (L::low == 8) {
        const uint2 v = load_stream_8(low);
        raw.words[0] = v.x, raw.words[1] = v.y;
    } else {
        const uint4 v = load_stream_16(low);
        raw.words[0] = v.x, raw.words[1] = v.y, raw.words[2] = v.z, raw.words[3] = v.w;
    }
    if (L::low == 32) {
        const uint4 v = load_stream_16(low + 16);
        raw.words[4] = v.x, raw.words[5] = v.y, raw.words[6] = v.z, raw.words[7] = v.w;
    }
    // Formats with 8 low words have no high plane, so the branches below never run for these formats.
    // The branches are still compiled, and `& 7` keeps their indices inside the array.
    constexpr int high_word = L::low / 4;
    if (L::high == 4) raw.words[high_word & 7] = load_stream_4(m.high + group * 4);
    if (L::high == 8) {
        const uint2 v = load_stream_8(m.high + group * 8);
        raw.words[high_word & 7] = v.x, raw.words[(high_word + 1) & 7] = v.y;
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
    constexpr int high_word = L::low / 4;      // `& 7` below: see load_group
    uint32_t q;
    if (L::low == 16)
        q = raw.words[j / 2] >> (4 * (j % 2)) & LOW_4_BITS;
    else
        q = raw.words[j / 4] >> (2 * (j % 4)) & LOW_2_BITS;
    if (L::high == 4) q |= (raw.words[high_word & 7] >> j & LOW_BIT) << bits;
    if (L::high == 8) q |= (raw.words[(high_word + j / 4) & 7] >> (2 * (j % 4)) & LOW_2_BITS) << bits;
    return q;
}

// Converts four quantized values to floats and subtracts the zero point of the format.
template <int F> __device__ __forceinline__ float4 to_floats(uint32_t q) {
    if (F == FP8) {
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
    if (is_signed) q ^= 0x80808080u;
    // Each hex digit of a __byte_perm selector chooses one result byte. The last digit chooses the lowest byte.
    // Digits 0 to 3 select bytes of q. Digits 4 and 7 select bytes 0x00 and 0x4b of the float 2^23.
    const auto one = [=](int selector) { return __uint_as_float(__byte_perm(q, TWO_TO_23_BITS, selector)) - offset; };
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
    if (FormatLayout<F>::has_row_scale) return {{1.0f, 1.0f}, {0.0f, 0.0f}};
    if (F == Q2_K)
        return {{super.x * (first & 15), super.x * (second & 15)}, {super.y * (first >> 4), super.y * (second >> 4)}};
    if (F == Q3_K || F == Q6_K) return {{super.x * (int8_t)first, super.x * (int8_t)second}, {0.0f, 0.0f}};
    if (F == Q4_K || F == Q5_K) {
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
    if (L::low == 32) {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(low) + p);
        first = two.x, second = two.y;
    } else if (L::low == 16) {
        const uint32_t w = __ldg(reinterpret_cast<const uint32_t*>(low) + p);
        first = w & LOW_4_BITS, second = w >> 4 & LOW_4_BITS;
    } else {
        const uint32_t w = __ldg(reinterpret_cast<const uint32_t*>(low) + p / 2) >> (4 * (p % 2));
        first = w & LOW_2_BITS, second = w >> 2 & LOW_2_BITS;
    }
    if (L::high == 4) {
        const uint32_t h = __ldg(reinterpret_cast<const uint32_t*>(m.high + at * 4)) >> (2 * p);
        first |= (h & LOW_BIT) << bits, second |= (h >> 1 & LOW_BIT) << bits;
    }
    if (L::high == 8) {
        const uint32_t h = __ldg(reinterpret_cast<const uint32_t*>(m.high + at * 8) + p / 2) >> (4 * (p % 2));
        first |= (h & LOW_2_BITS) << bits, second |= (h >> 2 & LOW_2_BITS) << bits;
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
                    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
                scale =
                    largest < F32_INFINITY ? __uint_as_float(largest) / MAX_QUANTIZED_INPUT : __uint_as_float(F32_NAN);
                inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
            }
            const int q[4] = {__float2int_rn(v.x * inverse), __float2int_rn(v.y * inverse),
                              __float2int_rn(v.z * inverse), __float2int_rn(v.w * inverse)};
            int sum = q[0] + q[1] + q[2] + q[3];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1), sum += __shfl_xor_sync(0xffffffffu, sum, 2);
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
            words[0] = high, words[8 * stride] = low;  // the low bytes are two pieces (8 · stride words) further
            if (j % 4 == 0) reinterpret_cast<int*>(sums + group)[j / 4] = sum;
            if (j == 0) scales[group] = scale;
        }
    }
};

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}
__device__ __forceinline__ int word(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Multiplies one group of each of ROWS rows by the same group of an integer input, and adds the products to `sum`.
// Applies all scales except row scales.
template <int F, int ROWS>
__device__ __forceinline__ void multiply_integers(const RawGroup (&raw)[ROWS], const QuantizedInput& x, int group,
                                                  float (&sum)[ROWS]) {
    using L = FormatLayout<F>;
    int half_sums[2][ROWS];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint4 high = x.pieces[h * x.stride + group], low = x.pieces[(2 + h) * x.stride + group];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            int high_sum = 0, low_sum = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int q = quad<F>(raw[r], 4 * h + j);
                high_sum = __dp4a(q, word(high, j), high_sum), low_sum = __dp4a(q, word(low, j), low_sum);
            }
            half_sums[h][r] = high_sum * 256 + low_sum;
        }
    }
    const float scale = x.scales[group];
    const int2 sums = L::has_mins || L::zero ? x.sums[group] : make_int2(0, 0);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const Scaling s = scaling<F>(raw[r]);
        const int first = half_sums[0][r] - L::zero * sums.x, second = half_sums[1][r] - L::zero * sums.y;
        float product = L::has_half_scales ? s.scale[0] * (float)first + s.scale[1] * (float)second
                                           : s.scale[0] * (float)(first + second);
        if (L::has_mins)
            product -= L::has_half_scales ? s.min[0] * (float)sums.x + s.min[1] * (float)sums.y
                                          : s.min[0] * (float)(sums.x + sums.y);
        sum[r] = fmaf(scale, product, sum[r]);
    }
}

template <int F, int ROWS>
__device__ __forceinline__ void multiply_group(const RawGroup (&raw)[ROWS], const QuantizedInput& x, int group,
                                               float (&sum)[ROWS]) {
    if constexpr (F == FP8) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float4 v = x.quad(j, group);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sum[r] = dot4(to_floats<F>(quad<F>(raw[r], j)), v, sum[r]);
        }
    } else {
        multiply_integers<F>(raw, x, group, sum);
    }
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

// The layout of rows whose groups are contiguous in memory.
struct ContiguousRows {
    static constexpr bool is_gathered = false;
    int groups;
    __device__ __forceinline__ size_t group_index(int row, int group) const { return (size_t)row * groups + group; }
    __device__ __forceinline__ int scale_row(int row, int) const { return row; }
};

// Multiplies the rows of a stack by an input vector. A *unit* is ROWS rows, which must have the same format.
// Each warp processes one unit at a time. The warps of the grid take units in round-robin order.
// Each lane has up to DEPTH groups of each row in flight.
// Near the end of a unit, a lane already loads the first groups of the next unit, if both units have the same format.
// `locate(u, r, matrix)` finds row r of unit u: it sets `matrix` to the index of the matrix that contains the row, and
// returns the index of the row in this matrix.
template <int ROWS, int DEPTH, class Locate, class Layout = ContiguousRows> struct QuantizedStream {
    struct UnitRows {
        int row[ROWS], matrix[ROWS];
    };
    const QuantizedStack& weights;
    const Locate locate;
    const Layout layout;
    const int groups, units, stride, lane;
    int unit;
    UnitRows rows;
    RawGroup loaded[DEPTH][ROWS];

    __device__ __forceinline__ QuantizedStream(const QuantizedStack& weights, int groups, int units, Locate locate)
        : QuantizedStream(weights, groups, units, locate, ContiguousRows{groups}) {}

    __device__ __forceinline__ QuantizedStream(const QuantizedStack& weights, int groups, int units, Locate locate,
                                               Layout layout)
        : weights(weights),
          locate(locate),
          layout(layout),
          groups(groups),
          units(units),
          stride(gridDim.x * (blockDim.x / 32)),
          lane(threadIdx.x % 32),
          unit(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) {
        if (!has_unit()) return;
        rows = unit_rows(unit);
        prefetch();
    }

    __device__ __forceinline__ bool has_unit() const { return unit < units; }

    __device__ __forceinline__ UnitRows unit_rows(int unit) const {
        UnitRows rows;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) rows.row[r] = locate(unit, r, rows.matrix[r]);
        return rows;
    }

    template <int F>
    __device__ __forceinline__ void load_groups(RawGroup (&raw)[ROWS], const UnitRows& from, int group) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const QuantizedMatrix& matrix = weights.matrices[from.matrix[r]];
            load_group<F>(raw[r], matrix, layout.group_index(from.row[r], group));
            if (Layout::is_gathered && FormatLayout<F>::has_row_scale) {
                const uint32_t* row_scales = reinterpret_cast<const uint32_t*>(matrix.scales);
                raw[r].scales = __ldg(row_scales + layout.scale_row(from.row[r], group));
            }
        }
    }

    // Adds the dot products of one group of each row to `sum`.
    // The groups of a gathered row come from several rows of the matrix, which have different row scales.
    // For gathered rows, this function therefore applies row scales to the dot products of the group.
    // For contiguous rows, `multiply` applies the row scale to the whole sum.
    template <int F>
    __device__ __forceinline__ void add_group(const RawGroup (&raw)[ROWS], const QuantizedInput& x, int group,
                                              float (&sum)[ROWS]) const {
        if (!Layout::is_gathered || !FormatLayout<F>::has_row_scale) return multiply_group<F>(raw, x, group, sum);
        float products[ROWS] = {};
        multiply_group<F>(raw, x, group, products);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = fmaf(__uint_as_float(raw[r].scales), products[r], sum[r]);
    }

    __device__ __forceinline__ void prefetch() {
        with_format(weights.matrices[rows.matrix[0]].format, [&](auto format) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d)
                if (lane + 32 * d < groups) load_groups<decltype(format)::value>(loaded[d], rows, lane + 32 * d);
        });
    }

    // Computes the dot product of `x` and each row of the current unit, and advances to the next unit.
    // All lanes receive the dot products.
    __device__ __forceinline__ void multiply(const QuantizedInput& x, float (&sum)[ROWS]) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = 0.0f;
        unit += stride;
        const UnitRows next = has_unit() ? unit_rows(unit) : rows;
        const int current = weights.matrices[rows.matrix[0]].format;
        const bool same_format = has_unit() && weights.matrices[next.matrix[0]].format == current;
        with_format(current, [&](auto format) {
            constexpr int F = decltype(format)::value;
            for (int base = lane; base - lane < groups; base += 32 * DEPTH) {
                const bool is_last = base - lane + 32 * DEPTH >= groups;
                const UnitRows from = is_last ? next : rows;
#pragma unroll
                for (int d = 0; d < DEPTH; ++d) {
                    const int group = base + 32 * d, ahead = is_last ? lane + 32 * d : group + 32 * DEPTH;
                    if (group < groups) add_group<F>(loaded[d], x, group, sum);
                    if (ahead < groups && (!is_last || same_format)) load_groups<F>(loaded[d], from, ahead);
                }
            }
            if (FormatLayout<F>::has_row_scale && !Layout::is_gathered) {
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    const QuantizedMatrix& matrix = weights.matrices[rows.matrix[r]];
                    sum[r] *= __ldg(reinterpret_cast<const float*>(matrix.scales) + rows.row[r]);
                }
            }
        });
        rows = next;
        if (has_unit() && !same_format) prefetch();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = warp_sum(sum[r]);
    }
};

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
    // Integers from -128 to 127 span 255 steps, so an int8 step is 2 · largest / 255.
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
        value = max_magnitude(value, __shfl_xor_sync(0xffffffffu, value, offset));
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    float largest = 0.0f;
    for (int w = 0; w < blockDim.x / 32; ++w) largest = max_magnitude(largest, scratch[w]);
    return largest;
}

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
