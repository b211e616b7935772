// Splits the output of the fused QKV projection into q, k and v. Adds the bias, and normalizes q and k (RMSNorm).
// Applies rotary position embedding (RoPE) to q and k. Rounds the results to T, and writes k and v to the KV cache.
// RoPE rotates the pairs (x[i], x[i + rotated / 2]) of a head, for i < rotated / 2.
// RoPE does not change the elements with index `rotated` or higher.
//   qkv: f32 [terms, tokens, heads + 2 · kv_heads, head_dim]; the terms are added up
//   bias: f32 [heads + 2 · kv_heads, head_dim] or null
//   q_norm, k_norm: f32 [head_dim] or null; each head of q and k is normalized before the rotation
//   cos, sin: f32 [positions, rotated / 2]
//   positions: u32 [tokens]
//   q: T [tokens, heads, head_dim]
//   k, v: the KV cache, T [rows, kv_heads, head_dim]
//   slots: u32 [tokens], the row of k and v for each token
//   grid: ceil(tokens · ceil((heads + 2 · kv_heads) / HEADS) / warps per block); a warp has HEADS heads of a token
//     split_qkv, for one term: HEADS = ROPE_HEADS_PER_WARP
//     split_qkv_few_tokens, for up to ROPE_FEW_TOKENS tokens or several terms: HEADS = 1
//     split_qkv_vectorized, for one term, and split_qkv_vectorized_terms, both without norms: see the template below
//   block: a multiple of 32
//   bytes moved: tokens · (heads + 2 · kv_heads) · head_dim · (4 · terms + sizeof(T))
#include "constants.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"
#include "headers/sum_terms.cuh"
#include "headers/tensor_core.cuh"

// Rotates the pair (a, b). With fmaf and __fmul_rn, all kernels of this file round in the same way. The compiler could
// round the expression a · cos - b · sin differently in each kernel.
__device__ __forceinline__ float2 rotate(float a, float b, float cos, float sin) {
    return make_float2(fmaf(a, cos, -__fmul_rn(b, sin)), fmaf(b, cos, __fmul_rn(a, sin)));
}

// The arguments of a kernel. The top of this file describes them. `RawArguments` in rope.rs mirrors them.
template <typename T> struct SplitQkvArguments {
    const float *qkv, *bias, *q_norm, *k_norm, *cos, *sin;
    const uint32_t* positions;
    T *q, *k, *v;
    const uint32_t* slots;
    int terms, tokens, heads, kv_heads, head_dim, rotated;
    float eps;
};
// The last 4 bytes are padding.
static_assert(sizeof(SplitQkvArguments<float>) == 11 * 8 + 8 * 4, "SplitQkvArguments must match RawArguments");

template <typename T, int HEADS> __device__ void split_qkv(const SplitQkvArguments<T>& args) {
    const int heads = args.heads, kv_heads = args.kv_heads, head_dim = args.head_dim;
    const int all = heads + 2 * kv_heads, warps_per_token = (all + HEADS - 1) / HEADS, half = args.rotated / 2;
    const int lane = threadIdx.x % 32;
    const int item = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, token = item / warps_per_token;
    pdl_wait();
    pdl_launch_dependents();
    if (token >= args.tokens) return;
    const int first = item % warps_per_token * HEADS, count = min(HEADS, all - first);

    const float *x = args.qkv + ((size_t)token * all + first) * head_dim, *added = args.bias + first * head_dim;
    const size_t term_stride = (size_t)args.tokens * all * head_dim;
    const auto biased = [&](int h, int i) {
        const int at = min(h, count - 1) * head_dim + i;
        return sum_terms<HEADS == 1>(args.terms, [&](int term) { return x[term * term_stride + at]; }) +
               (args.bias ? added[at] : 0.0f);
    };
    const auto is_query = [&](int h) { return first + h < heads; };
    const auto is_rotated = [&](int h) { return first + h < heads + kv_heads; };
    float scale[HEADS];
    if (args.q_norm) {
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            float squares = 0.0f;
            for (int i = lane; i < head_dim; i += 32) squares += biased(h, i) * biased(h, i);
            scale[h] = rsqrtf(warp_sum(squares) / head_dim + args.eps);
        }
    }
    const auto value = [&](int h, int i) {
        const float whole = biased(h, i);
        return args.q_norm && is_rotated(h) ? whole * scale[h] * (is_query(h) ? args.q_norm : args.k_norm)[i] : whole;
    };
    const size_t cache_row = args.slots[token];
    const auto out = [&](int h) {
        const int head = first + h;
        return is_query(h)     ? args.q + ((size_t)token * heads + head) * head_dim
               : is_rotated(h) ? args.k + (cache_row * kv_heads + head - heads) * head_dim
                               : args.v + (cache_row * kv_heads + head - heads - kv_heads) * head_dim;
    };
    const float *c = args.cos + (size_t)args.positions[token] * half,
                *s = args.sin + (size_t)args.positions[token] * half;
    // Unrolling lets the loads of two iterations run before the stores of the first.
#pragma unroll 2
    for (int i = lane; i < half; i += 32) {
        float a[HEADS], b[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            a[h] = value(h, i);
            b[h] = value(h, i + half);
        }
        const float ci = c[i], si = s[i];
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            if (h >= count) continue;
            T* row = out(h);
            const float2 pair = is_rotated(h) ? rotate(a[h], b[h], ci, si) : make_float2(a[h], b[h]);
            row[i] = from_float<T>(pair.x);
            row[i + half] = from_float<T>(pair.y);
        }
    }
    for (int i = 2 * half + lane; i < head_dim; i += 32) {
#pragma unroll
        for (int h = 0; h < HEADS; ++h)
            if (h < count) out(h)[i] = from_float<T>(value(h, i));
    }
}

// Rounds four adjacent elements of a head to T and stores them.
template <typename T> __device__ __forceinline__ void store_4(T* to, const float (&v)[4]) {
    if constexpr (sizeof(T) == 4)
        *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    else
        *reinterpret_cast<uint2*>(to) = make_uint2(pack<T>(v[0], v[1]), pack<T>(v[2], v[3]));
}

// Like split_qkv, but without norms, and only for heads that RoPE rotates completely.
// `head_dim` is 64, 128 or 256, and `head_dim` / 8 lanes share a head.
// In each of HEADS heads, a lane computes four adjacent elements of the first half, and their partners in the second.
// A lane loads four elements at once, so qkv, bias, cos and sin must be aligned to 16 bytes.
// If SEVERAL_TERMS is false, qkv has one term.
//   grid: one warp per HEADS · 256 / head_dim heads of a token
template <typename T, int HEADS, bool SEVERAL_TERMS>
__device__ void split_qkv_vectorized(const SplitQkvArguments<T>& args) {
    const int heads = args.heads, kv_heads = args.kv_heads, head_dim = args.head_dim;
    const int all = heads + 2 * kv_heads, half = head_dim / 2, lanes = head_dim / 8, at_once = 32 / lanes;
    const int warps_per_token = (all + HEADS * at_once - 1) / (HEADS * at_once), lane = threadIdx.x % 32;
    const int item = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, token = item / warps_per_token;
    pdl_wait();
    pdl_launch_dependents();
    if (token >= args.tokens) return;
    const int first = item % warps_per_token * HEADS * at_once + lane / lanes, i = lane % lanes * 4;
    const size_t term_stride = (size_t)args.tokens * all * head_dim;
    const auto load = [](const float* from) { return *reinterpret_cast<const float4*>(from); };
    float4 a[HEADS], b[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        const int head = first + h * at_once;
        if (head >= all) continue;
        const float* x = args.qkv + ((size_t)token * all + head) * head_dim + i;
        a[h] = sum_terms<SEVERAL_TERMS>(args.terms, [&](int term) { return load(x + term * term_stride); });
        b[h] = sum_terms<SEVERAL_TERMS>(args.terms, [&](int term) { return load(x + term * term_stride + half); });
    }
    const size_t cache_row = args.slots[token], angles = (size_t)args.positions[token] * half + i;
    const float4 cos_4 = load(args.cos + angles), sin_4 = load(args.sin + angles);
    const float c[4] = {cos_4.x, cos_4.y, cos_4.z, cos_4.w}, s[4] = {sin_4.x, sin_4.y, sin_4.z, sin_4.w};
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        const int head = first + h * at_once;
        if (head >= all) continue;
        float low[4] = {a[h].x, a[h].y, a[h].z, a[h].w}, high[4] = {b[h].x, b[h].y, b[h].z, b[h].w};
        if (args.bias) {
            const float4 e = load(args.bias + (size_t)head * head_dim + i),
                         f = load(args.bias + (size_t)head * head_dim + i + half);
            low[0] += e.x;
            low[1] += e.y;
            low[2] += e.z;
            low[3] += e.w;
            high[0] += f.x;
            high[1] += f.y;
            high[2] += f.z;
            high[3] += f.w;
        }
        if (head < heads + kv_heads) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float2 pair = rotate(low[n], high[n], c[n], s[n]);
                low[n] = pair.x;
                high[n] = pair.y;
            }
        }
        T* row = head < heads              ? args.q + ((size_t)token * heads + head) * head_dim
                 : head < heads + kv_heads ? args.k + (cache_row * kv_heads + head - heads) * head_dim
                                           : args.v + (cache_row * kv_heads + head - heads - kv_heads) * head_dim;
        store_4(row + i, low);
        store_4(row + i + half, high);
    }
}

// The argument is not __grid_constant__: with it, split_qkv_vectorized needs 54 registers instead of 48 (CUDA 13.0,
// H200).
#define DEFINE_KERNEL(NAME, FUNCTION, T)                                                                               \
    extern "C" __global__ void NAME(const SplitQkvArguments<T> args) { FUNCTION(args); }
#define DEFINE(T, SUFFIX)                                                                                              \
    DEFINE_KERNEL(split_qkv_##SUFFIX, (split_qkv<T, ROPE_HEADS_PER_WARP>), T)                                          \
    DEFINE_KERNEL(split_qkv_few_tokens_##SUFFIX, (split_qkv<T, 1>), T)                                                 \
    DEFINE_KERNEL(split_qkv_vectorized_##SUFFIX, (split_qkv_vectorized<T, ROPE_VECTORIZED_HEADS, false>), T)           \
    DEFINE_KERNEL(split_qkv_vectorized_terms_##SUFFIX, (split_qkv_vectorized<T, ROPE_VECTORIZED_HEADS, true>), T)
FOR_EACH_DTYPE(DEFINE)
