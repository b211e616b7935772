// Loads of weights that do not allocate cache lines in L1, because a thread block reads each weight only once.
#pragma once
#include "headers/common.cuh"

__device__ __forceinline__ uint4 load_stream_16(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}
__device__ __forceinline__ uint2 load_stream_8(const void* address) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
    return v;
}
__device__ __forceinline__ uint32_t load_stream_4(const void* address) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(address));
    return v;
}
