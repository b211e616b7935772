// Residual addition and RMSNorm: sum = x + y, normed = sum / sqrt(mean(sum²) + eps) · weight.
// With a bias, LayerNorm replaces RMSNorm: the mean of sum is subtracted first, and the bias is added last.
//   x, y, sum: f32 [tokens, columns]; if y is null, the kernel normalizes x and does not write sum
//   weight: f32 [columns]
//   bias: f32 [columns] or null
//   normed: T [tokens, columns]
//   grid: tokens; block: 256
//   bytes moved: tokens · columns · (12 + sizeof(T)), or tokens · columns · (4 + sizeof(T)) without y
#include "headers/common.cuh"

// Sums `value` over the block and returns the sum to every thread.
// The first barrier waits for all earlier reads of `scratch`.
__device__ float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0.0f;
    for (int w = 0; w < blockDim.x / 32; ++w) value += scratch[w];
    return value;
}

template <typename T>
__device__ void add_norm(const float* x, const float* y, const float* weight, const float* bias, float* sum, T* normed,
                         int columns, float eps) {
    __shared__ float scratch[32];
    const size_t row = (size_t)blockIdx.x * columns;
    float squares = 0.0f, total = 0.0f, center = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float value = x[row + i];
        if (y) {
            value += y[row + i];
            sum[row + i] = value;
        }
        squares += value * value;
        total += value;
    }
    const float* added = y ? sum : x;  // each thread rereads only its own elements, which are still in L1
    if (bias) {
        center = block_sum(total, scratch) / columns;
        squares = 0.0f;
        for (int i = threadIdx.x; i < columns; i += blockDim.x) {
            const float value = added[row + i] - center;
            squares += value * value;
        }
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / columns + eps);
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        normed[row + i] = from_float<T>((added[row + i] - center) * scale * weight[i] + (bias ? bias[i] : 0.0f));
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void add_norm_##SUFFIX(const float* x, const float* y, const float* weight,                  \
                                                 const float* bias, float* sum, T* normed, int columns, float eps) {   \
        add_norm<T>(x, y, weight, bias, sum, normed, columns, eps);                                                    \
    }
FOR_EACH_DTYPE(DEFINE)
