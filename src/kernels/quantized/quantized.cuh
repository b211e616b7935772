// Quantized matrices as `quantized.rs` lays them out, and products of their rows with one vector, in f32.
//
// A lane takes a chunk of 32 columns of a row at a time. The vector is in integers of 16 bits and a scale for each chunk
// (for the largest seven bits more than bf16 keeps), as two planes of bytes, so that four products at a time are summed without any rounding
// (dp4a); what is left in floats is one scale and one min for each chunk. For FP8 all is in floats.
#pragma once
#include <cuda_fp8.h>

#include "headers/common.cuh"

enum Format { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, INT8, FP8, FORMATS };

// One matrix, or rows of one.
struct Quantized {
    const uint8_t *low, *high, *scales, *supers;
    int format, rows;
};

// Several, one below the other: rows of part p end before ends[p].
constexpr int MAX_PARTS = 3;
struct Parts {
    Quantized part[MAX_PARTS];
    int ends[MAX_PARTS];
};

// Of a chunk, in bytes: bits of q in the low and the high plane, scales (0: one f32 a row). Whether there are supers.
template <int F> struct Layout {
    static constexpr bool row_scaled = F == INT8 || F == FP8, k = F >= Q2_K && F <= Q6_K;
    static constexpr int low = F == Q2_K || F == Q3_K ? 8 : F == Q8_0 || row_scaled ? 32 : 16;
    static constexpr int high = F == Q6_K ? 8 : F == Q5_0 || F == Q5_1 || F == Q5_K || F == Q3_K ? 4 : 0;
    static constexpr int scales = row_scaled ? 0 : F == Q4_1 || F == Q5_1 ? 4 : 2;
    static constexpr int zero = F == Q4_0 ? 8 : F == Q5_0 ? 16 : F == Q3_K ? 4 : F == Q6_K ? 32 : 0;
    static constexpr bool halves = F == Q2_K || F == Q3_K || F == Q6_K;
    static constexpr bool mins = F == Q4_1 || F == Q5_1 || F == Q2_K || F == Q4_K || F == Q5_K;
};

// A chunk on its way: low plane, then high plane; scales; supers.
struct Raw {
    uint32_t words[8], scales, supers;
};

// Read once, so they need no place in L1.
__device__ __forceinline__ uint4 stream4(const void* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}
__device__ __forceinline__ uint2 stream2(const void* at) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}
__device__ __forceinline__ uint32_t stream1(const void* at) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

template <int F> __device__ __forceinline__ void load_scales(Raw& raw, const Quantized& m, size_t at) {
    using L = Layout<F>;
    if (L::scales == 4) raw.scales = __ldg(reinterpret_cast<const uint32_t*>(m.scales) + at);
    if (L::scales == 2) raw.scales = __ldg(reinterpret_cast<const unsigned short*>(m.scales) + at);
    if (L::k) raw.supers = __ldg(reinterpret_cast<const uint32_t*>(m.supers) + at / 8);
}

// Chunk `at` of a matrix, counted from its first row on.
template <int F> __device__ __forceinline__ void load(Raw& raw, const Quantized& m, size_t at) {
    using L = Layout<F>;
    const uint8_t* low = m.low + at * L::low;
    if (L::low == 8) {
        const uint2 v = stream2(low);
        raw.words[0] = v.x, raw.words[1] = v.y;
    } else {
        const uint4 v = stream4(low);
        raw.words[0] = v.x, raw.words[1] = v.y, raw.words[2] = v.z, raw.words[3] = v.w;
    }
    if (L::low == 32) {
        const uint4 v = stream4(low + 16);
        raw.words[4] = v.x, raw.words[5] = v.y, raw.words[6] = v.z, raw.words[7] = v.w;
    }
    constexpr int after = L::low / 4;
    if (L::high == 4) raw.words[after & 7] = stream1(m.high + at * 4);
    if (L::high == 8) {
        const uint2 v = stream2(m.high + at * 8);
        raw.words[after & 7] = v.x, raw.words[(after + 1) & 7] = v.y;
    }
    load_scales<F>(raw, m, at);
}

// The q of quad j, a byte each.
template <int F> __device__ __forceinline__ uint32_t quad(const Raw& raw, int j) {
    using L = Layout<F>;
    constexpr int after = L::low / 4, bits = L::low / 4 == 2 ? 2 : 4;
    if constexpr (L::low == 32) return raw.words[j];
    uint32_t q;
    if (L::low == 16)
        q = raw.words[j / 2] >> (4 * (j % 2)) & 0x0f0f0f0fu;
    else
        q = raw.words[j / 4] >> (2 * (j % 4)) & 0x03030303u;
    if (L::high == 4) q |= (raw.words[after & 7] >> j & 0x01010101u) << bits;
    if (L::high == 8) q |= (raw.words[(after + j / 4) & 7] >> (2 * (j % 4)) & 0x03030303u) << bits;
    return q;
}

// Four q as floats, less their zero.
template <int F> __device__ __forceinline__ float4 floats(uint32_t q) {
    if (F == FP8) {
        const auto pair = [](uint32_t two) {
            return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3)));
        };
        const float2 a = pair(q & 0xffff), b = pair(q >> 16);
        return make_float4(a.x, a.y, b.x, b.y);
    }
    // By way of 2^23 + q; signed ones get 128 more.
    constexpr bool is_signed = Layout<F>::low == 32;
    constexpr float less = 8388608.0f + (is_signed ? 128 : Layout<F>::zero);
    if (is_signed) q ^= 0x80808080u;
    const auto one = [=](int selector) { return __uint_as_float(__byte_perm(q, 0x4b000000u, selector)) - less; };
    return make_float4(one(0x7440), one(0x7441), one(0x7442), one(0x7443));
}

// Scale and min of each half of a chunk; where a row has one scale, 1.
struct Scaling {
    float scale[2], min[2];
};
template <int F> __device__ __forceinline__ Scaling scaling(const Raw& raw) {
    const float2 super = __half22float2(*reinterpret_cast<const __half2*>(&raw.supers));
    const int first = raw.scales & 0xff, second = raw.scales >> 8 & 0xff;
    if (Layout<F>::row_scaled) return {{1.0f, 1.0f}, {0.0f, 0.0f}};
    if (F == Q2_K)
        return {{super.x * (first & 15), super.x * (second & 15)}, {super.y * (first >> 4), super.y * (second >> 4)}};
    if (F == Q3_K || F == Q6_K) return {{super.x * (int8_t)first, super.x * (int8_t)second}, {0.0f, 0.0f}};
    if (F == Q4_K || F == Q5_K) {
        const float s = super.x * first, m = super.y * second;
        return {{s, s}, {m, m}};
    }
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&raw.scales));
    const float m = Layout<F>::mins ? -pair.y : 0.0f;
    return {{pair.x, pair.x}, {m, m}};
}

// The values of columns 8p to 8p + 7 of a chunk: of quads 2p and 2p + 1.
struct Eight {
    float4 first, second;
};
template <int F>
__device__ __forceinline__ Eight eight(const Quantized& m, int row, int chunk, int p, int chunks) {
    using L = Layout<F>;
    const size_t at = (size_t)row * chunks + chunk;
    const uint8_t* low = m.low + at * L::low;
    constexpr int bits = L::low == 8 ? 2 : 4;
    uint32_t first, second;
    if (L::low == 32) {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(low) + p);
        first = two.x, second = two.y;
    } else if (L::low == 16) {
        const uint32_t w = __ldg(reinterpret_cast<const uint32_t*>(low) + p);
        first = w & 0x0f0f0f0fu, second = w >> 4 & 0x0f0f0f0fu;
    } else {
        const uint32_t w = __ldg(reinterpret_cast<const uint32_t*>(low) + p / 2) >> (4 * (p % 2));
        first = w & 0x03030303u, second = w >> 2 & 0x03030303u;
    }
    if (L::high == 4) {
        const uint32_t h = __ldg(reinterpret_cast<const uint32_t*>(m.high + at * 4)) >> (2 * p);
        first |= (h & 0x01010101u) << bits, second |= (h >> 1 & 0x01010101u) << bits;
    }
    if (L::high == 8) {
        const uint32_t h = __ldg(reinterpret_cast<const uint32_t*>(m.high + at * 8) + p / 2) >> (4 * (p % 2));
        first |= (h & 0x03030303u) << bits, second |= (h >> 2 & 0x03030303u) << bits;
    }
    Raw raw;
    load_scales<F>(raw, m, at);
    const Scaling s = scaling<F>(raw);
    const float scale = L::row_scaled ? __ldg(reinterpret_cast<const float*>(m.scales) + row) : s.scale[p / 2],
                min = s.min[p / 2];
    // The product is rounded before the min is taken off, as ggml does it.
    const auto value = [=](float q) { return __fsub_rn(__fmul_rn(scale, q), min); };
    const auto four = [=](float4 q) { return make_float4(value(q.x), value(q.y), value(q.z), value(q.w)); };
    return {four(floats<F>(first)), four(floats<F>(second))};
}

// The vector in shared memory. Integers: high bytes of columns 0 to 15 and 16 to 31 of chunk c at pieces [0][c] and [1][c], low
// bytes, which are signed, at [2][c] and [3][c]; their scale; sums of each half. Floats: quad j of chunk c at [j][c]. Lanes
// with chunks next to each other meet no bank conflict.
struct Vector {
    uint4* pieces;
    float* scales;
    int2* sums;
    int chunks, stride;
    bool in_floats;

    __device__ __forceinline__ Vector(void* shared, const Parts& parts, int chunks)
        : pieces(reinterpret_cast<uint4*>(shared)), chunks(chunks), stride(chunks + 1),
          in_floats(parts.part[0].format == FP8) {
        sums = reinterpret_cast<int2*>(pieces + 4 * stride);
        scales = reinterpret_cast<float*>(sums + chunks);
    }

    __device__ __forceinline__ float4 quad(int j, int chunk) const {
        return reinterpret_cast<const float4*>(pieces)[j * stride + chunk];
    }

    // Fills all from `at(i)`, quad i, which is zero from the last column on; EXACT: from whole numbers of up to 15 bits.
    // Called by all threads of the block; the caller puts a barrier after it.
    template <bool EXACT, class At> __device__ __forceinline__ void fill(At at) const {
        for (int i = threadIdx.x; i < (8 * chunks + 31) / 32 * 32; i += blockDim.x) {
            const int chunk = i / 8, j = i % 8;
            const bool inside = chunk < chunks;
            const float4 v = inside ? at(i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (in_floats) {
                if (inside) reinterpret_cast<float4*>(pieces)[j * stride + chunk] = v;
                continue;
            }
            float scale = 1.0f, inverse = 1.0f;
            if (!EXACT) {
                // By their bits magnitudes are ordered, and what is no number comes out on top.
                const auto bits = [](float x) { return __float_as_uint(x) & 0x7fffffffu; };
                uint32_t most = max(max(bits(v.x), bits(v.y)), max(bits(v.z), bits(v.w)));
#pragma unroll
                for (int offset = 1; offset < 8; offset *= 2)
                    most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
                scale = most < 0x7f800000u ? __uint_as_float(most) / 32512.0f : __uint_as_float(0x7fc00000u);
                inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
            }
            const int q[4] = {__float2int_rn(v.x * inverse), __float2int_rn(v.y * inverse),
                              __float2int_rn(v.z * inverse), __float2int_rn(v.w * inverse)};
            int sum = q[0] + q[1] + q[2] + q[3];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1), sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (!inside) continue;
            uint32_t high = 0, low = 0;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                high |= (uint32_t)(q[c] + 128 >> 8 & 0xff) << (8 * c);
                low |= (uint32_t)(q[c] & 0xff) << (8 * c);
            }
            uint32_t* words = reinterpret_cast<uint32_t*>(pieces + (j / 4) * stride + chunk) + j % 4;
            words[0] = high, words[8 * stride] = low;
            if (j % 4 == 0) reinterpret_cast<int*>(sums + chunk)[j / 4] = sum;
            if (j == 0) scales[chunk] = scale;
        }
    }
};

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}
__device__ __forceinline__ int word(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The product of ROWS chunks at the same place of their rows with the vector, added to `sum`.
template <int F, int ROWS>
__device__ __forceinline__ void multiply_integers(const Raw (&raw)[ROWS], const Vector& x, int chunk,
                                                  float (&sum)[ROWS]) {
    int half[2][ROWS];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint4 high = x.pieces[h * x.stride + chunk], low = x.pieces[(2 + h) * x.stride + chunk];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            int of_high = 0, of_low = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int q = quad<F>(raw[r], 4 * h + j);
                of_high = __dp4a(q, word(high, j), of_high), of_low = __dp4a(q, word(low, j), of_low);
            }
            half[h][r] = of_high * 256 + of_low;
        }
    }
    const float scale = x.scales[chunk];
    const int2 sums = Layout<F>::mins || Layout<F>::zero ? x.sums[chunk] : make_int2(0, 0);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const Scaling s = scaling<F>(raw[r]);
        const int first = half[0][r] - Layout<F>::zero * sums.x, second = half[1][r] - Layout<F>::zero * sums.y;
        float product = Layout<F>::halves ? s.scale[0] * (float)first + s.scale[1] * (float)second
                                          : s.scale[0] * (float)(first + second);
        if (Layout<F>::mins)
            product -= Layout<F>::halves ? s.min[0] * (float)sums.x + s.min[1] * (float)sums.y
                                         : s.min[0] * (float)(sums.x + sums.y);
        sum[r] = fmaf(scale, product, sum[r]);
    }
}

template <int F, int ROWS>
__device__ __forceinline__ void multiply(const Raw (&raw)[ROWS], const Vector& x, int chunk, float (&sum)[ROWS]) {
    if constexpr (F == FP8) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float4 v = x.quad(j, chunk);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sum[r] = dot4(floats<F>(quad<F>(raw[r], j)), v, sum[r]);
        }
    } else {
        multiply_integers<F>(raw, x, chunk, sum);
    }
}

// Calls `then` with the format as a type's constant.
template <int F> struct Constant {
    static constexpr int value = F;
};
template <class Then> __device__ __forceinline__ void with_format(int format, Then then) {
    switch (format) {
        case Q4_0: return then(Constant<Q4_0>());
        case Q4_1: return then(Constant<Q4_1>());
        case Q5_0: return then(Constant<Q5_0>());
        case Q5_1: return then(Constant<Q5_1>());
        case Q8_0: return then(Constant<Q8_0>());
        case Q2_K: return then(Constant<Q2_K>());
        case Q3_K: return then(Constant<Q3_K>());
        case Q4_K: return then(Constant<Q4_K>());
        case Q5_K: return then(Constant<Q5_K>());
        case Q6_K: return then(Constant<Q6_K>());
        case INT8: return then(Constant<INT8>());
        case FP8: return then(Constant<FP8>());
    }
}

// How the chunks of a row lie: one after the other.
struct WholeRows {
    static constexpr bool gathered = false;
    int chunks;
    __device__ __forceinline__ size_t at(int row, int chunk) const { return (size_t)row * chunks + chunk; }
    __device__ __forceinline__ int row_of(int row, int) const { return row; }
};

// Rows of matrices, ROWS at a time (a unit); units go round the warps of the grid. `place(u, r, part)` is the row of row r of
// unit u in its part, which it sets; all rows of a unit are of one format. DEPTH chunks of each row are under way at any
// time: towards the end of a unit those of the next one.
template <int ROWS, int DEPTH, class Place, class Lie = WholeRows> struct QuantizedStream {
    struct Unit {
        int row[ROWS], part[ROWS];
    };
    const Parts& parts;
    const Place place;
    const Lie lie;
    const int chunks, units, step, lane;
    int unit;
    Unit rows;
    Raw ahead[DEPTH][ROWS];

    __device__ __forceinline__ QuantizedStream(const Parts& parts, int chunks, int units, Place place)
        : QuantizedStream(parts, chunks, units, place, WholeRows{chunks}) {}

    __device__ __forceinline__ QuantizedStream(const Parts& parts, int chunks, int units, Place place, Lie lie)
        : parts(parts),
          place(place),
          lie(lie),
          chunks(chunks),
          units(units),
          step(gridDim.x * (blockDim.x / 32)),
          lane(threadIdx.x % 32),
          unit(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) {
        if (!more()) return;
        rows = locate(unit);
        start();
    }

    __device__ __forceinline__ bool more() const { return unit < units; }

    __device__ __forceinline__ Unit locate(int unit) const {
        Unit rows;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) rows.row[r] = place(unit, r, rows.part[r]);
        return rows;
    }

    template <int F> __device__ __forceinline__ void ask(Raw (&raw)[ROWS], const Unit& of, int chunk) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const Quantized& part = parts.part[of.part[r]];
            load<F>(raw[r], part, lie.at(of.row[r], chunk));
            if (Lie::gathered && Layout<F>::row_scaled)
                raw[r].scales = __ldg(reinterpret_cast<const uint32_t*>(part.scales) + lie.row_of(of.row[r], chunk));
        }
    }

    // Adds the products of a chunk; of rows with a scale each, gathered from several, the scale goes on here.
    template <int F> __device__ __forceinline__ void add(const Raw (&raw)[ROWS], const Vector& x, int chunk,
                                                         float (&sum)[ROWS]) const {
        if (!Lie::gathered || !Layout<F>::row_scaled) return multiply<F>(raw, x, chunk, sum);
        float products[ROWS] = {};
        multiply<F>(raw, x, chunk, products);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = fmaf(__uint_as_float(raw[r].scales), products[r], sum[r]);
    }

    __device__ __forceinline__ void start() {
        with_format(parts.part[rows.part[0]].format, [&](auto format) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d)
                if (lane + 32 * d < chunks) ask<decltype(format)::value>(ahead[d], rows, lane + 32 * d);
        });
    }

    // The dot products of this unit with x, in all lanes; goes on to the next unit.
    __device__ __forceinline__ void finish(const Vector& x, float (&sum)[ROWS]) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = 0.0f;
        unit += step;
        const Unit next = more() ? locate(unit) : rows;
        const int now = parts.part[rows.part[0]].format;
        const bool goes_on = more() && parts.part[next.part[0]].format == now;
        with_format(now, [&](auto format) {
            constexpr int F = decltype(format)::value;
            for (int base = lane; base - lane < chunks; base += 32 * DEPTH) {
                const bool last = base - lane + 32 * DEPTH >= chunks;
                const Unit of = last ? next : rows;
#pragma unroll
                for (int d = 0; d < DEPTH; ++d) {
                    const int chunk = base + 32 * d, after = last ? lane + 32 * d : chunk + 32 * DEPTH;
                    if (chunk < chunks) add<F>(ahead[d], x, chunk, sum);
                    if (after < chunks && (!last || goes_on)) ask<F>(ahead[d], of, after);
                }
            }
            if (Layout<F>::row_scaled && !Lie::gathered) {
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
                    sum[r] *= __ldg(reinterpret_cast<const float*>(parts.part[rows.part[r]].scales) + rows.row[r]);
            }
        });
        rows = next;
        if (more() && !goes_on) start();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = warp_sum(sum[r]);
    }
};

// How an input is rounded before the product: as `Rounding` of quantized.rs.
enum Rounding { AS_IT_IS, TO_INT8, TO_FP8, TO_FP8_BY, TO_INT8_BY };
__device__ __forceinline__ bool to_int8(int rounding) { return rounding == TO_INT8 || rounding == TO_INT8_BY; }

__device__ __forceinline__ float round_e4m3(float v) {
    const __nv_fp8_storage_t byte = __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3)));
}
// A value over its scale, rounded.
__device__ __forceinline__ float rounded(float v, int rounding) {
    return to_int8(rounding) ? fminf(fmaxf(rintf(v), -128.0f), 127.0f) : round_e4m3(v);
}
// The scale of a vector whose largest magnitude is `most`.
__device__ __forceinline__ float rounding_scale(float most, int rounding, float fixed) {
    const float scale = rounding == TO_INT8 ? most / 127.5f : rounding == TO_FP8 ? most / 448.0f : fixed;
    // A vector that is no number stays none, by way of its scale.
    return !isfinite(most) ? __uint_as_float(0x7fc00000u) : scale < 1.17549435e-38f ? 1.17549435e-38f : scale;
}

// How an input is rounded: `Rounding`, and the scale of TO_FP8_BY and TO_INT8_BY.
struct Rounds {
    int how;
    float by;
};

// The larger magnitude. By their bits magnitudes are ordered, and what is no number comes out on top.
__device__ __forceinline__ float larger(float a, float b) {
    return __uint_as_float(max(__float_as_uint(a) & 0x7fffffffu, __float_as_uint(b) & 0x7fffffffu));
}
__device__ __forceinline__ float largest(float4 v) { return larger(larger(v.x, v.y), larger(v.z, v.w)); }

// The largest magnitude of the block, in every thread. `scratch` holds a float a warp.
__device__ __forceinline__ float block_max(float value, float* scratch) {
    for (int offset = 16; offset > 0; offset /= 2) value = larger(value, __shfl_xor_sync(0xffffffffu, value, offset));
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    float most = 0.0f;
    for (int w = 0; w < blockDim.x / 32; ++w) most = larger(most, scratch[w]);
    return most;
}

// Fills `v` with factor · at(i), rounded, where the largest at(i) is `most`. Returns what products are to be multiplied by.
template <class At>
__device__ __forceinline__ float fill_rounded(const Vector& v, At at, float most, float factor, Rounds rounds,
                                              float* scratch) {
    const float scale = rounding_scale(block_max(most, scratch) * factor, rounds.how, rounds.by);
    const auto round = [=](float x) { return rounded(x * factor / scale, rounds.how); };
    v.fill<true>([&](int i) {
        const float4 a = at(i);
        return make_float4(round(a.x), round(a.y), round(a.z), round(a.w));
    });
    __syncthreads();
    return scale;
}
