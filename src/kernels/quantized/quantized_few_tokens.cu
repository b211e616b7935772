// Multiplies quantized matrices by the inputs of a few tokens, as in batched decode steps: y = x·Wᵀ on tensor cores.
//
// A warp loads weights directly into registers. It converts each weight to T once for all tokens of a tile.
// With several tiles of tokens, the weights are loaded once per tile, from the L2 cache if they are still there.
//
// In this file, a K step also has rows: the work is divided into *K steps* of ROWS weight rows (one tile) times
// K_STEP_COLUMNS columns. The K steps are divided evenly among the blocks of a tile of tokens, so a block can start or
// end inside a tile of rows. If several blocks share a tile of rows, the last block to finish adds the sums of all
// these blocks, in block order. The order of additions depends only on the sizes of the matrices and the number of
// blocks.
//
// In each K step, lane l reads group t = l % 4 (columns 32t to 32t + 31 of the K step) of its four weight rows.
// MMA j of the K step multiplies quad j of all four groups. A quad is four consecutive columns.
// The order of the columns in an MMA does not matter, because weights and x use the same order.
#include "headers/arrive.cuh"
#include "headers/async_copy.cuh"
#include "headers/tensor_core.cuh"
#include "quantized/format.cuh"

constexpr int STAGES = QUANTIZED_FEW_TOKENS_STAGES, K_STEP_COLUMNS = QUANTIZED_FEW_TOKENS_COLUMNS,
              K_STEP_GROUPS = K_STEP_COLUMNS / 32;
// Each warp multiplies a *row pair*: two 16-row MMA tiles (32 rows). ROWS is the number of weight rows per tile.
constexpr int ROW_PAIRS = QUANTIZED_FEW_TOKENS_THREADS / 32, ROWS = 32 * ROW_PAIRS;

// If several blocks share a tile of rows, a counter counts how many of them have finished their part of the tile.
// Each tile of tokens has its own counters. The counters are zero between launches.
// Two launches never use a counter at the same time: each rank opens its own candle device, each device loads this
// module with its own counters (launch/module.rs), and the kernels of a device run in order.
__device__ uint32_t finished[QUANTIZED_FEW_TOKENS_COUNTERS];

// The mma.sync results of one lane, for both 16-row tiles of a row pair and N tokens.
template <int N> using Sums = float[2][N / 8][4];

// The vector type for two values of type T, and the constants that convert small integers to T.
// For an integer q from 0 to 63, replacing the low byte of BIAS with q gives BIAS + q.
// BIAS_BYTES holds the high byte of BIAS four times.
template <typename T> struct Pair;
template <> struct Pair<__half> {
    using Type = __half2;
    static constexpr uint32_t BIAS_BYTES = 0x64646464;  // 0x6400 is 1024 in f16
    static constexpr float BIAS = 1024.0f;
    static constexpr bool IS_BF16 = false;
    static __device__ __forceinline__ Type both(float v) { return __float2half2_rn(v); }
};
template <> struct Pair<__nv_bfloat16> {
    using Type = __nv_bfloat162;
    static constexpr uint32_t BIAS_BYTES = 0x43434343;  // 0x4300 is 128 in bf16
    static constexpr float BIAS = 128.0f;
    static constexpr bool IS_BF16 = true;
    static __device__ __forceinline__ Type both(float v) { return __float2bfloat162_rn(v); }
};

// The scales and mins of a group.
// Rounding a scale to bf16 changes all values of its group by the same factor.
// These errors do not average out in a sum as independent rounding errors would.
// If T is bf16 and the format has no mins, a scale is therefore stored as the sum of two values: `scale` and `rest`.
// Formats with mins accept the error: they do not use `rest`, which saves instructions.
// `first_scale` is not rounded. It is for Q8_0, whose values are scaled as floats.
template <typename T, int F> struct GroupScaling {
    using L = FormatLayout<F>;
    using Two = typename Pair<T>::Type;
    static constexpr bool has_rest = Pair<T>::IS_BF16 && !L::has_mins;
    static constexpr int HALVES = L::has_half_scales ? 2 : 1;
    float first_scale;
    Two scale[HALVES], rest[HALVES], min[HALVES];

    __device__ __forceinline__ explicit GroupScaling(const RawGroup& raw) {
        const Scaling s = scaling<F>(raw);
        first_scale = s.scale[0];
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            const T rounded = from_float<T>(s.scale[half]);
            scale[half] = Pair<T>::both(to_float(rounded));
            rest[half] = Pair<T>::both(s.scale[half] - to_float(rounded));
            min[half] = Pair<T>::both(-s.min[half]);
        }
    }
    // Applies the scale and, in formats with mins, the min of one half of the group. The field `min` is negated.
    __device__ __forceinline__ Two apply(Two v, int half) const {
        if constexpr (L::has_mins) return __hfma2(v, scale[half], min[half]);
        if constexpr (has_rest) return __hfma2(v, scale[half], __hmul2(v, rest[half]));
        return __hmul2(v, scale[half]);
    }
};

// Converts quad j of a group (columns 4j to 4j + 3) to T. Does not apply row scales.
template <typename T, int F>
__device__ __forceinline__ uint2 convert_quad(const RawGroup& raw, const GroupScaling<T, F>& s, int j) {
    using L = FormatLayout<F>;
    using Two = typename Pair<T>::Type;
    const uint32_t q = quad<F>(raw, j);
    if constexpr (L::low == 32) {
        float4 v = to_floats<F>(q);
        if (!L::has_row_scale) {
            v.x *= s.first_scale;
            v.y *= s.first_scale;
            v.z *= s.first_scale;
            v.w *= s.first_scale;
        }
        return make_uint2(pack<T>(v.x, v.y), pack<T>(v.z, v.w));
    } else {
        const Two zero = Pair<T>::both(Pair<T>::BIAS + L::zero);
        const auto convert = [&](int selector) {
            const uint32_t biased = select_bytes(q, Pair<T>::BIAS_BYTES, selector);
            const Two w =
                s.apply(__hsub2(*reinterpret_cast<const Two*>(&biased), zero), L::has_half_scales ? j / 4 : 0);
            return *reinterpret_cast<const uint32_t*>(&w);
        };
        // In the selectors, digits 0 to 3 choose the bytes of q, and digit 4 chooses the high byte of BIAS.
        // Each result holds two values: BIAS plus one byte of q each.
        return make_uint2(convert(0x4140), convert(0x4342));
    }
}

// The arguments of multiply_few, except the matrices and their number.
struct Product {
    const void* x;
    const float* x_scales;
    float *y, *partials;
    int tokens, columns, stride;
};

// A range of K steps in one matrix of the stack. The K steps are numbered across all matrices.
// The tiles before `first_tile` and the rows before `first_row` belong to earlier matrices.
struct Range {
    int matrix, first_tile, first_row, begin, end;
};

// The part of a matrix product that one thread block computes, for one tile of N tokens.
template <typename T, int N> struct Block {
    static constexpr int TOKEN_TILES = N / 8, STAGE_BYTES = N * K_STEP_COLUMNS * 2;
    const QuantizedStack& weights;
    const Product& p;
    unsigned char* const shared;
    const int groups, k_steps, total;  // groups per row, K steps per tile of rows, K steps of all tiles
    const int lane = threadIdx.x % 32, row_pair = threadIdx.x / 32;
    const int first_token = blockIdx.y * N;

    // Starts copying one K step of x for the N tokens of the tile, in the order in which lanes read it.
    __device__ __forceinline__ void copy_x(int k_step, uint32_t stage) const {
        constexpr int SEGMENTS = STAGE_BYTES / 16, THREADS = QUANTIZED_FEW_TOKENS_THREADS;
#pragma unroll
        for (int k = 0; k < (SEGMENTS + THREADS - 1) / THREADS; ++k) {
            if (SEGMENTS < THREADS && threadIdx.x >= SEGMENTS) break;
            const int token = threadIdx.x / 16 + THREADS / 16 * k, segment = threadIdx.x % 16;
            const int column = k_step * K_STEP_COLUMNS + segment * 8;
            const bool is_inside = column < p.columns && first_token + token < p.tokens;
            const T* x = static_cast<const T*>(p.x);
            const T* from = is_inside ? x + (size_t)(first_token + token) * p.columns + column : x;
            const int lane = token % 8 * 4 + segment / 4, quads = segment % 4;
            copy_async_or_zero(stage + ((token / 8 * 4 + quads) * 32 + lane) * 16, from, is_inside);
        }
    }

    // Multiplies the weights of one K step by the inputs of N tokens, and adds the products to `sums`.
    template <int F>
    __device__ __forceinline__ void multiply(Sums<N>& sums, const RawGroup (&raw)[4], const unsigned char* x) const {
        const GroupScaling<T, F> s[4] = {GroupScaling<T, F>(raw[0]), GroupScaling<T, F>(raw[1]),
                                         GroupScaling<T, F>(raw[2]), GroupScaling<T, F>(raw[3])};
        const uint4* const from = reinterpret_cast<const uint4*>(x) + lane;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            uint32_t a[2][2][4];  // the fragments of both row tiles for quads j and j + 1
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const uint2 low = convert_quad<T, F>(raw[2 * m], s[2 * m], j + k);
                    const uint2 high = convert_quad<T, F>(raw[2 * m + 1], s[2 * m + 1], j + k);
                    a[m][k][0] = low.x;
                    a[m][k][1] = high.x;
                    a[m][k][2] = low.y;
                    a[m][k][3] = high.y;
                }
#pragma unroll
            for (int n = 0; n < N / 8; ++n) {
                const uint4 b = from[(n * 4 + j / 2) * 32];  // quads j and j + 1 of one token
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    multiply_add<T>(sums[m][n], a[m][0], b.x, b.y);
                    multiply_add<T>(sums[m][n], a[m][1], b.z, b.w);
                }
            }
        }
    }

    // Multiplies the weights of all K steps in a range by the inputs of N tokens, and stores the sums (see finish).
    template <int F> __device__ __forceinline__ void run(const Range& range) const {
        const QuantizedMatrix matrix = weights.matrices[range.matrix];
        const uint32_t stages = shared_address(shared);

        // 1. Start copying x for the first K steps.
        __syncthreads();  // slower warps may still read the last stages of the previous range
        int copy_k_step = range.begin % k_steps, copies = range.end - range.begin;
        const auto copy_next = [&](int stage) {
            if (copies-- > 0) copy_x(copy_k_step, stages + stage * STAGE_BYTES);
            commit_copies();
            if (++copy_k_step == k_steps) copy_k_step = 0;
        };
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; ++stage) copy_next(stage);

        // 2. Load the weights of the first K step.
        // A lane loads one group of 32 columns from each of four rows of the row pair: lane / 4 + 8r, for r = 0 to 3.
        int load_k_step = range.begin % k_steps, row = (range.begin / k_steps - range.first_tile) * ROWS;
        uint32_t first_group[4];
        const auto start_tile = [&] {
#pragma unroll
            for (int r = 0; r < 4; ++r)
                first_group[r] = min(row + row_pair * 32 + lane / 4 + 8 * r, matrix.rows - 1) * groups;
        };
        start_tile();
        RawGroup raw[4], next[4];
        const auto load_next = [&] {
            // Past the last group, x is zero. The lane then loads the row's last group again, whose products are zero.
            const int group = min(load_k_step * K_STEP_GROUPS + lane % 4, groups - 1);
#pragma unroll
            for (int r = 0; r < 4; ++r) load_group<F>(next[r], matrix, first_group[r] + group);
            if (++load_k_step == k_steps) {
                load_k_step = 0;
                row += ROWS;
                start_tile();
            }
        };
        load_next();

        // 3. Multiply one K step after another, while the weights of the next K step are being loaded.
        Sums<N> sums = {};
        int stage = 0, first = range.begin, left = k_steps - range.begin % k_steps;
#pragma unroll 1
        for (int k_step = range.begin; k_step < range.end;) {
#pragma unroll
            for (int r = 0; r < 4; ++r) raw[r] = next[r];
            if (k_step + 1 < range.end) load_next();
            wait_for_copies<STAGES - 2>();
            __syncthreads();
            copy_next((stage + STAGES - 1) % STAGES);
            multiply<F>(sums, raw, shared + stage * STAGE_BYTES);
            if (++stage == STAGES) stage = 0;
            ++k_step;
            if (--left > 0 && k_step < range.end) continue;
            finish<F>(range, first, k_step, sums);
            first = k_step;
            left = k_steps;
#pragma unroll
            for (int i = 0; i < 2 * TOKEN_TILES * 4; ++i)
                sums[i / (4 * TOKEN_TILES)][i / 4 % TOKEN_TILES][i % 4] = 0.0f;
        }
    }

    // Stores the sums of K steps `first` to `end` - 1, which belong to one tile of rows.
    // If other blocks have K steps of this tile, the last block to finish stores the sums of all blocks.
    template <int F> __device__ void finish(const Range& range, int first, int end, Sums<N>& sums) const {
        const int tile = first / k_steps;
        if (end - first < k_steps && !add_sums_of_other_blocks(tile, sums)) return;
        store<F>(range, tile, sums);
    }

    // Stores the sums of this block in `partials`. In the last block that finishes its part of the tile, then adds up
    // the sums of all blocks that share the tile, and returns true. Returns false in the other blocks.
    __device__ __forceinline__ bool add_sums_of_other_blocks(int tile, Sums<N>& sums) const {
        constexpr int VECTORS = 2 * TOKEN_TILES;
        const auto vector = [&](int i) -> float4& {
            return *reinterpret_cast<float4*>(sums[i / TOKEN_TILES][i % TOKEN_TILES]);
        };
        const auto block_of = [&](int k_step) { return (int)(((long long)gridDim.x * (k_step + 1) - 1) / total); };
        const int first_block = block_of(tile * k_steps), last_block = block_of(tile * k_steps + k_steps - 1);
        // A block can share two tiles. Its sums of the tile that it starts are at index 1, and the others at index 0.
        const auto partial = [&](int block) {
            const size_t at = ((size_t)blockIdx.y * gridDim.x + block) * 2 + (block == first_block ? 1 : 0);
            return reinterpret_cast<float4*>(p.partials) + (at * ROW_PAIRS + row_pair) * VECTORS * 32 + lane;
        };
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) __stcg(partial(blockIdx.x) + i * 32, vector(i));
        if (!is_last_block(finished + blockIdx.y * gridDim.x + first_block, last_block - first_block + 1)) return false;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) vector(i) = __ldcg(partial(first_block) + i * 32);
#pragma unroll 1
        for (int block = first_block + 1; block <= last_block; ++block)
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                const float4 v = __ldcg(partial(block) + i * 32);
                float4& sum = vector(i);
                sum.x += v.x;
                sum.y += v.y;
                sum.z += v.z;
                sum.w += v.w;
            }
        return true;
    }

    // Scales the sums of a tile of rows, and stores them in y.
    template <int F> __device__ __forceinline__ void store(const Range& range, int tile, const Sums<N>& sums) const {
        const QuantizedMatrix& matrix = weights.matrices[range.matrix];
        const int row = (tile - range.first_tile) * ROWS + row_pair * 32 + lane / 4;
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int token = first_token + n * 8 + lane % 4 * 2 + c;
                if (token >= p.tokens) continue;
                const float token_scale = p.x_scales ? __ldg(p.x_scales + token) : 1.0f;
                float* const y = p.y + (size_t)token * p.stride + range.first_row;
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int at = row + 8 * r;
                    if (at >= matrix.rows) continue;
                    float v = sums[r / 2][n][r % 2 * 2 + c] * token_scale;
                    if (FormatLayout<F>::has_row_scale) v *= __ldg(reinterpret_cast<const float*>(matrix.scales) + at);
                    y[at] = v;
                }
            }
    }
};

// Computes y[t] = x_scales[t] · W·x[t], where W is the vertical stack of `count` matrices.
//   x: T [tokens, columns]; columns is a multiple of 8
//   x_scales: f32 [tokens], or null for scales of 1
//   y: f32 [tokens, stride]; only the first columns are written, one per row of W
//   partials: f32 [ceil(tokens / N), grid.x, 2, ROWS, N], scratch memory
//   grid: (at most the number of K steps, ceil(tokens / N)); block: QUANTIZED_FEW_TOKENS_THREADS
//   shared memory: T [STAGES, N, K_STEP_COLUMNS]
//   bytes moved: W once, if the other tiles of tokens find it in the L2 cache; x once per tile of rows; y once
template <typename T, int N>
__device__ void multiply_few(const T* x, const float* x_scales, const QuantizedStack& weights, float* y,
                             float* partials, int count, int tokens, int columns, int stride) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Product product = {x, x_scales, y, partials, tokens, columns, stride};
    const int groups = (columns + 31) / 32, k_steps = (groups + K_STEP_GROUPS - 1) / K_STEP_GROUPS;
    int tiles = 0;
    for (int m = 0; m < count; ++m) tiles += (weights.matrices[m].rows + ROWS - 1) / ROWS;
    const int total = tiles * k_steps;
    const Block<T, N> block = {weights, product, shared, groups, k_steps, total};
    const int begin = (long long)total * blockIdx.x / gridDim.x, end = (long long)total * (blockIdx.x + 1) / gridDim.x;
    for (int m = 0, first_tile = 0, first_row = 0; m < count; ++m) {
        const int rows = weights.matrices[m].rows, last_tile = first_tile + (rows + ROWS - 1) / ROWS;
        const Range range = {m, first_tile, first_row, max(begin, first_tile * k_steps), min(end, last_tile * k_steps)};
        if (range.begin < range.end)
            with_format(weights.matrices[m].format,
                        [&](auto format) { block.template run<decltype(format)::value>(range); });
        first_tile = last_tile;
        first_row += rows;
    }
}

#define DEFINE_TILE(T, SUFFIX, N, BLOCKS)                                                                              \
    extern "C" __global__ void __launch_bounds__(QUANTIZED_FEW_TOKENS_THREADS, BLOCKS)                                 \
        quantized_few_tokens_##N##_##SUFFIX(const T* x, const float* x_scales,                                         \
                                            const __grid_constant__ QuantizedStack weights, float* y, float* partials, \
                                            int count, int tokens, int columns, int stride) {                          \
        multiply_few<T, N>(x, x_scales, weights, y, partials, count, tokens, columns, stride);                         \
    }
#define DEFINE(T, SUFFIX)                                                                                              \
    DEFINE_TILE(T, SUFFIX, 8, 2)                                                                                       \
    DEFINE_TILE(T, SUFFIX, 16, 2)                                                                                      \
    DEFINE_TILE(T, SUFFIX, 32, 2)                                                                                      \
    DEFINE_TILE(T, SUFFIX, 64, 1)
DEFINE(__half, f16)
DEFINE(__nv_bfloat16, bf16)
