// Counts the thread blocks that have finished their part of a shared task.
#pragma once
#include <stdint.h>

// Increments the counter, or sets it to 0 if its value is `last`. Returns the previous value.
// Earlier writes of this thread are visible to threads that increment the counter later.
__device__ __forceinline__ uint32_t arrive(uint32_t* counter, uint32_t last) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}

// Returns whether this block is the last of `count` blocks to call this function. All threads of a block must call it.
// All threads of the last block can then read earlier writes of all blocks with loads that bypass L1 (__ldcg).
// The counter must be zero before the first call, and is zero again after the call of the last block.
__device__ __forceinline__ bool is_last_block(uint32_t* counter, uint32_t count) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) is_last = arrive(counter, count - 1) == count - 1;
    __syncthreads();
    return is_last;
}
