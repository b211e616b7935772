// Sum reduction over a thread block.
#pragma once
#include "headers/common.cuh"

// Returns the sum of `value` over all threads of the block, which must all call this function.
// `scratch`, in shared memory, holds one float per warp. Callers may reuse it only after another __syncthreads().
__device__ __forceinline__ float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0.0f;
    for (int w = 0; w < blockDim.x / 32; ++w) sum += scratch[w];
    return sum;
}
