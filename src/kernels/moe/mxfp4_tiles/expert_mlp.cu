// The MLP of routed experts with MXFP4 weights.
// With few pairs per expert, expert_few_pairs.cu usually computes the products instead (see moe/mod.rs).
// The matrix products run on tensor cores. Weights stay packed in shared memory, and warps unpack them in registers.
//
//   x [tokens, hidden] -> spread_tokens -> expert_gate_up -> h [pairs, intermediate]
//   h -> expert_down -> y [pairs, hidden]
//   y -> expert_combine, expert_add_norm or exchange_add_norm, which compute Σ weights[t, c] · y[t, c] over c
//
// A pair is a token and one of its `chosen` experts.
// tiles.cuh describes the layout of weights, x and h.
// The rows of y are in the original order of the pairs, not in the order of `sorted`.
#include "headers/block_sum.cuh"
#include "headers/pdl.cuh"
#include "moe/mxfp4_tiles/expert_outputs.cuh"
#include "moe/mxfp4_tiles/expert_product_mma.cuh"
#include "moe/mxfp4_tiles/expert_product_wgmma.cuh"
#include "moe/mxfp4_tiles/tiles.cuh"

// ---- spreading and combining ----

// Copies each row of x, rounded to T and in fragment order, to the rows of all `chosen` pairs of the token.
//   x: f32 [tokens, columns]
//   rows: u32 [tokens · chosen], the row of each pair in `out`
//   out: T, tiled [ceil(columns / 64)][tiled_rows][64]
//   grid.x · block: at least one warp per token; grid.y: the number of warps that share the columns of a token
//   bytes moved: 4 · tokens · columns + 2 · pairs · columns
// The kernel starts loading x before it waits for the previous kernel.
// The caller guarantees that a kernel before the previous kernel computed x, so x is complete when this kernel starts
// (see pdl.cuh).
template <typename T>
__device__ void spread_tokens(const float* x, const uint32_t* rows, T* out, int tokens, int columns, int tiled_rows,
                              int chosen) {
    const int token = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int first = 32 * blockIdx.y, stride = 32 * gridDim.y, segments = (columns + 63) / 64 * 8;
    const float2* from = reinterpret_cast<const float2*>(x) + (size_t)min(token, tokens - 1) * (columns / 2);
    constexpr int HELD_SEGMENTS = 2;  // segments per lane that are loaded before the wait
    uint4 held[HELD_SEGMENTS];
#pragma unroll
    for (int h = 0; h < HELD_SEGMENTS; ++h) held[h] = fragment_segment<T>(from, first + h * stride + lane, columns);
    pdl_wait();
    pdl_launch_dependents();
    if (token >= tokens) return;
    const uint32_t own_row = lane < chosen ? rows[(size_t)token * chosen + lane] : 0;
    const auto store = [&](int i, const uint4& value) {
        uint4* to = reinterpret_cast<uint4*>(out) + (size_t)(i / 8) * tiled_rows * 8;
        for (int c = 0; c < chosen; ++c) {
            const int row = __shfl_sync(ALL_LANES, own_row, c);
            if (i < segments) to[(size_t)row * 8 + (i ^ row) % 8] = value;
        }
    };
#pragma unroll
    for (int h = 0; h < HELD_SEGMENTS; ++h) store(first + h * stride + lane, held[h]);
#pragma unroll 3
    for (int base = first + HELD_SEGMENTS * stride; base < segments; base += stride)
        store(base + lane, fragment_segment<T>(from, base + lane, columns));
}

// Loads or stores segment `index`: elements 8 · index to 8 · index + 7. T is f16, bf16 or f32.
__device__ __forceinline__ void load_segment(const float* from, size_t index, float2 (&v)[4]) {
    const float4* quads = reinterpret_cast<const float4*>(from) + 2 * index;
    const float4 low = quads[0], high = quads[1];
    v[0] = {low.x, low.y};
    v[1] = {low.z, low.w};
    v[2] = {high.x, high.y};
    v[3] = {high.z, high.w};
}
template <typename T> __device__ __forceinline__ void store_segment(T* to, size_t index, const float2 (&v)[4]) {
    if constexpr (sizeof(T) == 4) {
        float4* quads = reinterpret_cast<float4*>(to) + 2 * index;
        quads[0] = {v[0].x, v[0].y, v[1].x, v[1].y};
        quads[1] = {v[2].x, v[2].y, v[3].x, v[3].y};
    } else {
        const auto packed = [&](int k) { return pack<T>(v[k].x, v[k].y); };
        reinterpret_cast<uint4*>(to)[index] = make_uint4(packed(0), packed(1), packed(2), packed(3));
    }
}

// Computes x[t] = Σ weights[t, c] · y[t, c] over c.
//   y: T [tokens, chosen, columns]
//   weights: f32 [tokens, chosen]
//   x: OUT [tokens, columns]; OUT is f32 or T; n = tokens · columns / 8
//   grid: ceil(n / ELEMENT_THREADS); block: ELEMENT_THREADS
//   bytes moved: tokens · columns · (sizeof(OUT) + 2 · chosen)
template <typename T, typename OUT>
__device__ void expert_combine(const T* y, const float* weights, OUT* x, int n, int columns, int chosen) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    pdl_wait();
    pdl_launch_dependents();
    if (i >= n) return;
    const int segments = columns / 8, token = i / segments, segment = i % segments;
    float2 sum[4] = {};
    add_outputs(sum, y, weights, token, segment, segments, chosen);
    store_segment(x, i, sum);
}

// Adds the weighted expert outputs of each token to x, and normalizes the sum (RMSNorm):
// sum[t] = x[t] + Σ weights[t, c] · y[t, c] over c, and normed = sum / sqrt(mean(sum²) + eps) · norm_weight.
//   x, sum: f32 [tokens, columns]; y, weights: as in expert_combine
//   norm_weight: f32 [columns]
//   normed: OUT [tokens, columns]; OUT is f32 or T
//   columns: a multiple of 32, at most EXPERT_NORM_COLUMNS
//   grid: tokens; block: EXPERT_NORM_THREADS
//   bytes moved: tokens · columns · (8 + sizeof(OUT) + 2 · chosen)
// The kernel loads x before it waits for the previous kernel, which computes y.
// The caller guarantees that a kernel before the previous kernel computed x, so x is complete when this kernel starts
// (see pdl.cuh).
template <typename T, typename OUT>
__device__ void expert_add_norm(const float* x, const T* y, const float* weights, const float* norm_weight, float* sum,
                                OUT* normed, int columns, int chosen, float eps) {
    // A row has up to ROW_PARTS parts. A thread holds one segment of each part: 8 columns.
    constexpr int ROW_PARTS = EXPERT_NORM_COLUMNS / (8 * EXPERT_NORM_THREADS);
    __shared__ float scratch[32];
    const int segments = columns / 8, token = blockIdx.x;
    const size_t row = (size_t)token * segments;  // in segments
    const auto each_segment = [&](auto use) {
#pragma unroll
        for (int h = 0; h < ROW_PARTS; ++h) {
            const int i = threadIdx.x + h * EXPERT_NORM_THREADS;
            if (i < segments) use(h, i);  // part and segment
        }
    };
    float2 v[ROW_PARTS][4], factors[ROW_PARTS][4];
    each_segment([&](int h, int i) { load_segment(x, row + i, v[h]), load_segment(norm_weight, i, factors[h]); });
    pdl_wait();
    pdl_launch_dependents();
    float squares = 0.0f;
    each_segment([&](int h, int i) {
        float2 added[4] = {};
        add_outputs(added, y, weights, token, i, segments, chosen);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            v[h][k].x += added[k].x;
            v[h][k].y += added[k].y;
            squares += v[h][k].x * v[h][k].x + v[h][k].y * v[h][k].y;
        }
        store_segment(sum, row + i, v[h]);
    });
    const float scale = rsqrtf(block_sum(squares, scratch) / columns + eps);
    each_segment([&](int h, int i) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
            v[h][k] = make_float2(v[h][k].x * scale * factors[h][k].x, v[h][k].y * scale * factors[h][k].y);
        store_segment(normed, row + i, v[h]);
    });
}

// ---- products ----

// The inputs and the output of each product:
//   gate_up: tiled x, paired weights, bias [experts, 2 · intermediate] -> tiled h [pairs, intermediate]
//     rows = 2 · intermediate, columns = hidden
//   down: tiled h, grouped weights, bias [experts, hidden] -> y [pairs, hidden]
//     rows = hidden, columns = intermediate
// `hidden` and `intermediate` are multiples of 32, the size of an MXFP4 block.
#define DEFINE_MMA_PRODUCT(T, SUFFIX, SHAPE)                                                                           \
    extern "C" __global__ void __launch_bounds__(EXPERT_MMA_THREADS, 1)                                                \
        expert_gate_up_##SUFFIX(const uint8_t* blocks, const uint8_t* scales, const T* bias, const T* x,               \
                                const uint32_t* sorted, const uint32_t* offsets, T* h, int rows, int columns,          \
                                int tiled_rows, int experts, float limit) {                                            \
        expert_product<SHAPE, T, true>({blocks, scales, rows, columns}, {bias, sorted, h, tiled_rows, limit}, x,       \
                                       offsets, experts);                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(EXPERT_MMA_THREADS, 1)                                                \
        expert_down_##SUFFIX(const uint8_t* blocks, const uint8_t* scales, const T* bias, const T* h,                  \
                             const uint32_t* sorted, const uint32_t* offsets, T* y, int rows, int columns,             \
                             int tiled_rows, int experts) {                                                            \
        expert_product<SHAPE, T, false>({blocks, scales, rows, columns}, {bias, sorted, y, tiled_rows, 0.0f}, h,       \
                                        offsets, experts);                                                             \
    }
// The wgmma kernels take tensor maps of the blocks and scales, instead of their addresses.
#define DEFINE_WGMMA_PRODUCT(T, SUFFIX, SHAPE)                                                                         \
    extern "C" __global__ void __launch_bounds__(EXPERT_WGMMA_THREADS, SHAPE::BLOCKS)                                  \
        expert_gate_up_##SUFFIX(const __grid_constant__ TensorMap blocks, const __grid_constant__ TensorMap scales,    \
                                const T* bias, const T* x, const uint32_t* sorted, const uint32_t* offsets, T* h,      \
                                int rows, int columns, int tiled_rows, int experts, float limit) {                     \
        expert_product_wgmma<SHAPE, T, true>({blocks, scales, rows, columns}, {bias, sorted, h, tiled_rows, limit}, x, \
                                             offsets, experts);                                                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(EXPERT_WGMMA_THREADS, SHAPE::BLOCKS)                                  \
        expert_down_##SUFFIX(const __grid_constant__ TensorMap blocks, const __grid_constant__ TensorMap scales,       \
                             const T* bias, const T* h, const uint32_t* sorted, const uint32_t* offsets, T* y,         \
                             int rows, int columns, int tiled_rows, int experts) {                                     \
        expert_product_wgmma<SHAPE, T, false>({blocks, scales, rows, columns}, {bias, sorted, y, tiled_rows, 0.0f}, h, \
                                              offsets, experts);                                                       \
    }
#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void spread_tokens_##SUFFIX(const float* x, const uint32_t* rows, T* out, int tokens,        \
                                                      int columns, int tiled_rows, int chosen) {                       \
        spread_tokens<T>(x, rows, out, tokens, columns, tiled_rows, chosen);                                           \
    }                                                                                                                  \
    extern "C" __global__ void expert_combine_##SUFFIX(const T* y, const float* weights, float* x, int n, int columns, \
                                                       int chosen) {                                                   \
        expert_combine<T>(y, weights, x, n, columns, chosen);                                                          \
    }                                                                                                                  \
    extern "C" __global__ void expert_combine_rounded_##SUFFIX(const T* y, const float* weights, T* x, int n,          \
                                                               int columns, int chosen) {                              \
        expert_combine<T>(y, weights, x, n, columns, chosen);                                                          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(EXPERT_NORM_THREADS)                                                  \
        expert_add_norm_##SUFFIX(const float* x, const T* y, const float* weights, const float* norm_weight,           \
                                 float* sum, float* normed, int columns, int chosen, float eps) {                      \
        expert_add_norm(x, y, weights, norm_weight, sum, normed, columns, chosen, eps);                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(EXPERT_NORM_THREADS)                                                  \
        expert_add_norm_rounded_##SUFFIX(const float* x, const T* y, const float* weights, const float* norm_weight,   \
                                         float* sum, T* normed, int columns, int chosen, float eps) {                  \
        expert_add_norm(x, y, weights, norm_weight, sum, normed, columns, chosen, eps);                                \
    }                                                                                                                  \
    DEFINE_MMA_PRODUCT(T, SUFFIX##_t32, MmaShape<32>)                                                                  \
    DEFINE_MMA_PRODUCT(T, SUFFIX##_t64, MmaShape<64>)                                                                  \
    DEFINE_MMA_PRODUCT(T, SUFFIX##_t128, MmaShape<128>)                                                                \
    DEFINE_WGMMA_PRODUCT(T, SUFFIX##_small_tile, SmallTile)                                                            \
    DEFINE_WGMMA_PRODUCT(T, SUFFIX##_medium_tile, MediumTile)                                                          \
    DEFINE_WGMMA_PRODUCT(T, SUFFIX##_large_tile, LargeTile)
DEFINE(__half, f16)
DEFINE(__nv_bfloat16, bf16)
