// Chooses experts for each token: computes the router logits, and chooses the experts with the largest logits.
#include "headers/pdl.cuh"
#include "matmul/f32_few_rows.cuh"
#include "moe/routing/routing.cuh"

// A block routes F32_FEW_ROWS_TOKENS · TILES tokens. With more tiles per block, fewer blocks read the weights.
//   x: f32 [tokens, columns]; weight: f32 [experts, columns]; bias: f32 [experts] or null
//   ids: u32 [tokens, chosen], the chosen experts in descending order of their logits (see Routing::choose_by)
//   routing_weights: f32 [tokens, chosen], a softmax over the logits of the chosen experts
//   columns is a multiple of 16; chosen <= experts and chosen <= MAX_CHOSEN_EXPERTS
//   grid: ceil(tokens / (F32_FEW_ROWS_TOKENS · TILES)); block: 32 · F32_FEW_ROWS_WARPS
//   dynamic shared memory: the PartialSums<TILES> of F32_FEW_ROWS_WARPS warps, then the logits of the block's tokens:
//     f32 [F32_FEW_ROWS_TOKENS · TILES][experts, rounded up to a multiple of F32_FEW_ROWS_TILE]
//   bytes moved: x once per F32_FEW_ROWS_TILE experts and weight once per block, mostly from L2; the results once
template <int TILES>
__device__ void choose_experts(const float* x, const float* weight, const float* bias, uint32_t* ids,
                               float* routing_weights, int tokens, int columns, int experts, int chosen) {
    constexpr int TOKENS = F32_FEW_ROWS_TOKENS * TILES, TILE = F32_FEW_ROWS_TILE;
    extern __shared__ __align__(16) float memory[];
    __shared__ Routing routing[F32_FEW_ROWS_WARPS];
    const auto partial = reinterpret_cast<PartialSums<TILES>*>(memory);
    float* logits = memory + F32_FEW_ROWS_WARPS * TOKENS * F32_FEW_ROWS_STRIDE;
    const int row_size = (experts + TILE - 1) / TILE * TILE, first_token = blockIdx.x * TOKENS;
    pdl_wait();
    pdl_launch_dependents();
    for (int base = 0; base < experts; base += TILE) {
        multiply_few_rows<TILES>(x, weight, first_token, tokens, base, experts, columns, partial);
        __syncthreads();
        for (int i = threadIdx.x; i < TOKENS * TILE; i += blockDim.x) {
            const int token = i / TILE, expert = i % TILE;
            const float added = bias && base + expert < experts ? bias[base + expert] : 0.0f;
            logits[token * row_size + base + expert] = sum_of_warps<TILES>(partial, token, expert) + added;
        }
        __syncthreads();
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = warp; i < TOKENS && first_token + i < tokens; i += F32_FEW_ROWS_WARPS) {
        const auto logit_of = [&](int expert) { return logits[i * row_size + expert]; };
        routing[warp].choose_by(logit_of, experts, chosen, chosen, lane);
        __syncwarp();
        const size_t first = (size_t)(first_token + i) * chosen;
        if (lane < chosen) {
            ids[first + lane] = routing[warp].expert[lane];
            routing_weights[first + lane] = routing[warp].weight[lane];
        }
        __syncwarp();
    }
}

#define DEFINE(TILES)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * F32_FEW_ROWS_WARPS)                                              \
        choose_experts_##TILES(const float* x, const float* weight, const float* bias, uint32_t* ids,                  \
                               float* routing_weights, int tokens, int columns, int experts, int chosen) {             \
        choose_experts<TILES>(x, weight, bias, ids, routing_weights, tokens, columns, experts, chosen);                \
    }
DEFINE(1)
DEFINE(2)
