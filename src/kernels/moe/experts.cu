// Matrix products of routed experts on packed weights: out[t, n] = W[ids[t, n]] · x[t or (t, n)] + bias[ids[t, n]].
//   MXFP4 weights: blocks u8 [E, R, C/32, 16] (low nibble = even element), scales u8 [E, R, C/32] (2^(s-127), 255 = NaN)
//   dense weights: [E, R, C] of the compute dtype; bias [E, R] of the compute dtype or null
//   x [T, C] (shared by a token's experts) or [T, N, C]; ids u32 [T, N]; out [T, N, R]
// Three kernels: a matrix-vector one for few tokens; for many, `sort_by_expert` and, for MXFP4, a tensor-core tile that reads
// each expert's weights once per 64 (token, expert) pairs instead of once per pair. On MXFP4 in bf16 and f16 experts_gemm.cu
// and decode.cu take their place, unless a scale is above 2; on floats grouped_gemm.cu does. The sort serves all.
#include "headers/common.cuh"
#include <mma.h>

__device__ __forceinline__ float e8m0(uint8_t scale) {
    // 2^(scale - 127): the exponent field of an f32, except at the ends: 0 is the subnormal 2^-127, 255 is NaN.
    return scale == 0 ? __int_as_float(0x00400000) : scale == 255 ? NAN : __int_as_float((int)scale << 23);
}

// E2M1: 0 0.5 1 1.5 2 3 4 6 and their negatives.
__device__ __forceinline__ float e2m1(uint32_t nibble) {
    const uint32_t magnitude = nibble & 7;
    const float value = magnitude < 5 ? 0.5f * magnitude : magnitude == 5 ? 3.0f : magnitude == 6 ? 4.0f : 6.0f;
    return nibble & 8 ? -value : value;
}

struct Mxfp4 {
    const uint8_t *blocks, *scales;
};
template <typename T> struct Dense {
    const T* weights;
};

// One lane's share of the dot product of weight row `row` (of all E·R) with x: 32-element groups lane, lane + 32, ..
template <typename T> __device__ float lane_dot(const Mxfp4& w, size_t row, const T* x, int columns, int lane) {
    const int groups = columns / 32;
    float sum = 0.0f;
    for (int g = lane; g < groups; g += 32) {
        const uint4 packed = *reinterpret_cast<const uint4*>(w.blocks + (row * groups + g) * 16);
        const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
        const T* xs = x + g * 32;
        float group = 0.0f;
#pragma unroll
        for (int i = 0; i < 32; ++i) group += e2m1(words[i / 8] >> (4 * (i % 8)) & 15) * to_float(xs[i]);
        sum += group * e8m0(w.scales[row * groups + g]);
    }
    return sum;
}
template <typename T> __device__ float lane_dot(const Dense<T>& w, size_t row, const T* x, int columns, int lane) {
    float sum = 0.0f;
    for (int i = lane; i < columns; i += 32) sum += to_float(w.weights[row * columns + i]) * to_float(x[i]);
    return sum;
}

// grid (ceil(R / 8), T·N), block 256: one warp an output element.
template <typename W, typename T>
__device__ void expert_gemv(W w, const T* bias, const T* x, const uint32_t* ids, T* out, int rows, int columns, int pairs_per_x) {
    const int pair = blockIdx.y, row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const size_t expert_row = (size_t)ids[pair] * rows + row;
    float sum = warp_sum(lane_dot(w, expert_row, x + (size_t)(pair / pairs_per_x) * columns, columns, lane));
    if (lane == 0) out[(size_t)pair * rows + row] = from_float<T>(sum + (bias ? to_float(bias[expert_row]) : 0.0f));
}

#define DEFINE_GEMV(T, SUFFIX)                                                                                            \
    extern "C" __global__ void expert_gemv_mxfp4_##SUFFIX(const uint8_t* blocks, const uint8_t* scales, const T* bias,    \
                                                          const T* x, const uint32_t* ids, T* out, int rows, int columns, \
                                                          int pairs_per_x) {                                              \
        expert_gemv<Mxfp4, T>({blocks, scales}, bias, x, ids, out, rows, columns, pairs_per_x);                           \
    }                                                                                                                     \
    extern "C" __global__ void expert_gemv_dense_##SUFFIX(const T* weights, const uint8_t*, const T* bias, const T* x,    \
                                                          const uint32_t* ids, T* out, int rows, int columns,             \
                                                          int pairs_per_x) {                                              \
        expert_gemv<Dense<T>, T>({weights}, bias, x, ids, out, rows, columns, pairs_per_x);                               \
    }
FOR_EACH_DTYPE(DEFINE_GEMV)

// Groups the pairs by expert: sorted[offsets[e] .. offsets[e+1]] are the pairs of expert e, in any order.
// One block of 1024; E <= 1024.
extern "C" __global__ void sort_by_expert(const uint32_t* ids, uint32_t* sorted, uint32_t* offsets, int pairs, int experts) {
    __shared__ uint32_t count[1024], next[1024];
    for (int e = threadIdx.x; e < experts; e += blockDim.x) count[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) atomicAdd(&count[ids[p]], 1u);
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t start = 0;
        for (int e = 0; e < experts; ++e) {
            offsets[e] = next[e] = start;
            start += count[e];
        }
        offsets[experts] = start;
    }
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) sorted[atomicAdd(&next[ids[p]], 1u)] = p;
}

// One tile: TILE_R weight rows × TILE_P pairs of one expert, four warps of 32×32, K in steps of one MXFP4 block.
// grid (ceil(R / TILE_R), ceil(pairs / TILE_P) + E), block 128. A y index past the last tile ends at once.
constexpr int TILE_R = 64, TILE_P = 64, STEP = 32, PITCH = STEP + 8;

template <typename T> __device__ void load_weights(const Mxfp4& w, T* tile, size_t first_row, int valid, int group, int groups) {
    // 128 threads: half a block of 16 values each. E2M1 × 2^k is exact in bf16; in f16 only within its range.
    const int r = threadIdx.x / 2, part = threadIdx.x % 2;
    T* to = tile + r * PITCH + part * 16;
    if (r >= valid) {
        for (int i = 0; i < 16; ++i) to[i] = from_float<T>(0.0f);
        return;
    }
    const size_t block = (first_row + r) * groups + group;
    const uint2 packed = *reinterpret_cast<const uint2*>(w.blocks + block * 16 + part * 8);
    const float scale = e8m0(w.scales[block]);
#pragma unroll
    for (int i = 0; i < 16; ++i) to[i] = from_float<T>(e2m1((i < 8 ? packed.x : packed.y) >> (4 * (i % 8)) & 15) * scale);
}

template <typename T>
__device__ void expert_gemm(const Mxfp4& w, const T* bias, const T* x, const uint32_t* sorted, const uint32_t* offsets, T* out, int rows,
                            int columns, int pairs_per_x, int experts) {
    // Which expert and which of its tiles this block is: walk the (few) experts.
    int expert = 0, tile_index = blockIdx.y;
    for (; expert < experts; ++expert) {
        const int tiles = (offsets[expert + 1] - offsets[expert] + TILE_P - 1) / TILE_P;
        if (tile_index < tiles) break;
        tile_index -= tiles;
    }
    if (expert == experts) return;
    const int first_pair = offsets[expert] + tile_index * TILE_P;
    const int pairs = min(TILE_P, (int)offsets[expert + 1] - first_pair);
    const int first_row = blockIdx.x * TILE_R, valid_rows = min(TILE_R, rows - first_row), groups = columns / 32;
    const size_t weight_row = (size_t)expert * rows + first_row;

    using namespace nvcuda;
    // The inputs of a step and, after the last one, the results share the same memory.
    __shared__ __align__(32) unsigned char buffer[TILE_P * (TILE_R + 4) * sizeof(float)];
    static_assert(sizeof(buffer) >= (TILE_R + TILE_P) * PITCH * sizeof(T));
    T *tile_w = reinterpret_cast<T*>(buffer), *tile_x = tile_w + TILE_R * PITCH;
    float* tile_out = reinterpret_cast<float*>(buffer);
    const int warp = threadIdx.x / 32, warp_r = (warp / 2) * 32, warp_p = (warp % 2) * 32;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[2][2];
    for (auto& line : sum)
        for (auto& fragment : line) wmma::fill_fragment(fragment, 0.0f);

    const int p = threadIdx.x / 2, part = threadIdx.x % 2;
    const T* source = p < pairs ? x + (size_t)(sorted[first_pair + p] / pairs_per_x) * columns + part * 16 : nullptr;
    for (int group = 0; group < groups; ++group) {
        load_weights(w, tile_w, weight_row, valid_rows, group, groups);
        uint4* to = reinterpret_cast<uint4*>(tile_x + p * PITCH + part * 16);
        const uint4* from = reinterpret_cast<const uint4*>(source + group * 32);
        to[0] = source ? from[0] : make_uint4(0, 0, 0, 0);
        to[1] = source ? from[1] : make_uint4(0, 0, 0, 0);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> a[2];
            wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major> b[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                wmma::load_matrix_sync(a[i], tile_w + (warp_r + 16 * i) * PITCH + k, PITCH);
                wmma::load_matrix_sync(b[i], tile_x + (warp_p + 16 * i) * PITCH + k, PITCH);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) wmma::mma_sync(sum[i][j], a[i], b[j], sum[i][j]);
        }
        __syncthreads();
    }
    // sum[i][j] is (row, pair); stored column-major it lands as [pair][row], the order of `out`.
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
            wmma::store_matrix_sync(tile_out + (warp_p + 16 * j) * (TILE_R + 4) + warp_r + 16 * i, sum[i][j], TILE_R + 4,
                                    wmma::mem_col_major);
    __syncthreads();
    for (int i = threadIdx.x; i < pairs * TILE_R; i += blockDim.x) {
        const int pair = i / TILE_R, row = i % TILE_R;
        if (row >= valid_rows) continue;
        const float value = tile_out[pair * (TILE_R + 4) + row] + (bias ? to_float(bias[weight_row + row]) : 0.0f);
        out[(size_t)sorted[first_pair + pair] * rows + first_row + row] = from_float<T>(value);
    }
}

#define DEFINE_GEMM(T, SUFFIX)                                                                                              \
    extern "C" __global__ void __launch_bounds__(128)                                                                       \
        expert_gemm_mxfp4_##SUFFIX(const uint8_t* blocks, const uint8_t* scales, const T* bias, const T* x,                 \
                                   const uint32_t* sorted, const uint32_t* offsets, T* out, int rows, int columns,          \
                                   int pairs_per_x, int experts) {                                                          \
        expert_gemm<T>({blocks, scales}, bias, x, sorted, offsets, out, rows, columns, pairs_per_x, experts);        \
    }
DEFINE_GEMM(__half, f16)
DEFINE_GEMM(__nv_bfloat16, bf16)
