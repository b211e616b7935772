// Computes the router logits of one token from norm(x), the RMSNorm of x with the weight `norm`.
// For MXFP4 experts, also writes norm(x), scaled to fit in f16, as the input of the experts.
//
//   x, norm: f32 [columns]
//   weight: f32 [experts, columns]
//   bias: f32 [experts] or null
//   logits: f32 [experts]
//   normed: f16 [columns] or null; receives norm(x) / 2^k
//   normed_scale: f32 [1] or null; receives 2^k
//   grid: experts; block: DECODE_ROUTER_THREADS
//   bytes moved: the weight
// Each block computes the logit of one expert. If `normed` is not null, the block also writes a slice of `normed`.
// `normed` is f16, because f16 has three more bits of precision than bf16.
// k is the smallest integer >= 0 for which all magnitudes in norm(x) / 2^k are below 2^15.
#include "constants.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"

// Loads four floats with volatile assembly, because the compiler could move an ordinary load past pdl_wait().
__device__ __forceinline__ float4 load_early(const float4* address) {
    float4 v;
    asm volatile("ld.global.nc.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(address));
    return v;
}

extern "C" __global__ void __launch_bounds__(DECODE_ROUTER_THREADS)
    decode_router_f32(const float* x, const float* norm, const float* weight, const float* bias, float* logits,
                      __half* normed, float* normed_scale, int columns, int experts, float eps) {
    __shared__ float scratch[3][32];
    const int expert = blockIdx.x, quads = columns / 4, warps = blockDim.x / 32;
    constexpr int PREFETCHED = 4;
    const float4* row = reinterpret_cast<const float4*>(weight + (size_t)expert * columns);
    const float4* norms = reinterpret_cast<const float4*>(norm);
    float4 w[PREFETCHED], n[PREFETCHED];
#pragma unroll
    for (int i = 0; i < PREFETCHED; ++i) {
        const int quad = threadIdx.x + i * blockDim.x;
        if (quad < quads) {
            w[i] = load_early(row + quad);
            n[i] = load_early(norms + quad);
        }
    }
    // If `normed` is not null, this block writes up to `slice` elements of `normed`, from element `first` on.
    // The first of them that this thread writes is element `own`.
    const int slice = (columns + experts - 1) / experts, first = expert * slice, own = first + threadIdx.x;
    const bool writes_normed = normed && threadIdx.x < slice && own < columns;
    const float own_norm = writes_normed ? __ldg(norm + own) : 0.0f, router_bias = bias ? __ldg(bias + expert) : 0.0f;
    pdl_wait();
    pdl_launch_dependents();
    // Load x[own] early to hide the latency. The kernel uses this element only at the end.
    const float own_x = writes_normed ? __ldcg(x + own) : 0.0f;
    float squares = 0.0f, dot = 0.0f, largest = 0.0f;
    const auto add = [&](float4 v, float4 n, float4 w) {
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        const float4 y = make_float4(v.x * n.x, v.y * n.y, v.z * n.z, v.w * n.w);
        dot += y.x * w.x + y.y * w.y + y.z * w.z + y.w * w.w;
        largest = fmaxf(fmaxf(fmaxf(largest, fabsf(y.x)), fmaxf(fabsf(y.y), fabsf(y.z))), fabsf(y.w));
    };
    const float4* xs = reinterpret_cast<const float4*>(x);
#pragma unroll
    for (int i = 0; i < PREFETCHED; ++i) {
        const int quad = threadIdx.x + i * blockDim.x;
        if (quad < quads) add(__ldcg(xs + quad), n[i], w[i]);
    }
    for (int quad = threadIdx.x + PREFETCHED * blockDim.x; quad < quads; quad += blockDim.x)
        add(__ldcg(xs + quad), __ldg(reinterpret_cast<const float4*>(norm) + quad), __ldg(row + quad));
    squares = warp_sum(squares);
    dot = warp_sum(dot);
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) {
        const int warp = threadIdx.x / 32;
        scratch[0][warp] = squares;
        scratch[1][warp] = dot;
        scratch[2][warp] = largest;
    }
    __syncthreads();
    squares = dot = largest = 0.0f;
    for (int i = 0; i < warps; ++i) {
        squares += scratch[0][i];
        dot += scratch[1][i];
        largest = fmaxf(largest, scratch[2][i]);
    }
    const float rms = rsqrtf(squares / columns + eps);
    const int exponent = largest * rms < 32768.0f ? 0 : ilogbf(largest * rms) - 14;
    const float shrink = rms * exp2f((float)-exponent);
    if (writes_normed) normed[own] = __float2half_rn(own_x * own_norm * shrink);
    for (int i = own + blockDim.x; normed && i < min(first + slice, columns); i += blockDim.x)
        normed[i] = __float2half_rn(__ldcg(x + i) * __ldg(norm + i) * shrink);
    if (threadIdx.x == 0) {
        logits[expert] = dot * rms + router_bias;
        if (normed && expert == 0) *normed_scale = exp2f((float)exponent);
    }
}
