// Code that the sampling kernels share: parameters, penalties, probability masses, random numbers and a prefix sum.
#pragma once
#include "constants.cuh"
#include "headers/common.cuh"
#include "headers/sort_key.cuh"

// The unnormalized probability mass of the most likely token. Masses are integers, so their sum does not depend on the
// order of the additions. The sum of the masses of fewer than 2^24 tokens fits in 64 bits.
constexpr float TOP_MASS = 1099511627776.0f;  // 2^40

struct SamplingKernelParams {
    float temperature, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty;
    // `sampled_before` is the number of earlier random draws of the sequence when the host wrote the parameters.
    // decode/sample.cu adds the number of steps that the decode graph has run since then.
    uint32_t top_k, sampled_before;
    uint32_t seed[2];

    __device__ __forceinline__ float inverse_temperature() const { return 1.0f / fmaxf(temperature, 1e-6f); }
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

// Returns the sort key of a logit, or 0 if the logit is NaN. -0 becomes +0, so that both zeros have the same key.
__device__ __forceinline__ uint32_t logit_key(float logit) { return isnan(logit) ? 0 : sort_key(logit + 0.0f); }

// Returns the probability mass of the token with the logit_key `key`. `top` is the key of the most likely token.
// The mass is 0 if the logit is NaN or -inf, or if the relative probability is below 2^-40.
__device__ __forceinline__ unsigned long long probability_mass(uint32_t key, uint32_t top, float inverse_temperature) {
    if (key <= sort_key(-INFINITY)) return 0;
    return key == top ? TOP_MASS : expf((from_sort_key(key) - from_sort_key(top)) * inverse_temperature) * TOP_MASS;
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

// Returns a random integer below `mass`, or 0 if `mass` is 0. `drawn` is the number of earlier draws of the sequence.
__device__ __forceinline__ unsigned long long random_point(const SamplingKernelParams& params, uint32_t drawn,
                                                           unsigned long long mass) {
    const unsigned long long seed = (unsigned long long)params.seed[1] << 32 | params.seed[0];
    return min((unsigned long long)(uniform(seed, drawn) * (double)mass), mass - 1);
}

// The probability mass of the blocks with lower token ids than this block, and of all blocks.
struct BlockMasses {
    unsigned long long before, all;
};

// Returns the inclusive prefix sum of `value` over the threads of the block.
// `warp_values` is shared memory for one value per warp. All threads of the block must call this function.
__device__ __forceinline__ unsigned long long inclusive_scan(unsigned long long value,
                                                             unsigned long long* warp_values) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    value = warp_prefix_sum(value);
    __syncthreads();
    if (lane == 31) warp_values[warp] = value;
    __syncthreads();
    unsigned long long before = 0;
    for (int w = 0; w < warp; ++w) before += warp_values[w];
    return value + before;
}
