// For each token, chooses the `chosen` experts with the largest logits.
// The routing weights are a softmax over the chosen experts or over all experts.
// Ties go to the lower expert id. A NaN logit counts as -inf.
//   logits: T [tokens, experts]; experts <= MAX_EXPERTS
//   ids: u32 [tokens, chosen]; chosen <= MAX_CHOSEN_EXPERTS
//   weights: f32 [tokens, chosen]
//   grid: tokens; block: 32
//   bytes moved: tokens · (sizeof(T) · experts + 8 · chosen)
#include "headers/common.cuh"

template <typename T>
__device__ void topk_softmax(const T* logits, uint32_t* ids, float* weights, int experts, int chosen, int over_all) {
    const T* row = logits + (size_t)blockIdx.x * experts;
    const int lane = threadIdx.x;
    // Bit i of `taken` is set once expert `lane + 32 · i` has been chosen.
    uint32_t taken = 0;
    float top = 0.0f, mine = 0.0f;  // mine: the logit chosen in round `lane`
    uint32_t mine_id = 0;
    constexpr int NO_EXPERT = 0x7fffffff;  // larger than every expert id
    for (int round = 0; round < chosen; ++round) {
        float best = -INFINITY;
        int best_id = NO_EXPERT;
        for (int i = 0; lane + 32 * i < experts; ++i) {
            const float logit = to_float(row[lane + 32 * i]);
            const float value = isnan(logit) ? -INFINITY : logit;
            if (!(taken >> i & 1) && (value > best || best_id == NO_EXPERT)) {
                best = value;
                best_id = lane + 32 * i;
            }
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            const float other = __shfl_xor_sync(ALL_LANES, best, offset);
            const int other_id = __shfl_xor_sync(ALL_LANES, best_id, offset);
            const bool wins = best_id == NO_EXPERT || other > best || (other == best && other_id < best_id);
            if (other_id != NO_EXPERT && wins) {
                best = other;
                best_id = other_id;
            }
        }
        if (round == 0) top = best;
        if (lane == round) {
            mine = best;
            mine_id = best_id;
        }
        if (best_id % 32 == lane) taken |= 1u << (best_id / 32);
    }
    const float weight = lane < chosen ? expf(mine - top) : 0.0f;
    float share = weight;
    if (over_all) {
        share = 0.0f;
        for (int i = lane; i < experts; i += 32) {
            const float logit = to_float(row[i]);
            share += isnan(logit) ? 0.0f : expf(logit - top);
        }
    }
    const float total = warp_sum(share);
    if (lane < chosen) {
        ids[(size_t)blockIdx.x * chosen + lane] = mine_id;
        weights[(size_t)blockIdx.x * chosen + lane] = weight / total;
    }
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void topk_softmax_##SUFFIX(const T* logits, uint32_t* ids, float* weights, int experts,      \
                                                     int chosen, int over_all) {                                       \
        topk_softmax<T>(logits, ids, weights, experts, chosen, over_all);                                              \
    }
FOR_EACH_DTYPE(DEFINE)
