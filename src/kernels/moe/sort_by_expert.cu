// Sorts the indices of the (token, expert) pairs by expert. Pair p belongs to expert ids[p].
// The pairs of expert e are sorted[offsets[e] .. offsets[e + 1]], in any order.
// Also computes the row of each pair in a tiled tensor (mxfp4_tiles.cuh).
// In tiled tensors, each expert's rows start at a multiple of 8.
//   ids, sorted, rows: u32 [pairs]
//   offsets: u32 [experts + 1]; experts <= MAX_EXPERTS
//   grid: 1; block: 1024
//   bytes moved: 16 · pairs
#include "constants.cuh"
#include "headers/common.cuh"

// The number of ids that a thread loads before it uses the first id, so that its loads overlap.
constexpr int BATCH = 8;

// Calls `use(p, ids[p])` for each pair p of this thread.
template <typename Use> __device__ __forceinline__ void each_pair(const uint32_t* ids, int pairs, Use use) {
    for (int first = threadIdx.x; first < pairs; first += BATCH * blockDim.x) {
        uint32_t loaded[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) loaded[i] = ids[min(first + i * (int)blockDim.x, pairs - 1)];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (first + i * (int)blockDim.x < pairs) use(first + i * blockDim.x, loaded[i]);
    }
}

extern "C" __global__ void sort_by_expert(const uint32_t* ids, uint32_t* sorted, uint32_t* offsets, uint32_t* rows,
                                          int pairs, int experts) {
    // padding[e] is the number of unused rows before the first row of expert e.
    __shared__ uint32_t count[MAX_EXPERTS], next[MAX_EXPERTS], padding[MAX_EXPERTS];
    for (int e = threadIdx.x; e < experts; e += blockDim.x) count[e] = 0;
    __syncthreads();
    each_pair(ids, pairs, [&](int, uint32_t expert) { atomicAdd(&count[expert], 1u); });
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t start = 0, unused = 0;
        for (int e = 0; e < experts; ++e) {
            offsets[e] = next[e] = start;
            padding[e] = unused;
            start += count[e];
            unused += (8 - count[e] % 8) % 8;
        }
        offsets[experts] = start;
    }
    __syncthreads();
    each_pair(ids, pairs, [&](int pair, uint32_t expert) {
        const uint32_t position = atomicAdd(&next[expert], 1u);
        sorted[position] = pair;
        rows[pair] = position + padding[expert];
    });
}
