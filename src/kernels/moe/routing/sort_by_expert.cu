// Sorts the indices of the (token, expert) pairs by expert. Pair p belongs to expert ids[p], or to the last expert if
// ids[p] is past the last expert.
// The pairs of expert e are sorted[offsets[e] .. offsets[e + 1]], in any order.
// Also computes the row of each pair in a tiled tensor, where each expert's rows start at a multiple of 8
// (mxfp4_tiles/tiles.cuh).
//   ids, sorted, rows: u32 [pairs]
//   offsets: u32 [experts + 1]; experts <= MAX_EXPERTS
//   grid: any number of blocks, each of which sorts a share of the pairs; block: SORT_BY_EXPERT_THREADS
//   bytes moved: 12 · pairs, and 4 · pairs per block, mostly from L2
#include "constants.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"

// The number of ids that a thread loads before it uses the first id, so that its loads overlap.
constexpr int LOADS = 8;

// Calls `use(p, e)` for all pairs p from `first` to `end` - 1, where e is the expert of pair p. The threads of the
// block divide the calls.
template <typename Use>
__device__ __forceinline__ void each_pair(const uint32_t* ids, int experts, int first, int end, Use use) {
    for (int start = first + threadIdx.x; start < end; start += LOADS * blockDim.x) {
        uint32_t loaded[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) loaded[i] = ids[min(start + i * (int)blockDim.x, end - 1)];
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (start + i * (int)blockDim.x < end) use(start + i * blockDim.x, min(loaded[i], (uint32_t)experts - 1));
    }
}

extern "C" __global__ void __launch_bounds__(SORT_BY_EXPERT_THREADS)
    sort_by_expert(const uint32_t* ids, uint32_t* sorted, uint32_t* offsets, uint32_t* rows, int pairs, int experts) {
    // At first, next[e] counts the pairs of expert e in the shares of earlier blocks, and rest[e] counts its other
    // pairs. Later, next[e] is the position in `sorted` of the next pair of expert e from this block's share.
    // padding[e] is the number of unused rows before the first row of expert e in a tiled tensor.
    __shared__ uint32_t next[MAX_EXPERTS], rest[MAX_EXPERTS], padding[MAX_EXPERTS];
    const int share = (pairs + gridDim.x - 1) / gridDim.x, first = min((int)blockIdx.x * share, pairs);
    for (int e = threadIdx.x; e < experts; e += blockDim.x) next[e] = rest[e] = 0;
    __syncthreads();
    pdl_wait();
    pdl_launch_dependents();
    // Every block counts all pairs itself, because a sum over blocks would need another launch.
    each_pair(ids, experts, 0, first, [&](int, uint32_t expert) { atomicAdd(&next[expert], 1u); });
    each_pair(ids, experts, first, pairs, [&](int, uint32_t expert) { atomicAdd(&rest[expert], 1u); });
    __syncthreads();
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x;
        uint32_t start = 0, unused = 0;  // pairs and unused rows of the experts before `base`
        for (int base = 0; base < experts; base += 32) {
            const int e = base + lane;
            const uint32_t earlier = e < experts ? next[e] : 0, count = e < experts ? earlier + rest[e] : 0;
            const uint32_t own_unused = (8 - count % 8) % 8;
            const uint32_t pairs_up_to = warp_prefix_sum(count), unused_up_to = warp_prefix_sum(own_unused);
            if (e < experts) {
                const uint32_t offset = start + pairs_up_to - count;
                if (blockIdx.x == 0) offsets[e] = offset;
                next[e] = offset + earlier;
                padding[e] = unused + unused_up_to - own_unused;
            }
            start += __shfl_sync(ALL_LANES, pairs_up_to, 31);
            unused += __shfl_sync(ALL_LANES, unused_up_to, 31);
        }
        if (blockIdx.x == 0 && lane == 0) offsets[experts] = start;
    }
    __syncthreads();
    each_pair(ids, experts, first, min(first + share, pairs), [&](int pair, uint32_t expert) {
        const uint32_t position = atomicAdd(&next[expert], 1u);
        sorted[position] = pair;
        rows[pair] = position + padding[expert];
    });
}
