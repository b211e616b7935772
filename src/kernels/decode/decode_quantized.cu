// The decode step's products with quantized matrices: as those of `decode.cu`, with `QuantizedStream` in place of `Stream`.
//
//   x f32 [C]: the residual stream    T: bf16 or f16, the dtype of q, k, v, attention output and h
//   state u32: [0] position of the token in this step, [1] the token, [2] steps done
//   shared: as `vector_bytes` of quantized/cuda.rs says
#include "headers/activation.cuh"
#include "decode/decode.cuh"
#include "headers/pdl.cuh"
#include "quantized/quantized.cuh"
#include "moe/routing.cuh"

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
    QuantizedStream<2, DEPTH2, decltype(place)> stream(parts, chunks, qkv.units(), place);
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

// out = x + W·y + bias. parts: [R, C]; y T [C]; bias f32 [R] or null; x, out f32 [R], which may be the same, x may be null
template <typename T>
__device__ void decode_residual(const float* x, float* out, const T* y, const Parts& parts, const float* bias, int rows,
                                int columns, Rounds rounds) {
    extern __shared__ float4 vector[];
    __shared__ float scratch[WARPS];
    const int chunks = (columns + 31) / 32;
    const Vector v(vector, parts, chunks);
    const auto place = [](int unit, int, int& part) { return part = 0, unit; };
    QuantizedStream<1, DEPTH1, decltype(place)> stream(parts, chunks, rows, place);
    pdl_wait();
    pdl_launch_dependents();
    const float scale = load_vector(v, y, columns, rounds, scratch);
    while (stream.more()) {
        const int unit = stream.unit;
        const float rest = (x ? __ldcg(x + unit) : 0.0f) + (bias ? __ldg(bias + unit) : 0.0f);
        float sum[1];
        stream.finish(v, sum);
        if (stream.lane == 0) out[unit] = sum[0] * scale + rest;
    }
}

// h = activation(gate(norm(x))) · up(norm(x)). parts: gate, up [F, C]; biases f32 [F] or null; h T [F]
template <typename T>
__device__ void decode_gate_up(const float* x, const float* norm, const Parts& parts, const float* gate_bias,
                               const float* up_bias, T* h, int rows, int columns, int activation, float eps,
                               Rounds rounds) {
    extern __shared__ float4 vector[];
    __shared__ float scratch[WARPS];
    const int chunks = (columns + 31) / 32;
    const Vector v(vector, parts, chunks);
    const auto place = [](int unit, int r, int& part) { return part = r, unit; };
    QuantizedStream<2, DEPTH2, decltype(place)> stream(parts, chunks, rows, place);
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
        h[unit] = from_float<T>(activate(g, activation) * u);
    }
}

// h of the chosen experts: h[n] = silu(gate(norm(x))) · up(norm(x)).
//   parts: [E·2F, C], an expert's gate above its up; logits f32 [E]; h T [N, F]; a unit is one element of h
template <typename T>
__device__ void decode_routed_gate_up(const float* x, const float* norm, const Parts& parts, const float* logits, T* h,
                                      int experts, int chosen, int rows, int columns, float eps, Rounds rounds) {
    extern __shared__ float4 vector[];
    __shared__ float scratch[WARPS];
    __shared__ Routing routing;
    const int chunks = (columns + 31) / 32;
    const Vector v(vector, parts, chunks);
    pdl_wait();
    pdl_launch_dependents();
    if (threadIdx.x < 32) routing.choose(logits, experts, chosen, 0, threadIdx.x);
    __syncthreads();
    const uint32_t* expert = routing.expert;
    const auto place = [=](int unit, int r, int& part) {
        return part = 0, ((int)expert[unit / rows] * 2 + r) * rows + unit % rows;
    };
    QuantizedStream<2, DEPTH2, decltype(place)> stream(parts, chunks, chosen * rows, place);
    const float scale = load_normed(v, x, norm, columns, eps, rounds, scratch);
    while (stream.more()) {
        const int unit = stream.unit;
        float sum[2];
        stream.finish(v, sum);
        if (stream.lane == 0) h[unit] = from_float<T>(activate(sum[0] * scale, 0) * (sum[1] * scale));
    }
}

// A row of each chosen expert, one behind the other.
struct ChosenRows {
    static constexpr bool gathered = true;
    Chosen chosen;
    int rows;  // of an expert
    __device__ __forceinline__ size_t at(int row, int chunk) const {
        const int n = chosen.of(chunk);
        return chosen.experts[n] * chosen.apart + (size_t)row * chosen.each + (chunk - n * chosen.each);
    }
    __device__ __forceinline__ int row_of(int row, int chunk) const {
        return (int)chosen.experts[chosen.of(chunk)] * rows + row;
    }
};

// h to `v`, each expert's times its share, and rounded for itself. `factors` holds a float for each of the chosen.
template <typename T>
__device__ __forceinline__ void load_chosen(const Vector& v, const T* h, const Routing& routing, const Chosen& which,
                                            int chosen, int columns, Rounds rounds, float* factors) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto four = [=](int n, int i) {
        const uint2 two = __ldcg(reinterpret_cast<const uint2*>(h + (size_t)n * columns) + i);
        const T* values = reinterpret_cast<const T*>(&two);
        return make_float4(to_float(values[0]), to_float(values[1]), to_float(values[2]), to_float(values[3]));
    };
    // Quad i of v, each value through `change`; zero behind an expert's last column.
    const auto at = [&](int i, auto change) {
        const int n = which.of(i / 8), quad = i - n * which.each * 8;
        if (4 * quad >= columns) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float4 a = four(n, quad);
        return make_float4(change(a.x, n), change(a.y, n), change(a.z, n), change(a.w, n));
    };
    if (rounds.how == AS_IT_IS) {
        v.fill<false>([&](int i) { return at(i, [&](float value, int n) { return value * routing.share[n]; }); });
        __syncthreads();
        return;
    }
    for (int n = warp; n < chosen; n += blockDim.x / 32) {
        float most = 0.0f;
        for (int i = lane; 4 * i < columns; i += 32) most = larger(most, largest(four(n, i)));
        for (int offset = 16; offset > 0; offset /= 2) most = larger(most, __shfl_xor_sync(0xffffffffu, most, offset));
        if (lane == 0) factors[n] = rounding_scale(most, rounds.how, rounds.by);
    }
    __syncthreads();
    v.fill<true>([&](int i) {
        return at(i, [&](float value, int n) {
            const float whole = rounded(value / factors[n], rounds.how);
            return v.in_floats ? whole * factors[n] * routing.share[n] : whole;
        });
    });
    __syncthreads();
    if (v.in_floats) return;
    for (int chunk = threadIdx.x; chunk < v.chunks; chunk += blockDim.x) {
        const int n = which.of(chunk);
        v.scales[chunk] = factors[n] * routing.share[n];
    }
    __syncthreads();
}

// x += Σ share · down(h) over the chosen experts, whose rows count as one.
//   parts: [E·C, F]; h T [N, F]; a unit is one row
template <typename T>
__device__ void decode_routed_down(float* x, const T* h, const float* logits, const Parts& parts, int experts,
                                   int chosen, int rows, int columns, int over_all, Rounds rounds) {
    extern __shared__ float4 vector[];
    __shared__ float factors[MAX_CHOSEN];
    __shared__ Routing routing;
    const int each = (columns + 31) / 32, chunks = chosen * each;
    const Vector v(vector, parts, chunks);
    // The routing is older than the kernel ahead, which let this one start only when it had ended.
    if (threadIdx.x < 32) routing.choose(logits, experts, chosen, chosen, threadIdx.x, over_all);
    __syncthreads();
    const Chosen which(routing.expert, each, (size_t)rows * each);
    const auto place = [](int unit, int, int& part) { return part = 0, unit; };
    QuantizedStream<1, DEPTH1, decltype(place), ChosenRows> stream(parts, chunks, rows, place, ChosenRows{which, rows});
    pdl_wait();
    pdl_launch_dependents();
    load_chosen(v, h, routing, which, chosen, columns, rounds, factors);
    while (stream.more()) {
        const int unit = stream.unit;
        const float rest = __ldcg(x + unit);
        float sum[1];
        stream.finish(v, sum);
        if (stream.lane == 0) x[unit] = sum[0] + rest;
    }
}

// logits = head(norm(x)), and each block's best. parts: [V, C]; logits f32 [V]; best [grid]; a unit is two rows
__device__ void decode_head(const float* x, const float* norm, const Parts& parts, float* logits, Best* best, int vocab,
                            int columns, float eps, float softcap, Rounds rounds) {
    extern __shared__ float4 vector[];
    __shared__ float scratch[WARPS];
    __shared__ Best warps[WARPS];
    const int chunks = (columns + 31) / 32;
    const Vector v(vector, parts, chunks);
    const auto place = [=](int unit, int r, int& part) { return part = 0, min(2 * unit + r, vocab - 1); };
    QuantizedStream<2, DEPTH2, decltype(place)> stream(parts, chunks, (vocab + 1) / 2, place);
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
            const float logit = soft_capped(sum[r] * scale, softcap);
            logits[2 * unit + r] = logit;
            mine.offer(logit, 2 * unit + r);
        }
    }
    best_of_block(mine, warps, best);
}

// The row of the token in `state`, times factor, to x: what decode_next and decode_sample leave to this kernel. A thread has 8 columns:
// grid ceil(C / 8 / 256), block 256
extern "C" __global__ void __launch_bounds__(256)
    quantized_next(const __grid_constant__ Parts parts, const uint32_t* state, float* x, int columns, float factor) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    pdl_wait();
    pdl_launch_dependents();
    if (8 * i >= columns) return;
    const int row = __ldcg(state + 1);
    with_format(parts.part[0].format, [&](auto format) {
        const Eight v = eight<decltype(format)::value>(parts.part[0], row, i / 4, i % 4, (columns + 31) / 32);
        const auto times = [=](float4 a) { return make_float4(a.x * factor, a.y * factor, a.z * factor, a.w * factor); };
        reinterpret_cast<float4*>(x)[2 * i] = times(v.first), reinterpret_cast<float4*>(x)[2 * i + 1] = times(v.second);
    });
}

#define KERNEL extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)

KERNEL quantized_head(const float* x, const float* norm, const __grid_constant__ Parts parts, float* logits, Best* best,
                      int vocab, int columns, float eps, float softcap, int rounding, float by) {
    decode_head(x, norm, parts, logits, best, vocab, columns, eps, softcap, {rounding, by});
}

#define DEFINE(T, SUFFIX)                                                                                              \
    KERNEL quantized_qkv_##SUFFIX(const float* x, const float* norm, const __grid_constant__ Parts parts,              \
                                  const float* bias, const float* cos, const float* sin, const uint32_t* state, T* q,  \
                                  T* k, T* v, float* raw, int columns, int heads, int kv_heads, int head_dim,          \
                                  int rotated, int rows, float eps, int rounding, float by) {                          \
        decode_qkv<T>(x, norm, parts, state,                                                                           \
                      Qkv<T>{bias, cos, sin, q, k, v, raw, heads, kv_heads, head_dim, rotated, rows}, columns, eps,    \
                      {rounding, by});                                                                                 \
    }                                                                                                                  \
    KERNEL quantized_residual_##SUFFIX(const float* x, float* out, const T* y, const __grid_constant__ Parts parts,    \
                                       const float* bias, int rows, int columns, int rounding, float by) {             \
        decode_residual<T>(x, out, y, parts, bias, rows, columns, {rounding, by});                                     \
    }                                                                                                                  \
    KERNEL quantized_routed_gate_up_##SUFFIX(const float* x, const float* norm, const __grid_constant__ Parts parts,   \
                                             const float* logits, T* h, int experts, int chosen, int rows,             \
                                             int columns, float eps, int rounding, float by) {                         \
        decode_routed_gate_up<T>(x, norm, parts, logits, h, experts, chosen, rows, columns, eps, {rounding, by});      \
    }                                                                                                                  \
    KERNEL quantized_routed_down_##SUFFIX(float* x, const T* h, const float* logits,                                   \
                                          const __grid_constant__ Parts parts, int experts, int chosen, int rows,      \
                                          int columns, int over_all, int rounding, float by) {                         \
        decode_routed_down<T>(x, h, logits, parts, experts, chosen, rows, columns, over_all, {rounding, by});          \
    }                                                                                                                  \
    KERNEL quantized_gate_up_##SUFFIX(const float* x, const float* norm, const __grid_constant__ Parts parts,          \
                                      const float* gate_bias, const float* up_bias, T* h, int rows, int columns,       \
                                      int activation, float eps, int rounding, float by) {                             \
        decode_gate_up<T>(x, norm, parts, gate_bias, up_bias, h, rows, columns, activation, eps, {rounding, by});      \
    }
DEFINE(__nv_bfloat16, bf16)
DEFINE(__half, f16)
