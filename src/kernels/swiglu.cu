// gpt-oss's clamped SwiGLU over interleaved rows: out = g·sigmoid(alpha·g)·(u + 1), g = min(x[2i], limit), u = clamp(x[2i+1]).
//   x [R, 2F], out [R, F]; n = R·F; grid ceil(n / 256), block 256; bytes moved: 3·n·sizeof(T)
#include "common.cuh"

template <typename T> __device__ void clamped_swiglu(const T* x, T* out, int n, float alpha, float limit) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    // Comparisons, not fminf and fmaxf, which would turn a NaN into the limit.
    const float g = to_float(x[2 * (size_t)i]), u = to_float(x[2 * (size_t)i + 1]);
    const float gate = g > limit ? limit : g, up = u > limit ? limit : u < -limit ? -limit : u;
    out[i] = from_float<T>(gate / (1.0f + expf(-alpha * gate)) * (up + 1.0f));
}

// silu(gate) · up: gate, up f32 [n], out T [n]; bytes moved: n·(8 + sizeof(T))
template <typename T> __device__ void silu_mul(const float* gate, const float* up, T* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = from_float<T>(gate[i] / (1.0f + expf(-gate[i])) * up[i]);
}

#define DEFINE(T, SUFFIX)                                                                                \
    extern "C" __global__ void clamped_swiglu_##SUFFIX(const T* x, T* out, int n, float alpha, float limit) { \
        clamped_swiglu<T>(x, out, n, alpha, limit);                                                      \
    }                                                                                                    \
    extern "C" __global__ void silu_mul_##SUFFIX(const float* gate, const float* up, T* out, int n) {    \
        silu_mul<T>(gate, up, out, n);                                                                   \
    }
FOR_EACH_DTYPE(DEFINE)
