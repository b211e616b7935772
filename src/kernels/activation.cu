// Gated activations. Each thread computes one of the n elements of `out`.
//   grid: ceil(n / ELEMENT_THREADS); block: ELEMENT_THREADS
#include "headers/activation.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"

// Computes the clamped SwiGLU of gpt-oss: out[i] = g · sigmoid(SWIGLU_ALPHA · g) · (u + 1).
// g is min(x[2i], limit), and u is x[2i + 1] clamped to [-limit, limit].
//   x: T [2 · n]
//   out: T [n]
//   bytes moved: 3 · n · sizeof(T)
template <typename T> __device__ void clamped_swiglu(const T* x, T* out, int n, float limit) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float gate = to_float(x[2 * (size_t)i]), up = to_float(x[2 * (size_t)i + 1]);
    clamp_gate_up(gate, up, limit);
    out[i] = from_float<T>(swiglu(gate, up));
}

// Computes out = activation(gate) · up. If up is null, computes out = activation(gate).
//   gate, up: f32 [n]
//   out: T [n]
//   bytes moved: n · (8 + sizeof(T)), or n · (4 + sizeof(T)) if up is null
template <typename T> __device__ void gated(const float* gate, const float* up, T* out, int n, int activation) {
    pdl_wait();
    pdl_launch_dependents();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = from_float<T>(activate(gate[i], activation) * (up ? up[i] : 1.0f));
}

// Computes out = activation(gate) · up. Each row of x holds `columns` gate values, then `columns` up values.
//   x: X [tokens, 2 · columns]
//   out: T [tokens, columns]
//   bytes moved: n · (2 · sizeof(X) + sizeof(T))
template <typename X, typename T> __device__ void gated_halves(const X* x, T* out, int n, int columns, int activation) {
    pdl_wait();
    pdl_launch_dependents();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const size_t gate = (size_t)(i / columns) * 2 * columns + i % columns;
    out[i] = from_float<T>(activate(to_float(x[gate]), activation) * to_float(x[gate + columns]));
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void clamped_swiglu_##SUFFIX(const T* x, T* out, int n, float limit) {                       \
        clamped_swiglu<T>(x, out, n, limit);                                                                           \
    }                                                                                                                  \
    extern "C" __global__ void gated_##SUFFIX(const float* gate, const float* up, T* out, int n, int activation) {     \
        gated<T>(gate, up, out, n, activation);                                                                        \
    }                                                                                                                  \
    extern "C" __global__ void gated_halves_##SUFFIX(const T* x, T* out, int n, int columns, int activation) {         \
        gated_halves<T, T>(x, out, n, columns, activation);                                                            \
    }                                                                                                                  \
    extern "C" __global__ void gated_halves_of_f32_##SUFFIX(const float* x, T* out, int n, int columns,                \
                                                            int activation) {                                          \
        gated_halves<float, T>(x, out, n, columns, activation);                                                        \
    }
FOR_EACH_DTYPE(DEFINE)
