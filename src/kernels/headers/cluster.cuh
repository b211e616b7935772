// Thread block clusters (compute capability 9.0 and later).
// The blocks of a cluster run at the same time, and can access each other's shared memory.
#pragma once
#include <stdint.h>

#if __CUDA_ARCH__ >= 900
// Maps `own`, a 32-bit address in the calling block's shared memory (shared_memory.cuh), to the 32-bit address of the
// same offset in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32_t address_in_cluster(uint32_t own, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
    return address;
}

// Starts storing a float in the shared memory of block `rank` of the cluster.
// `to` and `barrier` (barrier.cuh) are addresses in the calling block's shared memory. The float is stored at the same
// offset in block `rank`, and the barrier at the same offset in block `rank` counts the four bytes when they arrive.
__device__ __forceinline__ void store_in_cluster(uint32_t to, int rank, float value, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                     address_in_cluster(to, rank)),
                 "f"(value), "r"(address_in_cluster(barrier, rank))
                 : "memory");
}

// Like address_in_cluster, for a pointer to shared memory instead of a 32-bit address.
template <typename V> __device__ __forceinline__ const V* in_block_of_cluster(const V* own, int rank) {
    const V* address;
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(own), "r"(rank));
    return address;
}

// Announces to the cluster the barriers (barrier.cuh) that this thread has initialized, if any.
// All threads of the cluster must call this function, and later wait_for_barriers_of_cluster.
__device__ __forceinline__ void announce_barriers_to_cluster() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Waits until all threads of the cluster have called announce_barriers_to_cluster.
// All blocks of the cluster can then use the barriers.
__device__ __forceinline__ void wait_for_barriers_of_cluster() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Waits until all threads of the cluster have called this function. All their earlier stores are then visible.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif
