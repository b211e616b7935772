// The matrix product x·wᵀ for up to DENSE_WGMMA_MAX_TOKENS tokens, for GPUs that run sm_90a code.
// Reading w takes most of the time. If w has few rows, several blocks divide its columns, so that more multiprocessors
// read w. The sums of these blocks are separate parts of the result. The next kernel reads the parts and adds them up.
//   w: T [rows, columns]; a box of the tensor map has DENSE_WGMMA_ROWS rows and DENSE_WGMMA_COLUMNS columns
//   x: T [tokens, columns]; a box has TOKENS rows and DENSE_WGMMA_COLUMNS columns
//   y: f32 [parts, tokens, rows]; the product is the sum over the parts
//   columns: the number of columns; at least DENSE_WGMMA_COLUMNS · parts if there are several parts
//   grid: (parts, ceil(rows / DENSE_WGMMA_ROWS)); block: DENSE_WGMMA_THREADS
//   bytes moved: rows · columns · sizeof(T) + parts · tokens · rows · 4; most reads of x hit L2
//
// The last warp copies w and x to a ring buffer. Each of the two warpgroups multiplies 64 rows of w by all tokens.
// Elements of a box outside w or x are zero, so incomplete tiles need no special case until the sums are stored.
#include "constants.cuh"
#include "headers/barrier.cuh"
#include "headers/bulk_copy.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"
#include "headers/shared_memory.cuh"
#include "headers/wgmma.cuh"

constexpr int ROWS = DENSE_WGMMA_ROWS, COLUMNS = DENSE_WGMMA_COLUMNS, THREADS = DENSE_WGMMA_THREADS;
constexpr int WARPGROUP_ROWS = 64, ROW_BYTES = 128, MULTIPLYING_WARPS = ROWS / WARPGROUP_ROWS * 4;
static_assert(COLUMNS * 2 == ROW_BYTES && THREADS == 32 * (MULTIPLYING_WARPS + 1),
              "the code below assumes these sizes");

// TOKENS is the N of the wgmma instructions (see wgmma.cuh), at least the number of tokens.
template <typename T, int TOKENS>
__device__ void dense_wgmma(const TensorMap& w, const TensorMap& x, float* y, int rows, int columns, int tokens) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int W_BYTES = ROWS * ROW_BYTES, STAGE_BYTES = W_BYTES + TOKENS * ROW_BYTES;
    constexpr int STAGES = DENSE_WGMMA_RING_BYTES / STAGE_BYTES;
    extern __shared__ uint8_t shared[];
    __shared__ uint64_t full[STAGES], empty[STAGES];                      // the barriers of each stage
    const uint32_t ring = (shared_address(shared) + 1023) / 1024 * 1024;  // swizzled boxes need this alignment
    // The shuffle tells the compiler that all lanes have the same value.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int part = blockIdx.x, parts = gridDim.x, first_row = blockIdx.y * ROWS;
    const int all_steps = (columns + COLUMNS - 1) / COLUMNS, first_step = all_steps * part / parts;
    const int steps = all_steps * (part + 1) / parts - first_step;

    // 1. Copy. No running kernel writes w, so the first copies of w start before pdl_wait().
    const auto copy_w = [&](int step, int stage) {
        const uint32_t barrier = shared_address(&full[stage]);
        barrier_expect(barrier, STAGE_BYTES);
        copy_tensor(ring + stage * STAGE_BYTES, w, (first_step + step) * ROW_BYTES, first_row, 0, barrier);
    };
    const auto copy_x = [&](int step, int stage) {
        copy_tensor(ring + stage * STAGE_BYTES + W_BYTES, x, (first_step + step) * ROW_BYTES, 0, 0,
                    shared_address(&full[stage]));
    };
    const int early_steps = min(steps, STAGES);
    if (warp == MULTIPLYING_WARPS && elect_lane()) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(shared_address(&full[stage]), 1);
            barrier_init(shared_address(&empty[stage]), MULTIPLYING_WARPS);
        }
        // The fence makes the barriers visible to bulk copies, which access them through the async proxy.
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int step = 0; step < early_steps; ++step) copy_w(step, step);
    }
    __syncthreads();
    if (warp == MULTIPLYING_WARPS) {
        if (elect_lane()) {
            pdl_wait();
            pdl_launch_dependents();
            for (int step = 0; step < early_steps; ++step) copy_x(step, step);
            for (int step = STAGES, stage = 0, parity = 0; step < steps; ++step) {
                barrier_wait(shared_address(&empty[stage]), parity);
                copy_w(step, stage);
                copy_x(step, stage);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }

    // 2. Multiply. While the products of one step run, the products of the next step are queued.
    // If this loop were unrolled, the compiler would insert a wait after each product.
    float sums[TOKENS / 2] = {};
    int stage = 0, parity = 0, previous = -1;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        barrier_wait(shared_address(&full[stage]), parity);
        const uint32_t at = ring + stage * STAGE_BYTES;
        const uint64_t a = wgmma_descriptor(at + warp / 4 * WARPGROUP_ROWS * ROW_BYTES);
        const uint64_t b = wgmma_descriptor(at + W_BYTES);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; ++k) wgmma<T>(sums, a + 2 * k, b + 2 * k);  // 16 columns are 2 · 16 bytes
        wgmma_commit();
        wgmma_wait<1>();
        if (previous >= 0 && lane == 0) barrier_arrive(shared_address(&empty[previous]));
        previous = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    // wgmma writes the sums asynchronously, and the compiler does not know this.
    // The empty asm statements keep the compiler from reading the sums before wgmma_wait.
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");

    // 3. Store. A store instruction of a warp writes 8 adjacent rows, 32 bytes, of each of four tokens.
    pdl_wait();
    y += (size_t)part * tokens * rows;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, row = first_row + warp * 16 + lane / 4 + i / 2 % 2 * 8;
        if (token < tokens && row < rows) y[(size_t)token * rows + row] = sums[i];
    }
#endif
}

#define DEFINE(T, SUFFIX, TOKENS)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        dense_wgmma_##SUFFIX##_##TOKENS(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,      \
                                        float* y, int rows, int columns, int tokens) {                                 \
        dense_wgmma<T, TOKENS>(w, x, y, rows, columns, tokens);                                                        \
    }
#define DEFINE_SIZES(T, SUFFIX) DEFINE(T, SUFFIX, 16) DEFINE(T, SUFFIX, 32)
DEFINE_SIZES(__half, f16)
DEFINE_SIZES(__nv_bfloat16, bf16)
