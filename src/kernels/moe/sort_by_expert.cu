// Sorts the indices of the (token, expert) pairs by expert. Pair p belongs to expert ids[p].
// The pairs of expert e are sorted[offsets[e] .. offsets[e + 1]], in any order.
//   ids, sorted: u32 [pairs]
//   offsets: u32 [experts + 1]; experts <= MAX_EXPERTS
//   grid: 1; block: 1024
//   bytes moved: 12 · pairs
#include "constants.cuh"
#include "headers/common.cuh"

extern "C" __global__ void sort_by_expert(const uint32_t* ids, uint32_t* sorted, uint32_t* offsets, int pairs,
                                          int experts) {
    __shared__ uint32_t count[MAX_EXPERTS], next[MAX_EXPERTS];
    for (int e = threadIdx.x; e < experts; e += blockDim.x) count[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) atomicAdd(&count[ids[p]], 1u);
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t start = 0;
        for (int e = 0; e < experts; ++e) {
            offsets[e] = next[e] = start;
            start += count[e];
        }
        offsets[experts] = start;
    }
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) sorted[atomicAdd(&next[ids[p]], 1u)] = p;
}
