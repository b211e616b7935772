// Causal attention over a KV cache, computed without tensor cores.
// Supports grouped-query attention, and optionally a sliding window, sinks and a soft cap.
// The kernel `attention` is the default for f32. For bf16 and f16, it is the default only if no tensor-core kernel of
// the build supports both the head size and the soft cap.
//   q, out: T [tokens, heads, head_dim]; head_dim <= PORTABLE_MAX_HEAD_DIM
//   k, v: the KV cache; see attention/paged.cuh
//   positions: u32 [tokens], the position of each query
//   sequences: u32 [tokens], the index of each query's sequence
//   tables: u32 [sequences, table_blocks], the block table of each sequence
//   sinks: f32 [heads] or null
//   softcap > 0: a score s becomes softcap · tanh(s / softcap)
//   grid: (tokens, heads); block: 32 · warps
//     Each block computes one query head of one token. Each warp runs an online softmax over its share of the keys.
//     The results of all warps are merged at the end.
//     portable_attention.rs chooses the number of warps.
//   shared memory: warps · (head_dim + 2) floats
//   bytes moved: about 2 · head_dim · sizeof(T) for each token, query head and visible key, mostly from L2
//     Each query head reads the keys and values of its KV head, even if other query heads share this KV head.
#include "attention/paged.cuh"
#include "constants.cuh"
#include "headers/activation.cuh"
#include "headers/common.cuh"

constexpr int MAX_LANE_DIMS = PORTABLE_MAX_HEAD_DIM / 32;

// The arguments of a kernel. The top of this file describes them. `RawArguments` in portable_attention.rs mirrors them.
template <typename T> struct AttentionArguments {
    const T *q, *k, *v;
    const float* sinks;
    T* out;
    const uint32_t *positions, *sequences, *tables;
    int table_blocks, heads, kv_heads, head_dim, window;
    float scale, softcap;

    // Returns the offset in k and v of a key and its value.
    __device__ __forceinline__ size_t offset(const uint32_t* table, int position, int kv_head) const {
        return ((size_t)cache_row(table, position) * kv_heads + kv_head) * head_dim;
    }
};
static_assert(sizeof(AttentionArguments<float>) == 8 * 8 + 8 * 4, "AttentionArguments must match RawArguments");

template <typename T> __device__ void attention(const AttentionArguments<T>& args) {
    const int head_dim = args.head_dim, window = args.window;
    const int token = blockIdx.x, head = blockIdx.y, kv_head = head / (args.heads / args.kv_heads);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const uint32_t* table = args.tables + (size_t)args.sequences[token] * args.table_blocks;
    const int last = args.positions[token];                                  // the newest visible key: the query's own
    const int first = window > 0 && last >= window ? last - window + 1 : 0;  // the oldest visible key
    const size_t base = ((size_t)token * args.heads + head) * head_dim;

    float query[MAX_LANE_DIMS], sum[MAX_LANE_DIMS];
#pragma unroll
    for (int i = 0; i < MAX_LANE_DIMS; ++i) {
        const int d = lane + 32 * i;
        query[i] = d < head_dim ? to_float(args.q[base + d]) * args.scale : 0.0f;
        sum[i] = 0.0f;
    }
    float top = -INFINITY, total = 0.0f;
    for (int p = first + warp; p <= last; p += warps) {
        const size_t row = args.offset(table, p, kv_head);
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < MAX_LANE_DIMS; ++i) {
            const int d = lane + 32 * i;
            if (d < head_dim) score += query[i] * to_float(args.k[row + d]);
        }
        score = warp_sum(score);
        if (args.softcap > 0.0f) score = soft_capped(score, args.softcap);
        const float new_top = fmaxf(top, score);
        const float keep = expf(top - new_top), weight = expf(score - new_top);
        total = total * keep + weight;
#pragma unroll
        for (int i = 0; i < MAX_LANE_DIMS; ++i) {
            const int d = lane + 32 * i;
            if (d < head_dim) sum[i] = sum[i] * keep + weight * to_float(args.v[row + d]);
        }
        top = new_top;
    }

    extern __shared__ float shared[];
    float *tops = shared, *totals = shared + warps, *sums = shared + 2 * warps;
    if (lane == 0) {
        tops[warp] = top;
        totals[warp] = total;
    }
#pragma unroll
    for (int i = 0; i < MAX_LANE_DIMS; ++i) {
        const int d = lane + 32 * i;
        if (d < head_dim) sums[warp * head_dim + d] = sum[i];
    }
    __syncthreads();
    // The sink is a logit without a value, so it contributes only to the softmax denominator.
    float block_top = args.sinks ? args.sinks[head] : -INFINITY;
    for (int w = 0; w < warps; ++w) block_top = fmaxf(block_top, tops[w]);
    float block_total = args.sinks ? expf(args.sinks[head] - block_top) : 0.0f;
    // A warp without keys has a maximum of -inf, so it contributes exp(-inf) = 0.
    for (int w = 0; w < warps; ++w) block_total += totals[w] * expf(tops[w] - block_top);
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float value = 0.0f;
        for (int w = 0; w < warps; ++w) value += sums[w * head_dim + d] * expf(tops[w] - block_top);
        args.out[base + d] = from_float<T>(value / block_total);
    }
}

// Applies sinks to attention output that was computed without sinks: out · sigmoid(lse - sink).
//   out: T [tokens, heads, head_dim]
//   lse: f32 [heads, tokens], the logarithm of each softmax denominator without the sink
//   sinks: f32 [heads]
//   bytes moved: out is read and written once
//   grid: (tokens, heads); block: 32
template <typename T>
__device__ void scale_by_sinks(T* out, const float* lse, const float* sinks, int tokens, int heads, int head_dim) {
    const int token = blockIdx.x, head = blockIdx.y;
    const float share = 1.0f / (1.0f + expf(sinks[head] - lse[(size_t)head * tokens + token]));
    T* row = out + ((size_t)token * heads + head) * head_dim;
    for (int d = threadIdx.x; d < head_dim; d += 32) row[d] = from_float<T>(to_float(row[d]) * share);
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void attention_##SUFFIX(const __grid_constant__ AttentionArguments<T> args) {                \
        attention<T>(args);                                                                                            \
    }                                                                                                                  \
    extern "C" __global__ void scale_by_sinks_##SUFFIX(T* out, const float* lse, const float* sinks, int tokens,       \
                                                       int heads, int head_dim) {                                      \
        scale_by_sinks<T>(out, lse, sinks, tokens, heads, head_dim);                                                   \
    }
FOR_EACH_DTYPE(DEFINE)
