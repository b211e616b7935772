// Bulk copies from device memory to shared memory (cp.async.bulk, compute capability 9.0 and later).
// The barrier of a bulk copy (barrier.cuh) counts the bytes that have arrived.
#pragma once

#include <stdint.h>

#include "constants.cuh"

// Starts copying `bytes` bytes, a multiple of 16, from device memory to shared memory.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// A tensor map describes a tensor in device memory for copy_tensor. launch/tensor_map.rs creates tensor maps.
// The size and the contents are those of CUtensorMap in cuda.h. The driver requires an alignment of only 64 bytes, even
// with CUDA 13, whose CUtensorMap is aligned to 128 bytes.
// A kernel takes a tensor map as a parameter of type `const __grid_constant__ TensorMap`.
struct TensorMap {
    alignas(64) uint64_t words[16];
};

// Starts copying a box of a three-dimensional tensor to shared memory. The box begins at (x, y, z).
// x is in bytes, a multiple of TENSOR_MAP_ELEMENT_BYTES. y and z are indices.
// The tensor map determines the size of the box. `to` must be a multiple of 128.
// Elements of the box outside the tensor become zeros. The barrier counts their bytes, too.
__device__ __forceinline__ void copy_tensor(uint32_t to, const TensorMap& map, int x, int y, int z, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(to),
        "l"(&map), "r"(x / TENSOR_MAP_ELEMENT_BYTES), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

// Like the function above, for a four-dimensional tensor. The box begins at (x, y, z, u), where u is also an index.
__device__ __forceinline__ void copy_tensor(uint32_t to, const TensorMap& map, int x, int y, int z, int u,
                                            uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(&map), "r"(x / TENSOR_MAP_ELEMENT_BYTES), "r"(y), "r"(z), "r"(u), "r"(barrier)
        : "memory");
}

// Returns true in one lane of the warp. All lanes must call elect_lane.
// Unlike a condition such as `lane == 0`, elect_lane() tells the compiler that only one lane runs the branch.
// The compiler then needs no loop over lanes to move the operands of bulk copies to uniform registers.
__device__ __forceinline__ bool elect_lane() {
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected;
}
