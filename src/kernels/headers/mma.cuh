// The former names of what async_copy.cuh and tensor_core.cuh define, for kernels that still use them.
#pragma once

#include "headers/async_copy.cuh"
#include "headers/tensor_core.cuh"

__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid) { copy_async_or_zero(to, from, valid); }
__device__ __forceinline__ void copy_commit() { commit_copies(); }
template <int PENDING> __device__ __forceinline__ void copy_wait() { wait_for_copies<PENDING>(); }
template <typename T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
    multiply_add<T>(d, a, b0, b1);
}
