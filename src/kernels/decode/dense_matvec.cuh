// Matrix-vector products with bf16 or f16 weights, for the decode kernels.
//
// A *segment* is 8 consecutive elements (16 bytes) of a row. A lane loads a segment with one instruction.
// A *strip* is one or two rows that a warp multiplies at the same time.
// Strips are assigned to the warps of the grid in round-robin order.
#pragma once
#include "constants.cuh"
#include "decode/normed_vector.cuh"
#include "headers/block_sum.cuh"
#include "headers/streaming_loads.cuh"

// The number of loads that a lane has in flight per row.
// DENSE_DEPTH_2 is for strips of two rows, and DENSE_DEPTH_1 is for strips of one row. Both keep six loads in flight.
constexpr int DENSE_DEPTH_2 = 3, DENSE_DEPTH_1 = 6;

// Returns `sum` plus the dot product of a segment of weights (`w`) and eight inputs (`a` and `b`).
template <typename T> __device__ __forceinline__ float dot8(uint4 w, float4 a, float4 b, float sum) {
    const float2 w0 = unpack<T>(w.x), w1 = unpack<T>(w.y), w2 = unpack<T>(w.z), w3 = unpack<T>(w.w);
    sum = fmaf(w0.x, a.x, sum);
    sum = fmaf(w0.y, a.y, sum);
    sum = fmaf(w1.x, a.z, sum);
    sum = fmaf(w1.y, a.w, sum);
    sum = fmaf(w2.x, b.x, sum);
    sum = fmaf(w2.y, b.y, sum);
    sum = fmaf(w3.x, b.z, sum);
    sum = fmaf(w3.y, b.w, sum);
    return sum;
}

// The input vector in shared memory, stored as f32 in two planes.
// The first plane holds the first four elements of every segment, and the second plane holds the last four.
// With this layout, a warp that reads one segment per lane has no bank conflicts.
struct DenseInput {
    float4* planes;
    int segments;
    // Returns the elements 4 · index to 4 · index + 3 of the input vector.
    __device__ __forceinline__ float4& quad(int index) const { return planes[(index & 1) * segments + (index >> 1)]; }
};

template <typename T> __device__ __forceinline__ const uint4* as_segments(const T* row) {
    return reinterpret_cast<const uint4*>(row);
}

// Streams the rows of a matrix through a warp, one strip of ROWS rows at a time.
// Each lane has DEPTH loads in flight per row.
// `locate(s, r)` returns the Address of row r of strip s.
// Address is a pointer or a struct. If `a` is the Address of a row, `a + s` is a pointer to segment s of the row.
template <typename T, int ROWS, int DEPTH, class Locate, class Address = const uint4*> struct DenseStream {
    const Locate locate;
    const int segments, strips, stride, lane;
    int strip;
    Address rows[ROWS];
    uint4 loaded[DEPTH][ROWS];

    __device__ __forceinline__ DenseStream(int segments, int strips, Locate locate)
        : locate(locate),
          segments(segments),
          strips(strips),
          stride(gridDim.x * (blockDim.x / 32)),
          lane(threadIdx.x % 32),
          strip(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) {
        prefetch();
    }

    __device__ __forceinline__ bool has_strip() const { return strip < strips; }

    // Loads a segment of row r. Returns zeros past the end of the row, so the unrolled loops below need no branches.
    __device__ __forceinline__ uint4 load(int r, int segment) const {
        return segment < segments ? load_stream_16(rows[r] + segment) : make_uint4(0, 0, 0, 0);
    }

    // Issues the first loads of the current strip.
    __device__ __forceinline__ void prefetch() {
        if (strip >= strips) return;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) rows[r] = locate(strip, r);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) loaded[d][r] = load(r, lane + 32 * d);
    }

    // Computes the dot product of `x` and each row of the current strip, and advances to the next strip.
    // All lanes receive the dot products.
    __device__ __forceinline__ void multiply(const DenseInput& x, float (&sum)[ROWS]) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = 0.0f;
        for (int base = lane; base - lane < segments; base += 32 * DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                const int segment = min(base + 32 * d, segments - 1);
                const float4 a = x.planes[segment], b = x.planes[segments + segment];
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    sum[r] = dot8<T>(loaded[d][r], a, b, sum[r]);
                    loaded[d][r] = load(r, base + 32 * (d + DEPTH));
                }
            }
        }
        strip += stride;
        prefetch();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = warp_sum(sum[r]);
    }
};

// Multiplies x by the norm weight, writes the result to shared memory, and returns 1 / sqrt(mean(x²) + eps).
// The caller multiplies the dot products by the returned factor.
__device__ __forceinline__ float load_normed(const DenseInput& input, const NormedVector& vector, float* scratch) {
    const auto [x, norm, columns, eps] = vector;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < columns / 4; i += blockDim.x) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(x) + i),
                     w = __ldg(reinterpret_cast<const float4*>(norm) + i);
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        input.quad(i) = make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
    }
    return rsqrtf(block_sum(squares, scratch) / columns + eps);
}

// Multiplies each segment s of x by factor(s) and writes the result to shared memory.
template <typename T, class Factor>
__device__ __forceinline__ void load_vector(const DenseInput& input, const T* x, Factor factor) {
    for (int i = threadIdx.x; i < input.segments; i += blockDim.x) {
        const uint4 v = __ldcg(reinterpret_cast<const uint4*>(x) + i);
        const float2 a = unpack<T>(v.x), b = unpack<T>(v.y), c = unpack<T>(v.z), d = unpack<T>(v.w);
        const float f = factor(i);
        input.planes[i] = make_float4(a.x * f, a.y * f, b.x * f, b.y * f);
        input.planes[input.segments + i] = make_float4(c.x * f, c.y * f, d.x * f, d.y * f);
    }
    __syncthreads();
}
