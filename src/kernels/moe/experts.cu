// Matrix products of routed experts: out[p] = W[ids[p]] · x[p / pairs_per_x] + bias[ids[p]] for each pair p.
//   blocks: u8 [experts, rows, columns / 32, 16], E2M1 values; the low half of a byte belongs to the even column
//   scales: u8 [experts, rows, columns / 32], the scale of each block; byte s is 2^(s - 127), or NaN if s is 255
//   weights: T [experts, rows, columns]; expert_gemv_dense takes `weights` instead of `blocks`, and ignores `scales`
//   bias: T [experts, rows] or null
//   x: T [pairs / pairs_per_x, columns]; `pairs_per_x` consecutive pairs share one row of x
//   ids: u32 [pairs], the expert of each pair (expert_gemv only); an id past the last expert selects the last expert
//   sorted, offsets: the pairs sorted by expert, see sort_by_expert.cu (expert_gemm only)
//   out: T [pairs, rows]
//
// expert_gemv reads an expert's weights once per pair. expert_gemm reads them once per tile of up to 64 pairs, but
// supports only MXFP4 weights, and only f16 and bf16 as T.
// moe/mod.rs has the conditions under which each kernel is used.
#include "constants.cuh"
#include "headers/common.cuh"
#include <mma.h>

__device__ __forceinline__ float e8m0(uint8_t scale) {
    // The scale byte is the exponent field of the f32 result, except that 0 is the subnormal 2^-127 and 255 is NaN.
    return scale == 0 ? __int_as_float(0x00400000) : scale == 255 ? NAN : __int_as_float((int)scale << 23);
}

// Returns the E2M1 value with the bits `nibble`: 0, 0.5, 1, 1.5, 2, 3, 4 or 6, or the negative of one of these.
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

// Returns one lane's part of the dot product of x and a weight row. `row` is an index into the rows of all experts.
// With MXFP4 weights, the lane processes blocks `lane`, `lane` + 32, ...
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

// In expert_gemv, one warp computes one output element.
//   grid: (ceil(rows / 8), pairs); block: 256, one warp per weight row
//   bytes moved: the weights of one expert for each pair
template <typename W, typename T>
__device__ void expert_gemv(W w, const T* bias, const T* x, const uint32_t* ids, T* out, int rows, int columns,
                            int pairs_per_x, int experts) {
    const int pair = blockIdx.y, row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const size_t expert_row = (size_t)min(ids[pair], (uint32_t)experts - 1) * rows + row;
    float sum = warp_sum(lane_dot(w, expert_row, x + (size_t)(pair / pairs_per_x) * columns, columns, lane));
    if (lane == 0) out[(size_t)pair * rows + row] = from_float<T>(sum + (bias ? to_float(bias[expert_row]) : 0.0f));
}

#define DEFINE_GEMV(T, SUFFIX)                                                                                         \
    extern "C" __global__ void expert_gemv_mxfp4_##SUFFIX(const uint8_t* blocks, const uint8_t* scales, const T* bias, \
                                                          const T* x, const uint32_t* ids, T* out, int rows,           \
                                                          int columns, int pairs_per_x, int experts) {                 \
        expert_gemv<Mxfp4, T>({blocks, scales}, bias, x, ids, out, rows, columns, pairs_per_x, experts);               \
    }                                                                                                                  \
    extern "C" __global__ void expert_gemv_dense_##SUFFIX(const T* weights, const uint8_t*, const T* bias, const T* x, \
                                                          const uint32_t* ids, T* out, int rows, int columns,          \
                                                          int pairs_per_x, int experts) {                              \
        expert_gemv<Dense<T>, T>({weights}, bias, x, ids, out, rows, columns, pairs_per_x, experts);                   \
    }
FOR_EACH_DTYPE(DEFINE_GEMV)

// In expert_gemm, a thread block computes at most EXPERT_GEMM_ROWS weight rows × EXPERT_GEMM_PAIRS pairs of one expert.
// Each of the four warps computes 32 × 32 results. Each K step covers one MXFP4 block of 32 columns.
//   grid: (ceil(rows / EXPERT_GEMM_ROWS), ceil(pairs / EXPERT_GEMM_PAIRS) + experts)
//     A thread block past the last tile exits immediately.
//   block: EXPERT_GEMM_THREADS
//   bytes moved: an expert's weights once per tile of pairs
constexpr int K_STEP = 32, STRIDE = K_STEP + 8, OUT_STRIDE = EXPERT_GEMM_ROWS + 4;

template <typename T>
__device__ void load_weights(const Mxfp4& w, T* tile, size_t first_row, int valid, int group, int groups) {
    // Each of the 128 threads unpacks half an MXFP4 block: 16 values.
    // The product of an E2M1 value and its scale is exact in T (bf16 or f16), unless it overflows or underflows.
    const int r = threadIdx.x / 2, half = threadIdx.x % 2;
    T* to = tile + r * STRIDE + half * 16;
    if (r >= valid) {
        for (int i = 0; i < 16; ++i) to[i] = from_float<T>(0.0f);
        return;
    }
    const size_t block = (first_row + r) * groups + group;
    const uint2 packed = *reinterpret_cast<const uint2*>(w.blocks + block * 16 + half * 8);
    const float scale = e8m0(w.scales[block]);
#pragma unroll
    for (int i = 0; i < 16; ++i)
        to[i] = from_float<T>(e2m1((i < 8 ? packed.x : packed.y) >> (4 * (i % 8)) & 15) * scale);
}

template <typename T>
__device__ void expert_gemm(const Mxfp4& w, const T* bias, const T* x, const uint32_t* sorted, const uint32_t* offsets,
                            T* out, int rows, int columns, int pairs_per_x, int experts) {
    // Find this block's expert and tile of pairs.
    int expert = 0, tile_index = blockIdx.y;
    for (; expert < experts; ++expert) {
        const int tiles = (offsets[expert + 1] - offsets[expert] + EXPERT_GEMM_PAIRS - 1) / EXPERT_GEMM_PAIRS;
        if (tile_index < tiles) break;
        tile_index -= tiles;
    }
    if (expert == experts) return;
    const int first_pair = offsets[expert] + tile_index * EXPERT_GEMM_PAIRS;
    const int pairs = min(EXPERT_GEMM_PAIRS, (int)offsets[expert + 1] - first_pair);
    const int first_row = blockIdx.x * EXPERT_GEMM_ROWS, valid_rows = min(EXPERT_GEMM_ROWS, rows - first_row);
    const int groups = columns / 32;
    const size_t weight_row = (size_t)expert * rows + first_row;

    using namespace nvcuda;
    // During the loop, the buffer holds the weights and the inputs of one K step. After the loop, it holds the results.
    __shared__ __align__(32) unsigned char buffer[EXPERT_GEMM_PAIRS * OUT_STRIDE * sizeof(float)];
    static_assert(sizeof(buffer) >= (EXPERT_GEMM_ROWS + EXPERT_GEMM_PAIRS) * STRIDE * sizeof(T));
    T *tile_w = reinterpret_cast<T*>(buffer), *tile_x = tile_w + EXPERT_GEMM_ROWS * STRIDE;
    float* tile_out = reinterpret_cast<float*>(buffer);
    const int warp = threadIdx.x / 32, warp_r = (warp / 2) * 32, warp_p = (warp % 2) * 32;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[2][2];
    for (auto& row : sum)
        for (auto& fragment : row) wmma::fill_fragment(fragment, 0.0f);

    const int p = threadIdx.x / 2, half = threadIdx.x % 2;
    const T* source = p < pairs ? x + (size_t)(sorted[first_pair + p] / pairs_per_x) * columns + half * 16 : nullptr;
    for (int group = 0; group < groups; ++group) {
        load_weights(w, tile_w, weight_row, valid_rows, group, groups);
        uint4* to = reinterpret_cast<uint4*>(tile_x + p * STRIDE + half * 16);
        const uint4* from = reinterpret_cast<const uint4*>(source + group * 32);
        to[0] = source ? from[0] : make_uint4(0, 0, 0, 0);
        to[1] = source ? from[1] : make_uint4(0, 0, 0, 0);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < K_STEP; k += 16) {
            wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> a[2];
            wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major> b[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                wmma::load_matrix_sync(a[i], tile_w + (warp_r + 16 * i) * STRIDE + k, STRIDE);
                wmma::load_matrix_sync(b[i], tile_x + (warp_p + 16 * i) * STRIDE + k, STRIDE);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) wmma::mma_sync(sum[i][j], a[i], b[j], sum[i][j]);
        }
        __syncthreads();
    }
    // sum[i][j] has the layout [row][pair]. A column-major store turns it into [pair][row], the layout of `out`.
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
            wmma::store_matrix_sync(tile_out + (warp_p + 16 * j) * OUT_STRIDE + warp_r + 16 * i, sum[i][j], OUT_STRIDE,
                                    wmma::mem_col_major);
    __syncthreads();
    for (int i = threadIdx.x; i < pairs * EXPERT_GEMM_ROWS; i += blockDim.x) {
        const int pair = i / EXPERT_GEMM_ROWS, row = i % EXPERT_GEMM_ROWS;
        if (row >= valid_rows) continue;
        const float b = bias ? to_float(bias[weight_row + row]) : 0.0f;
        out[(size_t)sorted[first_pair + pair] * rows + first_row + row] =
            from_float<T>(tile_out[pair * OUT_STRIDE + row] + b);
    }
}

#define DEFINE_GEMM(T, SUFFIX)                                                                                         \
    extern "C" __global__ void __launch_bounds__(EXPERT_GEMM_THREADS)                                                  \
        expert_gemm_mxfp4_##SUFFIX(const uint8_t* blocks, const uint8_t* scales, const T* bias, const T* x,            \
                                   const uint32_t* sorted, const uint32_t* offsets, T* out, int rows, int columns,     \
                                   int pairs_per_x, int experts) {                                                     \
        expert_gemm<T>({blocks, scales}, bias, x, sorted, offsets, out, rows, columns, pairs_per_x, experts);          \
    }
DEFINE_GEMM(__half, f16)
DEFINE_GEMM(__nv_bfloat16, bf16)
