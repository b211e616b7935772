// Computes the queries, keys and values of one token: applies RMSNorm, the projection and its bias, and then RoPE to
// queries and keys. Writes the queries to a buffer, and the keys and values to the KV cache.
// If the model has QK norms, writes the queries and keys to `unnormalized` instead, without RoPE, and decode_qk_norm
// follows.
//
//   x, norm: f32 [columns]; `norm` is the weight of the RMSNorm
//   weight: T [(heads + 2 · kv_heads) · head_dim, columns], or up to three quantized matrices
//   bias: f32 [(heads + 2 · kv_heads) · head_dim] or null
//   cos, sin: f32 [positions, rotated / 2]; RoPE applies to the first `rotated` elements of a head
//   state: see decode/mod.rs
//   q: T [heads, head_dim]
//   k, v: the KV cache; see attention/paged.cuh
//   table: u32 [blocks], the block table of the sequence
//   unnormalized: f32 [heads + kv_heads, head_dim], or null if the model has no QK norms
//   grid: at most one block per multiprocessor
//   block: at most DECODE_MAX_WARPS warps, or QUANTIZED_WARPS with quantized weights
//   bytes moved: the weight
// Each strip is two rows of the weight. RoPE rotates the two outputs of a strip as a pair, or not at all.
#include "attention/paged.cuh"
#include "decode/dense_matvec.cuh"
#include "decode/quantized_matvec.cuh"
#include "headers/pdl.cuh"

// The output buffers of the projection, and the bias and the RoPE tables, which QkvPair applies to the outputs.
// The top of this file describes the fields. `RawTarget` in qkv.rs mirrors this struct.
template <typename T> struct QkvTarget {
    const float *bias, *cos, *sin;
    T *q, *k, *v;
    const uint32_t* table;
    float* unnormalized;
    int heads, kv_heads, head_dim, rotated;

    // Returns the number of strips: one for each pair of elements of a head.
    __device__ __forceinline__ int strips() const { return (heads + 2 * kv_heads) * (head_dim / 2); }
    // Returns the index in its head of output r (0 or 1) of a strip. The strips of the rotated elements come first.
    __device__ __forceinline__ int in_head(int strip, int r) const {
        const int p = strip % (head_dim / 2), half = rotated / 2;
        return p < half ? p + r * half : 2 * p + r;
    }
    // Returns the row of the weight that computes output r of a strip.
    __device__ __forceinline__ int row(int strip, int r) const {
        return strip / (head_dim / 2) * head_dim + in_head(strip, r);
    }
};
static_assert(sizeof(QkvTarget<__half>) == 8 * 8 + 4 * 4, "QkvTarget must match RawTarget");

// The two outputs of a strip.
// The constructor loads the biases, cosine and sine before the dot products are computed, to hide the latency.
template <typename T> struct QkvPair {
    int head, first, second;  // the head of both outputs, and their indices in the head
    float a_bias, b_bias, cos, sin;

    __device__ __forceinline__ QkvPair(const QkvTarget<T>& to, int strip, int position)
        : head(strip / (to.head_dim / 2)), first(to.in_head(strip, 0)), second(to.in_head(strip, 1)) {
        const size_t base = (size_t)head * to.head_dim;
        const int half = to.rotated / 2;
        const bool rotates = head < to.heads + to.kv_heads && first < half;
        a_bias = to.bias ? __ldg(to.bias + base + first) : 0.0f;
        b_bias = to.bias ? __ldg(to.bias + base + second) : 0.0f;
        cos = rotates ? __ldg(to.cos + (size_t)position * half + first) : 1.0f;
        sin = rotates ? __ldg(to.sin + (size_t)position * half + first) : 0.0f;
    }

    // Adds the biases to the dot products `a` and `b`. If decode_qk_norm follows, stores queries and keys in
    // `unnormalized`. Otherwise, applies RoPE to queries and keys and stores them in q and k. Always stores values in
    // v. `row` is the row of the KV cache for this position.
    __device__ __forceinline__ void store(const QkvTarget<T>& to, uint32_t row, float a, float b) const {
        const size_t base = (size_t)head * to.head_dim, kv_row = (size_t)row * to.kv_heads;
        a += a_bias;
        b += b_bias;
        if (to.unnormalized && head < to.heads + to.kv_heads) {
            to.unnormalized[base + first] = a;
            to.unnormalized[base + second] = b;
            return;
        }
        T* out = head < to.heads                 ? to.q + base
                 : head < to.heads + to.kv_heads ? to.k + (kv_row + head - to.heads) * to.head_dim
                                                 : to.v + (kv_row + head - to.heads - to.kv_heads) * to.head_dim;
        out[first] = from_float<T>(a * cos - b * sin);
        out[second] = from_float<T>(b * cos + a * sin);
    }
};

// Computes the outputs of this warp's strips. Multiplies all dot products by `scale`.
template <typename T, typename Stream, typename Input>
__device__ __forceinline__ void store_strips(Stream& stream, const Input& input, float scale, const uint32_t* state,
                                             const QkvTarget<T>& to) {
    const int position = __ldcg(state + STATE_POSITION);
    const uint32_t row_in_cache = cache_row(to.table, position);
    while (stream.has_strip()) {
        const QkvPair<T> pair(to, stream.strip, position);
        float sum[2];
        stream.multiply(input, sum);
        if (stream.lane == 0) pair.store(to, row_in_cache, sum[0] * scale, sum[1] * scale);
    }
}

template <typename T>
__device__ void decode_qkv(const NormedVector& x, const T* weight, const uint32_t* state, const QkvTarget<T>& to) {
    extern __shared__ float4 shared[];
    __shared__ float scratch[DECODE_MAX_WARPS];
    const int columns = x.columns;
    const DenseInput input{shared, columns / 8};
    const auto row = [=](int strip, int r) { return as_segments(weight + (size_t)to.row(strip, r) * columns); };
    DenseStream<T, 2, DENSE_DEPTH_2, decltype(row)> stream(input.segments, to.strips(), row);
    pdl_wait();
    pdl_launch_dependents();
    const float scale = load_normed(input, x, scratch);
    store_strips(stream, input, scale, state, to);
}

template <typename T>
__device__ void quantized_qkv(const NormedVector& x, const QuantizedStack& weight, const uint32_t* state,
                              const QkvTarget<T>& to, QuantizationArgs quantization) {
    extern __shared__ float4 vector[];
    __shared__ float scratch[QUANTIZED_WARPS];
    const int groups = (x.columns + 31) / 32;
    const QuantizedInput input(vector, weight, groups);
    const auto row = [&](int strip, int r, int& matrix) {
        const int row = to.row(strip, r);
        matrix = row < weight.row_ends[0] ? 0 : row < weight.row_ends[1] ? 1 : 2;
        return matrix == 0 ? row : row - weight.row_ends[matrix - 1];
    };
    QuantizedStream<2, QUANTIZED_DEPTH_2, decltype(row)> stream(weight, groups, to.strips(), row);
    pdl_wait();
    pdl_launch_dependents();
    const float scale = load_normed(input, x, quantization, scratch);
    store_strips(stream, input, scale, state, to);
}

// Applies the QK norms and then RoPE to each head of q and k, which decode_qkv has stored in `unnormalized`.
// Writes the queries to their buffer and the keys to the KV cache.
//   q_norm, k_norm: f32 [head_dim]
//   state, to: as for decode_qkv
//   grid and block: one warp per head of q and k
//   bytes moved: (4 + sizeof(T)) · (heads + kv_heads) · head_dim
template <typename T>
__device__ void decode_qk_norm(const float* q_norm, const float* k_norm, const uint32_t* state, const QkvTarget<T>& to,
                               float eps) {
    const int heads = to.heads, head_dim = to.head_dim, half = to.rotated / 2;
    const int head = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    pdl_wait();
    pdl_launch_dependents();
    if (head >= heads + to.kv_heads) return;
    const int position = __ldcg(state + STATE_POSITION);
    const float *x = to.unnormalized + (size_t)head * head_dim, *weight = head < heads ? q_norm : k_norm;
    const float *c = to.cos + (size_t)position * half, *s = to.sin + (size_t)position * half;
    T* out = head < heads ? to.q + (size_t)head * head_dim
                          : to.k + ((size_t)cache_row(to.table, position) * to.kv_heads + head - heads) * head_dim;
    float squares = 0.0f;
    for (int i = lane; i < head_dim; i += 32) squares += __ldcg(x + i) * __ldcg(x + i);
    const float scale = rsqrtf(warp_sum(squares) / head_dim + eps);
    for (int i = lane; i < half; i += 32) {
        const float a = __ldcg(x + i) * scale * weight[i], b = __ldcg(x + i + half) * scale * weight[i + half];
        out[i] = from_float<T>(a * c[i] - b * s[i]);
        out[i + half] = from_float<T>(b * c[i] + a * s[i]);
    }
    for (int i = to.rotated + lane; i < head_dim; i += 32) out[i] = from_float<T>(__ldcg(x + i) * scale * weight[i]);
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * DECODE_MAX_WARPS, 1)                                             \
        decode_qkv_##SUFFIX(const float* x, const float* norm, const T* weight, const uint32_t* state,                 \
                            const __grid_constant__ QkvTarget<T> to, int columns, float eps) {                         \
        decode_qkv<T>({x, norm, columns, eps}, weight, state, to);                                                     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * QUANTIZED_WARPS, 1)                                              \
        quantized_qkv_##SUFFIX(const float* x, const float* norm, const __grid_constant__ QuantizedStack weight,       \
                               const uint32_t* state, const __grid_constant__ QkvTarget<T> to, int columns, float eps, \
                               int quantization, float static_scale) {                                                 \
        quantized_qkv<T>({x, norm, columns, eps}, weight, state, to, {quantization, static_scale});                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(ELEMENT_THREADS)                                                      \
        decode_qk_norm_##SUFFIX(const float* q_norm, const float* k_norm, const uint32_t* state,                       \
                                const __grid_constant__ QkvTarget<T> to, float eps) {                                  \
        decode_qk_norm<T>(q_norm, k_norm, state, to, eps);                                                             \
    }
DEFINE(__nv_bfloat16, bf16)
DEFINE(__half, f16)
