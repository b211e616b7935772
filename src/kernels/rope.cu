// From the fused projection to q, k and v: bias, rotary position embedding of q and k, rounding.
// Split-half RoPE: pair i of a head is (x[i], x[i + R/2]), R = rotated dims; dims from R on pass through.
//   qkv f32 [T, H + 2K, D]; bias f32 [H + 2K, D] or null; cos, sin f32 [P, R/2]; positions u32 [T]
//   q T [T, H, D]; k, v T [T, K, D]
//   grid (T, H + 2K), block 64; bytes moved: T·(H + 2K)·D·(4 + sizeof(T))
#include "common.cuh"

template <typename T>
__device__ void split_qkv(const float* qkv, const float* bias, const float* cos, const float* sin,
                          const uint32_t* positions, T* q, T* k, T* v, int heads, int kv_heads, int head_dim,
                          int rotated) {
    const int token = blockIdx.x, head = blockIdx.y, half = rotated / 2;
    const float* x = qkv + ((size_t)token * (heads + 2 * kv_heads) + head) * head_dim;
    const float* b = bias ? bias + (size_t)head * head_dim : nullptr;
    T* out = head < heads              ? q + ((size_t)token * heads + head) * head_dim
             : head < heads + kv_heads ? k + ((size_t)token * kv_heads + head - heads) * head_dim
                                       : v + ((size_t)token * kv_heads + head - heads - kv_heads) * head_dim;
    const auto value = [&](int i) { return x[i] + (b ? b[i] : 0.0f); };
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

#define DEFINE(T, SUFFIX)                                                                                        \
    extern "C" __global__ void split_qkv_##SUFFIX(const float* qkv, const float* bias, const float* cos,         \
                                                  const float* sin, const uint32_t* positions, T* q, T* k, T* v, \
                                                  int heads, int kv_heads, int head_dim, int rotated) {          \
        split_qkv<T>(qkv, bias, cos, sin, positions, q, k, v, heads, kv_heads, head_dim, rotated);               \
    }
FOR_EACH_DTYPE(DEFINE)
