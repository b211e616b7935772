// Code that the sampling kernels share: parameters, penalties, random numbers, a warp maximum, a prefix sum,
// and a part of the search for the top-k and top-p cutoffs.
#pragma once
#include "constants.cuh"
#include "headers/common.cuh"
#include "headers/sort_key.cuh"

// The unnormalized probability mass of the most likely token. Masses are integers, so their sum does not depend on the
// order of the additions. The sum of the masses of fewer than 2^24 tokens fits in 64 bits.
constexpr float UNIT = 1099511627776.0f;  // 2^40

struct SamplingKernelParams {
    float temperature, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty;
    // `sampled_before` is the number of earlier random draws of the sequence when the host wrote the parameters.
    // decode/sample.cu adds the number of steps that the decode graph has run since then.
    uint32_t top_k, sampled_before;
    uint32_t seed[2];
};

static_assert(sizeof(SamplingKernelParams) == 4 * SAMPLE_PARAM_WORDS,
              "SAMPLE_PARAM_WORDS must match SamplingKernelParams");

// Returns the penalized logit of a token that has appeared in the prompt or in the generated text.
// `generated` is the number of times that the token was generated, or 0 if only the prompt contains the token.
__device__ __forceinline__ float penalize(float logit, uint32_t generated, float repetition, float frequency,
                                          float presence) {
    logit = logit > 0.0f ? logit / repetition : logit * repetition;
    return generated > 0 ? logit - (frequency * generated + presence) : logit;
}

// The output function of SplitMix64, with the constants of its reference implementation.
__device__ __forceinline__ unsigned long long mix(unsigned long long z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// Returns the same random number in [0, 1) as `uniform` in engine/sampling/sampler.rs (SplitMix64).
__device__ __forceinline__ double uniform(unsigned long long seed, unsigned long long counter) {
    const unsigned long long golden = 0x9E3779B97F4A7C15ull;  // 2^64 divided by the golden ratio
    // A double has 53 bits of precision, so only the highest 53 of the 64 random bits are used.
    return (double)(mix(mix(seed + golden) + (counter + 1) * golden) >> 11) / 9007199254740992.0;  // 2^53
}

// Returns the largest key of the warp. All lanes get the result.
__device__ __forceinline__ unsigned long long warp_largest(unsigned long long key) {
    for (int offset = 16; offset > 0; offset /= 2) key = max(key, __shfl_xor_sync(0xffffffffu, key, offset));
    return key;
}

// Returns the inclusive prefix sum of `value` over the threads of the block.
// `warps` is shared memory for one value per warp. All threads of the block must call this function.
__device__ __forceinline__ unsigned long long inclusive_scan(unsigned long long value, unsigned long long* warps) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    value = warp_prefix_sum(value);
    __syncthreads();
    if (lane == 31) warps[warp] = value;
    __syncthreads();
    unsigned long long before = 0;
    for (int w = 0; w < warp; ++w) before += warps[w];
    return value + before;
}

// Ends a round of `threshold` (decode/sample.cu, sample_rows.cu), which has filled the bins with masses or counts.
// `value` is the mass or the count of bin SAMPLE_BINS - 1 - threadIdx.x, or 0 in threads without a bin.
// If `sets_target` and BY_MASS are true, first sets `target` to the fraction `share` of the total mass.
// Adds up the bins from the highest down, and chooses the bin at which the sum reaches `target`.
// Appends the number of this bin, the next eight bits of the sort key, to `prefix`.
// Subtracts the sum of all bins above the chosen bin from `target`.
// If the sum of all bins is below `target`, chooses bin 0 and sets `target` to 0.
template <bool BY_MASS>
__device__ __forceinline__ void choose_bin(unsigned long long value, bool sets_target, float share,
                                           unsigned long long& target, uint32_t& prefix, unsigned long long* warps) {
    __shared__ uint32_t chosen;
    __shared__ unsigned long long rest;
    const int bin = SAMPLE_BINS - 1 - threadIdx.x;
    const unsigned long long sum = inclusive_scan(value, warps);
    if (sets_target && BY_MASS) {
        // In the last thread with a bin, `sum` is the total mass.
        if (threadIdx.x == SAMPLE_BINS - 1) rest = (unsigned long long)((double)share * (double)sum);
        __syncthreads();
        target = rest;
        __syncthreads();  // wait before `rest` is overwritten below
    }
    if (threadIdx.x == 0) chosen = 0, rest = 0;
    __syncthreads();
    if (bin >= 0 && value > 0 && sum >= target && sum - value < target) chosen = bin, rest = target - (sum - value);
    // If the target is 0, choose the highest bin that is not empty.
    if (bin >= 0 && value > 0 && target == 0 && sum == value) chosen = bin;
    __syncthreads();
    prefix = prefix << 8 | chosen, target = rest;
    __syncthreads();
}
