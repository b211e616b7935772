// The MLP of routed experts with MXFP4 weights, for many tokens.
// The matrix products run on tensor cores. Weights are packed in shared memory and unpacked in registers.
//
//   x [tokens, hidden] -> spread_tokens -> expert_gate_up -> h [pairs, intermediate]
//   h -> expert_down -> y [pairs, hidden]
//   y -> expert_combine or expert_add_norm, which compute Σ weights[t, c] · y[t, c] over c
//
// A pair is a token and one of its `chosen` experts.
// mxfp4_tiles.cuh describes the layout of weights, x and h.
// The rows of y are in the original order of the pairs, not in the order of `sorted`.
#include "headers/async_copy.cuh"
#include "headers/barrier.cuh"
#include "headers/block_sum.cuh"
#include "headers/pdl.cuh"
#include "headers/shared_memory.cuh"
#include "headers/wgmma.cuh"
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

// Computes sum += Σ weights[token, c] · y[token, c] over c, for the four column pairs of a segment.
//   y: T [tokens, chosen, segments], 8 columns per segment, in fragment order
template <typename T>
__device__ __forceinline__ void add_outputs(float2 (&sum)[4], const T* y, const float* weights, int token, int segment,
                                            int segments, int chosen) {
#pragma unroll 4
    for (int c = 0; c < chosen; ++c) {
        const size_t pair = (size_t)token * chosen + c;
        const float weight = weights[pair];
        const uint4 packed = reinterpret_cast<const uint4*>(y)[pair * segments + segment];
        const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float2 value = unpack<T>(words[k]);
            sum[k].x += weight * value.x, sum[k].y += weight * value.y;
        }
    }
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

// ---- scheduling ----

// Finds output tile `number`. Returns false if `number` is past the last tile.
// Output tiles are ordered by expert.
// Within an expert, the tiles that have the same weight rows and different pairs are consecutive.
// With this order, weights are mostly read from DRAM only once, and activations stay in L2.
template <int ROW_TILES, bool GATE_UP>
__device__ __forceinline__ bool find_tile(const uint32_t* offsets, int experts, int weight_rows, int max_pairs,
                                          int number, Tile& tile) {
    // For gate_up, 128 weight rows give 64 columns of h. The tiles also cover the padding of h to a multiple of 64.
    const int rows = GATE_UP ? (weight_rows + 127) / 128 * 128 : weight_rows;
    const int row_blocks = (rows + ROW_TILES * 16 - 1) / (ROW_TILES * 16);
    WorkItem item;
    if (!find_work_item(offsets, experts, max_pairs, row_blocks, number, item)) return false;
    const int tiles = item.count / row_blocks, tile_pairs = ((item.pairs + tiles - 1) / tiles + 7) / 8 * 8;
    const int start = item.index % tiles * tile_pairs, pairs = min(tile_pairs, item.pairs - start);
    tile = {item.expert, item.first + start, pairs, item.row + start, item.index / tiles * ROW_TILES};
    return true;
}

// ---- matrix multiplication with mma.sync ----

// The output tile of a thread block: at most PAIRS pairs × 256 weight rows, divided among eight warps.
// Each warp computes all pairs × 32 weight rows, or 64 pairs × 64 weight rows if PAIRS is 128.
// The MMAs of a warp cover COLUMNS · 8 pairs and ROW_TILES · 16 weight rows.
template <int PAIRS_> struct MmaShape {
    static constexpr int PAIRS = PAIRS_, BLOCK_ROW_TILES = EXPERT_MMA_ROW_TILES, STAGES = EXPERT_MMA_STAGES;
    static constexpr int WARPS = EXPERT_MMA_THREADS / 32, COLUMN_WARPS = PAIRS == 128 ? 2 : 1;
    static constexpr int ROW_TILES = 2 * COLUMN_WARPS, COLUMNS = PAIRS / 8 / COLUMN_WARPS;
    static constexpr int WEIGHT_BYTES = BLOCK_ROW_TILES * MXFP4_TILE_BYTES;
    static constexpr int SCALE_BYTES = BLOCK_ROW_TILES * MXFP4_TILE_SCALE_BYTES;
    static constexpr int X_BYTES = PAIRS * 128, W_BYTES = WEIGHT_BYTES + SCALE_BYTES;
};

// The pipeline stages in shared memory. A stage holds 64 columns of x, and 64 columns of the weights with their scales.
template <typename S> struct MmaStages {
    unsigned char* base;
    uint32_t address;
    __device__ __forceinline__ uint32_t x(int step) const { return address + step % S::STAGES * S::X_BYTES; }
    __device__ __forceinline__ int weights_offset(int step) const {
        return S::STAGES * S::X_BYTES + step % S::STAGES * S::W_BYTES;
    }
    __device__ __forceinline__ uint32_t weights(int step) const { return address + weights_offset(step); }
    __device__ __forceinline__ const unsigned char* weight_bytes(int step) const { return base + weights_offset(step); }
};

// Starts copying one step of a tile: 64 columns of x and of the weights.
// Does not fill the part of the stage past the last pair or weight tile.
// Old data in that part of the stage affects only results that are not stored.
template <typename S, typename T>
__device__ __forceinline__ void load_step(const MmaStages<S>& stages, const Weights& w, const Output<T>& o, const T* x,
                                          const Tile& tile, int step) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row_tiles = (w.rows + 15) / 16, steps = (w.columns + STEP - 1) / STEP;
    const int segments = tile.pairs * 8, tiles = min(row_tiles - tile.row_tile, S::BLOCK_ROW_TILES);
    const uint4* x_from = reinterpret_cast<const uint4*>(x) + ((size_t)step * o.tiled_rows + tile.row) * 8;
    const size_t first_tile = ((size_t)tile.expert * row_tiles + tile.row_tile) * steps + step;
    const uint32_t to_x = stages.x(step), to_w = stages.weights(step);
#pragma unroll
    for (int i = 0; i < S::X_BYTES / 16 / EXPERT_MMA_THREADS; ++i) {
        const int segment = threadIdx.x + i * EXPERT_MMA_THREADS;
        if (segment < segments) copy_async(to_x + segment * 16, x_from + segment);
    }
#pragma unroll
    for (int i = 0; i < S::BLOCK_ROW_TILES / S::WARPS; ++i) {
        const int row_tile = warp + i * S::WARPS;
        const uint8_t* from = w.blocks + (first_tile + row_tile * steps) * MXFP4_TILE_BYTES;
        if (row_tile < tiles) copy_async(to_w + row_tile * MXFP4_TILE_BYTES + lane * 16, from + lane * 16);
    }
    const int row_tile = threadIdx.x / 2, half = threadIdx.x % 2 * 16;
    const uint8_t* from = w.scales + (first_tile + row_tile * steps) * MXFP4_TILE_SCALE_BYTES;
    if (row_tile < tiles) copy_async(to_w + S::WEIGHT_BYTES + row_tile * MXFP4_TILE_SCALE_BYTES + half, from + half);
}

// Adds the products of this warp's weight rows and this warp's pairs to `sum`, for one step (64 columns).
template <typename S, typename T>
__device__ __forceinline__ void multiply_step(float (&sum)[S::ROW_TILES][S::COLUMNS][4], const MmaStages<S>& stages,
                                              const Tile& tile, int step) {
    constexpr int ROW_TILES = S::ROW_TILES, COLUMN_WARPS = S::COLUMN_WARPS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    const unsigned char* weights = stages.weight_bytes(step);
    const uint32_t x = stages.x(step) + lane % 8 * 128;
    uint4 words[ROW_TILES];
    uint32_t factors[ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
        const int weight_tile = warp / COLUMN_WARPS * ROW_TILES + m;
        words[m] = *reinterpret_cast<const uint4*>(weights + weight_tile * MXFP4_TILE_BYTES + lane * 16);
        const unsigned char* from = weights + S::WEIGHT_BYTES + weight_tile * MXFP4_TILE_SCALE_BYTES + g * 4;
        const uint32_t scales = *reinterpret_cast<const uint32_t*>(from);
        scale_factors<T>(scales, factors[m]);
    }
#pragma unroll
    for (int block = 0; block < 2; ++block) {
        uint32_t a[ROW_TILES][2][4];
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            const uint32_t low = block ? words[m].z : words[m].x, high = block ? words[m].w : words[m].y;
            const uint32_t f = factors[m][2 * block], f8 = factors[m][2 * block + 1];
            unpack_items<T, 0>(low, high, f, f8, a[m][0]);
            unpack_items<T, 1>(low, high, f, f8, a[m][1]);
        }
        const uint32_t segment = ((4 * block + lane / 8) ^ lane % 8) * 16;
#pragma unroll
        for (int n = 0; n < S::COLUMNS; n += 2) {
            const int pair = (n * COLUMN_WARPS + warp % COLUMN_WARPS) * 8;
            if (pair >= tile.pairs) continue;
            uint32_t b[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) load_matrices(b[i], x + (pair + i * COLUMN_WARPS * 8) * 128 + segment);
            // Two MMAs that add to the same sum must not be adjacent, because the second MMA would wait for the first.
#pragma unroll
            for (int k = 0; k < 2; ++k)
#pragma unroll
                for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
                    for (int i = 0; i < 2; ++i) multiply_add<T>(sum[m][n + i], a[m][k], b[i][2 * k], b[i][2 * k + 1]);
        }
    }
}

// Stores the results that this warp computed for one tile.
template <typename S, typename T, bool GATE_UP>
__device__ __forceinline__ void store_tile(float (&sum)[S::ROW_TILES][S::COLUMNS][4], const Weights& w,
                                           const Output<T>& o, const Tile& tile) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m += 2) {
        const int row_tile = tile.row_tile + warp / S::COLUMN_WARPS * S::ROW_TILES + m;
        const float2 bias[2] = {row_bias<T, GATE_UP>(o, w.rows, tile.expert, row_tile),
                                row_bias<T, GATE_UP>(o, w.rows, tile.expert, row_tile + 1)};
#pragma unroll
        for (int n = 0; n < S::COLUMNS; ++n) {
            const int pair = (n * S::COLUMN_WARPS + warp % S::COLUMN_WARPS) * 8;
            if (pair < tile.pairs)
                store<T, GATE_UP, 2>(o, w.rows, tile, row_tile, pair, {sum[m][n], sum[m + 1][n]}, bias);
        }
    }
}

// Computes the product of each expert with the inputs of its pairs, with mma.sync. Runs on GPUs without wgmma.
//   grid: any number of blocks; block b processes the tiles b, b + gridDim.x, b + 2 · gridDim.x, ...
//   block: EXPERT_MMA_THREADS
//   shared memory: STAGES · (X_BYTES + W_BYTES)
//   bytes moved: the weights of an expert once per tile of PAIRS pairs, mostly from L2 after the first tile;
//   x once per 256 rows of weights, mostly from L2; the output once
template <typename S, typename T, bool GATE_UP>
__device__ void expert_product(const Weights& w, const Output<T>& o, const T* x, const uint32_t* offsets, int experts) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const MmaStages<S> stages = {shared, shared_address(shared)};
    const int steps = (w.columns + STEP - 1) / STEP;
    pdl_wait();
    pdl_launch_dependents();

    Tile tile;
    const auto next_tile = [&](int number) {
        return find_tile<S::BLOCK_ROW_TILES, GATE_UP>(offsets, experts, w.rows, S::PAIRS, number, tile);
    };
    for (int number = blockIdx.x; next_tile(number); number += gridDim.x) {
        const auto load = [&](int step) {
            if (step < steps) load_step<S, T>(stages, w, o, x, tile, step);
            commit_copies();
        };
        for (int s = 0; s < S::STAGES - 1; ++s) load(s);
        float sum[S::ROW_TILES][S::COLUMNS][4] = {};
        for (int step = 0; step < steps; ++step) {
            wait_for_copies<S::STAGES - 2>();
            __syncthreads();
            load(step + S::STAGES - 1);
            multiply_step<S, T>(sum, stages, tile, step);
        }
        store_tile<S, T, GATE_UP>(sum, w, o, tile);
        __syncthreads();  // slower warps may still read the data that the next tile overwrites
    }
}

// ---- matrix multiplication with wgmma (sm_90a) ----

// A stage of the ring buffer holds two steps. For each row tile, the weight tiles of both steps are adjacent.
constexpr int STAGE_TILE_BYTES = 2 * MXFP4_TILE_BYTES, STAGE_SCALE_BYTES = 2 * MXFP4_TILE_SCALE_BYTES;

// The output tile of a thread block in the wgmma kernels: at most PAIRS pairs × 192 weight rows.
// Three warpgroups compute 64 weight rows each, and a fourth warpgroup copies data.
// The expert matrices of gpt-oss have 2880 or 5760 rows. Both numbers are multiples of 192.
// While one warpgroup waits for its products, another warpgroup can unpack weights.
// A fourth computing warpgroup would need more registers than a multiprocessor has.
// If a tile has at most UNROLL_PAIRS pairs, the loop over columns is unrolled by two.
// BLOCKS is the number of thread blocks that fit on a multiprocessor.
template <int PAIRS_, int UNROLL_PAIRS_, int STAGES_, int BLOCKS_> struct TileShape {
    static constexpr int PAIRS = PAIRS_, UNROLL_PAIRS = UNROLL_PAIRS_, STAGES = STAGES_, BLOCKS = BLOCKS_;
    // Registers per thread in the copying warpgroup and in the multiplying warpgroups.
    static constexpr int COPY_REGISTERS = BLOCKS == 1 ? 32 : 24, REGISTERS = BLOCKS == 1 ? 160 : 72;
    static constexpr int HALF_X = PAIRS * 128, X_BYTES = 2 * HALF_X;
    static constexpr int WEIGHT_BYTES = EXPERT_WGMMA_ROW_TILES * STAGE_TILE_BYTES;
    static constexpr int SCALE_BYTES = EXPERT_WGMMA_ROW_TILES * STAGE_SCALE_BYTES;
};
// The shape for many pairs per expert. With wide tiles, each weight is read fewer times.
using Wide = TileShape<EXPERT_WIDE_PAIRS, 0, EXPERT_WIDE_STAGES, 1>;
// The shape for few pairs per expert. Narrow tiles have more pipeline stages and an unrolled loop over columns.
using Narrow = TileShape<EXPERT_NARROW_PAIRS, EXPERT_NARROW_PAIRS, EXPERT_NARROW_STAGES, 1>;
// The shape for very few pairs per expert.
// With two thread blocks per multiprocessor, more warps unpack weights at the same time.
using Slim = TileShape<EXPERT_SLIM_PAIRS, EXPERT_SLIM_PAIRS, EXPERT_SLIM_STAGES, 2>;

// In code for targets other than sm_90a, the wgmma kernels (slim, narrow and wide) have empty bodies.
// product_kernel.rs launches the wgmma kernels only if the GPU runs sm_90a code.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The parts of a ring buffer stage, in bytes from its start. x is first, because wgmma requires an aligned address.
// The barrier FULL counts copying warps and copied bytes. The barrier EMPTY counts warps that have finished reading.
// TILE is the output tile to which the stage belongs. TILE is valid only in the first stage of each output tile.
template <typename S> struct Stage {
    static constexpr int WEIGHTS = S::X_BYTES, SCALES = WEIGHTS + S::WEIGHT_BYTES, FULL = SCALES + S::SCALE_BYTES;
    static constexpr int EMPTY = FULL + 8, TILE = EMPTY + 8;
    static constexpr int BYTES = (TILE + EXPERT_WGMMA_TILE_BYTES + 1023) / 1024 * 1024;
};
static_assert(sizeof(Tile) == EXPERT_WGMMA_TILE_BYTES);

__device__ __forceinline__ void store_tile_of_stage(uint32_t to, const Tile& tile) {
    store_shared_16(to, make_uint4(tile.expert, tile.first_pair, tile.pairs, tile.row));
    store_shared_4(to + 16, tile.row_tile);
}
__device__ __forceinline__ Tile load_tile_of_stage(uint32_t from) {
    const uint4 words = load_shared_16(from);
    return {(int)words.x, (int)words.y, (int)words.z, (int)words.w, (int)load_shared_4(from + 16)};
}

// The stage that a warp copies or multiplies next: the address of the stage and the wgmma descriptor of its x.
// A warp that reads the stage waits at FULL for the phase `parity`.
// A warp that fills the stage waits at EMPTY for the phase `parity` ^ 1.
template <typename S> class StageCursor {
    uint32_t first;
    uint64_t first_x;
    int left = S::STAGES;  // stages before the cursor returns to the first one

public:
    uint32_t stage;
    uint64_t x;
    uint32_t parity = 0;

    __device__ __forceinline__ explicit StageCursor(uint32_t ring) {
        // Each shuffle returns a value that every lane already has.
        // The shuffles tell the compiler that all lanes have equal values, so that it uses uniform registers.
        const auto uniform = [](uint32_t value) { return __shfl_sync(0xffffffffu, value, 0); };
        const uint64_t descriptor = wgmma_descriptor(ring);
        stage = first = uniform(ring);
        x = first_x = (uint64_t)uniform(descriptor >> 32) << 32 | uniform(descriptor);
    }
    __device__ __forceinline__ void next() {
        stage += Stage<S>::BYTES, x += Stage<S>::BYTES / 16;
        if (--left == 0) stage = first, x = first_x, left = S::STAGES, parity ^= 1;
    }
};

// Returns `value` in a register. Without this function, the compiler would recompute `value` in each loop iteration.
__device__ __forceinline__ uint32_t in_register(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Computes one warpgroup's part of an output tile: 64 weight rows × N pairs.
// Unpacking the weights limits the speed, so every instruction in the loop over columns matters.
template <typename S, typename T, int N, bool GATE_UP>
__device__ __forceinline__ void consume(StageCursor<S>& cursor, const Weights& w, const Output<T>& o,
                                        const Tile& tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;  // each warp has one weight tile
    const uint32_t words_at = in_register(Stage<S>::WEIGHTS + warp * STAGE_TILE_BYTES + lane * 16);
    const uint32_t scales_at = in_register(Stage<S>::SCALES + warp * STAGE_SCALE_BYTES + g * 4);
    float sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sum[i] = 0.0f;
    uint32_t a[2][4];       // the weights of two MMAs with K = 16: one MMA runs while the other's weights are unpacked
    uint32_t previous = 0;  // the address of the previous stage of this tile, or 0
    const auto multiply = [&](int half) __attribute__((always_inline)) {
        const uint4 words = load_shared_16(cursor.stage + words_at + half * MXFP4_TILE_BYTES);
        uint32_t factors[4];
        scale_factors<T>(load_shared_4(cursor.stage + scales_at + half * MXFP4_TILE_SCALE_BYTES), factors);
        const uint64_t b = cursor.x + half * (S::HALF_X / 16);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint32_t low = k / 2 ? words.z : words.x, high = k / 2 ? words.w : words.y;
            const uint32_t f = factors[k / 2 * 2], f8 = factors[k / 2 * 2 + 1];
            uint32_t (&to)[4] = a[k % 2];
            if (k % 2 == 0) unpack_items<T, 0>(low, high, f, f8, to);
            if (k % 2 == 1) unpack_items<T, 1>(low, high, f, f8, to);
            wgmma_fence();
            wgmma<T>(sum, to, b + 2 * k);
            wgmma_commit();
            wgmma_wait<1>();
            // Here, all products of the previous stage have finished.
            if (k == 0 && half == 0 && previous && lane == 0) barrier_arrive(previous + Stage<S>::EMPTY);
        }
    };
    int left = (w.columns + STEP - 1) / STEP;  // the number of steps that are left
    if constexpr (N <= S::UNROLL_PAIRS) {
#pragma unroll 1
        for (; left > 1; left -= 2) {
            barrier_wait(cursor.stage + Stage<S>::FULL, cursor.parity);
            multiply(0);
            multiply(1);
            previous = cursor.stage;
            cursor.next();
        }
    }
#pragma unroll 1
    for (; left > 0; left -= 2) {
        barrier_wait(cursor.stage + Stage<S>::FULL, cursor.parity);
#pragma unroll 1
        for (int half = 0; half < min(left, 2); ++half) multiply(half);
        previous = cursor.stage;
        cursor.next();
    }
    wgmma_wait<0>();
    // wgmma writes the sums asynchronously, and the compiler does not know this.
    // The empty asm statements keep the compiler from reading the sums before wgmma_wait.
#pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(sum[i])::"memory");
    if (lane == 0) barrier_arrive(previous + Stage<S>::EMPTY);

    const int row_tile = tile.row_tile + warp;
    const float2 bias[1] = {row_bias<T, GATE_UP>(o, w.rows, tile.expert, row_tile)};
#pragma unroll
    for (int n = 0; n < N / 8; ++n) store<T, GATE_UP, 1>(o, w.rows, tile, row_tile, n * 8, {sum + n * 4}, bias);
}

// Calls `consume` with N set to the smallest multiple of 16 that is at least the tile's number of pairs.
template <typename S, typename T, int N, bool GATE_UP>
__device__ __forceinline__ void multiply_tile(StageCursor<S>& cursor, const Weights& w, const Output<T>& o,
                                              const Tile& tile) {
    if constexpr (N < S::PAIRS) {
        if (tile.pairs > N) return multiply_tile<S, T, N + 16, GATE_UP>(cursor, w, o, tile);
    }
    consume<S, T, N, GATE_UP>(cursor, w, o, tile);
}

// Three warpgroups multiply. The fourth warpgroup finds the tiles and copies their data, several stages ahead.
// Bulk copies and wgmma both access shared memory through the async proxy.
// With cp.async instead of bulk copies, each stage would need a proxy fence after all its copies.
//   grid: any number of blocks; block b processes the tiles b, b + gridDim.x, b + 2 · gridDim.x, ...
//   block: EXPERT_WGMMA_THREADS
//   shared memory: see `wgmma_shared_bytes` in product_kernel.rs
//   bytes moved: the weights of an expert once per tile of PAIRS pairs, mostly from L2 after the first tile;
//   x once per 192 rows of weights, mostly from L2; the output once
template <typename S, typename T, bool GATE_UP>
__device__ void expert_product_wgmma(const Weights& w, const Output<T>& o, const T* x, const uint32_t* offsets,
                                     int experts) {
    constexpr int ROW_TILES = EXPERT_WGMMA_ROW_TILES;
    constexpr int MULTIPLYING = EXPERT_WGMMA_THREADS / 4 * 3, COPYING = EXPERT_WGMMA_THREADS / 4;  // threads
    constexpr int LANES = ROW_TILES / 3;  // weight tiles per warp that copies weights
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t ring = (shared_address(shared) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0) {
        for (int s = 0; s < S::STAGES; ++s) {
            barrier_init(ring + s * Stage<S>::BYTES + Stage<S>::FULL, COPYING / 32);
            barrier_init(ring + s * Stage<S>::BYTES + Stage<S>::EMPTY, MULTIPLYING / 32);
        }
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    StageCursor<S> cursor(ring);
    if (threadIdx.x >= MULTIPLYING) {
        // At the start, each thread has 128 / BLOCKS registers.
        // The copying warpgroup releases most of its registers, so that the multiplying warpgroups can have more.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::COPY_REGISTERS));
        // Of the copying warps, warp 0 copies x after the previous kernel has ended.
        // Copying warps 1 to 3 copy weights without waiting for the previous kernel.
        // All copying warps may read `offsets` without waiting. The previous kernel is spread_tokens or gate_up.
        // Both let this kernel start only after the kernels that write `offsets` have ended.
        // In a warp that copies weights, four lanes copy blocks and four lanes copy scales, each for one weight tile.
        // A warp issues its copies one by one, so three warps share the copies of weights.
        // Every copying warp arrives at FULL, even a warp without anything to copy.
        // The warp arrives only after all its lanes have seen that the stage is empty.
        // Otherwise, the stage could become full and empty again before a slow lane looks.
        // The slow lane would then miss a phase of EMPTY, and would wait forever.
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row_tile = (warp - 1) * LANES + lane % LANES;
        const int row_tiles = (w.rows + 15) / 16, steps = (w.columns + STEP - 1) / STEP;
        if (warp == 0) {
            pdl_wait();
            pdl_launch_dependents();
        }
        Tile tile;
        const auto next = [&](int number) {
            return find_tile<ROW_TILES, GATE_UP>(offsets, experts, w.rows, S::PAIRS, number, tile);
        };
        for (int number = blockIdx.x; next(number); number += gridDim.x) {
            const size_t first_tile = ((size_t)tile.expert * row_tiles + tile.row_tile + row_tile) * steps;
            const int tiles = min(row_tiles - tile.row_tile, ROW_TILES), x_bytes = (tile.pairs + 7) / 8 * 1024;
            const int own_tiles = max(min(tiles - (warp - 1) * LANES, LANES), 0);
            const int bytes = warp == 0 ? x_bytes : own_tiles * (MXFP4_TILE_BYTES + MXFP4_TILE_SCALE_BYTES);
            const bool blocks = lane < LANES;
            const int size = blocks ? MXFP4_TILE_BYTES : MXFP4_TILE_SCALE_BYTES;
            const int to = blocks ? Stage<S>::WEIGHTS + row_tile * STAGE_TILE_BYTES
                                  : Stage<S>::SCALES + row_tile * STAGE_SCALE_BYTES;
            const uint8_t* from = (blocks ? w.blocks : w.scales) + first_tile * size;
            const char* x_from = reinterpret_cast<const char*>(x) + (size_t)tile.row * 128;
            const size_t x_pitch = (size_t)o.tiled_rows * 128;
#pragma unroll 1
            for (int step = 0; step < steps; step += 2) {
                const int count = min(2, steps - step);
                barrier_wait(cursor.stage + Stage<S>::EMPTY, cursor.parity ^ 1);
                __syncwarp();
                const uint32_t full = cursor.stage + Stage<S>::FULL;
                if (threadIdx.x == MULTIPLYING && step == 0) store_tile_of_stage(cursor.stage + Stage<S>::TILE, tile);
                if (lane == 0) barrier_expect(full, count * bytes);
                if (threadIdx.x == MULTIPLYING) {
                    copy_bulk(cursor.stage, x_from, x_bytes, full);
                    if (count == 2) copy_bulk(cursor.stage + S::HALF_X, x_from + x_pitch, x_bytes, full);
                }
                if (warp > 0 && lane < 2 * LANES && row_tile < tiles)
                    copy_bulk(cursor.stage + to, from, size * count, full);
                from += size * 2, x_from += x_pitch * 2;
                cursor.next();
            }
        }
        // A tile without pairs tells the multiplying warpgroups to stop.
        barrier_wait(cursor.stage + Stage<S>::EMPTY, cursor.parity ^ 1);
        __syncwarp();
        if (threadIdx.x == MULTIPLYING) store_tile_of_stage(cursor.stage + Stage<S>::TILE, {});
        if (lane == 0) barrier_arrive(cursor.stage + Stage<S>::FULL);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::REGISTERS));
        while (true) {
            barrier_wait(cursor.stage + Stage<S>::FULL, cursor.parity);
            const Tile tile = load_tile_of_stage(cursor.stage + Stage<S>::TILE);
            if (tile.pairs == 0) return;
            multiply_tile<S, T, 16, GATE_UP>(cursor, w, o, tile);
        }
    }
}
#else
template <typename S, typename T, bool GATE_UP>
__device__ void expert_product_wgmma(const Weights&, const Output<T>&, const T*, const uint32_t*, int) {}
#endif

//   gate_up: tiled x, paired weights, bias [experts, 2 · intermediate] -> tiled h [pairs, intermediate]
//     rows = 2 · intermediate, columns = hidden
//   down: tiled h, plain weights, bias [experts, hidden] -> y [pairs, hidden]
//     rows = hidden, columns = intermediate
// `hidden` and `intermediate` are multiples of 32, the size of an MXFP4 block.
// The variadic arguments of DEFINE_PRODUCT are the first template arguments of PRODUCT.
#define DEFINE_PRODUCT(T, SUFFIX, THREADS, BLOCKS, PRODUCT, ...)                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                      \
        expert_gate_up_##SUFFIX(const uint8_t* blocks, const uint8_t* scales, const T* bias, const T* x,               \
                                const uint32_t* sorted, const uint32_t* offsets, T* h, int rows, int columns,          \
                                int tiled_rows, int experts, float limit) {                                            \
        PRODUCT<__VA_ARGS__, true>({blocks, scales, rows, columns}, {bias, sorted, h, tiled_rows, limit}, x, offsets,  \
                                   experts);                                                                           \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                      \
        expert_down_##SUFFIX(const uint8_t* blocks, const uint8_t* scales, const T* bias, const T* h,                  \
                             const uint32_t* sorted, const uint32_t* offsets, T* y, int rows, int columns,             \
                             int tiled_rows, int experts) {                                                            \
        PRODUCT<__VA_ARGS__, false>({blocks, scales, rows, columns}, {bias, sorted, y, tiled_rows, 0.0f}, h, offsets,  \
                                    experts);                                                                          \
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
    DEFINE_PRODUCT(T, SUFFIX##_t32, EXPERT_MMA_THREADS, 1, expert_product, MmaShape<32>, T)                            \
    DEFINE_PRODUCT(T, SUFFIX##_t64, EXPERT_MMA_THREADS, 1, expert_product, MmaShape<64>, T)                            \
    DEFINE_PRODUCT(T, SUFFIX##_t128, EXPERT_MMA_THREADS, 1, expert_product, MmaShape<128>, T)                          \
    DEFINE_PRODUCT(T, SUFFIX##_slim, EXPERT_WGMMA_THREADS, 2, expert_product_wgmma, Slim, T)                           \
    DEFINE_PRODUCT(T, SUFFIX##_narrow, EXPERT_WGMMA_THREADS, 1, expert_product_wgmma, Narrow, T)                       \
    DEFINE_PRODUCT(T, SUFFIX##_wide, EXPERT_WGMMA_THREADS, 1, expert_product_wgmma, Wide, T)
DEFINE(__half, f16)
DEFINE(__nv_bfloat16, bf16)
