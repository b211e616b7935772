// Computes the weighted sum of each token's expert outputs: out[t] = Σ routing_weights[t, c] · y[t, c] over c.
//   y: T [tokens, chosen, columns]
//   routing_weights: f32 [tokens, chosen]
//   out: f32 [tokens, columns]; n = tokens · columns
//   grid: ceil(n / ELEMENT_THREADS); block: ELEMENT_THREADS
//   bytes moved: n · (chosen · sizeof(T) + 4)
#include "constants.cuh"
#include "headers/common.cuh"

template <typename T>
__device__ void combine(const T* y, const float* routing_weights, float* out, int n, int columns, int chosen) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int token = i / columns, column = i % columns;
    float sum = 0.0f;
    for (int c = 0; c < chosen; ++c)
        sum += routing_weights[token * chosen + c] * to_float(y[((size_t)token * chosen + c) * columns + column]);
    out[i] = sum;
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void __launch_bounds__(ELEMENT_THREADS)                                                      \
        combine_##SUFFIX(const T* y, const float* routing_weights, float* out, int n, int columns, int chosen) {       \
        combine(y, routing_weights, out, n, columns, chosen);                                                          \
    }
FOR_EACH_DTYPE(DEFINE)
