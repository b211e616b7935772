// Routes a few tokens in one launch.
// Computes the router logits, chooses the experts, and sorts all (token, expert) pairs by expert.
//   x: f32 [tokens, columns]
//   weight: f32 [experts, columns]
//   bias: f32 [experts] or null
//   partials: f32 [slices, tokens, experts], scratch memory for the sums over each slice of columns
//   ids: u32 [tokens, chosen], scratch memory for the chosen experts
//   routing_weights: f32 [tokens, chosen], the routing weights
//   sorted, offsets: see sort_by_expert
//   usage: u32 [2] or null; each launch adds 1 to usage[0], and the number of experts that have pairs to usage[1]
//   columns is a multiple of 4; experts <= ROUTE_EXPERTS; tokens <= ROUTE_TOKENS
//   grid: (ceil(tokens / ROUTE_BLOCK_TOKENS), slices, ceil(experts / 32)) with slices = ceil(columns / ROUTE_COLUMNS)
//   block: 32 · ROUTE_BLOCK_TOKENS, one warp per token and one lane per expert
//   bytes moved: 4 · (tokens + experts) · columns
// The last block to finish for a group of ROUTE_BLOCK_TOKENS tokens adds the partial sums and chooses the experts.
// The last block to choose experts sorts all pairs.
// The partial sums of a token are always added in the same order, so its logits do not depend on the other tokens.
#include "constants.cuh"
#include "headers/arrive.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"
#include "moe/routing.cuh"

constexpr int TOKENS = ROUTE_BLOCK_TOKENS, THREADS = 32 * TOKENS, WARPS = THREADS / 32, QUADS = ROUTE_COLUMNS / 4;

// Counters of finished blocks: one counter per TOKENS tokens, and one counter for the blocks that have chosen experts.
// All counters are zero between launches. Two launches never use the same counters at the same time:
// each device has its own counters, and a device runs the launches of this kernel one by one.
__device__ uint32_t finished[ROUTE_TOKENS / TOKENS + 1];

// Sorts all pairs by expert. Unlike sort_by_expert, keeps the pairs of each expert in ascending order.
// The order determines which pairs share a tile in later kernels, so a fixed order makes results reproducible.
// Adds 1 to usage[0], and the number of experts that have pairs to usage[1], unless `usage` is null.
//   next, experts_of: scratch space in shared memory
__device__ __forceinline__ void sort_pairs(const uint32_t* ids, uint32_t* sorted, uint32_t* offsets, uint32_t* usage,
                                           uint32_t (*next)[ROUTE_EXPERTS], uint16_t* experts_of, int pairs,
                                           int experts) {
    // Each warp sorts `share` consecutive pairs. experts_of[p] is the expert of pair p.
    // At first, next[w][e] is the number of pairs of expert e in the share of warp w.
    // Later, next[w][e] is the position in `sorted` of the next pair of expert e from this share.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int share = (pairs + THREADS - 1) / THREADS * 32, first = warp * share, end = min(first + share, pairs);
    for (int e = lane; e < experts; e += 32) next[warp][e] = 0;
    __syncwarp();
    for (int p = first + lane; p < end; p += 32) {
        const uint32_t expert = __ldcg(ids + p);
        experts_of[p] = expert;
        atomicAdd(&next[warp][expert], 1u);
    }
    __syncthreads();
    if (warp == 0) {
        uint32_t before = 0, used = 0;
        for (int base = 0; base < experts; base += 32) {
            const int e = base + lane;
            uint32_t count = 0;
            for (int w = 0; w < WARPS && e < experts; ++w) count += next[w][e];
            uint32_t last = count;
            used += __popc(__ballot_sync(0xffffffffu, count > 0));
#pragma unroll
            for (int offset = 1; offset < 32; offset *= 2) {
                const uint32_t other = __shfl_up_sync(0xffffffffu, last, offset);
                if (lane >= offset) last += other;
            }
            uint32_t position = before + last - count;
            if (e < experts) offsets[e] = position;
            for (int w = 0; w < WARPS && e < experts; ++w) {
                const uint32_t own = next[w][e];
                next[w][e] = position;
                position += own;
            }
            before += __shfl_sync(0xffffffffu, last, 31);
        }
        if (lane == 0) {
            offsets[experts] = before;
            if (usage) atomicAdd(usage, 1u), atomicAdd(usage + 1, used);
        }
    }
    __syncthreads();
    for (int p = first + lane; p - lane < end; p += 32) {
        const uint32_t expert = p < end ? experts_of[p] : NO_EXPERT;
        const uint32_t same = __match_any_sync(0xffffffffu, expert), earlier = __popc(same & ((1u << lane) - 1));
        if (p < end) sorted[next[warp][expert] + earlier] = p;
        __syncwarp();
        if (p < end && earlier == 0) next[warp][expert] += __popc(same);
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    route_f32(const float* x, const float* weight, const float* bias, float* partials, uint32_t* ids,
              float* routing_weights, uint32_t* sorted, uint32_t* offsets, uint32_t* usage, int tokens, int columns,
              int experts, int chosen) {
    __shared__ float4 xs[TOKENS][QUADS];
    __shared__ float4 weights[32][QUADS + 1];  // each row has one extra float4, so that lanes read different banks
    __shared__ float logits[TOKENS][ROUTE_EXPERTS];
    __shared__ Routing routing[TOKENS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x * TOKENS + warp;
    const int first_expert = blockIdx.z * 32, first_column = blockIdx.y * ROUTE_COLUMNS;

    // 1. Multiply one slice of columns, for TOKENS tokens and 32 experts.
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto load = [&](const float* matrix, int row, int rows, int quad) {
        const bool valid = row < rows && first_column + 4 * quad < columns;
        const float* from = matrix + (size_t)row * columns + first_column;
        return valid ? __ldg(reinterpret_cast<const float4*>(from) + quad) : zero;
    };
    static_assert(QUADS <= 32);
    float4 loaded[32 / TOKENS];
#pragma unroll
    for (int i = 0; i < 32 / TOKENS; ++i)
        loaded[i] = lane < QUADS ? load(weight, first_expert + warp + i * TOKENS, experts, lane) : zero;
    pdl_wait();
    pdl_launch_dependents();
    const float4 own = lane < QUADS ? load(x, token, tokens, lane) : zero;
    if (lane < QUADS) {
        xs[warp][lane] = own;
#pragma unroll
        for (int i = 0; i < 32 / TOKENS; ++i) weights[warp + i * TOKENS][lane] = loaded[i];
    }
    __syncthreads();
    float4 sums = zero;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        const float4 a = xs[warp][i], b = weights[lane][i];
        sums.x += a.x * b.x, sums.y += a.y * b.y, sums.z += a.z * b.z, sums.w += a.w * b.w;
    }
    if (token < tokens && first_expert + lane < experts)
        partials[((size_t)blockIdx.y * tokens + token) * experts + first_expert + lane] =
            (sums.x + sums.y) + (sums.z + sums.w);
    if (!is_last_block(finished + blockIdx.x, gridDim.y * gridDim.z)) return;

    // 2. Add the partial sums of all slices, and choose the experts of TOKENS tokens.
    if (token < tokens) {
        for (int e = lane; e < experts; e += 32) {
            float sum = bias ? bias[e] : 0.0f;
#pragma unroll 24
            for (int slice = 0; slice < gridDim.y; ++slice)
                sum += __ldcg(partials + ((size_t)slice * tokens + token) * experts + e);
            logits[warp][e] = sum;
        }
        __syncwarp();
        routing[warp].choose_by([&](int expert) { return logits[warp][expert]; }, experts, chosen, chosen, lane);
        __syncwarp();
        if (lane < chosen) {
            ids[(size_t)token * chosen + lane] = routing[warp].expert[lane];
            routing_weights[(size_t)token * chosen + lane] = routing[warp].weight[lane];
        }
    }

    // 3. Sort the pairs of all tokens. The sort reuses the shared memory of the logits and the weights.
    // With more shared memory per block, fewer blocks of the next kernel could start beside the blocks of this kernel.
    static_assert(sizeof(logits) == WARPS * ROUTE_EXPERTS * sizeof(uint32_t));
    static_assert(sizeof(weights) >= ROUTE_TOKENS * MAX_CHOSEN_EXPERTS * sizeof(uint16_t));
    if (is_last_block(finished + ROUTE_TOKENS / TOKENS, gridDim.x))
        sort_pairs(ids, sorted, offsets, usage, reinterpret_cast<uint32_t (*)[ROUTE_EXPERTS]>(logits),
                   reinterpret_cast<uint16_t*>(weights), tokens * chosen, experts);
}
