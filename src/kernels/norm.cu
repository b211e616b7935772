// The residual stream between two blocks: x' = x + y, normed = x' / sqrt(mean(x'²) + eps) · w.
//   x, y, sum f32 [T, C] (y and sum null: nothing is added, x itself is normed); w f32 [C]; normed T [T, C]
//   grid T, block 256; bytes moved: T·C·(12 + sizeof(T)), or T·C·(4 + sizeof(T)) without y
#include "common.cuh"

template <typename T>
__device__ void add_norm(const float* x, const float* y, const float* weight, float* sum, T* normed, int columns,
                         float eps) {
    __shared__ float scratch[32];
    const size_t row = (size_t)blockIdx.x * columns;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float value = x[row + i];
        if (y) {
            value += y[row + i];
            sum[row + i] = value;
        }
        squares += value * value;
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = 0.0f;
    for (int w = 0; w < blockDim.x / 32; ++w) squares += scratch[w];
    const float scale = rsqrtf(squares / columns + eps);
    const float* added = y ? sum : x;  // still in L1
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        normed[row + i] = from_float<T>(added[row + i] * scale * weight[i]);
}

#define DEFINE(T, SUFFIX)                                                                                         \
    extern "C" __global__ void add_norm_##SUFFIX(const float* x, const float* y, const float* weight, float* sum, \
                                                 T* normed, int columns, float eps) {                             \
        add_norm<T>(x, y, weight, sum, normed, columns, eps);                                                     \
    }
FOR_EACH_DTYPE(DEFINE)
