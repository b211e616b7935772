// Chooses the experts of one token, in one warp.
// In the decode graph, every thread block that needs the chosen experts computes them from the router logits itself.
#pragma once
#include "constants.cuh"
#include "headers/common.cuh"
#include "headers/sort_key.cuh"

// Stands for "no expert". It is larger than every expert id, so a minimum over ids ignores it.
constexpr uint32_t NO_EXPERT = 0xffffffffu;
// The argument `chosen` of callers that need no routing weights.
constexpr int NO_WEIGHTS = 0;

struct Routing {
    uint32_t expert[MAX_CHOSEN_EXPERTS];
    float weight[MAX_CHOSEN_EXPERTS];

    // Stores the experts with the `count` largest logits, in descending order. Ties go to the lower id. NaN comes last.
    // Also stores the routing weights of the first `chosen` of these experts: a softmax over these `chosen` experts, or
    // over all experts if `over_all` is true.
    // `logit_of(e)` returns the logit of expert e. All lanes of the warp must call choose_by.
    // `experts` must be at most 1024: each lane has at most 32 of the experts, one for each bit of `taken`.
    template <typename Logit>
    __device__ __forceinline__ void choose_by(Logit&& logit_of, int experts, int count, int chosen, int lane,
                                              bool over_all = false) {
        uint32_t taken = 0;  // one bit per expert of this lane: lane, lane + 32, ...
        float top = 0.0f, own = -INFINITY;
        constexpr int HELD_LOGITS = 4;  // logits per lane in registers; other logits are reloaded in every round
        float held[HELD_LOGITS];
#pragma unroll
        for (int i = 0; i < HELD_LOGITS; ++i) held[i] = lane + 32 * i < experts ? logit_of(lane + 32 * i) : -INFINITY;
        for (int n = 0; n < count; ++n) {
            // Key 0 means that the expert was already chosen, and key 1 means NaN. The keys of all numbers are larger.
            uint32_t best = 0, id = NO_EXPERT;
            const auto offer = [&](int i, float logit) {
                const uint32_t key = taken >> i & 1 ? 0u : isnan(logit) ? 1u : sort_key(logit);
                if (key > best) {
                    best = key;
                    id = lane + 32 * i;
                }
            };
            if (lane < experts) offer(0, held[0]);
            if (experts > 32) {
#pragma unroll
                for (int i = 1; i < HELD_LOGITS; ++i)
                    if (lane + 32 * i < experts) offer(i, held[i]);
                for (int i = HELD_LOGITS; lane + 32 * i < experts; ++i) offer(i, logit_of(lane + 32 * i));
            }
            const uint32_t largest = __reduce_max_sync(ALL_LANES, best);
            id = __reduce_min_sync(ALL_LANES, best == largest ? id : NO_EXPERT);
            if (id % 32 == lane) taken |= 1u << (id / 32);
            const float logit = largest <= 1 ? -INFINITY : from_sort_key(largest);
            if (n == 0) top = logit;
            if (n == lane) {
                own = logit;
                expert[n] = id;
            }
        }
        const float exponential = lane < chosen ? expf(own - top) : 0.0f;
        float total = exponential;
        if (over_all) {
            total = 0.0f;
            for (int i = lane; i < experts; i += 32) {
                const float logit = logit_of(i);
                total += isnan(logit) ? 0.0f : expf(logit - top);
            }
        }
        total = warp_sum(total);
        if (lane < chosen) weight[lane] = exponential / total;
    }

    // Chooses experts like choose_by, but reads the logits from device memory.
    __device__ __forceinline__ void choose(const float* logits, int experts, int count, int chosen, int lane,
                                           bool over_all = false) {
        choose_by([&](int expert) { return __ldcg(logits + expert); }, experts, count, chosen, lane, over_all);
    }
};
