// Splits the output of the fused QKV projection into q, k and v. Adds the bias, and normalizes q and k (RMSNorm).
// Applies rotary position embedding (RoPE) to q and k. Rounds the results to T, and writes k and v to the KV cache.
// RoPE rotates the pairs (x[i], x[i + rotated / 2]) of a head, for i < rotated / 2.
// RoPE does not change the elements with index `rotated` or higher.
//   qkv: f32 [tokens, heads + 2 · kv_heads, head_dim]
//   bias: f32 [heads + 2 · kv_heads, head_dim] or null
//   q_norm, k_norm: f32 [head_dim] or null; each head is normalized before the rotation
//   cos, sin: f32 [positions, rotated / 2]
//   positions: u32 [tokens]
//   q: T [tokens, heads, head_dim]
//   k, v: the KV cache, T [rows, kv_heads, head_dim]
//   slots: u32 [tokens], the row of k and v for each token
//   grid: one warp per HEADS heads of a token: ceil(tokens · ceil((heads + 2 · kv_heads) / HEADS) / warps per block)
//     split_qkv: HEADS = ROPE_HEADS_PER_WARP; block: 256
//     split_qkv_few, for a few tokens: HEADS = 1; block: 64
//   bytes moved: tokens · (heads + 2 · kv_heads) · head_dim · (4 + sizeof(T))
#include "constants.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"

template <typename T, int HEADS>
__device__ void split_qkv(const float* __restrict__ qkv, const float* __restrict__ bias,
                          const float* __restrict__ q_norm, const float* __restrict__ k_norm,
                          const float* __restrict__ cos, const float* __restrict__ sin,
                          const uint32_t* __restrict__ positions, T* __restrict__ q, T* __restrict__ k,
                          T* __restrict__ v, const uint32_t* __restrict__ slots, int tokens, int heads, int kv_heads,
                          int head_dim, int rotated, float eps) {
    const int all = heads + 2 * kv_heads, groups = (all + HEADS - 1) / HEADS, half = rotated / 2;
    const int lane = threadIdx.x % 32;
    const int item = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, token = item / groups;
    pdl_wait();
    pdl_launch_dependents();
    if (token >= tokens) return;
    const int first = item % groups * HEADS, count = min(HEADS, all - first);

    const float *x = qkv + ((size_t)token * all + first) * head_dim, *added = bias + first * head_dim;
    const auto biased = [&](int h, int i) {
        const int at = min(h, count - 1) * head_dim + i;
        return x[at] + (bias ? added[at] : 0.0f);
    };
    const auto is_query = [&](int h) { return first + h < heads; };
    const auto is_rotated = [&](int h) { return first + h < heads + kv_heads; };
    float scale[HEADS];
    if (q_norm) {
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            float squares = 0.0f;
            for (int i = lane; i < head_dim; i += 32) squares += biased(h, i) * biased(h, i);
            scale[h] = rsqrtf(warp_sum(squares) / head_dim + eps);
        }
    }
    const auto value = [&](int h, int i) {
        const float whole = biased(h, i);
        return q_norm && is_rotated(h) ? whole * scale[h] * (is_query(h) ? q_norm : k_norm)[i] : whole;
    };
    const size_t cache_row = slots[token];
    const auto out = [&](int h) {
        const int head = first + h;
        return is_query(h)     ? q + ((size_t)token * heads + head) * head_dim
               : is_rotated(h) ? k + (cache_row * kv_heads + head - heads) * head_dim
                               : v + (cache_row * kv_heads + head - heads - kv_heads) * head_dim;
    };
    const float *c = cos + (size_t)positions[token] * half, *s = sin + (size_t)positions[token] * half;
    // This loop is unrolled so that the loads of an iteration do not wait for the stores of the previous iteration.
#pragma unroll 2
    for (int i = lane; i < half; i += 32) {
        float a[HEADS], b[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; ++h) a[h] = value(h, i), b[h] = value(h, i + half);
        const float ci = c[i], si = s[i];
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            if (h >= count) continue;
            T* row = out(h);
            row[i] = from_float<T>(is_rotated(h) ? a[h] * ci - b[h] * si : a[h]);
            row[i + half] = from_float<T>(is_rotated(h) ? b[h] * ci + a[h] * si : b[h]);
        }
    }
    for (int i = 2 * half + lane; i < head_dim; i += 32) {
#pragma unroll
        for (int h = 0; h < HEADS; ++h)
            if (h < count) out(h)[i] = from_float<T>(value(h, i));
    }
}

#define DEFINE_KERNEL(T, NAME, HEADS)                                                                                  \
    extern "C" __global__ void NAME(const float* qkv, const float* bias, const float* q_norm, const float* k_norm,     \
                                    const float* cos, const float* sin, const uint32_t* positions, T* q, T* k, T* v,   \
                                    const uint32_t* slots, int tokens, int heads, int kv_heads, int head_dim,          \
                                    int rotated, float eps) {                                                          \
        split_qkv<T, HEADS>(qkv, bias, q_norm, k_norm, cos, sin, positions, q, k, v, slots, tokens, heads, kv_heads,   \
                            head_dim, rotated, eps);                                                                   \
    }
#define DEFINE(T, SUFFIX)                                                                                              \
    DEFINE_KERNEL(T, split_qkv_##SUFFIX, ROPE_HEADS_PER_WARP)                                                          \
    DEFINE_KERNEL(T, split_qkv_few_##SUFFIX, 1)
FOR_EACH_DTYPE(DEFINE)
