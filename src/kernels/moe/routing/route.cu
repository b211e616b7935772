// Routes up to ROUTE_TOKENS tokens in one launch. Needs thread block clusters (compute capability 9.0 and later).
// Computes the router logits, chooses the experts, and sorts all (token, expert) pairs by expert.
//   x: f32 [tokens, columns]
//   weight: f32 [experts, columns]
//   bias: f32 [experts] or null
//   routing_weights: f32 [tokens, chosen], a softmax over the logits of the chosen experts
//   sorted, offsets, rows: see sort_by_expert
//   usage: u32 [2] or null; each launch increments usage[0], and adds the number of experts with pairs to usage[1]
//   columns is a multiple of 4; experts <= ROUTE_EXPERTS; tokens <= ROUTE_TOKENS
//   chosen <= experts and chosen <= MAX_CHOSEN_EXPERTS
//   grid: (ROUTE_CLUSTER, ceil(tokens / ROUTE_CLUSTER)); cluster: (ROUTE_CLUSTER, 1); block: ROUTE_THREADS
//   bytes moved: 4 · (tokens + experts) · columns; each cluster reads all of `weight`, mostly from L2 after the first
//
// A cluster routes as many tokens as it has blocks. Its warps divide the columns, and compute the partial logits of all
// tokens of the cluster. Each block then adds up the partial logits of one token, and chooses experts for this token.
// The last block of the grid sorts all pairs.
//
// The blocks exchange data without memory fences, because a fence waits for all earlier memory accesses of its thread.
// Instead, they send partial logits with st.async, and a barrier counts the bytes that have arrived.
// The sorting block polls `chosen_experts` until it has the chosen experts of all tokens.
// The partial logits of a token are always added in the same order, so its logits do not depend on other tokens.
#include "constants.cuh"
#include "headers/barrier.cuh"
#include "headers/cluster.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"
#include "headers/shared_memory.cuh"
#include "headers/tensor_core.cuh"
#include "headers/tf32.cuh"
#include "moe/routing/routing.cuh"

constexpr int BLOCKS = ROUTE_CLUSTER, THREADS = ROUTE_THREADS, WARPS = THREADS / 32;
// The number of experts whose logits are computed at once: the rows of two MMAs.
constexpr int EXPERTS = 32;
// A column tile is TILE_COLUMNS columns, which are multiplied at once.
// A warp loads the weights of HELD_TILES column tiles before it waits for the previous kernel.
constexpr int TILE_COLUMNS = 16, HELD_TILES = 3;
static_assert(BLOCKS == 8, "BLOCKS must be 8, because an MMA multiplies 8 tokens");
static_assert(BLOCKS * EXPERTS == THREADS,
              "BLOCKS * EXPERTS must be THREADS: each thread adds up the partial logits of one token and one expert");

// The chosen expert of each pair plus 1, or 0 if the expert is not chosen yet. All zeros between launches.
// Two launches never use the array at the same time: each rank opens its own candle device, and each device loads this
// module with its own array (launch/module.rs). A launch uses the array only after pdl_wait(), when all earlier
// launches on its device have ended.
__device__ uint32_t chosen_experts[ROUTE_TOKENS * MAX_CHOSEN_EXPERTS];

__device__ __forceinline__ void store_chosen(int pair, uint32_t word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(chosen_experts + pair), "r"(word) : "memory");
}
__device__ __forceinline__ uint32_t load_chosen(int pair) {
    uint32_t word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(chosen_experts + pair) : "memory");
    return word;
}

// The results of sort_pairs. The top of this file describes the fields.
struct SortedPairs {
    uint32_t *sorted, *offsets, *rows, *usage;
};

// The scratch space of sort_pairs, in shared memory. Each warp sorts some of the pairs: its share.
struct SortScratch {
    // At first, next[w][e] is the number of pairs of expert e in the share of warp w.
    // Later, next[w][e] is the position in `sorted` of the next pair of expert e from this share.
    uint32_t (*next)[ROUTE_EXPERTS];
    uint32_t* padding;     // padding[e] is the number of unused rows before the first row of expert e in a tiled tensor
    uint16_t* experts_of;  // experts_of[p] is the expert of pair p
};

// Waits for the chosen experts, and sorts all pairs by expert.
// Unlike sort_by_expert, keeps the pairs of each expert in ascending order.
// The order determines which pairs share a tile in later kernels, so a fixed order makes results reproducible.
// Increments usage[0], and adds the number of experts with pairs to usage[1].
__device__ __forceinline__ void sort_pairs(const SortedPairs& results, const SortScratch& scratch, int pairs,
                                           int experts) {
    const auto [next, padding, experts_of] = scratch;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int share = (pairs + THREADS - 1) / THREADS * 32, first = warp * share, end = min(first + share, pairs);
    for (int e = lane; e < experts; e += 32) next[warp][e] = 0;
    __syncwarp();
    constexpr int LOADS = 4;  // loads per lane that are in flight at the same time
    for (int base = first + lane; base - lane < end; base += 32 * LOADS) {
        uint32_t words[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (base + 32 * i < end) words[i] = load_chosen(base + 32 * i);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int p = base + 32 * i;
            if (p >= end) continue;
            while (words[i] == 0) words[i] = load_chosen(p);
            store_chosen(p, 0);
            experts_of[p] = words[i] - 1;
            atomicAdd(&next[warp][words[i] - 1], 1u);
        }
    }
    __syncthreads();
    if (warp == 0) {
        // The low half of a word counts pairs, and the high half counts unused rows.
        static_assert(ROUTE_TOKENS * MAX_CHOSEN_EXPERTS < 1 << 16 && 7 * ROUTE_EXPERTS < 1 << 16);
        uint32_t before = 0, used = 0;
        for (int base = 0; base < experts; base += 32) {
            const int e = min(base + lane, experts - 1);
            uint32_t counts[WARPS], count = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                counts[w] = next[w][e];
                count += counts[w];
            }
            if (base + lane >= experts) count = 0;
            const uint32_t both = (8 - count % 8) % 8 << 16 | count;
            const uint32_t sum = warp_prefix_sum(both);
            used += __popc(__ballot_sync(ALL_LANES, count > 0));
            if (base + lane < experts) {
                const uint32_t earlier = before + sum - both;
                uint32_t position = earlier & 0xffff;
                results.offsets[e] = position;
                padding[e] = earlier >> 16;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    next[w][e] = position;
                    position += counts[w];
                }
            }
            before += __shfl_sync(ALL_LANES, sum, 31);
        }
        if (lane == 0) {
            results.offsets[experts] = before & 0xffff;
            if (results.usage) atomicAdd(results.usage, 1u), atomicAdd(results.usage + 1, used);
        }
    }
    __syncthreads();
    for (int p = first + lane; p - lane < end; p += 32) {
        const uint32_t expert = p < end ? experts_of[p] : NO_EXPERT;
        const uint32_t same = __match_any_sync(ALL_LANES, expert), earlier = __popc(same & ((1u << lane) - 1));
        if (p < end) {
            const uint32_t position = next[warp][expert] + earlier;
            results.sorted[position] = p;
            results.rows[p] = position + padding[expert];
        }
        __syncwarp();
        if (p < end && earlier == 0) next[warp][expert] += __popc(same);
        __syncwarp();
    }
}

// Multiplies 16 columns of the weights of 32 experts by the same columns of 8 tokens, and adds the products to `sums`.
// In lane 4g + t:
//   weights[i] has columns 4t to 4t + 3 of expert 8i + g, and x has the same columns of token g
//   sums[m][0] has the lane's sums for experts 16m to 16m + 15, in the layout of d in multiply_add_tf32
__device__ __forceinline__ void multiply_columns(float (&sums)[2][1][4], const float4 (&weights)[4], const float4& x) {
    Tf32Pair a[2][2][4], b[1][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) split_tf32(a[i / 2][i % 2], weights[i]);
    split_tf32(b[0], x);
    multiply_add_pairs(sums, a, b);
}

// Chooses the experts of one token in one warp. Stores the chosen experts and their routing weights.
//   of_blocks: the partial logits of all blocks of the cluster for this token
//   routing: scratch space in shared memory
__device__ __forceinline__ void choose_experts(const float (&of_blocks)[BLOCKS][ROUTE_EXPERTS], Routing& routing,
                                               float* routing_weights, int token, int experts, int chosen) {
    const int lane = threadIdx.x % 32;
    const auto logit_of = [&](int expert) {
        float logit = 0.0f;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) logit += of_blocks[block][expert];
        return logit;
    };
    routing.choose_by(logit_of, experts, chosen, chosen, lane);
    __syncwarp();
    if (lane < chosen) {
        store_chosen(token * chosen + lane, routing.expert[lane] + 1);
        routing_weights[(size_t)token * chosen + lane] = routing.weight[lane];
    }
}

// Older GPUs have no clusters. There, `RoutedPairs::route` (route.rs) launches several other kernels instead.
#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __launch_bounds__(THREADS) __cluster_dims__(BLOCKS, 1, 1)
    route_f32(const float* x, const float* weight, const float* bias, float* routing_weights, uint32_t* sorted,
              uint32_t* offsets, uint32_t* rows, uint32_t* usage, int tokens, int columns, int experts, int chosen) {
    // The sort reuses the memory of the partial logits, because blocks with more shared memory could leave too little
    // for the next kernel's blocks, which start early (see pdl.cuh).
    __shared__ union {
        float of_warps[WARPS][BLOCKS][EXPERTS];  // of this block's warps, for the tokens of all blocks of the cluster
        uint32_t next[WARPS][ROUTE_EXPERTS];
    } partials;
    __shared__ union {
        float of_blocks[BLOCKS][ROUTE_EXPERTS];  // of all blocks of the cluster, for this block's token
        uint16_t experts_of[ROUTE_TOKENS * MAX_CHOSEN_EXPERTS];
    } token_partials;
    __shared__ uint32_t padding[ROUTE_EXPERTS];
    __shared__ Routing routing;
    __shared__ uint64_t barrier;  // counts the bytes of token_partials.of_blocks
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rank = blockIdx.x, first_token = blockIdx.y * BLOCKS, token = first_token + rank;
    const uint32_t arrived = shared_address(&barrier);
    if (threadIdx.x == 0) {
        barrier_init(arrived, 1);
        barrier_expect(arrived, BLOCKS * ((experts + EXPERTS - 1) / EXPERTS * EXPERTS) * sizeof(float));
    }
    announce_barriers_to_cluster();

    // 1. Each warp multiplies every (BLOCKS · WARPS)-th column tile.
    // Past the last column, a lane loads zeros. Past the last expert or token, it loads the last one again.
    const int first_tile = rank * WARPS + warp, tiles = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const auto load = [&](const float* matrix, int row, int tile) {
        const int column = tile * TILE_COLUMNS + 4 * t;
        const float* from = matrix + (size_t)row * columns + column;
        return column < columns ? *reinterpret_cast<const float4*>(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    };
    const auto load_weights = [&](float4(&to)[4], int base, int tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = load(weight, min(base + 8 * i + g, experts - 1), tile);
    };
    const auto load_x = [&](int tile) { return load(x, min(first_token + g, tokens - 1), tile); };
    float4 held_weights[HELD_TILES][4], held_x[HELD_TILES];
#pragma unroll
    for (int h = 0; h < HELD_TILES; ++h) load_weights(held_weights[h], 0, first_tile + h * BLOCKS * WARPS);
    const auto load_bias = [&](int expert) { return bias && rank == 0 && expert < experts ? bias[expert] : 0.0f; };
    float added = load_bias(lane);
    wait_for_barriers_of_cluster();
    pdl_wait();
    pdl_launch_dependents();
#pragma unroll
    for (int h = 0; h < HELD_TILES; ++h) held_x[h] = load_x(first_tile + h * BLOCKS * WARPS);

    for (int base = 0; base < experts; base += EXPERTS) {
        float sums[2][1][4] = {};
#pragma unroll
        for (int h = 0; h < HELD_TILES; ++h) {
            if (base > 0) load_weights(held_weights[h], base, first_tile + h * BLOCKS * WARPS);
            multiply_columns(sums, held_weights[h], held_x[h]);
        }
        for (int tile = first_tile + HELD_TILES * BLOCKS * WARPS; tile < tiles; tile += BLOCKS * WARPS) {
            float4 weights[4];
            load_weights(weights, base, tile);
            multiply_columns(sums, weights, load_x(tile));
        }
        if (base > 0) added = load_bias(base + lane);
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                partials.of_warps[warp][2 * t + i % 2][16 * m + 8 * (i / 2) + g] = sums[m][0][i];
        __syncthreads();
        // Each thread adds up the partial logits of this block's warps for one token and one expert.
        // In the first block of the cluster, it also adds the bias.
        float sum = added;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += partials.of_warps[w][warp][lane];
        store_in_cluster(shared_address(&token_partials.of_blocks[rank][base + lane]), warp, sum, arrived);
        if (base + EXPERTS < experts) __syncthreads();
    }

    // 2. Choose the experts of this block's token. A block must not end before all stores to its memory have arrived.
    // barrier_wait does not order accesses to other blocks' memory. Here, the data is in this block's own memory.
    if (warp == 0) barrier_wait(arrived, 0);
    if (warp == 0 && token < tokens)
        choose_experts(token_partials.of_blocks, routing, routing_weights, token, experts, chosen);

    // 3. In the last block of the grid, sort the pairs of all tokens.
    // Only this block waits for other clusters. In practice, GPUs start its cluster last.
    // Even if its cluster started first, the wait would end: the other clusters could run on the other multiprocessors.
    if (blockIdx.x + 1 == gridDim.x && blockIdx.y + 1 == gridDim.y) {
        __syncthreads();  // other warps may still use the memory that sort_pairs reuses
        sort_pairs({sorted, offsets, rows, usage}, {partials.next, padding, token_partials.experts_of}, tokens * chosen,
                   experts);
    }
}
#endif
