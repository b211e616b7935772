// The MLP of routed experts with MXFP4 weights.
// With few pairs per expert, expert_few_pairs.cu usually computes the products instead (see moe/mod.rs).
// The matrix products run on tensor cores. Weights are packed in shared memory and unpacked in registers.
//
//   x [tokens, hidden] -> spread_tokens -> expert_gate_up -> h [pairs, intermediate]
//   h -> expert_down -> y [pairs, hidden]
//   y -> expert_combine, expert_add_norm or exchange_add_norm, which compute Σ weights[t, c] · y[t, c] over c
//
// A pair is a token and one of its `chosen` experts.
// mxfp4_tiles.cuh describes the layout of weights, x and h.
// The rows of y are in the original order of the pairs, not in the order of `sorted`.
#include "headers/block_sum.cuh"
#include "headers/pdl.cuh"
#include "moe/expert_outputs.cuh"
#include "moe/expert_product_mma.cuh"
#include "moe/expert_product_wgmma.cuh"
#include "moe/mxfp4_tiles.cuh"

// ---- spreading and combining ----

// Copies each row of x, rounded to T and in fragment order, to the rows of all `chosen` pairs of the token.
//   x: f32 [tokens, columns]
//   rows: u32 [tokens · chosen], the row of each pair in `out`
//   out: T, tiled [ceil(columns / 64)][tiled_rows][64]
//   grid.x · block: at least one warp per token; grid.y: the number of warps that share the columns of a token
//   bytes moved: 4 · tokens · columns + 2 · pairs · columns
// The kernel loads x before it waits for the previous kernel.
// The caller guarantees that a kernel before the previous kernel computed x, so x is complete when this kernel starts
// (see pdl.cuh).
template <typename T>
__device__ void spread_tokens(const float* x, const uint32_t* rows, T* out, int tokens, int columns, int tiled_rows,
                              int chosen) {
    const int token = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int first = 32 * blockIdx.y, step = 32 * gridDim.y, segments = (columns + 63) / 64 * 8;
    const float2* from = reinterpret_cast<const float2*>(x) + (size_t)min(token, tokens - 1) * (columns / 2);
    constexpr int HELD = 2;  // segments per lane that are loaded before the wait
    uint4 held[HELD];
#pragma unroll
    for (int h = 0; h < HELD; ++h) held[h] = fragment_segment<T>(from, first + h * step + lane, columns);
    pdl_wait();
    pdl_launch_dependents();
    if (token >= tokens) return;
    const uint32_t own_row = lane < chosen ? rows[(size_t)token * chosen + lane] : 0;
    const auto store = [&](int i, const uint4& value) {
        uint4* to = reinterpret_cast<uint4*>(out) + (size_t)(i / 8) * tiled_rows * 8;
        for (int c = 0; c < chosen; ++c) {
            const int row = __shfl_sync(0xffffffffu, own_row, c);
            if (i < segments) to[(size_t)row * 8 + (i ^ row) % 8] = value;
        }
    };
#pragma unroll
    for (int h = 0; h < HELD; ++h) store(first + h * step + lane, held[h]);
#pragma unroll 3
    for (int base = first + HELD * step; base < segments; base += step)
        store(base + lane, fragment_segment<T>(from, base + lane, columns));
}

// Computes x[t] = Σ weights[t, c] · y[t, c] over c.
//   y: T [tokens, chosen, columns] in fragment order
//   weights: f32 [tokens, chosen]
//   x: OUT [tokens, columns]; OUT is f32 or T; n = tokens · columns / 8
//   grid: ceil(n / 256); block: 256
//   bytes moved: tokens · columns · (sizeof(OUT) + 2 · chosen)
template <typename T, typename OUT>
__device__ void expert_combine(const T* y, const float* weights, OUT* x, int n, int columns, int chosen) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    pdl_wait();
    pdl_launch_dependents();
    if (i >= n) return;
    const int segments = columns / 8, token = i / segments, segment = i % segments;
    const size_t first = (size_t)(i / 4) * 16 + i % 4;  // the first of this thread's four column pairs
    float2 sum[4] = {};
    add_outputs(sum, y, weights, token, segment, segments, chosen);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if constexpr (sizeof(OUT) == 4)
            reinterpret_cast<float2*>(x)[first + 4 * k] = sum[k];
        else
            reinterpret_cast<uint32_t*>(x)[first + 4 * k] = pack<OUT>(sum[k].x, sum[k].y);
    }
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
    // A row has up to HELD parts. A thread holds one segment of each part: 8 columns, in four column pairs.
    constexpr int HELD = EXPERT_NORM_COLUMNS / (8 * EXPERT_NORM_THREADS);
    __shared__ float scratch[32];
    const int segments = columns / 8, token = blockIdx.x;
    const size_t row = (size_t)token * (columns / 2);  // in column pairs
    const auto each_segment = [&](auto use) {
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            const int i = threadIdx.x + h * EXPERT_NORM_THREADS;
            if (i < segments) use(h, i, i / 4 * 16 + i % 4);  // part, segment, and first column pair of the segment
        }
    };
    float2 v[HELD][4], factors[HELD][4];
    each_segment([&](int h, int, int first) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            v[h][k] = reinterpret_cast<const float2*>(x)[row + first + 4 * k];
            factors[h][k] = reinterpret_cast<const float2*>(norm_weight)[first + 4 * k];
        }
    });
    pdl_wait();
    pdl_launch_dependents();
    float squares = 0.0f;
    each_segment([&](int h, int i, int first) {
        float2 added[4] = {};
        add_outputs(added, y, weights, token, i, segments, chosen);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            v[h][k].x += added[k].x, v[h][k].y += added[k].y;
            squares += v[h][k].x * v[h][k].x + v[h][k].y * v[h][k].y;
            reinterpret_cast<float2*>(sum)[row + first + 4 * k] = v[h][k];
        }
    });
    const float scale = rsqrtf(block_sum(squares, scratch) / columns + eps);
    each_segment([&](int h, int, int first) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float2 out = make_float2(v[h][k].x * scale * factors[h][k].x, v[h][k].y * scale * factors[h][k].y);
            if constexpr (sizeof(OUT) == 4)
                reinterpret_cast<float2*>(normed)[row + first + 4 * k] = out;
            else
                reinterpret_cast<uint32_t*>(normed)[row + first + 4 * k] = pack<OUT>(out.x, out.y);
        }
    });
}

// ---- products ----

// The inputs and the output of each product:
//   gate_up: tiled x, paired weights, bias [experts, 2 · intermediate] -> tiled h [pairs, intermediate]
//     rows = 2 · intermediate, columns = hidden
//   down: tiled h, plain weights, bias [experts, hidden] -> y [pairs, hidden]
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
    DEFINE_WGMMA_PRODUCT(T, SUFFIX##_slim, Slim)                                                                       \
    DEFINE_WGMMA_PRODUCT(T, SUFFIX##_narrow, Narrow)                                                                   \
    DEFINE_WGMMA_PRODUCT(T, SUFFIX##_wide, Wide)
DEFINE(__half, f16)
DEFINE(__nv_bfloat16, bf16)
