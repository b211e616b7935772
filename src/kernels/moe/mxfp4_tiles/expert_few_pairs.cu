// The products of routed experts with MXFP4 weights, for few (token, expert) pairs per expert, as in small batches.
// product_kernel.rs has the limit.
//
//   x [tokens, hidden] -> expert_few_pairs_gate_up -> h [pairs, intermediate]
//   -> expert_few_pairs_down -> y [pairs, hidden]
//
// tiles.cuh describes the layout of weights and h. The rows of y are in the original order of the pairs.
//
// With few pairs per expert, reading and unpacking the weights takes longer than the MMAs.
// Each warp therefore reads its share of the weights directly into registers, and unpacks each weight only once for all
// pairs of a tile.
// With few pairs, mma.sync needs fewer cycles per weight than wgmma, so both kernels use only mma.sync.
//
// A row pair is two row tiles (32 weight rows).
// A work item (work_items.cuh) multiplies a tile of (token, expert) pairs by one row pair of its expert.
// The thread blocks divide all work items evenly. For each tile, a block divides its row pairs evenly among its warps.
// The share of a warp can start or end inside a row pair.
// The warp that starts a row pair adds the partial sums of the warps that continue this row pair.
// The shares of the warps depend on the routing of all tokens, and the order of the additions depends on the shares.
// The last bits of a token's results can therefore depend on the other tokens in the batch.
#include "headers/async_copy.cuh"
#include "headers/pdl.cuh"
#include "moe/mxfp4_tiles/tiles.cuh"

constexpr int WARPS = EXPERT_FEW_PAIRS_THREADS / 32;
// A lane holds the weights of K_STEPS column tiles in registers, and multiplies one tile while the others are loading.
constexpr int K_STEPS = EXPERT_FEW_PAIRS_K_STEPS;

// The sizes of a product. `RawSizes` in expert_few_pairs.rs mirrors this struct.
struct Sizes {
    int rows, columns;  // of each expert's matrix
    int tiled_rows;     // of h (see tiles.cuh)
    int experts;
    int chosen;     // experts per token
    int max_pairs;  // per tile: 8, 16 or 24; an expert with more pairs has several tiles
};
static_assert(sizeof(Sizes) == 24, "RawSizes in expert_few_pairs.rs has 24 bytes");

// The matrix of one expert. `k_steps`, the number of column tiles, is a multiple of K_STEPS.
struct Matrix {
    const uint8_t *blocks, *scales;
    int row_tiles, k_steps;
};

// The position of a lane in the weights. A bundle is K_STEPS column tiles.
// `next` moves to the next bundle of the row pair, or from the last bundle to the first bundle of the next row pair.
struct Cursor {
    const uint8_t *block, *scale;
    int bundle, bundles, k_steps;

    __device__ __forceinline__ Cursor(const Matrix& matrix, int row_pair, int bundle_, int lane)
        : bundle(bundle_), bundles(matrix.k_steps / K_STEPS), k_steps(matrix.k_steps) {
        const size_t tile = (size_t)2 * row_pair * k_steps + bundle * K_STEPS;
        block = matrix.blocks + tile * MXFP4_TILE_BYTES + lane * 16;
        scale = matrix.scales + tile * MXFP4_TILE_SCALE_BYTES + lane / 4 * 4;
    }
    // Loads the weights and scales of column tile j of this bundle, for both row tiles.
    __device__ __forceinline__ void load(int j, uint4 (&words)[2], uint32_t (&scales)[2]) const {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const size_t tile = (size_t)m * k_steps;
            words[m] = __ldcs(reinterpret_cast<const uint4*>(block + (tile + j) * MXFP4_TILE_BYTES));
            scales[m] = __ldcs(reinterpret_cast<const uint32_t*>(scale + (tile + j) * MXFP4_TILE_SCALE_BYTES));
        }
    }
    __device__ __forceinline__ void next() {
        int tiles = K_STEPS;
        if (++bundle == bundles) {  // skip the second row tile
            bundle = 0;
            tiles += k_steps;
        }
        block += tiles * MXFP4_TILE_BYTES;
        scale += tiles * MXFP4_TILE_SCALE_BYTES;
    }
};

// The sums of a row pair for 8 · N (token, expert) pairs, in the layout of mma.sync results.
template <int N> using Sums = float[2][N][4];

template <int N> __device__ __forceinline__ void clear(Sums<N>& sums) {
#pragma unroll
    for (int i = 0; i < 2 * N * 4; ++i) sums[i / (4 * N)][i / 4 % N][i % 4] = 0.0f;
}

// With up to 8 pairs (N = 1), scaling the sums of an MXFP4 block takes fewer instructions than scaling its weights.
// Unscaled weights keep the factor of convert_items: 2^-126 in bf16, 2^-14 in f16.
// x and h are multiplied by X_FACTOR, so that their products with unscaled weights are normal f32 numbers.
// Multiplying the sums by SUM_FACTOR cancels X_FACTOR and, for unscaled weights, the factor of convert_items.
template <typename T> struct Factors;
template <> struct Factors<__nv_bfloat16> {
    static constexpr float X_FACTOR = E2M1_X_FACTOR, SCALED_SUM_FACTOR = 1.0f / X_FACTOR,
                           UNSCALED_SUM_FACTOR = E2M1_SUM_FACTOR;
};
template <> struct Factors<__half> {
    static constexpr float X_FACTOR = 1.0f, SCALED_SUM_FACTOR = 1.0f, UNSCALED_SUM_FACTOR = 0x1p14f;
};
template <typename T, int N>
constexpr float SUM_FACTOR = N == 1 ? Factors<T>::UNSCALED_SUM_FACTOR : Factors<T>::SCALED_SUM_FACTOR;

// Multiplies the weights of one column tile by 8 · N rows of x or h in shared memory, and adds the products to `sums`.
// `x_low` and `x_high` are this lane's ldmatrix row addresses for the first and second block of 32 columns.
template <typename T, int N>
__device__ __forceinline__ void multiply(Sums<N>& sums, const uint4 (&words)[2], const uint32_t (&scales)[2],
                                         uint32_t x_low, uint32_t x_high) {
    uint32_t factors[2][2];
    if constexpr (N > 1) {
        scale_factors<T>(scales[0], factors[0]);
        scale_factors<T>(scales[1], factors[1]);
    }
#pragma unroll
    for (int block = 0; block < 2; ++block) {
        uint32_t b[N][4];
#pragma unroll
        for (int n = 0; n < N; ++n) load_matrices(b[n], (block ? x_high : x_low) + n * 1024);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const uint32_t low = block ? words[m].z : words[m].x, high = block ? words[m].w : words[m].y;
            uint32_t a[2][4];
            if constexpr (N == 1) {
                e2m1_items<0>(low, high, a[0]), convert_items<T>(a[0]);
                e2m1_items<1>(low, high, a[1]), convert_items<T>(a[1]);
                float part[4] = {};
                multiply_add<T>(part, a[0], b[0][0], b[0][1]);
                multiply_add<T>(part, a[1], b[0][2], b[0][3]);
                const float scale = scale_of(scales[m], 2 * block), scale8 = scale_of(scales[m], 2 * block + 1);
                sums[m][0][0] += scale * part[0];
                sums[m][0][1] += scale * part[1];
                sums[m][0][2] += scale8 * part[2];
                sums[m][0][3] += scale8 * part[3];
            } else {
                unpack_items<T, 0>(low, high, factors[m][block], a[0]);
                unpack_items<T, 1>(low, high, factors[m][block], a[1]);
#pragma unroll
                for (int k = 0; k < 2; ++k)
#pragma unroll
                    for (int n = 0; n < N; ++n) multiply_add<T>(sums[m][n], a[k], b[n][2 * k], b[n][2 * k + 1]);
            }
        }
    }
}

// Multiplies the sums of a row pair by SUM_FACTOR, adds the biases, applies the clamped SwiGLU (gate_up only), and
// stores the results.
template <typename T, bool GATE_UP, int N>
__device__ __forceinline__ void store_row_pair(const Output<T>& output, int rows, const OutputTile& tile, int row_pair,
                                               Sums<N>& sums) {
#pragma unroll
    for (int i = 0; i < 2 * N * 4; ++i) sums[i / (4 * N)][i / 4 % N][i % 4] *= SUM_FACTOR<T, N>;
    const float2 bias[2] = {row_bias<T, GATE_UP>(output, rows, tile.expert, 2 * row_pair),
                            row_bias<T, GATE_UP>(output, rows, tile.expert, 2 * row_pair + 1)};
    const ResultStore<T, GATE_UP, 2> results(output, rows, tile, 2 * row_pair);
#pragma unroll
    for (int n = 0; n < N; ++n)
        results.store(n * 8, pair_of_lane<GATE_UP>(output, tile, n * 8), {sums[0][n], sums[1][n]}, bias);
}

// Stores the sums of this warp in shared memory: float4 [WARPS][2 · N][lane].
template <int N> __device__ __forceinline__ void store_partial(float4* partials, const Sums<N>& sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2 * N; ++i)
        partials[(warp * 2 * N + i) * 32 + lane] = *reinterpret_cast<const float4*>(sums[i / N][i % N]);
}

// Adds the sums that warp `warp` has stored with store_partial to `sums`.
template <int N> __device__ __forceinline__ void add_partial(Sums<N>& sums, const float4* partials, int warp) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) {
        const float4 part = partials[(warp * 2 * N + i) * 32 + lane];
        float (&sum)[4] = sums[i / N][i % N];
        sum[0] += part.x;
        sum[1] += part.y;
        sum[2] += part.z;
        sum[3] += part.w;
    }
}

// Multiplies row pairs `first` to `last` - 1 of one expert by the tile's rows of x (gate_up) or h (down).
// Stores the results. The rows of x or h are in shared memory at address `xs`: [k_steps][8 · N rows][128 bytes].
// For down, `load_inputs` waits for the previous kernel and starts copying the rows of h.
// For gate_up, the rows of x are already in shared memory, and `load_inputs` does nothing.
template <typename T, bool GATE_UP, int N, typename LoadInputs>
__device__ __forceinline__ void multiply_row_pairs(const Matrix& matrix, const Output<T>& output, int rows,
                                                   const OutputTile& tile, int first, int last, uint32_t xs,
                                                   float4* partials, LoadInputs&& load_inputs) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int bundles = matrix.k_steps / K_STEPS, total = (last - first) * bundles;
    const auto begin = [&](int warp) { return total * warp / WARPS; };
    int left = begin(warp + 1) - begin(warp), bundle = begin(warp) % bundles, row_pair = first + begin(warp) / bundles;

    // 1. Load the first weights before `load_inputs`, which for down waits for the previous kernel.
    uint4 words[K_STEPS][2];
    uint32_t scales[K_STEPS][2];
    Cursor cursor(matrix, row_pair, bundle, lane);
    if (left > 0) {
#pragma unroll
        for (int j = 0; j < K_STEPS; ++j) cursor.load(j, words[j], scales[j]);
        cursor.next();
    }
    load_inputs();
    wait_for_copies<0>();
    __syncthreads();

    // 2. Multiply one bundle of column tiles at a time.
    constexpr int K_STEP_BYTES = N * 1024;
    const uint32_t x_start = xs + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
    uint32_t x = x_start + bundle * K_STEPS * K_STEP_BYTES;
    bool starts_here = bundle == 0, is_open = false;
    Sums<N> sums = {};
#pragma unroll 1
    for (; left > 0; --left) {
#pragma unroll
        for (int j = 0; j < K_STEPS; ++j) {
            multiply<T, N>(sums, words[j], scales[j], x + j * K_STEP_BYTES, (x ^ 64) + j * K_STEP_BYTES);
            if (left > 1) cursor.load(j, words[j], scales[j]);
        }
        cursor.next();
        x += K_STEPS * K_STEP_BYTES;
        const bool ends_here = ++bundle == bundles;
        if (!ends_here && left > 1) continue;
        if (!starts_here) {
            store_partial<N>(partials, sums);
        } else if (ends_here) {
            store_row_pair<T, GATE_UP, N>(output, rows, tile, row_pair, sums);
        } else {
            is_open = true;
        }
        if (ends_here) {
            bundle = 0;
            ++row_pair;
            starts_here = true;
            x = x_start;
            clear<N>(sums);
        }
    }

    // 3. If this warp started a row pair that later warps continued, add their partial sums and store the results.
    __syncthreads();
    if (!is_open) return;
    for (int other = warp + 1; other < WARPS && begin(other) < (row_pair - first + 1) * bundles; ++other)
        if (begin(other) != begin(other + 1)) add_partial<N>(sums, partials, other);
    store_row_pair<T, GATE_UP, N>(output, rows, tile, row_pair, sums);
}

// For gate_up: reads the tile's rows of x, f32 [tokens, columns], and stores x · X_FACTOR in shared memory as T, in
// fragment order.
template <typename T>
__device__ __forceinline__ void convert_x(const float* x, const Output<T>& output, const OutputTile& tile, int columns,
                                          int k_steps, int chosen, int padded_pairs, unsigned char* shared) {
    const int segments = k_steps * 8;
#pragma unroll 2
    for (int i = threadIdx.x; i < tile.pairs * segments; i += EXPERT_FEW_PAIRS_THREADS) {
        const int row = i / segments, segment = i % segments;
        const int token = output.sorted[tile.first_pair + row] / chosen;
        const float2* from = reinterpret_cast<const float2*>(x + (size_t)token * columns);
        unsigned char* to = shared + (segment / 8 * padded_pairs + row) * 128 + (segment ^ row) % 8 * 16;
        *reinterpret_cast<uint4*>(to) = fragment_segment<T>(from, segment, columns, Factors<T>::X_FACTOR);
    }
}

// For down: starts copying the tile's rows of tiled h to shared memory.
template <typename T>
__device__ __forceinline__ void start_copying_h(const T* h, const Output<T>& output, const OutputTile& tile,
                                                int k_steps, int padded_pairs, unsigned char* shared) {
    const uint4* from = reinterpret_cast<const uint4*>(h) + (size_t)tile.row * 8;
    const uint32_t to = shared_address(shared);
    for (int i = threadIdx.x; i < k_steps * padded_pairs * 8; i += EXPERT_FEW_PAIRS_THREADS)
        copy_async(to + i * 16,
                   from + (size_t)(i / (padded_pairs * 8)) * output.tiled_rows * 8 + i % (padded_pairs * 8));
    commit_copies();
}

// Computes gate_up or down for the pairs of all experts.
//   grid: one block per multiprocessor; block: EXPERT_FEW_PAIRS_THREADS
//   shared memory: x or h [k_steps][max_pairs][128 bytes], then the partial sums f32 [WARPS][32][max_pairs]
//   bytes moved: an expert's weights once per tile of pairs; the output once; a tile's x or h once per block that has
//     row pairs of the tile, mostly from L2
template <typename T, bool GATE_UP, typename X>
__device__ void multiply_experts(const Weights& weights, const Output<T>& output, const X* x, const uint32_t* offsets,
                                 const Sizes& sizes) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int experts = sizes.experts, max_pairs = sizes.max_pairs;
    const int row_tiles = (weights.rows + 15) / 16, k_steps = (weights.columns + K_STEP - 1) / K_STEP,
              row_pairs = (weights.rows + 31) / 32;
    float4* const partials = reinterpret_cast<float4*>(shared + (size_t)k_steps * max_pairs * 128);

    // gate_up waits here for the kernel that writes `offsets` and `sorted`.
    // down starts only after this wait of gate_up, so down can read `offsets` and `sorted` without waiting.
    if constexpr (GATE_UP) {
        pdl_wait();
        pdl_launch_dependents();
    }

    // 1. Find this block's work items.
    const int total = count_work_items(offsets, experts, max_pairs, row_pairs);
    int next = (long long)total * blockIdx.x / gridDim.x;
    const int end = (long long)total * (blockIdx.x + 1) / gridDim.x;

    // 2. Multiply one tile of an expert's pairs at a time.
    WorkItem item;
    while (next < end && find_work_item(offsets, experts, max_pairs, row_pairs, next, item)) {
        const int tiles = item.count / row_pairs, tile_pairs = ((item.pairs + tiles - 1) / tiles + 7) / 8 * 8;
        const int start = item.index / row_pairs * tile_pairs, first = item.index % row_pairs;
        const int last = min(row_pairs, first + end - next);
        const OutputTile tile = {item.expert, item.first + start, min(tile_pairs, item.pairs - start), item.row + start,
                                 0};
        next += last - first;
        const size_t first_tile = (size_t)item.expert * row_tiles * k_steps;
        const Matrix matrix = {weights.blocks + first_tile * MXFP4_TILE_BYTES,
                               weights.scales + first_tile * MXFP4_TILE_SCALE_BYTES, row_tiles, k_steps};
        const uint32_t xs = shared_address(shared);
        __syncthreads();  // slower warps may still read x or partial sums of the previous tile
        const int padded_pairs = (tile.pairs + 7) / 8 * 8;
        // For gate_up, convert x before loading weights. Doing both at the same time would need too many registers.
        if constexpr (GATE_UP)
            convert_x<T>(x, output, tile, weights.columns, k_steps, sizes.chosen, padded_pairs, shared);
        const auto load_inputs = [&] {
            if constexpr (!GATE_UP) {
                pdl_wait();
                start_copying_h<T>(x, output, tile, k_steps, padded_pairs, shared);
            }
        };
        if (padded_pairs == 8)
            multiply_row_pairs<T, GATE_UP, 1>(matrix, output, weights.rows, tile, first, last, xs, partials,
                                              load_inputs);
        else if (padded_pairs == 16)
            multiply_row_pairs<T, GATE_UP, 2>(matrix, output, weights.rows, tile, first, last, xs, partials,
                                              load_inputs);
        else
            multiply_row_pairs<T, GATE_UP, 3>(matrix, output, weights.rows, tile, first, last, xs, partials,
                                              load_inputs);
    }
    pdl_wait();  // without this wait, a down kernel without work could end before the previous kernel
}

// The inputs and the output of each product:
//   gate_up: x f32 [tokens, hidden], paired weights, bias [experts, 2 · intermediate] -> tiled h [pairs, intermediate]
//     sizes.rows = 2 · intermediate, sizes.columns = hidden
//   down: tiled h, grouped weights, bias [experts, hidden] -> y [pairs, hidden]
//     sizes.rows = hidden, sizes.columns = intermediate
// `hidden` and `intermediate` are multiples of 64 · K_STEPS.
#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void __launch_bounds__(EXPERT_FEW_PAIRS_THREADS, 1)                                          \
        expert_few_pairs_gate_up_##SUFFIX(const uint8_t* blocks, const uint8_t* scales, const T* bias, const float* x, \
                                          const uint32_t* sorted, const uint32_t* offsets, T* h, Sizes sizes,          \
                                          float limit) {                                                               \
        const Output<T> output = {bias, sorted, h, sizes.tiled_rows, limit, Factors<T>::X_FACTOR};                     \
        multiply_experts<T, true>({blocks, scales, sizes.rows, sizes.columns}, output, x, offsets, sizes);             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(EXPERT_FEW_PAIRS_THREADS, 1)                                          \
        expert_few_pairs_down_##SUFFIX(const uint8_t* blocks, const uint8_t* scales, const T* bias, const T* h,        \
                                       const uint32_t* sorted, const uint32_t* offsets, T* y, Sizes sizes) {           \
        const Output<T> output = {bias, sorted, y, sizes.tiled_rows, 0.0f};                                            \
        multiply_experts<T, false>({blocks, scales, sizes.rows, sizes.columns}, output, h, offsets, sizes);            \
    }
DEFINE(__half, f16)
DEFINE(__nv_bfloat16, bf16)
