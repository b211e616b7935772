// Access to shared memory by 32-bit addresses.
// With 32-bit addresses instead of pointers, a loop over the stages of a buffer needs fewer instructions:
// the load instruction itself adds the address of a stage, the offset of a lane and a constant.
// The compiler does not reorder the loads and stores in this file, nor move them across the functions of barrier.cuh.
#pragma once

#include <stdint.h>

// Returns the 32-bit address of `p`, a pointer to shared memory, for PTX instructions.
__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ uint32_t load_shared_4(uint32_t from) {
    uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
    uint4 words;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(from)
                 : "memory");
    return words;
}
__device__ __forceinline__ void store_shared_4(uint32_t to, uint32_t word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void store_shared_16(uint32_t to, uint4 words) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words.x), "r"(words.y), "r"(words.z),
                 "r"(words.w)
                 : "memory");
}
