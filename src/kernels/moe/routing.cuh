// Routing on the device: one warp of every block that needs the choice works it out from the E logits.
#pragma once
#include "headers/common.cuh"

constexpr int MAX_CHOSEN = 32;

struct Routing {
    uint32_t expert[MAX_CHOSEN];
    float share[MAX_CHOSEN];

    // The `count` best of E logits, best first, the lower of equals first, NaN last. Shares of the best `chosen` are a
    // softmax over them, or over all experts. Called by one whole warp; E <= 32 · 32.
    __device__ __forceinline__ void choose(const float* logits, int experts, int count, int chosen, int lane,
                                           bool over_all = false) {
        uint32_t taken = 0;  // of this lane's experts lane, lane + 32, .., one bit each
        float top = 0.0f, mine = -INFINITY;
        constexpr int HELD = 4;  // in registers, of this lane's; those of more experts are read again
        float held[HELD];
#pragma unroll
        for (int i = 0; i < HELD; ++i) held[i] = lane + 32 * i < experts ? __ldcg(logits + lane + 32 * i) : -INFINITY;
        for (int n = 0; n < count; ++n) {
            // Ordered as the logits are; 0: taken or none, 1: NaN
            uint32_t best = 0, id = 0xffffffffu;
            const auto offer = [&](int i, float logit) {
                const uint32_t bits = __float_as_uint(logit);
                const uint32_t key = taken >> i & 1       ? 0u
                                     : isnan(logit)       ? 1u
                                     : bits & 0x80000000u ? ~bits
                                                          : bits | 0x80000000u;
                if (key > best) best = key, id = lane + 32 * i;
            };
            if (lane < experts) offer(0, held[0]);
            if (experts > 32) {
#pragma unroll
                for (int i = 1; i < HELD; ++i)
                    if (lane + 32 * i < experts) offer(i, held[i]);
                for (int i = HELD; lane + 32 * i < experts; ++i) offer(i, __ldcg(logits + lane + 32 * i));
            }
            const uint32_t most = __reduce_max_sync(0xffffffffu, best);
            id = __reduce_min_sync(0xffffffffu, best == most ? id : 0xffffffffu);
            if (id % 32 == lane) taken |= 1u << (id / 32);
            const float logit =
                most <= 1 ? -INFINITY : __uint_as_float(most & 0x80000000u ? most & 0x7fffffffu : ~most);
            if (n == 0) top = logit;
            if (n == lane) mine = logit, expert[n] = id;
        }
        const float weight = lane < chosen ? expf(mine - top) : 0.0f;
        float total = weight;
        if (over_all) {
            total = 0.0f;
            for (int i = lane; i < experts; i += 32) {
                const float logit = __ldcg(logits + i);
                total += isnan(logit) ? 0.0f : expf(logit - top);
            }
        }
        total = warp_sum(total);
        if (lane < chosen) share[lane] = weight / total;
    }
};
