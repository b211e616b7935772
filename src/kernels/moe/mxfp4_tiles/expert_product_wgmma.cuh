// Matrix products of routed experts with wgmma, for GPUs that run sm_90a code.
// expert_mlp.cu has the kernels that compute gate_up and down with this code. tiles.cuh describes the layouts.
// A pair is a token and one of its chosen experts.
// `x` is the input of the product: tiled x for gate_up, tiled h for down.
//
// Three of a block's four warpgroups multiply. The fourth copies the data of the next K steps to a ring buffer.
#pragma once
#include "headers/barrier.cuh"
#include "headers/bulk_copy.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"
#include "headers/shared_memory.cuh"
#include "headers/wgmma.cuh"
#include "moe/mxfp4_tiles/tiles.cuh"

// The matrices of all experts, either gate_up or down: tensor maps of the blocks and scales, and the size of a matrix.
// `blocks` and `scales` are references to kernel parameters, because copy_tensor needs the address of the parameter.
struct MappedWeights {
    const TensorMap &blocks, &scales;
    int rows, columns;
};

// The output tiles and the ring buffer of a wgmma kernel. An output tile has at most PAIRS pairs × 192 weight rows.
// Three warpgroups compute 64 weight rows each, and a fourth warpgroup copies data.
// While one of the three warpgroups waits for its products, another one can unpack weights.
// A fourth multiplying warpgroup would need more registers than a multiprocessor has.
// The expert matrices of gpt-oss have 2880 or 5760 rows. Both numbers are multiples of 192.
// K_STEPS is the number of K steps per stage of the ring buffer. In a stage, the weight tiles of the same rows are
// adjacent. If a tile has at most UNROLL_PAIRS pairs, the loop over the K steps of a full stage is unrolled. BLOCKS is
// the number of thread blocks that fit on a multiprocessor. If TAKES_TURNS is true, the warpgroups store their results
// in turns (see Turns).
template <int PAIRS_, int UNROLL_PAIRS_, int STAGES_, int K_STEPS_, int BLOCKS_, bool TAKES_TURNS_> struct WgmmaShape {
    static constexpr int PAIRS = PAIRS_, UNROLL_PAIRS = UNROLL_PAIRS_;
    static constexpr int STAGES = STAGES_, K_STEPS = K_STEPS_, BLOCKS = BLOCKS_;
    static constexpr bool TAKES_TURNS = TAKES_TURNS_;
    // Registers per thread in the copying warpgroup and in the multiplying warpgroups.
    static constexpr int COPY_REGISTERS = BLOCKS == 1 ? 32 : 24, REGISTERS = BLOCKS == 1 ? 160 : 72;
    // Bytes of x per K step, and bytes of weights and scales per row tile and stage.
    static constexpr int K_STEP_X_BYTES = PAIRS * 128;
    static constexpr int TILE_BYTES = K_STEPS * MXFP4_TILE_BYTES, TILE_SCALE_BYTES = K_STEPS * MXFP4_TILE_SCALE_BYTES;
    // Bytes of x, weights and scales per stage.
    static constexpr int X_BYTES = K_STEPS * K_STEP_X_BYTES, WEIGHT_BYTES = EXPERT_WGMMA_ROW_TILES * TILE_BYTES;
    static constexpr int SCALE_BYTES = EXPERT_WGMMA_ROW_TILES * TILE_SCALE_BYTES;
};
// The shape for more than 80 pairs per expert on average (see product_kernel.rs). With large tiles, each weight is read
// fewer times.
using LargeTile = WgmmaShape<EXPERT_LARGE_TILE_PAIRS, 0, EXPERT_LARGE_TILE_STAGES, EXPERT_LARGE_TILE_K_STEPS, 1, true>;
// The shape for 25 to 80 pairs per expert. Medium tiles leave room for more K steps in the ring buffer, and the loop
// over the K steps of a stage is unrolled.
using MediumTile = WgmmaShape<EXPERT_MEDIUM_TILE_PAIRS, EXPERT_MEDIUM_TILE_PAIRS, EXPERT_MEDIUM_TILE_STAGES,
                              EXPERT_MEDIUM_TILE_K_STEPS, 1, false>;
// The shape for at most 24 pairs per expert.
// With two thread blocks per multiprocessor, more warps unpack weights at the same time.
using SmallTile = WgmmaShape<EXPERT_SMALL_TILE_PAIRS, EXPERT_SMALL_TILE_PAIRS, EXPERT_SMALL_TILE_STAGES,
                             EXPERT_SMALL_TILE_K_STEPS, 2, false>;

// In code for targets other than sm_90a, the wgmma kernels (small_tile, medium_tile and large_tile) have empty bodies.
// product_kernel.rs launches the wgmma kernels only if the GPU runs sm_90a code.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The byte offsets of the parts of a ring buffer stage. x is first, because it needs the largest alignment.
// The barrier FULL counts copying warps and copied bytes. The barrier EMPTY counts warps that have finished reading.
// TILE is the output tile to which the stage belongs. TILE is valid only in the first stage of each output tile, and in
// the stage after the last output tile, where it has no pairs.
template <typename Shape> struct Stage {
    static constexpr int WEIGHTS = Shape::X_BYTES, SCALES = WEIGHTS + Shape::WEIGHT_BYTES,
                         FULL = SCALES + Shape::SCALE_BYTES;
    static constexpr int EMPTY = FULL + 8, TILE = EMPTY + 8;
    static constexpr int BYTES = (TILE + EXPERT_WGMMA_TILE_BYTES + 1023) / 1024 * 1024;
    // wgmma requires x at a multiple of 1024, and copy_tensor requires weights and scales at multiples of 128.
    static_assert(Shape::K_STEP_X_BYTES % 1024 == 0 && WEIGHTS % 128 == 0 && SCALES % 128 == 0);
};
static_assert(sizeof(OutputTile) == EXPERT_WGMMA_TILE_BYTES);

constexpr int ROW_TILES = EXPERT_WGMMA_ROW_TILES;
// The number of threads in the multiplying warpgroups. The threads of the copying warpgroup follow them.
constexpr int MULTIPLYING_THREADS = EXPERT_WGMMA_THREADS / 4 * 3;
// The number of warps in the copying warpgroup that copy data.
constexpr int COPYING_WARPS = 2;

__device__ __forceinline__ void store_tile_of_stage(uint32_t to, const OutputTile& tile) {
    store_shared_16(to, make_uint4(tile.expert, tile.first_pair, tile.pairs, tile.row));
    store_shared_4(to + 16, tile.row_tile);
}
__device__ __forceinline__ OutputTile load_tile_of_stage(uint32_t from) {
    const uint4 words = load_shared_16(from);
    return {(int)words.x, (int)words.y, (int)words.z, (int)words.w, (int)load_shared_4(from + 16)};
}

// The stage that a warp fills or reads next: the address of the stage and the wgmma descriptor of its x.
// A warp that reads the stage waits at FULL for the phase `parity`.
// A warp that fills the stage waits at EMPTY for the phase `parity` ^ 1.
template <typename Shape> class StageCursor {
    uint32_t first;
    uint64_t first_x;
    int left = Shape::STAGES;  // stages before the cursor returns to the first one

public:
    uint32_t stage;
    uint64_t x;
    uint32_t parity = 0;

    __device__ __forceinline__ explicit StageCursor(uint32_t ring) {
        stage = first = warp_uniform(ring);
        x = first_x = warp_uniform(wgmma_descriptor(ring));
    }
    __device__ __forceinline__ void next() {
        stage += Stage<Shape>::BYTES;
        x += Stage<Shape>::BYTES / 16;
        if (--left == 0) {
            stage = first;
            x = first_x;
            left = Shape::STAGES;
            parity ^= 1;
        }
    }
};

// Makes the compiler keep `value` in a register, so that it does not recompute `value` in each loop iteration.
__device__ __forceinline__ uint32_t in_register(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// With large tiles, the multiplying warpgroups store their results in turns: for each tile, warpgroup 0, then 1,
// then 2. Without turns, all warpgroups would store at the same time, and the tensor cores would be idle. With turns,
// the warpgroups soon reach the ends of their tiles at different times, and two multiply while one stores. Each
// warpgroup waits at its own barrier, where the warps of the previous warpgroup arrive after they have stored.
class Turns {
    static constexpr int WARPGROUPS = MULTIPLYING_THREADS / 128;
    uint32_t own, next;  // barriers
    uint32_t parity;     // of the phase for which this warpgroup waits at `own` next

public:
    __device__ __forceinline__ explicit Turns(const uint64_t (&barriers)[WARPGROUPS]) {
        const int warpgroup = threadIdx.x / 128;
        own = shared_address(&barriers[warpgroup]);
        next = shared_address(&barriers[(warpgroup + 1) % WARPGROUPS]);
        // Warpgroup 0 has the first turn. A wait for the phase before the first one ends at once.
        parity = warpgroup == 0 ? 1 : 0;
    }
    static __device__ __forceinline__ void init(const uint64_t (&barriers)[WARPGROUPS]) {
        for (const uint64_t& barrier : barriers) barrier_init(shared_address(&barrier), 4);
    }
    __device__ __forceinline__ void wait() { barrier_wait(own, parity), parity ^= 1; }
    __device__ __forceinline__ void pass() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(next);
    }
};

// Computes one warpgroup's part of an output tile: 64 weight rows × N pairs.
// Except with large tiles, unpacking the weights limits the speed, so every instruction in the loops over K steps
// matters.
template <typename Shape, typename T, int N, bool GATE_UP>
__device__ __forceinline__ void consume(StageCursor<Shape>& cursor, Turns& turns, const MappedWeights& weights,
                                        const Output<T>& output, const OutputTile& tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;  // each warp has one weight tile
    const uint32_t words_at = in_register(Stage<Shape>::WEIGHTS + warp * Shape::TILE_BYTES + lane * 16);
    const uint32_t scales_at = in_register(Stage<Shape>::SCALES + warp * Shape::TILE_SCALE_BYTES + g * 4);
    // 1. Load the biases and the indices of the pairs. Loads just before the stores would delay the stores.
    // In lane i, held[j] is the index of pair 32 · j + i of the tile.
    const int row_tile = tile.row_tile + warp;
    const float2 bias[1] = {row_bias<T, GATE_UP>(output, weights.rows, tile.expert, row_tile)};
    uint32_t held[(N + 31) / 32];
    if constexpr (!GATE_UP) {
#pragma unroll
        for (int j = 0; j < (N + 31) / 32; ++j)
            held[j] = output.sorted[tile.first_pair + min(32 * j + lane, tile.pairs - 1)];
    }

    // 2. Multiply all K steps.
    float sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sum[i] = 0.0f;
    uint32_t a[2][4];       // the weights of two MMAs with K = 16: one MMA runs while the other's weights are unpacked
    uint32_t previous = 0;  // the address of the previous stage of this tile, or 0
    const auto multiply = [&](int k_step) __attribute__((always_inline)) {
        const uint4 words = load_shared_16(cursor.stage + words_at + k_step * MXFP4_TILE_BYTES);
        uint32_t factors[2];
        scale_factors<T>(load_shared_4(cursor.stage + scales_at + k_step * MXFP4_TILE_SCALE_BYTES), factors);
        const uint64_t b = cursor.x + k_step * (Shape::K_STEP_X_BYTES / 16);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint32_t low = k / 2 ? words.z : words.x, high = k / 2 ? words.w : words.y;
            uint32_t (&to)[4] = a[k % 2];
            if (k % 2 == 0) unpack_items<T, 0>(low, high, factors[k / 2], to);
            if (k % 2 == 1) unpack_items<T, 1>(low, high, factors[k / 2], to);
            wgmma_fence();
            wgmma<T>(sum, to, b + 2 * k);
            wgmma_commit();
            wgmma_wait<1>();
            // Only the product above can still be unfinished.
            // If it is the first product of a stage, the previous stage can therefore be filled again.
            if (k == 0 && k_step == 0 && previous && lane == 0) barrier_arrive(previous + Stage<Shape>::EMPTY);
        }
    };
    int left = (weights.columns + K_STEP - 1) / K_STEP;  // the number of K steps that are left
    if constexpr (N <= Shape::UNROLL_PAIRS) {
#pragma unroll 1
        for (; left >= Shape::K_STEPS; left -= Shape::K_STEPS) {
            barrier_wait(cursor.stage + Stage<Shape>::FULL, cursor.parity);
#pragma unroll
            for (int k_step = 0; k_step < Shape::K_STEPS; ++k_step) multiply(k_step);
            previous = cursor.stage;
            cursor.next();
        }
    }
#pragma unroll 1
    for (; left > 0; left -= Shape::K_STEPS) {
        barrier_wait(cursor.stage + Stage<Shape>::FULL, cursor.parity);
#pragma unroll 1
        for (int k_step = 0; k_step < min(left, Shape::K_STEPS); ++k_step) multiply(k_step);
        previous = cursor.stage;
        cursor.next();
    }
    wgmma_wait<0>();
    read_after_wgmma(sum);
    if (lane == 0) barrier_arrive(previous + Stage<Shape>::EMPTY);

    // 3. Store the results.
    const ResultStore<T, GATE_UP, 1> results(output, weights.rows, tile, row_tile);
    if constexpr (Shape::TAKES_TURNS) turns.wait();
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
        const uint32_t pair = GATE_UP ? 0 : __shfl_sync(ALL_LANES, held[n / 4], n % 4 * 8 + g);
        results.store(n * 8, pair, {sum + n * 4}, bias);
    }
    if constexpr (Shape::TAKES_TURNS) turns.pass();
}

// Calls `consume` with N set to the smallest multiple of 16 that is at least the tile's number of pairs.
template <typename Shape, typename T, int N, bool GATE_UP>
__device__ __forceinline__ void multiply_tile(StageCursor<Shape>& cursor, Turns& turns, const MappedWeights& weights,
                                              const Output<T>& output, const OutputTile& tile) {
    if constexpr (N < Shape::PAIRS) {
        if (tile.pairs > N) return multiply_tile<Shape, T, N + 16, GATE_UP>(cursor, turns, weights, output, tile);
    }
    consume<Shape, T, N, GATE_UP>(cursor, turns, weights, output, tile);
}

// Initializes all barriers, and waits until all threads of the block see them.
template <typename Shape>
__device__ __forceinline__ void init_barriers(uint32_t ring,
                                              const uint64_t (&turn_barriers)[MULTIPLYING_THREADS / 128]) {
    if (threadIdx.x == 0) {
        if constexpr (Shape::TAKES_TURNS) Turns::init(turn_barriers);
        for (int s = 0; s < Shape::STAGES; ++s) {
            barrier_init(ring + s * Stage<Shape>::BYTES + Stage<Shape>::FULL, COPYING_WARPS);
            barrier_init(ring + s * Stage<Shape>::BYTES + Stage<Shape>::EMPTY, MULTIPLYING_THREADS / 32);
        }
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncthreads();
}

// For the K_STEPS K steps of each stage of each output tile of this thread block, waits for an empty stage, and then
// calls `copy(tile, k_step)` in one lane, where `k_step` is the first of these K steps. `copy` must arrive at FULL of
// the stage. Returns when the stage after the last tile is empty.
//
// elect_lane waits for all lanes, so every lane has seen that the stage is empty before one lane arrives at FULL.
// Otherwise, the stage could become full and empty again before a slow lane checks EMPTY.
// The slow lane would then miss a phase of EMPTY, and would wait forever.
template <typename Shape, bool GATE_UP, typename Copy>
__device__ __forceinline__ void fill_stages(StageCursor<Shape>& cursor, const MappedWeights& weights,
                                            const uint32_t* offsets, int experts, int k_steps, Copy&& copy) {
    OutputTile tile;
    for (int number = blockIdx.x;
         find_tile<ROW_TILES, GATE_UP>(offsets, experts, weights.rows, Shape::PAIRS, number, tile);
         number += gridDim.x) {
#pragma unroll 1
        for (int k_step = 0; k_step < k_steps; k_step += Shape::K_STEPS) {
            barrier_wait(cursor.stage + Stage<Shape>::EMPTY, cursor.parity ^ 1);
            if (elect_lane()) copy(tile, k_step);
            __syncwarp();
            cursor.next();
        }
    }
    barrier_wait(cursor.stage + Stage<Shape>::EMPTY, cursor.parity ^ 1);
}

// The copying warpgroup: copies x, weights and scales to the ring buffer, several stages ahead of their use.
// Bulk copies write x, and wgmma reads x, through the async proxy.
// If cp.async copied x, each stage would need a proxy fence between the copies and wgmma.
//
// Warp 0 copies x after the previous kernel has ended.
// Warp 1 copies weights and scales without waiting for the previous kernel.
// Warp 1 also reads `offsets` without waiting: the previous kernel is spread_tokens or gate_up, and each of these
// kernels lets this kernel start only after the kernels that write `offsets` have ended.
//
// Warps 2 and 3 have nothing to do. They exist because setmaxnreg changes the registers of a whole warpgroup.
//
// Every instruction of a copying warp delays the multiplying warps, so a stage is filled with few copies.
// One copy_tensor copies the weights of all row tiles, and another one copies their scales.
template <typename Shape, typename T, bool GATE_UP>
__device__ __forceinline__ void copy_tiles(StageCursor<Shape>& cursor, const MappedWeights& weights,
                                           const Output<T>& output, const T* x, const uint32_t* offsets, int experts) {
    const int warp = warp_uniform((threadIdx.x - MULTIPLYING_THREADS) / 32);
    const int k_steps = (weights.columns + K_STEP - 1) / K_STEP;
    if (warp == 0) {
        pdl_wait();
        pdl_launch_dependents();
        const size_t stride = (size_t)output.tiled_rows * 128;
        fill_stages<Shape, GATE_UP>(cursor, weights, offsets, experts, k_steps,
                                    [&](const OutputTile& tile, int k_step) {
                                        const uint32_t full = cursor.stage + Stage<Shape>::FULL;
                                        const int count = min(Shape::K_STEPS, k_steps - k_step),
                                                  bytes = (tile.pairs + 7) / 8 * 1024;
                                        const char* from =
                                            reinterpret_cast<const char*>(x) + (size_t)tile.row * 128 + k_step * stride;
                                        if (k_step == 0) store_tile_of_stage(cursor.stage + Stage<Shape>::TILE, tile);
                                        barrier_expect(full, count * bytes);
#pragma unroll
                                        for (int i = 0; i < Shape::K_STEPS; ++i)
                                            if (i < count)
                                                copy_bulk(cursor.stage + i * Shape::K_STEP_X_BYTES, from + i * stride,
                                                          bytes, full);
                                    });
        // A tile without pairs tells the multiplying warpgroups to stop.
        if (elect_lane()) {
            store_tile_of_stage(cursor.stage + Stage<Shape>::TILE, {});
            barrier_arrive(cursor.stage + Stage<Shape>::FULL);
        }
    } else if (warp == 1) {
        fill_stages<Shape, GATE_UP>(cursor, weights, offsets, experts, k_steps,
                                    [&](const OutputTile& tile, int k_step) {
                                        const uint32_t full = cursor.stage + Stage<Shape>::FULL;
                                        barrier_expect(full, Shape::WEIGHT_BYTES + Shape::SCALE_BYTES);
                                        copy_tensor(cursor.stage + Stage<Shape>::WEIGHTS, weights.blocks,
                                                    k_step * MXFP4_TILE_BYTES, tile.row_tile, tile.expert, full);
                                        copy_tensor(cursor.stage + Stage<Shape>::SCALES, weights.scales,
                                                    k_step * MXFP4_TILE_SCALE_BYTES, tile.row_tile, tile.expert, full);
                                    });
        if (elect_lane()) barrier_arrive(cursor.stage + Stage<Shape>::FULL);
    }
}

// Multiplies each expert's matrix by the inputs of the expert's pairs, with wgmma.
//   grid: any number of blocks; block b processes the tiles b, b + gridDim.x, b + 2 · gridDim.x, ...
//   block: EXPERT_WGMMA_THREADS
//   shared memory: see `WgmmaTile::shared_bytes` in product_kernel.rs
//   bytes moved: an expert's weights once per tile of up to PAIRS pairs, mostly from L2 after the first tile;
//     x once per 192 weight rows, mostly from L2; the output once
template <typename Shape, typename T, bool GATE_UP>
__device__ void expert_product_wgmma(const MappedWeights& weights, const Output<T>& output, const T* x,
                                     const uint32_t* offsets, int experts) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t ring = (shared_address(shared) + 1023) / 1024 * 1024;
    __shared__ uint64_t turn_barriers[MULTIPLYING_THREADS / 128];
    init_barriers<Shape>(ring, turn_barriers);
    StageCursor<Shape> cursor(ring);
    // At the start, each thread has 128 / BLOCKS registers.
    // The copying warpgroup releases most of its registers, so that the multiplying warpgroups can have more.
    if (threadIdx.x >= MULTIPLYING_THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::COPY_REGISTERS));
        copy_tiles<Shape, T, GATE_UP>(cursor, weights, output, x, offsets, experts);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::REGISTERS));
        Turns turns(turn_barriers);
        while (true) {
            barrier_wait(cursor.stage + Stage<Shape>::FULL, cursor.parity);
            const OutputTile tile = load_tile_of_stage(cursor.stage + Stage<Shape>::TILE);
            if (tile.pairs == 0) return;
            multiply_tile<Shape, T, 16, GATE_UP>(cursor, turns, weights, output, tile);
        }
    }
}
#else
template <typename Shape, typename T, bool GATE_UP>
__device__ void expert_product_wgmma(const MappedWeights&, const Output<T>&, const T*, const uint32_t*, int) {}
#endif
