// The decode step's products with quantised matrices: as those of `decode.cu`, with `QuantisedStream` in place of `Stream`.
//
//   x f32 [C]: the residual stream    T: bf16 or f16, the dtype of q, k, v, attention output and h
//   state u32: [0] position of the token in this step, [1] the token, [2] steps done
//   shared: as `vector_bytes` of quantised/cuda.rs says
#include "decode.cuh"
#include "pdl.cuh"
#include "quantised.cuh"

// Chunks under way for each of two rows, and of one; warps of a block.
constexpr int DEPTH2 = 2, DEPTH1 = 4, WARPS = 16;

// norm(x) to `v`, but for a factor that is returned.
__device__ __forceinline__ float load_normed(const Vector& v, const float* x, const float* norm, int columns, float eps,
                                             Rounds rounds, float* scratch) {
    const auto at = [=](int i) {
        if (4 * i >= columns) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        return __ldcg(reinterpret_cast<const float4*>(x) + i);
    };
    const auto weigh = [=](int i, float4 a) {
        if (4 * i >= columns) return a;
        const float4 w = __ldg(reinterpret_cast<const float4*>(norm) + i);
        return make_float4(a.x * w.x, a.y * w.y, a.z * w.z, a.w * w.w);
    };
    float squares = 0.0f, most = 0.0f;
    const auto square = [&](float4 a) { squares += a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w; };
    if (rounds.how == AS_IT_IS) {
        v.fill<false>([&](int i) {
            const float4 a = at(i);
            square(a);
            return weigh(i, a);
        });
        return rsqrtf(block_sum(squares, scratch) / columns + eps);
    }
    for (int i = threadIdx.x; i < columns / 4; i += blockDim.x) {
        const float4 a = at(i);
        square(a);
        most = larger(most, largest(weigh(i, a)));
    }
    const float rms = rsqrtf(block_sum(squares, scratch) / columns + eps);
    return fill_rounded(v, [&](int i) { return weigh(i, at(i)); }, most, rms, rounds, scratch);
}

// y to `v`, but for a factor that is returned.
template <typename T>
__device__ __forceinline__ float load_vector(const Vector& v, const T* y, int columns, Rounds rounds, float* scratch) {
    const auto at = [=](int i) {
        if (4 * i >= columns) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const uint2 two = __ldcg(reinterpret_cast<const uint2*>(y) + i);
        const T* four = reinterpret_cast<const T*>(&two);
        return make_float4(to_float(four[0]), to_float(four[1]), to_float(four[2]), to_float(four[3]));
    };
    if (rounds.how == AS_IT_IS) {
        v.fill<false>(at);
        __syncthreads();
        return 1.0f;
    }
    float most = 0.0f;
    for (int i = threadIdx.x; i < columns / 4; i += blockDim.x) most = larger(most, largest(at(i)));
    return fill_rounded(v, at, most, 1.0f, rounds, scratch);
}

// q, k, v of the token. parts: rows [(H + 2K)·D, C]
template <typename T>
__device__ void decode_qkv(const float* x, const float* norm, const Parts& parts, const uint32_t* state,
                           const Qkv<T>& qkv, int columns, float eps, Rounds rounds) {
    extern __shared__ float4 vector[];
    __shared__ float scratch[WARPS];
    const int chunks = (columns + 31) / 32;
    const Vector v(vector, parts, chunks);
    const auto place = [&](int unit, int r, int& part) {
        const int row = qkv.row(unit, r);
        part = row < parts.ends[0] ? 0 : row < parts.ends[1] ? 1 : 2;
        return part == 0 ? row : row - parts.ends[part - 1];
    };
    QuantisedStream<2, DEPTH2, decltype(place)> stream(parts, chunks, qkv.units(), place);
    pdl_wait();
    pdl_launch_dependents();
    const float scale = load_normed(v, x, norm, columns, eps, rounds, scratch);
    const int position = __ldcg(state);
    while (stream.more()) {
        // What the end needs is asked for at the start.
        const QkvPair<T> pair(qkv, stream.unit, position);
        float sum[2];
        stream.finish(v, sum);
        if (stream.lane == 0) pair.store(qkv, position, sum[0] * scale, sum[1] * scale);
    }
}

// x += W·y + bias. parts: [R, C]; y T [C]; bias f32 [R] or null
template <typename T>
__device__ void decode_residual(float* x, const T* y, const Parts& parts, const float* bias, int rows, int columns,
                                Rounds rounds) {
    extern __shared__ float4 vector[];
    __shared__ float scratch[WARPS];
    const int chunks = (columns + 31) / 32;
    const Vector v(vector, parts, chunks);
    const auto place = [](int unit, int, int& part) { return part = 0, unit; };
    QuantisedStream<1, DEPTH1, decltype(place)> stream(parts, chunks, rows, place);
    pdl_wait();
    pdl_launch_dependents();
    const float scale = load_vector(v, y, columns, rounds, scratch);
    while (stream.more()) {
        const int unit = stream.unit;
        const float rest = __ldcg(x + unit) + (bias ? __ldg(bias + unit) : 0.0f);
        float sum[1];
        stream.finish(v, sum);
        if (stream.lane == 0) x[unit] = sum[0] * scale + rest;
    }
}

// h = silu(gate(norm(x))) · up(norm(x)). parts: gate, up [F, C]; biases f32 [F] or null; h T [F]
template <typename T>
__device__ void decode_gate_up(const float* x, const float* norm, const Parts& parts, const float* gate_bias,
                               const float* up_bias, T* h, int rows, int columns, float eps, Rounds rounds) {
    extern __shared__ float4 vector[];
    __shared__ float scratch[WARPS];
    const int chunks = (columns + 31) / 32;
    const Vector v(vector, parts, chunks);
    const auto place = [](int unit, int r, int& part) { return part = r, unit; };
    QuantisedStream<2, DEPTH2, decltype(place)> stream(parts, chunks, rows, place);
    pdl_wait();
    pdl_launch_dependents();
    const float scale = load_normed(v, x, norm, columns, eps, rounds, scratch);
    while (stream.more()) {
        const int unit = stream.unit;
        float sum[2];
        stream.finish(v, sum);
        if (stream.lane != 0) continue;
        const float g = sum[0] * scale + (gate_bias ? gate_bias[unit] : 0.0f),
                    u = sum[1] * scale + (up_bias ? up_bias[unit] : 0.0f);
        h[unit] = from_float<T>(g / (1.0f + expf(-g)) * u);
    }
}

// logits = head(norm(x)), and each block's best. parts: [V, C]; logits f32 [V]; best [grid]; a unit is two rows
__device__ void decode_head(const float* x, const float* norm, const Parts& parts, float* logits, Best* best, int vocab,
                            int columns, float eps, Rounds rounds) {
    extern __shared__ float4 vector[];
    __shared__ float scratch[WARPS];
    __shared__ Best warps[WARPS];
    const int chunks = (columns + 31) / 32;
    const Vector v(vector, parts, chunks);
    const auto place = [=](int unit, int r, int& part) { return part = 0, min(2 * unit + r, vocab - 1); };
    QuantisedStream<2, DEPTH2, decltype(place)> stream(parts, chunks, (vocab + 1) / 2, place);
    pdl_wait();
    pdl_launch_dependents();
    const float scale = load_normed(v, x, norm, columns, eps, rounds, scratch);
    Best mine{-INFINITY, 0xffffffffu};
    while (stream.more()) {
        const int unit = stream.unit;
        float sum[2];
        stream.finish(v, sum);
        if (stream.lane != 0) continue;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (2 * unit + r >= vocab) break;
            logits[2 * unit + r] = sum[r] * scale;
            mine.offer(sum[r] * scale, 2 * unit + r);
        }
    }
    best_of_block(mine, warps, best);
}

// The row of the token in `state` to x: what decode_next and decode_sample leave to this kernel. A thread has 8 columns:
// grid ceil(C / 8 / 256), block 256
extern "C" __global__ void __launch_bounds__(256)
    quantised_next(const __grid_constant__ Parts parts, const uint32_t* state, float* x, int columns) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    pdl_wait();
    pdl_launch_dependents();
    if (8 * i >= columns) return;
    const int row = __ldcg(state + 1);
    with_format(parts.part[0].format, [&](auto format) {
        const Eight v = eight<decltype(format)::value>(parts.part[0], row, i / 4, i % 4, (columns + 31) / 32);
        reinterpret_cast<float4*>(x)[2 * i] = v.first, reinterpret_cast<float4*>(x)[2 * i + 1] = v.second;
    });
}

#define KERNEL extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)

KERNEL quantised_head(const float* x, const float* norm, const __grid_constant__ Parts parts, float* logits, Best* best,
                      int vocab, int columns, float eps, int rounding, float by) {
    decode_head(x, norm, parts, logits, best, vocab, columns, eps, {rounding, by});
}

#define DEFINE(T, SUFFIX)                                                                                              \
    KERNEL quantised_qkv_##SUFFIX(const float* x, const float* norm, const __grid_constant__ Parts parts,              \
                                  const float* bias, const float* cos, const float* sin, const uint32_t* state, T* q,  \
                                  T* k, T* v, float* raw, int columns, int heads, int kv_heads, int head_dim,          \
                                  int rotated, int rows, float eps, int rounding, float by) {                          \
        decode_qkv<T>(x, norm, parts, state,                                                                           \
                      Qkv<T>{bias, cos, sin, q, k, v, raw, heads, kv_heads, head_dim, rotated, rows}, columns, eps,    \
                      {rounding, by});                                                                                 \
    }                                                                                                                  \
    KERNEL quantised_residual_##SUFFIX(float* x, const T* y, const __grid_constant__ Parts parts, const float* bias,   \
                                       int rows, int columns, int rounding, float by) {                                \
        decode_residual<T>(x, y, parts, bias, rows, columns, {rounding, by});                                          \
    }                                                                                                                  \
    KERNEL quantised_gate_up_##SUFFIX(const float* x, const float* norm, const __grid_constant__ Parts parts,          \
                                      const float* gate_bias, const float* up_bias, T* h, int rows, int columns,       \
                                      float eps, int rounding, float by) {                                             \
        decode_gate_up<T>(x, norm, parts, gate_bias, up_bias, h, rows, columns, eps, {rounding, by});                  \
    }
DEFINE(__nv_bfloat16, bf16)
DEFINE(__half, f16)
