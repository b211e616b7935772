// Barriers in shared memory (mbarrier, compute capability 8.0 and later).
// A barrier counts arrivals of threads. With compute capability 9.0 or later, it also counts the bytes of bulk copies
// (bulk_copy.cuh) and of stores from blocks of the same cluster (cluster.cuh).
// A barrier alternates between phases of parity 0 and parity 1. The first phase has parity 0.
#pragma once

#include <stdint.h>

// Initializes a barrier. A phase ends once there have been `count` arrivals of threads, and all bytes that
// barrier_expect announced in the phase have been written.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Arrives once at the barrier, and does not wait.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Makes this thread arrive at the barrier as soon as its earlier copies (async_copy.cuh) have completed. Does not wait.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until the barrier's phase with the given parity has ended.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
        "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// Arrives at the barrier, and makes the current phase wait for `bytes` more bytes of bulk copies or cluster stores.
// Requires compute capability 9.0 or later.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
