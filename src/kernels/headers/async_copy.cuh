// Asynchronous copies from device memory to shared memory (cp.async, compute capability 8.0 and later).
#pragma once

#include <stdint.h>

#include "headers/shared_memory.cuh"

// Starts copying 16 bytes from device memory to shared memory.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Starts copying 16 bytes if `is_valid` is true. Otherwise, starts writing 16 zero bytes, and reads nothing.
// Unlike copy_async, this copy also asks the GPU to prefetch the aligned 128 bytes that contain `from` into L2.
__device__ __forceinline__ void copy_async_or_zero(uint32_t to, const void* from, bool is_valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_valid ? 16 : 0)
                 : "memory");
}

// Commits all uncommitted copies of this thread as one group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all copy groups of this thread have finished, except for the latest PENDING groups.
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
