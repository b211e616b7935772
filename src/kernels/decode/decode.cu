// The decode step of one token, batch 1: every matrix is read once, so each kernel here is judged by bytes a second.
//
// A step is a chain of launches on static buffers, made for a CUDA graph: whatever changes from token to token (position,
// token, routing) lies in device memory. Each kernel is launched with programmatic dependent launch: it asks for its first
// weights, which no kernel writes, while the one ahead still runs, then waits, then reads its input.
//
//   x f32 [C]: the residual stream    T: bf16 or f16, the dtype of dense weights, q, k, v and attention output
//   state u32: [0] position of the token in this step, [1] the token, [2] steps done
#include "headers/activation.cuh"
#include "headers/common.cuh"
#include "decode/decode.cuh"
#include "headers/pdl.cuh"
#include "moe/routing.cuh"

// 16 bytes of weights: read once, so they need no place in L1.
__device__ __forceinline__ uint4 load_stream(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}
// Constants that are to be asked for right here, before a wait: the compiler would move a plain load behind it.
__device__ __forceinline__ float4 load_early(const float4* address) {
    float4 v;
    asm volatile("ld.global.nc.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(address));
    return v;
}
__device__ __forceinline__ uint32_t load_stream_word(const void* address) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(address));
    return v;
}

// ---- dense matrix · vector -------------------------------------------------------------------------------------------

template <typename T> __device__ __forceinline__ float2 unpack(uint32_t pair);
template <> __device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack<__half>(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

template <typename T> __device__ __forceinline__ float dot8(uint4 w, float4 a, float4 b, float sum) {
    const float2 w0 = unpack<T>(w.x), w1 = unpack<T>(w.y), w2 = unpack<T>(w.z), w3 = unpack<T>(w.w);
    sum = fmaf(w0.x, a.x, sum), sum = fmaf(w0.y, a.y, sum), sum = fmaf(w1.x, a.z, sum), sum = fmaf(w1.y, a.w, sum);
    sum = fmaf(w2.x, b.x, sum), sum = fmaf(w2.y, b.y, sum), sum = fmaf(w3.x, b.z, sum), sum = fmaf(w3.y, b.w, sum);
    return sum;
}

// The input vector in shared memory as f32, in two planes: element 8c + i is in plane i / 4 at [c][i % 4], so that a warp
// reading 8 consecutive elements a lane meets no bank conflict.
struct Planes {
    float4* at;
    int chunks;  // of 8 elements
    __device__ __forceinline__ float4& quad(int index) const { return at[(index & 1) * chunks + (index >> 1)]; }
};

template <typename T> __device__ __forceinline__ const uint4* chunk_of(const T* row) {
    return reinterpret_cast<const uint4*>(row);
}

// Loads ahead for two rows and for one.
constexpr int DEPTH2 = 3, DEPTH1 = 6;

// The rows of a matrix, ROWS at a time (a unit); units go round the warps of the grid. `row(u, r)` is the address of row r of
// unit u, or what gives that of a chunk when the chunk is added. DEPTH loads of each row are under way at any time.
template <typename T, int ROWS, int DEPTH, class Row, class Address = const uint4*> struct Stream {
    const Row row;
    const int chunks, units, step, lane;
    int unit;
    Address rows[ROWS];
    uint4 ahead[DEPTH][ROWS];

    __device__ __forceinline__ Stream(int chunks, int units, Row row)
        : row(row),
          chunks(chunks),
          units(units),
          step(gridDim.x * (blockDim.x / 32)),
          lane(threadIdx.x % 32),
          unit(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) {
        start();
    }

    __device__ __forceinline__ bool more() const { return unit < units; }

    // Past the end come zeros: no branch, so that the rounds below are one straight line.
    __device__ __forceinline__ uint4 load(int r, int chunk) const {
        return chunk < chunks ? load_stream(rows[r] + chunk) : make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void start() {
        if (unit >= units) return;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) rows[r] = row(unit, r);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) ahead[d][r] = load(r, lane + 32 * d);
    }

    // The dot products of this unit with x, in all lanes; goes on to the next unit.
    __device__ __forceinline__ void finish(const Planes& x, float (&sum)[ROWS]) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = 0.0f;
        for (int base = lane; base - lane < chunks; base += 32 * DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                const int chunk = min(base + 32 * d, chunks - 1);
                const float4 a = x.at[chunk], b = x.at[chunks + chunk];
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    sum[r] = dot8<T>(ahead[d][r], a, b, sum[r]);
                    ahead[d][r] = load(r, base + 32 * (d + DEPTH));
                }
            }
        }
        unit += step;
        start();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = warp_sum(sum[r]);
    }
};

// x · norm to the planes; returns 1 / rms(x), by which the dot products are multiplied afterwards.
__device__ __forceinline__ float load_normed(const Planes& planes, const float* x, const float* norm, int columns,
                                             float eps, float* scratch) {
    float squares = 0.0f;
    for (int i = threadIdx.x; i < columns / 4; i += blockDim.x) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(x) + i),
                     w = __ldg(reinterpret_cast<const float4*>(norm) + i);
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        planes.quad(i) = make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
    }
    return rsqrtf(block_sum(squares, scratch) / columns + eps);
}

// x to the planes, chunk c of it times factor(c).
template <typename T, class Factor>
__device__ __forceinline__ void load_vector(const Planes& planes, const T* x, Factor factor) {
    for (int i = threadIdx.x; i < planes.chunks; i += blockDim.x) {
        const uint4 v = __ldcg(reinterpret_cast<const uint4*>(x) + i);
        const float2 a = unpack<T>(v.x), b = unpack<T>(v.y), c = unpack<T>(v.z), d = unpack<T>(v.w);
        const float f = factor(i);
        planes.at[i] = make_float4(a.x * f, a.y * f, b.x * f, b.y * f);
        planes.at[planes.chunks + i] = make_float4(c.x * f, c.y * f, d.x * f, d.y * f);
    }
    __syncthreads();
}

// q, k, v of the token: norm, projection, bias, RoPE; q to its buffer, k and v to the cache.
//   weight T [(H + 2K)·D, C]; bias f32 [(H + 2K)·D] or null; cos, sin f32 [P, R/2]; cache k, v T [S, K, D]
//   raw f32 [H + K, D] or null: where q and k go, not yet turned, if decode_qk_norm comes next
//   a unit is two rows, those that RoPE turns together
template <typename T>
__device__ void decode_qkv(const float* x, const float* norm, const T* weight, const uint32_t* state,
                           const Qkv<T>& qkv, int columns, float eps) {
    extern __shared__ float4 shared[];
    __shared__ float scratch[MAX_WARPS];
    const Planes planes{shared, columns / 8};
    const auto row = [=](int unit, int r) {
        return chunk_of(weight + (size_t)qkv.row(unit, r) * columns);
    };
    Stream<T, 2, DEPTH2, decltype(row)> stream(planes.chunks, qkv.units(), row);
    pdl_wait();
    pdl_launch_dependents();
    const float scale = load_normed(planes, x, norm, columns, eps, scratch);
    const int position = __ldcg(state);
    while (stream.more()) {
        // What the end needs is asked for at the start.
        const QkvPair<T> pair(qkv, stream.unit, position);
        float sum[2];
        stream.finish(planes, sum);
        if (stream.lane == 0) pair.store(qkv, position, sum[0] * scale, sum[1] * scale);
    }
}

// RMSNorm of every head of q and k, then RoPE: a warp a head; q to its buffer, k to the cache.
//   raw f32 [H + K, D]; q_norm, k_norm f32 [D]
template <typename T>
__device__ void decode_qk_norm(const float* raw, const float* q_norm, const float* k_norm, const float* cos,
                               const float* sin, const uint32_t* state, T* q, T* k, int heads, int kv_heads,
                               int head_dim, int rotated, int rows, float eps) {
    const int head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32, half = rotated / 2;
    pdl_wait();
    pdl_launch_dependents();
    if (head >= heads + kv_heads) return;
    const int position = __ldcg(state);
    const float *x = raw + (size_t)head * head_dim, *weight = head < heads ? q_norm : k_norm;
    const float *c = cos + (size_t)position * half, *s = sin + (size_t)position * half;
    T* out = head < heads ? q + (size_t)head * head_dim
                          : k + ((size_t)(position % rows) * kv_heads + head - heads) * head_dim;
    float squares = 0.0f;
    for (int i = lane; i < head_dim; i += 32) squares += __ldcg(x + i) * __ldcg(x + i);
    const float scale = rsqrtf(warp_sum(squares) / head_dim + eps);
    for (int i = lane; i < half; i += 32) {
        const float a = __ldcg(x + i) * scale * weight[i], b = __ldcg(x + i + half) * scale * weight[i + half];
        out[i] = from_float<T>(a * c[i] - b * s[i]), out[i + half] = from_float<T>(b * c[i] + a * s[i]);
    }
    for (int i = rotated + lane; i < head_dim; i += 32) out[i] = from_float<T>(__ldcg(x + i) * scale * weight[i]);
}

// out = x + W·y + bias: the projection back into the residual stream, or for itself, to be normed before it is added.
//   weight T [R, C]; y T [C]; bias f32 [R] or null; x, out f32 [R], which may be the same, x may be null; a unit is one row
template <typename T>
__device__ void decode_residual(const float* x, float* out, const T* y, const T* weight, const float* bias, int rows,
                                int columns) {
    extern __shared__ float4 shared[];
    const Planes planes{shared, columns / 8};
    const auto row = [=](int unit, int) { return chunk_of(weight + (size_t)unit * columns); };
    Stream<T, 1, DEPTH1, decltype(row)> stream(planes.chunks, rows, row);
    pdl_wait();
    pdl_launch_dependents();
    load_vector(planes, y, [](int) { return 1.0f; });
    while (stream.more()) {
        const int unit = stream.unit;
        const float rest = (x ? __ldcg(x + unit) : 0.0f) + (bias ? __ldg(bias + unit) : 0.0f);
        float sum[1];
        stream.finish(planes, sum);
        if (stream.lane == 0) out[unit] = sum[0] + rest;
    }
}

// x += norm(y): one block of 1024. x, y, norm f32 [C]
__device__ void decode_add_normed(float* x, const float* y, const float* norm, int columns, float eps) {
    __shared__ float scratch[32];
    pdl_wait();
    pdl_launch_dependents();
    const auto at = [](const float* from, int i) { return __ldcg(reinterpret_cast<const float4*>(from) + i); };
    float squares = 0.0f;
    for (int i = threadIdx.x; i < columns / 4; i += blockDim.x) {
        const float4 v = at(y, i);
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / columns + eps);
    for (int i = threadIdx.x; i < columns / 4; i += blockDim.x) {
        const float4 v = at(y, i), w = at(norm, i), sum = at(x, i);
        reinterpret_cast<float4*>(x)[i] = make_float4(sum.x + v.x * scale * w.x, sum.y + v.y * scale * w.y,
                                                      sum.z + v.z * scale * w.z, sum.w + v.w * scale * w.w);
    }
}

// h = activation(gate(norm(x))) · up(norm(x)): the first half of a gated MLP.
//   gate, up T [F, C]; biases f32 [F] or null; h T [F]; a unit is one element of h
template <typename T>
__device__ void decode_gate_up(const float* x, const float* norm, const T* gate, const T* up, const float* gate_bias,
                               const float* up_bias, T* h, int rows, int columns, int activation, float eps) {
    extern __shared__ float4 shared[];
    __shared__ float scratch[MAX_WARPS];
    const Planes planes{shared, columns / 8};
    const auto row = [=](int unit, int r) {
        return chunk_of((r == 0 ? gate : up) + (size_t)unit * columns);
    };
    Stream<T, 2, DEPTH2, decltype(row)> stream(planes.chunks, rows, row);
    pdl_wait();
    pdl_launch_dependents();
    const float scale = load_normed(planes, x, norm, columns, eps, scratch);
    while (stream.more()) {
        const int unit = stream.unit;
        float sum[2];
        stream.finish(planes, sum);
        if (stream.lane != 0) continue;
        const float g = sum[0] * scale + (gate_bias ? gate_bias[unit] : 0.0f),
                    u = sum[1] * scale + (up_bias ? up_bias[unit] : 0.0f);
        h[unit] = from_float<T>(activate(g, activation) * u);
    }
}

// logits = head(norm(x)), and each block's best.
//   weight T [V, C]; logits f32 [V]; best [grid]; with softcap > 0 logits l become softcap · tanh(l / softcap)
//   a unit is two rows
template <typename T>
__device__ void decode_head(const float* x, const float* norm, const T* weight, float* logits, Best* best, int vocab,
                            int columns, float eps, float softcap) {
    extern __shared__ float4 shared[];
    __shared__ float scratch[MAX_WARPS];
    __shared__ Best warps[MAX_WARPS];
    const Planes planes{shared, columns / 8};
    const auto row = [=](int unit, int r) {
        return chunk_of(weight + (size_t)min(2 * unit + r, vocab - 1) * columns);
    };
    Stream<T, 2, DEPTH2, decltype(row)> stream(planes.chunks, (vocab + 1) / 2, row);
    pdl_wait();
    pdl_launch_dependents();
    const float scale = load_normed(planes, x, norm, columns, eps, scratch);
    Best mine{-INFINITY, 0xffffffffu};
    while (stream.more()) {
        const int unit = stream.unit;
        float sum[2];
        stream.finish(planes, sum);
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

// The end of a step: the likeliest token becomes the next input. One block of 1024.
//   embedding T [V, C], which `factor` goes on, or null: x is left to another kernel
//   ring u32 [slots], in host memory: the token of step s, plus one, at s mod slots
template <typename T>
__device__ void decode_next(const Best* best, int blocks, const T* embedding, float* x, uint32_t* state,
                            volatile uint32_t* ring, int slots, int columns, float factor) {
    __shared__ Best warps[32];
    const int lane = threadIdx.x % 32;
    pdl_wait();
    Best mine{-INFINITY, 0xffffffffu};
    for (int i = threadIdx.x; i < blocks; i += blockDim.x) mine.offer(__ldcg(&best[i].logit), __ldcg(&best[i].token));
    const auto reduce = [&] {
        for (int offset = 16; offset > 0; offset /= 2)
            mine.offer(__shfl_xor_sync(0xffffffffu, mine.logit, offset),
                       __shfl_xor_sync(0xffffffffu, mine.token, offset));
    };
    reduce();
    if (lane == 0) warps[threadIdx.x / 32] = mine;
    __syncthreads();
    mine = warps[lane];
    reduce();
    // Nothing but NaN: the host sees the mark and reports it; here any token will do.
    const bool broken = mine.token == 0xffffffffu;
    const uint32_t token = broken ? 0 : mine.token;
    for (int i = threadIdx.x; embedding && i < columns; i += blockDim.x)
        x[i] = to_float(embedding[(size_t)token * columns + i]) * factor;
    if (threadIdx.x == 0) {
        const uint32_t steps = state[2];
        ring[steps % slots] = broken ? 0xffffffffu : token + 1;
        __threadfence_system();
        state[0] += 1, state[1] = token, state[2] = steps + 1;
    }
}

// ---- routing ----------------------------------------------------------------------------------------------------------

// Router logits, and norm(x) in f16 for the experts: one block an expert, and a slice of norm(x) each.
//   weight f32 [E, C]; bias f32 [E] or null; logits f32 [E]; normed f16 [C] = norm(x) / 2^k, or null; normed_scale f32: 2^k
// f16 keeps three bits more than bf16; k is 0 unless norm(x) would overflow it.
__device__ void decode_router(const float* x, const float* norm, const float* weight, const float* bias, float* logits,
                              __half* normed, float* normed_scale, int columns, int experts, float eps) {
    __shared__ float scratch[3][32];
    const int expert = blockIdx.x, quads = columns / 4, warps = blockDim.x / 32;
    constexpr int AHEAD = 4;
    const float4* row = reinterpret_cast<const float4*>(weight + (size_t)expert * columns);
    float4 w[AHEAD], n[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        const int at = threadIdx.x + i * blockDim.x;
        if (at < quads) w[i] = load_early(row + at), n[i] = load_early(reinterpret_cast<const float4*>(norm) + at);
    }
    const int slice = (columns + experts - 1) / experts, first = expert * slice, mine = first + threadIdx.x;
    const bool norms = normed && threadIdx.x < slice && mine < columns;
    const float norm_mine = norms ? __ldg(norm + mine) : 0.0f, shift = bias ? __ldg(bias + expert) : 0.0f;
    pdl_wait();
    pdl_launch_dependents();
    // What the end needs is asked for at the start.
    const float x_mine = norms ? __ldcg(x + mine) : 0.0f;
    float squares = 0.0f, dot = 0.0f, top = 0.0f;
    const auto add = [&](float4 v, float4 n, float4 w) {
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        const float4 y = make_float4(v.x * n.x, v.y * n.y, v.z * n.z, v.w * n.w);
        dot += y.x * w.x + y.y * w.y + y.z * w.z + y.w * w.w;
        top = fmaxf(fmaxf(fmaxf(top, fabsf(y.x)), fmaxf(fabsf(y.y), fabsf(y.z))), fabsf(y.w));
    };
    const float4* xs = reinterpret_cast<const float4*>(x);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        const int at = threadIdx.x + i * blockDim.x;
        if (at < quads) add(__ldcg(xs + at), n[i], w[i]);
    }
    for (int at = threadIdx.x + AHEAD * blockDim.x; at < quads; at += blockDim.x)
        add(__ldcg(xs + at), __ldg(reinterpret_cast<const float4*>(norm) + at), __ldg(row + at));
    squares = warp_sum(squares), dot = warp_sum(dot);
    for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
    if (threadIdx.x % 32 == 0) {
        const int warp = threadIdx.x / 32;
        scratch[0][warp] = squares, scratch[1][warp] = dot, scratch[2][warp] = top;
    }
    __syncthreads();
    squares = dot = top = 0.0f;
    for (int i = 0; i < warps; ++i) squares += scratch[0][i], dot += scratch[1][i], top = fmaxf(top, scratch[2][i]);
    const float rms = rsqrtf(squares / columns + eps);
    const int exponent = top * rms < 32768.0f ? 0 : ilogbf(top * rms) - 14;
    const float shrink = rms * exp2f((float)-exponent);
    if (norms) normed[mine] = __float2half_rn(x_mine * norm_mine * shrink);
    for (int i = mine + blockDim.x; normed && i < min(first + slice, columns); i += blockDim.x)
        normed[i] = __float2half_rn(__ldcg(x + i) * __ldg(norm + i) * shrink);
    if (threadIdx.x == 0) {
        logits[expert] = dot * rms + shift;
        if (normed && expert == 0) *normed_scale = exp2f((float)exponent);
    }
}

// ---- routed experts of floats ------------------------------------------------------------------------------------------

// h of the chosen experts, each a gated MLP: h[n] = silu(gate(norm(x))) · up(norm(x)).
//   weight T [E, 2F, C], an expert's gate above its up; logits f32 [E]; h T [N, F]; a unit is one element of h
template <typename T>
__device__ void decode_routed_gate_up(const float* x, const float* norm, const T* weight, const float* logits, T* h,
                                      int experts, int chosen, int rows, int columns, float eps) {
    extern __shared__ float4 shared[];
    __shared__ float scratch[MAX_WARPS];
    __shared__ Routing routing;
    const Planes planes{shared, columns / 8};
    pdl_wait();
    pdl_launch_dependents();
    if (threadIdx.x < 32) routing.choose(logits, experts, chosen, 0, threadIdx.x);
    __syncthreads();
    const uint32_t* expert = routing.expert;
    const auto row = [=](int unit, int r) {
        const size_t above = (size_t)expert[unit / rows] * 2 + r;
        return chunk_of(weight + (above * rows + unit % rows) * columns);
    };
    Stream<T, 2, DEPTH2, decltype(row)> stream(planes.chunks, chosen * rows, row);
    const float scale = load_normed(planes, x, norm, columns, eps, scratch);
    while (stream.more()) {
        const int unit = stream.unit;
        float sum[2];
        stream.finish(planes, sum);
        if (stream.lane == 0) h[unit] = from_float<T>(activate(sum[0] * scale, 0) * (sum[1] * scale));
    }
}

// A row of each chosen expert, one behind the other.
struct ChosenRows {
    const uint4* row;  // expert 0's
    Chosen chosen;
    __device__ __forceinline__ const uint4* operator+(int chunk) const {
        const int n = chosen.of(chunk);
        return row + chosen.experts[n] * chosen.apart + (chunk - n * chosen.each);
    }
};

// x += Σ share · down(h) over the chosen experts, whose rows count as one.
//   weight T [E, C, F]; h T [N, F]; a unit is one row
template <typename T>
__device__ void decode_routed_down(float* x, const T* h, const float* logits, const T* weight, int experts, int chosen,
                                   int rows, int columns, int over_all) {
    extern __shared__ float4 shared[];
    __shared__ Routing routing;
    const int each = columns / 8;
    const Planes planes{shared, chosen * each};
    // The routing is older than the kernel ahead, which let this one start only when it had ended.
    if (threadIdx.x < 32) routing.choose(logits, experts, chosen, chosen, threadIdx.x, over_all);
    __syncthreads();
    const Chosen which(routing.expert, each, (size_t)rows * each);
    const auto row = [=](int unit, int) { return ChosenRows{chunk_of(weight) + (size_t)unit * each, which}; };
    Stream<T, 1, DEPTH1, decltype(row), ChosenRows> stream(planes.chunks, rows, row);
    pdl_wait();
    pdl_launch_dependents();
    load_vector(planes, h, [&](int chunk) { return routing.share[which.of(chunk)]; });
    while (stream.more()) {
        const int unit = stream.unit;
        const float rest = __ldcg(x + unit);
        float sum[1];
        stream.finish(planes, sum);
        if (stream.lane == 0) x[unit] = sum[0] + rest;
    }
}

// ---- routed experts in MXFP4 ------------------------------------------------------------------------------------------

// Weights as `repack_mxfp4` lays them: blocks [E][R/16][C/64][lane][16 bytes], scales [E][R/16][C/64][8][4 bytes], R and C
// rounded up. A lane's 16 bytes are the fragments of A for four mma.m16n8k16: rows g and g + 8 of two blocks of 32 columns.
struct Tiles {
    const uint8_t *blocks, *scales;
    int groups;  // of 64 columns

    __device__ __forceinline__ Tiles of(size_t tile) const {
        return {blocks + tile * groups * 512, scales + tile * groups * 32, groups};
    }
};

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Pair i of a word of 8 values as f16x2, times 2^-14.
template <int I> __device__ __forceinline__ uint32_t e2m1_pair(uint32_t w) {
    if (I == 0) return w & 0x8e008e00u;
    return ((w << (3 * I)) & 0x0e000e00u) | ((w << I) & 0x80008000u);
}

// 16 rows × 32 columns times x: rows g and g + 8 in c[0] and c[2] of the lanes that hold column 0. The other columns of
// the product are the same again: x is given to all eight, which costs nothing.
__device__ __forceinline__ void block_product(uint32_t low, uint32_t high, uint4 x, float (&c)[4]) {
    c[0] = c[1] = c[2] = c[3] = 0.0f;
    mma(c, e2m1_pair<0>(low), e2m1_pair<0>(high), e2m1_pair<1>(low), e2m1_pair<1>(high), x.x, x.y);
    mma(c, e2m1_pair<2>(low), e2m1_pair<2>(high), e2m1_pair<3>(low), e2m1_pair<3>(high), x.z, x.w);
}

// 2^(s - 127) of byte `index`; 0 becomes zero and 255 infinity, which no f32 sum would tell from the true values.
__device__ __forceinline__ float scale_of(uint32_t word, int index) {
    return __uint_as_float((index == 3 ? word >> 1 : word << (23 - 8 * index)) & 0x7f800000u);
}

// A warp's share of one tile's product: its groups first, first + STEP, .. DEPTH of them are under way at any time.
template <int STEP, int DEPTH> struct TileStream {
    const uint8_t *blocks, *scales;  // at this lane's part of group `first`
    uint4 weights[DEPTH];
    uint32_t exponents[DEPTH];
    const int first, groups;

    // Group base + i · STEP.
    __device__ __forceinline__ void load(int d, int i) {
        weights[d] = load_stream(blocks + i * STEP * 512), exponents[d] = load_stream_word(scales + i * STEP * 32);
    }

    __device__ __forceinline__ TileStream(const Tiles& all, size_t tile, int first, int lane)
        : first(first), groups(all.groups) {
        blocks = all.blocks + (tile * groups + first) * 512 + lane * 16,
        scales = all.scales + (tile * groups + first) * 32 + lane / 4 * 4;
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            if (first + d * STEP < groups) load(d, d);
    }

    __device__ __forceinline__ void multiply(int d, const uint4* x, float& low, float& high) const {
        const uint4 w = weights[d];
        const uint32_t s = exponents[d];
        float c[4];
        block_product(w.x, w.y, x[d * STEP * 8], c);
        low += scale_of(s, 0) * c[0], high += scale_of(s, 1) * c[2];
        block_product(w.z, w.w, x[d * STEP * 8 + 4], c);
        low += scale_of(s, 2) * c[0], high += scale_of(s, 3) * c[2];
    }

    // x: f16 in shared memory, zero from C on. Sums for rows g and g + 8, still to be multiplied by 2^14.
    __device__ __forceinline__ void finish(const uint4* x, int lane, float& low, float& high) {
        low = high = 0.0f;
        x += first * 8 + lane % 4;
        int base = first;
        // Rounds after which a whole one is left: no branches.
        for (; base + (2 * DEPTH - 1) * STEP < groups; base += DEPTH * STEP) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) multiply(d, x, low, high), load(d, d + DEPTH);
            blocks += DEPTH * STEP * 512, scales += DEPTH * STEP * 32, x += DEPTH * STEP * 8;
        }
        // One whole round and a part of one, or less.
        for (; base < groups; base += DEPTH * STEP) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                if (base + d * STEP < groups) multiply(d, x, low, high);
                if (base + (d + DEPTH) * STEP < groups) load(d, d + DEPTH);
            }
            blocks += DEPTH * STEP * 512, scales += DEPTH * STEP * 32, x += DEPTH * STEP * 8;
        }
    }
};

constexpr float E2M1_UNIT = 16384.0f;  // 2^14

// h[n] = clamped SwiGLU of the n-th chosen expert: grid (ceil(tiles / UP_TILES), N), block
// UP_THREADS; UP_WARPS warps share the columns of a tile.
//   tiles of `paired` rows: gate in row g, its linear half in row g + 8; bias f32 [E, 2F] (interleaved); h f16 [N, F]
//   shared: C rounded up to 64, f16
constexpr int UP_TILES = 3, UP_WARPS = 5, UP_DEPTH = 3, UP_THREADS = 32 * UP_TILES * UP_WARPS;
__device__ void decode_gate_up_experts(const __half* normed, const float* normed_scale, const float* logits,
                                       Tiles weights, const float* bias, __half* h, int experts, int intermediate,
                                       int columns, float alpha, float limit) {
    extern __shared__ uint4 x[];
    __shared__ float sums[UP_TILES][UP_WARPS][16];
    __shared__ Routing routing;
    const int warp = threadIdx.x / 32 % UP_WARPS, which = threadIdx.x / 32 / UP_WARPS, lane = threadIdx.x % 32;
    const int chunks = weights.groups * 8, whole = columns / 8, tiles = (intermediate + 7) / 8,
              tile = blockIdx.x * UP_TILES + which;
    pdl_wait();
    pdl_launch_dependents();
    if (threadIdx.x < 32) routing.choose(logits, experts, blockIdx.y + 1, 0, lane);
    for (int i = threadIdx.x; i < chunks; i += UP_THREADS)
        x[i] = i < whole ? __ldcg(reinterpret_cast<const uint4*>(normed) + i) : make_uint4(0, 0, 0, 0);
    const float unscale = E2M1_UNIT * __ldcg(normed_scale);
    __syncthreads();
    const uint32_t expert = routing.expert[blockIdx.y];
    const int unit = tile * 8 + lane;
    const bool mine = warp == 0 && lane < 8 && unit < intermediate;
    float2 b = make_float2(0.0f, 0.0f);
    if (tile < tiles) {
        TileStream<UP_WARPS, UP_DEPTH> stream(weights, (size_t)expert * tiles + tile, warp, lane);
        if (mine) b = __ldg(reinterpret_cast<const float2*>(bias) + (size_t)expert * intermediate + unit);
        float low, high;
        stream.finish(x, lane, low, high);
        if (lane % 4 == 0) sums[which][warp][lane / 4] = low, sums[which][warp][lane / 4 + 8] = high;
    }
    __syncthreads();
    if (mine) {
        float gate = 0.0f, up = 0.0f;
#pragma unroll
        for (int w = 0; w < UP_WARPS; ++w) gate += sums[which][w][lane], up += sums[which][w][lane + 8];
        gate = gate * unscale + b.x, up = up * unscale + b.y;
        // Comparisons as in torch.clamp: a NaN stays a NaN.
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        h[(size_t)blockIdx.y * intermediate + unit] =
            __float2half_rn(gate / (1.0f + expf(-alpha * gate)) * (up + 1.0f));
    }
}

// x += Σ over the N chosen experts of share · (down(h) + bias): grid tiles, block 32·N·DOWN_SPLITS; the splits of an
// expert share the columns of its tile.
//   bias f32 [E, C]; shared: N · (F rounded up to 64) f16, then 16 floats a warp
constexpr int DOWN_SPLITS = 3, DOWN_DEPTH = 5, DOWN_MAX_CHOSEN = 4;
__device__ void decode_down_experts(float* x, const __half* h, const float* logits, Tiles weights, const float* bias,
                                    int experts, int chosen, int rows, int columns) {
    extern __shared__ uint4 inputs[];
    __shared__ Routing routing;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x, tiles = gridDim.x;
    const int n = warp % chosen, split = warp / chosen, chunks = weights.groups * 8, whole = columns / 8;
    float* sums = reinterpret_cast<float*>(inputs + chosen * chunks);
    // The routing is older than the kernel ahead, which let this one start only when it had ended.
    if (warp == 0) routing.choose(logits, experts, chosen, chosen, lane);
    __syncthreads();
    TileStream<DOWN_SPLITS, DOWN_DEPTH> stream(weights, (size_t)routing.expert[n] * tiles + tile, split, lane);
    const int row = tile * 16 + threadIdx.x;
    const bool mine = threadIdx.x < 16 && row < rows;
    float sum = 0.0f;
    for (int i = 0; i < chosen && mine; ++i)
        sum += routing.share[i] * __ldg(bias + (size_t)routing.expert[i] * rows + row);
    pdl_wait();
    pdl_launch_dependents();
    if (mine) sum += __ldcg(x + row);
    for (int i = threadIdx.x; i < chosen * chunks; i += blockDim.x) {
        const int row = i / chunks, at = i % chunks;
        inputs[i] = at < whole ? __ldcg(reinterpret_cast<const uint4*>(h) + row * whole + at) : make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    float low, high;
    stream.finish(inputs + n * chunks, lane, low, high);
    if (lane % 4 == 0) sums[warp * 16 + lane / 4] = low, sums[warp * 16 + lane / 4 + 8] = high;
    __syncthreads();
    if (mine) {
        for (int i = 0; i < chosen; ++i) {
            float y = 0.0f;
#pragma unroll
            for (int split = 0; split < DOWN_SPLITS; ++split) y += sums[(split * chosen + i) * 16 + threadIdx.x];
            sum += routing.share[i] * E2M1_UNIT * y;
        }
        x[row] = sum;
    }
}

// ---- entry points -----------------------------------------------------------------------------------------------------

#define KERNEL extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, 1)

#define DEFINE_DENSE(T, SUFFIX)                                                                                        \
    KERNEL decode_qkv_##SUFFIX(const float* x, const float* norm, const T* weight, const float* bias,                  \
                               const float* cos, const float* sin, const uint32_t* state, T* q, T* k, T* v,            \
                               float* raw, int columns, int heads, int kv_heads, int head_dim, int rotated, int rows,  \
                               float eps) {                                                                            \
        decode_qkv<T>(x, norm, weight, state,                                                                          \
                      Qkv<T>{bias, cos, sin, q, k, v, raw, heads, kv_heads, head_dim, rotated, rows}, columns, eps);   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        decode_qk_norm_##SUFFIX(const float* raw, const float* q_norm, const float* k_norm, const float* cos,          \
                                const float* sin, const uint32_t* state, T* q, T* k, int heads, int kv_heads,          \
                                int head_dim, int rotated, int rows, float eps) {                                      \
        decode_qk_norm<T>(raw, q_norm, k_norm, cos, sin, state, q, k, heads, kv_heads, head_dim, rotated, rows, eps);  \
    }                                                                                                                  \
    KERNEL decode_residual_##SUFFIX(const float* x, float* out, const T* y, const T* weight, const float* bias,        \
                                    int rows, int columns) {                                                           \
        decode_residual<T>(x, out, y, weight, bias, rows, columns);                                                    \
    }                                                                                                                  \
    KERNEL decode_gate_up_##SUFFIX(const float* x, const float* norm, const T* gate, const T* up,                      \
                                   const float* gate_bias, const float* up_bias, T* h, int rows, int columns,          \
                                   int activation, float eps) {                                                        \
        decode_gate_up<T>(x, norm, gate, up, gate_bias, up_bias, h, rows, columns, activation, eps);                   \
    }                                                                                                                  \
    KERNEL decode_routed_gate_up_##SUFFIX(const float* x, const float* norm, const T* weight, const float* logits,     \
                                          T* h, int experts, int chosen, int rows, int columns, float eps) {           \
        decode_routed_gate_up<T>(x, norm, weight, logits, h, experts, chosen, rows, columns, eps);                     \
    }                                                                                                                  \
    KERNEL decode_routed_down_##SUFFIX(float* x, const T* h, const float* logits, const T* weight, int experts,        \
                                       int chosen, int rows, int columns, int over_all) {                              \
        decode_routed_down<T>(x, h, logits, weight, experts, chosen, rows, columns, over_all);                         \
    }                                                                                                                  \
    KERNEL decode_head_##SUFFIX(const float* x, const float* norm, const T* weight, float* logits, Best* best,         \
                                int vocab, int columns, float eps, float softcap) {                                    \
        decode_head<T>(x, norm, weight, logits, best, vocab, columns, eps, softcap);                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        decode_next_##SUFFIX(const Best* best, int blocks, const T* embedding, float* x, uint32_t* state,              \
                             volatile uint32_t* ring, int slots, int columns, float factor) {                          \
        decode_next<T>(best, blocks, embedding, x, state, ring, slots, columns, factor);                               \
    }
DEFINE_DENSE(__nv_bfloat16, bf16)
DEFINE_DENSE(__half, f16)

extern "C" __global__ void __launch_bounds__(1024)
    decode_add_normed_f32(float* x, const float* y, const float* norm, int columns, float eps) {
    decode_add_normed(x, y, norm, columns, eps);
}

extern "C" __global__ void __launch_bounds__(256)
    decode_router_f32(const float* x, const float* norm, const float* weight, const float* bias, float* logits,
                      __half* normed, float* normed_scale, int columns, int experts, float eps) {
    decode_router(x, norm, weight, bias, logits, normed, normed_scale, columns, experts, eps);
}

extern "C" __global__ void __launch_bounds__(UP_THREADS, 2)
    decode_gate_up_mxfp4(const __half* normed, const float* normed_scale, const float* logits, const uint8_t* blocks,
                         const uint8_t* scales, const float* bias, __half* h, int experts, int intermediate,
                         int columns, float alpha, float limit) {
    decode_gate_up_experts(normed, normed_scale, logits, {blocks, scales, (columns + 63) / 64}, bias, h, experts,
                           intermediate, columns, alpha, limit);
}

extern "C" __global__ void __launch_bounds__(32 * DOWN_SPLITS * DOWN_MAX_CHOSEN, 2)
    decode_down_mxfp4(float* x, const __half* h, const float* logits, const uint8_t* blocks, const uint8_t* scales,
                      const float* bias, int experts, int chosen, int rows, int columns) {
    decode_down_experts(x, h, logits, {blocks, scales, (columns + 63) / 64}, bias, experts, chosen, rows, columns);
}
