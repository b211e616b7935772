// Programmatic dependent launch (PDL), on Hopper and later GPUs.
// A kernel launched with the PDL attribute may start before the previous kernel has ended.
// `LaunchList` and `Launch::overlapping` set this attribute.
// Before such a kernel waits for earlier kernels, it may load data that no running kernel writes, such as weights.
// The `SAFETY` comment at each launch says which data the kernel loads early, in the part that starts with "Overlap:".
//
// On older GPUs, the kernels of a stream do not overlap, and pdl_wait() and pdl_launch_dependents() have no effect.
// A kernel launched without the PDL attribute starts only after all earlier kernels have ended. In such a kernel,
// pdl_wait() returns at once, and in the kernel before it, pdl_launch_dependents() has no effect.
//
// A kernel must call pdl_launch_dependents() only after pdl_wait().
// At least one block of a kernel with the PDL attribute must call pdl_wait(), so that the kernel does not end before
// the previous kernel.
// If a kernel does not call pdl_launch_dependents(), the next kernel starts only after this kernel has ended.
// Therefore, when a kernel starts, all kernels before the previous kernel have ended.
//
// exchange_sent (exchange/exchange_sum.cu) is an exception: unless ranks share a GPU, it calls pdl_launch_dependents()
// without pdl_wait(), and receives the results of the previous kernel from a mailbox.
// The kernel after exchange_sent can therefore start while the kernel before exchange_sent is still running.
// Before pdl_wait(), the kernel after exchange_sent may load only data that no kernel of the step writes.
// When exchange_sent ends, the kernel before it has read all its inputs and sent all its results, so later kernels can
// treat that kernel as ended.
//
// decode_greedy and decode_sample never call pdl_launch_dependents(), because no later kernel of the step would gain
// from an early start: only quantized_next can follow, and it loads nothing before pdl_wait().
#pragma once

// Waits until the previous kernel has ended. The writes of all earlier kernels are then visible.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start as soon as all blocks have called this function or exited.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
