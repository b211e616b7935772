// Programmatic dependent launch (Hopper and later): a kernel of a launch sequence may start before the kernel ahead of it
// has ended. It loads data that no kernel writes, such as weights, and then waits for the results that it needs. On older
// GPUs, and in launches without the attribute, these functions do nothing, because the kernels of a stream do not overlap.
//
// Every kernel of a sequence calls pdl_launch_dependents() after its own pdl_wait(). So when a kernel starts, all kernels
// before it have ended, except the one right ahead of it.
#pragma once

// Waits until every kernel ahead has ended and its writes are visible.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start as soon as all blocks have called this.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
