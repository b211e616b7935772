// From the fused projection to q, k and v: bias, RMSNorm and rotary position embedding of q and k, rounding.
// Split-half RoPE: pair i of a head is (x[i], x[i + R/2]), R = rotated dims; dims from R on pass through.
//   qkv f32 [T, H + 2K, D]; bias f32 [H + 2K, D] or null; cos, sin f32 [P, R/2]; positions u32 [T]
//   q_norm, k_norm f32 [D] or null: each head is normed before it is turned
//   q T [T, H, D]; k, v T [T, K, D]
//   grid (T, H + 2K), block 64 (two warps share the sum of a norm); bytes moved: T·(H + 2K)·D·(4 + sizeof(T))
#include "common.cuh"

template <typename T>
__device__ void split_qkv(const float* qkv, const float* bias, const float* q_norm, const float* k_norm,
                          const float* cos, const float* sin, const uint32_t* positions, T* q, T* k, T* v, int heads,
                          int kv_heads, int head_dim, int rotated, float eps) {
    const int token = blockIdx.x, head = blockIdx.y, half = rotated / 2;
    const float* x = qkv + ((size_t)token * (heads + 2 * kv_heads) + head) * head_dim;
    const float* b = bias ? bias + (size_t)head * head_dim : nullptr;
    T* out = head < heads              ? q + ((size_t)token * heads + head) * head_dim
             : head < heads + kv_heads ? k + ((size_t)token * kv_heads + head - heads) * head_dim
                                       : v + ((size_t)token * kv_heads + head - heads - kv_heads) * head_dim;
    const float* weight = head < heads ? q_norm : head < heads + kv_heads ? k_norm : nullptr;
    float scale = 1.0f;
    if (weight) {  // the same for the whole block
        __shared__ float halves[2];
        float squares = 0.0f;
        for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
            const float biased = x[i] + (b ? b[i] : 0.0f);
            squares += biased * biased;
        }
        squares = warp_sum(squares);
        if (threadIdx.x % 32 == 0) halves[threadIdx.x / 32] = squares;
        __syncthreads();
        scale = rsqrtf((halves[0] + halves[1]) / head_dim + eps);
    }
    const auto value = [&](int i) {
        const float biased = x[i] + (b ? b[i] : 0.0f);
        return weight ? biased * scale * weight[i] : biased;
    };
    const int turned = head < heads + kv_heads ? half : 0;
    const float* c = cos + (size_t)positions[token] * half;
    const float* s = sin + (size_t)positions[token] * half;
    for (int i = threadIdx.x; i < turned; i += blockDim.x) {
        const float first = value(i), second = value(i + half);
        out[i] = from_float<T>(first * c[i] - second * s[i]);
        out[i + half] = from_float<T>(second * c[i] + first * s[i]);
    }
    for (int i = 2 * turned + threadIdx.x; i < head_dim; i += blockDim.x) out[i] = from_float<T>(value(i));
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void split_qkv_##SUFFIX(const float* qkv, const float* bias, const float* q_norm,            \
                                                  const float* k_norm, const float* cos, const float* sin,             \
                                                  const uint32_t* positions, T* q, T* k, T* v, int heads,              \
                                                  int kv_heads, int head_dim, int rotated, float eps) {                \
        split_qkv<T>(qkv, bias, q_norm, k_norm, cos, sin, positions, q, k, v, heads, kv_heads, head_dim, rotated, eps); \
    }
FOR_EACH_DTYPE(DEFINE)
