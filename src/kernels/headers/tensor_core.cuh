// Matrix products on tensor cores (ldmatrix and mma.sync, compute capability 8.0 and later).
#pragma once

#include "headers/common.cuh"

// Loads four 8×8 matrices of 16-bit elements from shared memory.
// Lane i passes the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Loads four 8×8 matrices like load_matrices, and transposes each matrix.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Computes d += a·b with a [16, 16] and b [16, 8] of type T (f16 or bf16), and d [16, 8] f32.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

#define DEFINE_MULTIPLY_ADD(T, NAME)                                                                                   \
    template <>                                                                                                        \
    __device__ __forceinline__ void multiply_add<T>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                                                     \
            ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                               \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                           \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                           \
    }
DEFINE_MULTIPLY_ADD(__half, "f16")
DEFINE_MULTIPLY_ADD(__nv_bfloat16, "bf16")
#undef DEFINE_MULTIPLY_ADD

// Computes d += a·b with a [16, 8] and b [8, 8] of TF32 values, and d [16, 8] f32.
// An element of a or b is a 32-bit word. Tensor cores ignore its lowest 13 bits.
__device__ __forceinline__ void multiply_add_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds two floats to T and packs them into one word, with `low` in the low half.
template <typename T> __device__ __forceinline__ uint32_t pack(float low, float high);
template <> __device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
template <> __device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
