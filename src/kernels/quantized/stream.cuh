// Products of the rows of quantized matrices with one input vector. A lane reads one group at a time.
#pragma once
#include "quantized/format.cuh"
#include "quantized/input.cuh"

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
                high_sum = __dp4a(q, word(high, j), high_sum);
                low_sum = __dp4a(q, word(low, j), low_sum);
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

// The layout of rows whose groups are contiguous in memory.
struct ContiguousRows {
    static constexpr bool is_gathered = false;
    int groups;
    __device__ __forceinline__ size_t group_index(int row, int group) const { return (size_t)row * groups + group; }
    __device__ __forceinline__ int scale_row(int row, int) const { return row; }
};

// Multiplies the rows of a stack by an input vector. A *strip* is ROWS rows, which must have the same format.
// Each warp processes one strip at a time. The warps of the grid take strips in round-robin order.
// Each lane has up to DEPTH groups of each row in flight.
// Near the end of a strip, a lane already loads the first groups of the next strip, if both strips have the same
// format.
// `locate(s, r, matrix)` finds row r of strip s: it sets `matrix` to the index of the matrix that contains the row, and
// returns the index of the row in this matrix.
template <int ROWS, int DEPTH, class Locate, class Layout = ContiguousRows> struct QuantizedStream {
    struct StripRows {
        int row[ROWS], matrix[ROWS];
    };
    const QuantizedStack& weights;
    const Locate locate;
    const Layout layout;
    const int groups, strips, stride, lane;
    int strip;
    StripRows rows;
    RawGroup loaded[DEPTH][ROWS];

    __device__ __forceinline__ QuantizedStream(const QuantizedStack& weights, int groups, int strips, Locate locate)
        : QuantizedStream(weights, groups, strips, locate, ContiguousRows{groups}) {}

    __device__ __forceinline__ QuantizedStream(const QuantizedStack& weights, int groups, int strips, Locate locate,
                                               Layout layout)
        : weights(weights),
          locate(locate),
          layout(layout),
          groups(groups),
          strips(strips),
          stride(gridDim.x * (blockDim.x / 32)),
          lane(threadIdx.x % 32),
          strip(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) {
        if (!has_strip()) return;
        rows = strip_rows(strip);
        prefetch();
    }

    __device__ __forceinline__ bool has_strip() const { return strip < strips; }

    __device__ __forceinline__ StripRows strip_rows(int strip) const {
        StripRows rows;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) rows.row[r] = locate(strip, r, rows.matrix[r]);
        return rows;
    }

    template <int F>
    __device__ __forceinline__ void load_groups(RawGroup (&raw)[ROWS], const StripRows& from, int group) const {
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

    // Computes the dot product of `x` and each row of the current strip, and advances to the next strip.
    // All lanes receive the dot products.
    __device__ __forceinline__ void multiply(const QuantizedInput& x, float (&sum)[ROWS]) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = 0.0f;
        strip += stride;
        const StripRows next = has_strip() ? strip_rows(strip) : rows;
        const int current = weights.matrices[rows.matrix[0]].format;
        const bool same_format = has_strip() && weights.matrices[next.matrix[0]].format == current;
        with_format(current, [&](auto format) {
            constexpr int F = decltype(format)::value;
            for (int base = lane; base - lane < groups; base += 32 * DEPTH) {
                const bool is_last = base - lane + 32 * DEPTH >= groups;
                const StripRows from = is_last ? next : rows;
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
        if (has_strip() && !same_format) prefetch();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = warp_sum(sum[r]);
    }
};
