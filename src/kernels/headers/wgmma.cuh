// Asynchronous matrix products of a warpgroup (wgmma, only in code for sm_90a).
#pragma once

#include <stdint.h>

#include "headers/common.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// wgmma<T>(sum, a, b) starts to compute sum [64, N] += a [64, 16] · b [16, N], with a and b of type T (f16 or bf16).
// The matrix a is in registers. The matrix b is in shared memory, and the parameter b is its wgmma_descriptor.
// N, the number of columns of b, is a multiple of 16 and at most 160.
#define SUM4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define SUM8(i) SUM4(i), SUM4(i + 4)
#define SUMS16 SUM8(0)
#define SUMS32 SUMS16, SUM8(8)
#define SUMS48 SUMS32, SUM8(16)
#define SUMS64 SUMS48, SUM8(24)
#define SUMS80 SUMS64, SUM8(32)
#define SUMS96 SUMS80, SUM8(40)
#define SUMS112 SUMS96, SUM8(48)
#define SUMS128 SUMS112, SUM8(56)
#define SUMS144 SUMS128, SUM8(64)
#define SUMS160 SUMS144, SUM8(72)
#define NAMES16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES32 NAMES16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES48 NAMES32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES64 NAMES48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES80 NAMES64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES96 NAMES80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES112 NAMES96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES128 NAMES112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES144 NAMES128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES160 NAMES144 ", %72, %73, %74, %75, %76, %77, %78, %79"
// clang-format off: clang-format would put line breaks between the parts of the string
#define WGMMA(N, TYPE, A, B)                                                                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES##N "}, {" A "}, " B ", "   \
                 "1, 1, 1, 0;"                                                                                         \
                 : SUMS##N                                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
// clang-format on
#define DEFINE_WGMMA(N, A, B)                                                                                          \
    template <typename T>                                                                                              \
    __device__ __forceinline__ void wgmma(float (&sum)[N / 2], const uint32_t (&a)[4], uint64_t b) {                   \
        if constexpr (__is_same(T, __half))                                                                            \
            WGMMA(N, "f16", A, B);                                                                                     \
        else                                                                                                           \
            WGMMA(N, "bf16", A, B);                                                                                    \
    }
DEFINE_WGMMA(16, "%8, %9, %10, %11", "%12")
DEFINE_WGMMA(32, "%16, %17, %18, %19", "%20")
DEFINE_WGMMA(48, "%24, %25, %26, %27", "%28")
DEFINE_WGMMA(64, "%32, %33, %34, %35", "%36")
DEFINE_WGMMA(80, "%40, %41, %42, %43", "%44")
DEFINE_WGMMA(96, "%48, %49, %50, %51", "%52")
DEFINE_WGMMA(112, "%56, %57, %58, %59", "%60")
DEFINE_WGMMA(128, "%64, %65, %66, %67", "%68")
DEFINE_WGMMA(144, "%72, %73, %74, %75", "%76")
DEFINE_WGMMA(160, "%80, %81, %82, %83", "%84")

// The same product with both matrices in shared memory, for N = 16, 32, 64, 96 and 128.
// Both parameters are wgmma_descriptors. A row of a is swizzled like a column of b.
// clang-format off
#define WGMMA_SHARED(N, TYPE, A, B)                                                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES##N "}, " A ", " B ", "     \
                 "1, 1, 1, 0, 0;"                                                                                      \
                 : SUMS##N                                                                                             \
                 : "l"(a), "l"(b))
// clang-format on
#define DEFINE_WGMMA_SHARED(N, A, B)                                                                                   \
    template <typename T> __device__ __forceinline__ void wgmma(float (&sum)[N / 2], uint64_t a, uint64_t b) {         \
        if constexpr (__is_same(T, __half))                                                                            \
            WGMMA_SHARED(N, "f16", A, B);                                                                              \
        else                                                                                                           \
            WGMMA_SHARED(N, "bf16", A, B);                                                                             \
    }
DEFINE_WGMMA_SHARED(16, "%8", "%9")
DEFINE_WGMMA_SHARED(32, "%16", "%17")
DEFINE_WGMMA_SHARED(64, "%32", "%33")
DEFINE_WGMMA_SHARED(96, "%48", "%49")
DEFINE_WGMMA_SHARED(128, "%64", "%65")

// Returns the wgmma descriptor of the matrix a or b at `address` in shared memory.
// A swizzled row of 128 bytes contains 64 values of one row of a or one column of b. One wgmma multiplies 16 of them.
// Every eight swizzled rows take 1024 bytes, the stride distance of the descriptor.
// Addresses and distances in a wgmma descriptor are in units of 16 bytes.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
    constexpr uint64_t SWIZZLE_128_BYTES = (uint64_t)1 << 62;
    constexpr uint64_t STRIDE_DISTANCE = (uint64_t)(1024 / 16) << 32;
    constexpr uint64_t LEADING_DISTANCE = (uint64_t)1 << 16;  // ignored, because rows are swizzled
    constexpr uint32_t ADDRESS_MASK = 0x3FFF;
    return SWIZZLE_128_BYTES | STRIDE_DISTANCE | LEADING_DISTANCE | (address >> 4 & ADDRESS_MASK);
}

// A thread must call wgmma_fence before its first wgmma, and before a wgmma whose registers it has read or written
// since the previous wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Commits all uncommitted wgmmas of this warpgroup as one group.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most LEFT committed groups of wgmmas are unfinished.
template <int LEFT> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// A thread must call read_after_wgmma between wgmma_wait<0> and its first use of `sum`.
// The compiler does not know that wgmma writes the sums asynchronously. The empty asm statements keep it from reading
// the sums before wgmma_wait.
template <int COUNT> __device__ __forceinline__ void read_after_wgmma(float (&sum)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

#undef DEFINE_WGMMA
#undef DEFINE_WGMMA_SHARED
#undef WGMMA
#undef WGMMA_SHARED

#endif
