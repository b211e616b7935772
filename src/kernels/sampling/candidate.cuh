// Candidates for the largest logit of a row, from which greedy sampling chooses a token.
#pragma once
#include "constants.cuh"
#include "headers/sort_key.cuh"

// A logit and its token id. Ids are below 2^24, so they are exact in f32. If the logit is -inf, the id is meaningless.
struct Candidate {
    float logit, token;
};

// Returns a key that is larger for a larger logit, and among equal logits, for a lower token id.
__device__ __forceinline__ unsigned long long candidate_key(float logit, uint32_t token) {
    return (unsigned long long)sort_key(logit + 0.0f) << 32 | ~token;  // -0 becomes +0, so both zeros are equal
}

// Stores the candidate with the given key (see candidate_key) as candidate `block` of a row. `blocks` is the number of
// blocks that search the row, at most BEST_LOGITS_CANDIDATES. Each block finds one candidate. Together, the blocks also
// set the logits of the remaining candidates to -inf.
__device__ __forceinline__ void store_candidate(Candidate* row, unsigned long long key, int block, int blocks) {
    row[block] = {from_sort_key((uint32_t)(key >> 32)), (float)~(uint32_t)key};
    for (int i = block + blocks; i < BEST_LOGITS_CANDIDATES; i += blocks) row[i] = {-INFINITY, 0.0f};
}
