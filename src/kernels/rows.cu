// Embedding lookup, bias and soft cap.
#include "headers/activation.cuh"
#include "headers/common.cuh"

// Looks up rows of an embedding table: out[t] = scale · table[ids[t]]. An id past the last row selects the last row.
//   table: T [rows, columns]
//   ids: u32 [tokens]
//   out: f32 [tokens, columns]
//   grid: tokens; block: 256
//   bytes moved: tokens · columns · (4 + sizeof(T))
template <typename T>
__device__ void embed(const T* table, const uint32_t* ids, float* out, int rows, int columns, float scale) {
    const T* row = table + (size_t)min(ids[blockIdx.x], (uint32_t)rows - 1) * columns;
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        out[(size_t)blockIdx.x * columns + i] = to_float(row[i]) * scale;
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void embed_##SUFFIX(const T* table, const uint32_t* ids, float* out, int rows, int columns,  \
                                              float scale) {                                                           \
        embed<T>(table, ids, out, rows, columns, scale);                                                               \
    }
FOR_EACH_DTYPE(DEFINE)

// Adds a bias to every row of y: out = y + bias.
//   y, out: f32 [tokens, columns]; n = tokens · columns
//   bias: f32 [columns]
//   grid: ceil(n / ELEMENT_THREADS); block: ELEMENT_THREADS
//   bytes moved: 8 · n
extern "C" __global__ void add_bias(const float* y, const float* bias, float* out, int n, int columns) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = y[i] + bias[i % columns];
}

// Applies the soft cap to every element: out = cap · tanh(x / cap).
//   x, out: f32 [n]
//   grid: ceil(n / ELEMENT_THREADS); block: ELEMENT_THREADS
//   bytes moved: 8 · n
extern "C" __global__ void soft_cap(const float* x, float* out, int n, float cap) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = soft_capped(x[i], cap);
}
