// Candidates for the largest logit of a row, from which greedy sampling chooses a token.
#pragma once
#include "constants.cuh"
#include "headers/sort_key.cuh"

// A logit and its token id. The id is exact in f32, because it is below 2^24. The logit is -inf if there is no token.
struct Candidate {
    float logit, token;
};

// Returns a key that orders tokens by logit. Among equal logits, the lower token id has the larger key.
__device__ __forceinline__ unsigned long long candidate_key(float logit, uint32_t token) {
    return (unsigned long long)sort_key(logit + 0.0f) << 32 | ~token;  // -0 becomes +0, so both zeros are equal
}

// Stores the candidate with the given key as candidate `block` of a row. The row has `blocks` blocks, at most
// BEST_LOGITS_CANDIDATES, and each block finds one candidate. The blocks also fill the other candidates with -inf.
__device__ __forceinline__ void store_candidate(Candidate* row, unsigned long long key, int block, int blocks) {
    row[block] = {from_sort_key((uint32_t)(key >> 32)), (float)~(uint32_t)key};
    for (int i = block + blocks; i < BEST_LOGITS_CANDIDATES; i += blocks) row[i] = {-INFINITY, 0.0f};
}
