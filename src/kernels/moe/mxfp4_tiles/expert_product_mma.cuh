// Matrix products of routed experts with mma.sync, for GPUs or builds without support for wgmma (see moe/mod.rs).
// expert_mlp.cu has the kernels that compute gate_up and down with this code. tiles.cuh describes the layouts.
// A pair is a token and one of its chosen experts.
// `x` is the input of the product: tiled x for gate_up, tiled h for down.
#pragma once
#include "headers/async_copy.cuh"
#include "headers/pdl.cuh"
#include "headers/shared_memory.cuh"
#include "moe/mxfp4_tiles/tiles.cuh"

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
template <typename Shape> struct MmaStages {
    unsigned char* base;
    uint32_t address;
    __device__ __forceinline__ uint32_t x(int k_step) const {
        return address + k_step % Shape::STAGES * Shape::X_BYTES;
    }
    __device__ __forceinline__ int weights_offset(int k_step) const {
        return Shape::STAGES * Shape::X_BYTES + k_step % Shape::STAGES * Shape::W_BYTES;
    }
    __device__ __forceinline__ uint32_t weights(int k_step) const { return address + weights_offset(k_step); }
    __device__ __forceinline__ const unsigned char* weight_bytes(int k_step) const {
        return base + weights_offset(k_step);
    }
};

// Starts copying one K step of a tile: 64 columns of x and of the weights.
// Does not fill the part of the stage past the last pair or weight tile.
// Whatever that part of the stage contains affects only results that are not stored.
template <typename Shape, typename T>
__device__ __forceinline__ void load_k_step(const MmaStages<Shape>& stages, const Weights& weights,
                                            const Output<T>& output, const T* x, const OutputTile& tile, int k_step) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row_tiles = (weights.rows + 15) / 16, k_steps = (weights.columns + K_STEP - 1) / K_STEP;
    const int segments = tile.pairs * 8, tiles = min(row_tiles - tile.row_tile, Shape::BLOCK_ROW_TILES);
    const uint4* x_from = reinterpret_cast<const uint4*>(x) + ((size_t)k_step * output.tiled_rows + tile.row) * 8;
    const size_t first_tile = ((size_t)tile.expert * row_tiles + tile.row_tile) * k_steps + k_step;
    const uint32_t to_x = stages.x(k_step), to_w = stages.weights(k_step);
#pragma unroll
    for (int i = 0; i < Shape::X_BYTES / 16 / EXPERT_MMA_THREADS; ++i) {
        const int segment = threadIdx.x + i * EXPERT_MMA_THREADS;
        if (segment < segments) copy_async(to_x + segment * 16, x_from + segment);
    }
#pragma unroll
    for (int i = 0; i < Shape::BLOCK_ROW_TILES / Shape::WARPS; ++i) {
        const int row_tile = warp + i * Shape::WARPS;
        const uint8_t* from = weights.blocks + (first_tile + row_tile * k_steps) * MXFP4_TILE_BYTES;
        if (row_tile < tiles) copy_async(to_w + row_tile * MXFP4_TILE_BYTES + lane * 16, from + lane * 16);
    }
    const int row_tile = threadIdx.x / 2, half = threadIdx.x % 2 * 16;
    const uint8_t* from = weights.scales + (first_tile + row_tile * k_steps) * MXFP4_TILE_SCALE_BYTES;
    if (row_tile < tiles)
        copy_async(to_w + Shape::WEIGHT_BYTES + row_tile * MXFP4_TILE_SCALE_BYTES + half, from + half);
}

// Adds the products of this warp's weight rows and this warp's pairs to `sum`, for one K step (64 columns).
template <typename Shape, typename T>
__device__ __forceinline__ void multiply_k_step(float (&sum)[Shape::ROW_TILES][Shape::COLUMNS][4],
                                                const MmaStages<Shape>& stages, const OutputTile& tile, int k_step) {
    constexpr int ROW_TILES = Shape::ROW_TILES, COLUMN_WARPS = Shape::COLUMN_WARPS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    const unsigned char* weights = stages.weight_bytes(k_step);
    const uint32_t x = stages.x(k_step) + lane % 8 * 128;
    uint4 words[ROW_TILES];
    uint32_t factors[ROW_TILES][2];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
        const int weight_tile = warp / COLUMN_WARPS * ROW_TILES + m;
        words[m] = *reinterpret_cast<const uint4*>(weights + weight_tile * MXFP4_TILE_BYTES + lane * 16);
        const unsigned char* from = weights + Shape::WEIGHT_BYTES + weight_tile * MXFP4_TILE_SCALE_BYTES + g * 4;
        const uint32_t scales = *reinterpret_cast<const uint32_t*>(from);
        scale_factors<T>(scales, factors[m]);
    }
#pragma unroll
    for (int block = 0; block < 2; ++block) {
        uint32_t a[ROW_TILES][2][4];
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            const uint32_t low = block ? words[m].z : words[m].x, high = block ? words[m].w : words[m].y;
            unpack_items<T, 0>(low, high, factors[m][block], a[m][0]);
            unpack_items<T, 1>(low, high, factors[m][block], a[m][1]);
        }
        const uint32_t segment = ((4 * block + lane / 8) ^ lane % 8) * 16;
#pragma unroll
        for (int n = 0; n < Shape::COLUMNS; n += 2) {
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
template <typename Shape, typename T, bool GATE_UP>
__device__ __forceinline__ void store_tile(float (&sum)[Shape::ROW_TILES][Shape::COLUMNS][4], const Weights& weights,
                                           const Output<T>& output, const OutputTile& tile) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < Shape::ROW_TILES; m += 2) {
        const int row_tile = tile.row_tile + warp / Shape::COLUMN_WARPS * Shape::ROW_TILES + m;
        const float2 bias[2] = {row_bias<T, GATE_UP>(output, weights.rows, tile.expert, row_tile),
                                row_bias<T, GATE_UP>(output, weights.rows, tile.expert, row_tile + 1)};
        const ResultStore<T, GATE_UP, 2> results(output, weights.rows, tile, row_tile);
#pragma unroll
        for (int n = 0; n < Shape::COLUMNS; ++n) {
            const int token = (n * Shape::COLUMN_WARPS + warp % Shape::COLUMN_WARPS) * 8;
            if (token < tile.pairs)
                results.store(token, pair_of_lane<GATE_UP>(output, tile, token), {sum[m][n], sum[m + 1][n]}, bias);
        }
    }
}

// Multiplies each expert's matrix by the inputs of the expert's pairs, with mma.sync.
//   grid: any number of blocks; block b processes the tiles b, b + gridDim.x, b + 2 · gridDim.x, ...
//   block: EXPERT_MMA_THREADS
//   shared memory: STAGES · (X_BYTES + W_BYTES)
//   bytes moved: an expert's weights once per tile of up to PAIRS pairs, mostly from L2 after the first tile;
//     x once per 256 weight rows, mostly from L2; the output once
template <typename Shape, typename T, bool GATE_UP>
__device__ void expert_product(const Weights& weights, const Output<T>& output, const T* x, const uint32_t* offsets,
                               int experts) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const MmaStages<Shape> stages = {shared, shared_address(shared)};
    const int k_steps = (weights.columns + K_STEP - 1) / K_STEP;
    pdl_wait();
    pdl_launch_dependents();

    OutputTile tile;
    const auto next_tile = [&](int number) {
        return find_tile<Shape::BLOCK_ROW_TILES, GATE_UP>(offsets, experts, weights.rows, Shape::PAIRS, number, tile);
    };
    for (int number = blockIdx.x; next_tile(number); number += gridDim.x) {
        const auto load = [&](int k_step) {
            if (k_step < k_steps) load_k_step<Shape, T>(stages, weights, output, x, tile, k_step);
            commit_copies();
        };
        for (int s = 0; s < Shape::STAGES - 1; ++s) load(s);
        float sum[Shape::ROW_TILES][Shape::COLUMNS][4] = {};
        for (int k_step = 0; k_step < k_steps; ++k_step) {
            wait_for_copies<Shape::STAGES - 2>();
            __syncthreads();
            load(k_step + Shape::STAGES - 1);
            multiply_k_step<Shape, T>(sum, stages, tile, k_step);
        }
        store_tile<Shape, T, GATE_UP>(sum, weights, output, tile);
        __syncthreads();  // slower warps may still read the data that the next tile overwrites
    }
}
