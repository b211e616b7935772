// Thread block clusters (compute capability 9.0 and later).
// The blocks of a cluster run at the same time, and can access each other's shared memory.
#pragma once
#include <stdint.h>

#if __CUDA_ARCH__ >= 900
// Stores a float in the shared memory of block `rank` of the cluster.
// `to` is an address in the calling block's shared memory. The float is stored at the same offset in block `rank`.
__device__ __forceinline__ void store_in_cluster(float* to, int rank, float value) {
    const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// Returns the address that `own`, which is in shared memory of the calling block, has in block `rank` of the cluster.
template <typename V> __device__ __forceinline__ const V* in_block_of_cluster(const V* own, int rank) {
    const V* address;
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(own), "r"(rank));
    return address;
}

// Waits until all threads of the cluster have called this function. All their earlier stores are then visible.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif
