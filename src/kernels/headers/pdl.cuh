// Programmatic dependent launch (Hopper and later): a kernel of a chain may start before the one ahead of it has ended,
// fetch what no kernel writes (weights), and then wait for the results it needs. No-ops on older GPUs and in launches
// without the attribute, where kernels of a stream run one after the other anyway.
//
// Every kernel of a chain calls pdl_launch_dependents() only after its own pdl_wait(): so when a kernel starts, all but the
// one right ahead of it have ended.
#pragma once

// Until every kernel ahead has ended and its writes can be seen.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel may start, once all blocks have come here.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
