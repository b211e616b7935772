// What the kernels of a decode step share, whether weights are floats (`decode.cu`) or quantized (`decode_quantized.cu`).
#pragma once
#include "headers/common.cuh"

// A block is as large as it takes to have one a multiprocessor, up to this many warps: all blocks read the same vector, and
// the fewer they are, the less they queue for it.
constexpr int MAX_WARPS = 24;

// Sum over the block; every thread gets it. `scratch` holds a float a warp, which are read after its barrier.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0.0f;
    for (int w = 0; w < blockDim.x / 32; ++w) sum += scratch[w];
    return sum;
}

// Where q, k and v of the token go.
//   bias f32 [(H + 2K)·D] or null; cos, sin f32 [P, R/2]; q T [H, D]; cache k, v T [S, K, D]
//   raw f32 [H + K, D] or null: where q and k go, not yet turned, if decode_qk_norm comes next
//   a unit is two rows of the projection, those that RoPE turns together
template <typename T> struct Qkv {
    const float *bias, *cos, *sin;
    T *q, *k, *v;
    float* raw;
    int heads, kv_heads, head_dim, rotated, rows;

    __device__ __forceinline__ int units() const { return (heads + 2 * kv_heads) * (head_dim / 2); }
    __device__ __forceinline__ int in_head(int unit, int r) const {
        const int p = unit % (head_dim / 2), half = rotated / 2;
        return p < half ? p + r * half : 2 * p + r;
    }
    __device__ __forceinline__ int row(int unit, int r) const {
        return unit / (head_dim / 2) * head_dim + in_head(unit, r);
    }
};

// The two elements of a unit: what their end needs, then that end.
template <typename T> struct QkvPair {
    int head, first, second;
    float a_bias, b_bias, cos, sin;

    __device__ __forceinline__ QkvPair(const Qkv<T>& to, int unit, int position)
        : head(unit / (to.head_dim / 2)), first(to.in_head(unit, 0)), second(to.in_head(unit, 1)) {
        const size_t base = (size_t)head * to.head_dim;
        const int half = to.rotated / 2;
        const bool turns = head < to.heads + to.kv_heads && first < half;
        a_bias = to.bias ? __ldg(to.bias + base + first) : 0.0f;
        b_bias = to.bias ? __ldg(to.bias + base + second) : 0.0f;
        cos = turns ? __ldg(to.cos + (size_t)position * half + first) : 1.0f;
        sin = turns ? __ldg(to.sin + (size_t)position * half + first) : 0.0f;
    }

    __device__ __forceinline__ void store(const Qkv<T>& to, int position, float a, float b) const {
        const size_t base = (size_t)head * to.head_dim, at = (size_t)(position % to.rows) * to.kv_heads;
        a += a_bias, b += b_bias;
        if (to.raw && head < to.heads + to.kv_heads) {
            to.raw[base + first] = a, to.raw[base + second] = b;
            return;
        }
        T* out = head < to.heads                 ? to.q + base
                 : head < to.heads + to.kv_heads ? to.k + (at + head - to.heads) * to.head_dim
                                                 : to.v + (at + head - to.heads - to.kv_heads) * to.head_dim;
        out[first] = from_float<T>(a * cos - b * sin), out[second] = from_float<T>(b * cos + a * sin);
    }
};

// Rows of the chosen experts of one matrix, one behind the other: `each` chunks of each; experts' rows lie `apart` chunks.
struct Chosen {
    const uint32_t* experts;
    int each;
    size_t apart;
    uint32_t inverse;  // 2^32 / each, rounded up: exact for chunks below 2^32 / each

    __device__ __forceinline__ Chosen() {}
    __device__ __forceinline__ Chosen(const uint32_t* experts, int each, size_t apart)
        : experts(experts), each(each), apart(apart), inverse(0xffffffffu / each + 1) {}
    // Which of the chosen a chunk belongs to. `each` of 1 makes the inverse 0.
    __device__ __forceinline__ int of(int chunk) const { return each == 1 ? chunk : __umulhi(chunk, inverse); }
};

// With cap > 0: cap · tanh(x / cap)
__device__ __forceinline__ float soft_capped(float x, float cap) { return cap > 0.0f ? cap * tanhf(x / cap) : x; }

// A logit and its token; the first of equals wins, NaN never does.
struct Best {
    float logit;
    uint32_t token;
    __device__ __forceinline__ void offer(float other, uint32_t other_token) {
        if (other > logit || (other == logit && other_token < token)) logit = other, token = other_token;
    }
};

// The best of what the first lanes of a block's warps have, to best[block]. `warps` holds one a warp.
__device__ __forceinline__ void best_of_block(Best mine, Best* warps, Best* best) {
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < blockDim.x / 32; ++w) mine.offer(warps[w].logit, warps[w].token);
        best[blockIdx.x] = mine;
    }
}
