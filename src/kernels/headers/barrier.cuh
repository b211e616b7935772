// Barriers in shared memory that count threads and asynchronous copies (mbarrier, compute capability 8.0 and later).
// A barrier alternates between phases of parity 0 and parity 1. The first phase has parity 0.
#pragma once

#include <stdint.h>

#include "constants.cuh"

// Initializes a barrier. A phase ends after `count` arrivals and all bytes that barrier_expect announced in the phase.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Arrives once at the barrier, and does not wait.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier when all earlier copy_async copies of this thread have completed.
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

// Arrives at the barrier, and makes the current phase wait for `bytes` bytes of bulk copies.
// Requires compute capability 9.0 or later.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Starts copying `bytes` bytes, a multiple of 16, from device memory to shared memory.
// Requires compute capability 9.0 or later.
// The barrier counts the bytes when they have arrived.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// A tensor map: describes a tensor in device memory for copy_tensor (CUtensorMap in cuda.h, see tensor_map.rs).
// A kernel takes a tensor map as a parameter of type `const __grid_constant__ TensorMap`.
struct TensorMap {
    alignas(64) uint64_t words[16];
};

// Starts copying the box of a three-dimensional tensor that begins at (x, y, z) to shared memory.
// x counts elements of TENSOR_MAP_ELEMENT_BYTES bytes.
// The tensor map determines the size of the box. `to` must be a multiple of 128. Requires compute capability 9.0 or
// later. Elements of the box outside the tensor become zeros. The barrier counts their bytes, too.
__device__ __forceinline__ void copy_tensor(uint32_t to, const TensorMap& map, int x, int y, int z, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

// Returns true in one lane of the warp. All lanes must call elect_lane.
// With elect_lane instead of `lane == 0`, the compiler knows that a single lane runs the branch.
// It then needs no loop over lanes to move the operands of bulk copies to uniform registers.
// Requires compute capability 9.0 or later.
__device__ __forceinline__ bool elect_lane() {
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected;
}
