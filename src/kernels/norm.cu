// Residual addition and RMSNorm: sum = x + y + y_bias, normed = sum / sqrt(mean(sum²) + eps) · weight.
// With `bias`, LayerNorm replaces RMSNorm: the mean of sum is subtracted first, and `bias` is added last.
//   x, sum: f32 [tokens, columns]
//   y: f32 [terms, tokens, columns] or null; the terms are added up
//     if y is null, the kernel normalizes x and does not write sum
//   y_bias: f32 [columns] or null; null means zeros
//   weight: f32 [columns]
//   bias: f32 [columns] or null
//   normed: T [tokens, columns]
//   grid: tokens; block: ADD_NORM_THREADS
//   bytes moved: tokens · columns · (8 + 4 · terms + sizeof(T)), or tokens · columns · (4 + sizeof(T)) without y
#include "constants.cuh"
#include "headers/block_sum.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"
#include "headers/sum_terms.cuh"
#include "headers/tensor_core.cuh"

// A thread keeps up to HELD_VECTORS · WIDTH elements of a row in registers, and reloads its other elements for each
// use.
constexpr int THREADS = ADD_NORM_THREADS, HELD_VECTORS = 2;

// WIDTH adjacent elements of a row, which one instruction loads or stores.
template <int WIDTH> struct alignas(4 * WIDTH) Elements {
    float v[WIDTH];
};
template <int WIDTH> __device__ __forceinline__ Elements<WIDTH> add(Elements<WIDTH> a, const Elements<WIDTH>& b) {
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) a.v[k] += b.v[k];
    return a;
}
template <int WIDTH> __device__ __forceinline__ Elements<WIDTH> load(const float* from) {
    Elements<WIDTH> e;
    if constexpr (WIDTH == 4)
        *reinterpret_cast<float4*>(e.v) = *reinterpret_cast<const float4*>(from);
    else
        e.v[0] = *from;
    return e;
}
template <int WIDTH> __device__ __forceinline__ void store(float* to, const Elements<WIDTH>& e) {
    if constexpr (WIDTH == 4)
        *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(e.v);
    else
        *to = e.v[0];
}
template <int WIDTH, typename T> __device__ __forceinline__ void store(T* to, const Elements<WIDTH>& e) {
    if constexpr (WIDTH == 4)
        *reinterpret_cast<uint2*>(to) = make_uint2(pack<T>(e.v[0], e.v[1]), pack<T>(e.v[2], e.v[3]));
    else
        *to = from_float<T>(e.v[0]);
}

// SEVERAL_TERMS says whether y can have several terms.
template <typename T, int WIDTH, bool SEVERAL_TERMS>
__device__ void add_norm(const float* x, const float* y, const float* y_bias, const float* weight, const float* bias,
                         float* sum, T* normed, int terms, int columns, float eps) {
    __shared__ float scratch[2][32];  // one row for each call of block_sum
    const size_t row = (size_t)blockIdx.x * columns;
    const int count = columns / WIDTH;
    x += row;
    y += y ? row : 0;
    sum += y ? row : 0;
    normed += row;
    const float* const added = y ? sum : x;  // each thread rereads only its own elements of this array

    // Returns elements WIDTH · i to WIDTH · i + WIDTH - 1 of this row of y: the sum of the terms.
    const auto load_y = [&](int i) {
        return sum_terms<SEVERAL_TERMS>(terms, [&](int term) {
            return load<WIDTH>(y + (size_t)term * gridDim.x * columns + i * WIDTH);
        });
    };

    // 1. Add x, y and the bias of y. The loads of all elements that stay in registers are in flight at the same time.
    Elements<WIDTH> held[HELD_VECTORS], other[HELD_VECTORS], biases[HELD_VECTORS], weights[HELD_VECTORS];
    float squares = 0.0f, total = 0.0f, center = 0.0f;
#pragma unroll
    for (int h = 0; h < HELD_VECTORS; ++h) {
        const int i = min(threadIdx.x + h * THREADS, count - 1);
        if (y_bias) biases[h] = load<WIDTH>(y_bias + i * WIDTH);
        weights[h] = load<WIDTH>(weight + i * WIDTH);
    }
    pdl_wait();
#pragma unroll
    for (int h = 0; h < HELD_VECTORS; ++h) {
        // Past the last element, a thread loads the last one again. With a branch, it would wait for the earlier loads.
        const int i = min(threadIdx.x + h * THREADS, count - 1);
        held[h] = load<WIDTH>(x + i * WIDTH);
        if (y) other[h] = load_y(i);
    }
    pdl_launch_dependents();
    const auto accumulate = [&](const Elements<WIDTH>& e) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            squares += e.v[k] * e.v[k];
            total += e.v[k];
        }
    };
    const auto add_y = [&](Elements<WIDTH>& e, const Elements<WIDTH>& addend, const Elements<WIDTH>& added_bias,
                           int i) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) e.v[k] += y_bias ? addend.v[k] + added_bias.v[k] : addend.v[k];
        store(sum + i * WIDTH, e);
    };
#pragma unroll
    for (int h = 0; h < HELD_VECTORS; ++h) {
        const int i = threadIdx.x + h * THREADS;
        if (i >= count) continue;
        if (y) add_y(held[h], other[h], biases[h], i);
        accumulate(held[h]);
    }
    for (int i = threadIdx.x + HELD_VECTORS * THREADS; i < count; i += THREADS) {
        Elements<WIDTH> e = load<WIDTH>(x + i * WIDTH);
        // If y_bias is null, `add_y` ignores the loaded bias, so the load may read any valid address.
        if (y) add_y(e, load_y(i), load<WIDTH>((y_bias ? y_bias : weight) + i * WIDTH), i);
        accumulate(e);
    }

    // 2. Compute the mean (LayerNorm only) and the factor that normalizes the row.
    const auto for_each = [&](auto&& visit) {
#pragma unroll
        for (int h = 0; h < HELD_VECTORS; ++h) {
            const int i = threadIdx.x + h * THREADS;
            if (i < count) visit(held[h], weights[h], i);
        }
        for (int i = threadIdx.x + HELD_VECTORS * THREADS; i < count; i += THREADS)
            visit(load<WIDTH>(added + i * WIDTH), load<WIDTH>(weight + i * WIDTH), i);
    };
    if (bias) {
        center = block_sum(total, scratch[0]) / columns;
        squares = 0.0f;
        for_each([&](const Elements<WIDTH>& e, const Elements<WIDTH>&, int) {
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) squares += (e.v[k] - center) * (e.v[k] - center);
        });
    }
    const float scale = rsqrtf(block_sum(squares, scratch[1]) / columns + eps);

    // 3. Normalize the row.
    for_each([&](const Elements<WIDTH>& e, const Elements<WIDTH>& w, int i) {
        Elements<WIDTH> out;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k)
            out.v[k] = (e.v[k] - center) * scale * w.v[k] + (bias ? bias[i * WIDTH + k] : 0.0f);
        store(normed + i * WIDTH, out);
    });
}

#define DEFINE_KERNEL(T, NAME, SEVERAL_TERMS)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        NAME(const float* x, const float* y, const float* y_bias, const float* weight, const float* bias, float* sum,  \
             T* normed, int terms, int columns, float eps) {                                                           \
        if (columns % 4 == 0)                                                                                          \
            add_norm<T, 4, SEVERAL_TERMS>(x, y, y_bias, weight, bias, sum, normed, terms, columns, eps);               \
        else                                                                                                           \
            add_norm<T, 1, SEVERAL_TERMS>(x, y, y_bias, weight, bias, sum, normed, terms, columns, eps);               \
    }
#define DEFINE(T, SUFFIX)                                                                                              \
    DEFINE_KERNEL(T, add_norm_##SUFFIX, false)                                                                         \
    DEFINE_KERNEL(T, add_norm_terms_##SUFFIX, true)
FOR_EACH_DTYPE(DEFINE)
