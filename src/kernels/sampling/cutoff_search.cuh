// The search for the cutoffs of top-k and top-p, which decode/sample.cu and sample_rows.cu share.
#pragma once
#include "sampling/sampling.cuh"

// The radix search for the largest sort key k (see sort_key) for which the tokens with keys >= k together reach a
// target. If BY_MASS is true, the target is a probability mass, otherwise a number of tokens.
// Each round determines eight bits of the result, from the highest bits to the lowest. In each round, the kernel
// - adds the mass, or 1, of each token whose key `has_prefix` to the bin `bin_of(key)`,
// - adds up the bins of all thread blocks, and calls `end_round` with the sum of bin `own_bin()`.
// After SAMPLE_ROUNDS rounds, `prefix` is the result.
template <bool BY_MASS> struct CutoffSearch {
    unsigned long long target;  // the part of the target that the tokens of this round must reach
    int round = 0;
    uint32_t prefix = 0;  // the bits that earlier rounds have determined

    // Returns whether the highest bits of a key are those that earlier rounds have determined.
    __device__ __forceinline__ bool has_prefix(uint32_t key) const {
        return round == 0 || key >> (32 - 8 * round) == prefix;
    }
    // Returns the bin of a key: the eight bits that this round determines.
    __device__ __forceinline__ uint32_t bin_of(uint32_t key) const {
        return key >> (24 - 8 * round) & (SAMPLE_BINS - 1);
    }

    // Returns the bin whose sum this thread passes to end_round, or a negative number if it passes 0. Thread 0 has the
    // highest bin, so that prefix sums over the threads add up the bins from the highest down.
    static __device__ __forceinline__ int own_bin() { return SAMPLE_BINS - 1 - (int)threadIdx.x; }

    // Ends a round. All threads of the block must call this function.
    // `value` is the mass or the count of bin own_bin(), or 0 in threads without a bin.
    // If `sets_target` and BY_MASS are true, first sets the target to the fraction `share` of the total mass.
    // Adds up the bins from the highest down, and chooses the bin at which the sum reaches the target.
    // Appends the number of this bin, the next eight bits of the sort key, to `prefix`.
    // Subtracts the sum of all bins above the chosen bin from the target.
    // If the sum of all bins is below the target, chooses bin 0 and sets the target to 0.
    // `warp_values` is shared memory for one value per warp.
    __device__ __forceinline__ void end_round(unsigned long long value, bool sets_target, float share,
                                              unsigned long long* warp_values) {
        __shared__ uint32_t chosen;
        __shared__ unsigned long long rest;
        const int bin = own_bin();
        const unsigned long long sum = inclusive_scan(value, warp_values);
        if (sets_target && BY_MASS) {
            // In the last thread with a bin, `sum` is the total mass.
            if (threadIdx.x == SAMPLE_BINS - 1) rest = (unsigned long long)((double)share * (double)sum);
            __syncthreads();
            target = rest;
            __syncthreads();  // wait before `rest` is overwritten below
        }
        if (threadIdx.x == 0) {
            chosen = 0;
            rest = 0;
        }
        __syncthreads();
        if (bin >= 0 && value > 0 && sum >= target && sum - value < target) {
            chosen = bin;
            rest = target - (sum - value);
        }
        // If the target is 0, choose the highest bin that is not empty.
        if (bin >= 0 && value > 0 && target == 0 && sum == value) chosen = bin;
        __syncthreads();
        prefix = prefix << 8 | chosen;
        target = rest;
        ++round;
        __syncthreads();
    }
};
