// Operations on quantized matrices:
// - matrix-vector products
// - dequantization of weights
// - 8-bit quantization of activations, and multiplication by the scales after an 8-bit matrix product
// - embedding lookup
// More kernels for quantized matrices are in quantized_few_tokens.cu and kernels/decode.
#include "quantized/input_quantization.cuh"
#include "quantized/stream.cuh"

// Matrix-vector products: y[t] = W·x[t / pairs_per_x]. First quantizes x as `quantization` specifies.
//   x: T [tokens / pairs_per_x, columns]; `pairs_per_x` consecutive rows of y share one row of x
//   y: S [tokens, stride], where S is f32 or T; only the first `rows` columns are written
//   ids: u32 [tokens] or null; with ids, t counts (token, expert) pairs, and W is the `rows` rows of expert ids[t]
//     An id past the last expert selects the last expert.
//   grid: (at most one block per multiprocessor, tokens); block: 32 · QUANTIZED_WARPS
//   shared memory: see `input_bytes` in quantized_ops.rs
//   bytes moved: the size of W once per token
// Each warp multiplies two rows of W at a time: one strip of the `QuantizedStream`.
template <typename T, typename S>
__device__ void matvec(const T* x, const QuantizedStack& weights, const uint32_t* ids, S* y, int rows, int columns,
                       int stride, int pairs_per_x, QuantizationArgs quantization) {
    extern __shared__ float4 vector[];
    __shared__ float scratch[QUANTIZED_WARPS];
    const int groups = (columns + 31) / 32;
    const QuantizedInput input(vector, weights, groups);
    const int last = weights.row_ends[0] - rows;  // with ids: the first row of the last expert
    const int first = ids ? (int)min((uint64_t)ids[blockIdx.y] * rows, (uint64_t)last) : 0;
    const auto row = [=](int strip, int r, int& matrix) {
        matrix = 0;
        return first + min(2 * strip + r, rows - 1);
    };
    QuantizedStream<2, 2, decltype(row)> stream(weights, groups, (rows + 1) / 2, row);
    x += (size_t)(blockIdx.y / pairs_per_x) * columns;
    y += (size_t)blockIdx.y * stride;
    const auto one = [=](int i) { return i < columns ? to_float(x[i]) : 0.0f; };
    const auto quad = [=](int i) { return make_float4(one(4 * i), one(4 * i + 1), one(4 * i + 2), one(4 * i + 3)); };
    float scale = 1.0f;
    if (quantization.mode == QUANTIZATION_NONE) {
        input.fill<false>(quad);
        __syncthreads();
    } else {
        float largest = 0.0f;
        for (int i = threadIdx.x; i < columns; i += blockDim.x) largest = max_magnitude(largest, one(i));
        scale = fill_quantized(input, quad, largest, 1.0f, quantization, scratch);
    }
    while (stream.has_strip()) {
        const int strip = stream.strip;
        float sum[2];
        stream.multiply(input, sum);
        if (stream.lane != 0) continue;
        y[2 * strip] = from_float<S>(sum[0] * scale);
        if (2 * strip + 1 < rows) y[2 * strip + 1] = from_float<S>(sum[1] * scale);
    }
}

// Multiplies eight values by `factor` and stores them in columns 8i to 8i + 7 of a row that has `columns` columns.
template <typename T> __device__ __forceinline__ void store(T* row, int i, int columns, EightValues v, float factor) {
    const float values[8] = {v.first.x,  v.first.y,  v.first.z,  v.first.w,
                             v.second.x, v.second.y, v.second.z, v.second.w};
    alignas(16) T rounded[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) rounded[c] = from_float<T>(values[c] * factor);
    if (columns % 8 == 0) {
#pragma unroll
        for (int segment = 0; segment < sizeof(rounded) / 16; ++segment)
            reinterpret_cast<uint4*>(row + 8 * i)[segment] = reinterpret_cast<const uint4*>(rounded)[segment];
    } else {
        for (int c = 0; c < 8 && 8 * i + c < columns; ++c) row[8 * i + c] = rounded[c];
    }
}

// Dequantizes a matrix.
//   out: T [rows, columns]
//   grid: ceil(rows · ceil(columns / 8) / ELEMENT_THREADS); block: ELEMENT_THREADS; one thread per 8 columns
//   bytes moved: the size of the matrix, plus rows · columns · sizeof(T)
template <typename T> __device__ void dequantize(const QuantizedStack& weights, T* out, int rows, int columns) {
    const int eights = (columns + 7) / 8, groups = (columns + 31) / 32;
    const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (long long)rows * eights) return;
    const int row = at / eights, i = at % eights;
    with_format(weights.matrices[0].format, [&](auto format) {
        const EightValues v = dequantize8<decltype(format)::value>(weights.matrices[0], row, i / 4, i % 4, groups);
        store(out + (size_t)row * columns, i, columns, v, 1.0f);
    });
}

// Looks up token embeddings: out[t] = factor · weights[ids[t]]. An id past the last row selects the last row.
//   ids: u32 [tokens]
//   out: f32 [tokens, columns]
//   bytes moved: one quantized row per token, plus out
//   grid: tokens; block: QUANTIZED_ROW_THREADS
extern "C" __global__ void __launch_bounds__(QUANTIZED_ROW_THREADS)
    quantized_embed(const __grid_constant__ QuantizedStack weights, const uint32_t* ids, float* out, int columns,
                    float factor) {
    const int eights = (columns + 7) / 8, groups = (columns + 31) / 32;
    const int row = min(ids[blockIdx.x], (uint32_t)weights.row_ends[0] - 1);
    with_format(weights.matrices[0].format, [&](auto format) {
        for (int i = threadIdx.x; i < eights; i += blockDim.x) {
            const EightValues v = dequantize8<decltype(format)::value>(weights.matrices[0], row, i / 4, i % 4, groups);
            store(out + (size_t)blockIdx.x * columns, i, columns, v, factor);
        }
    });
}

// Quantizes each row of x to int8 or E4M3 for an 8-bit matrix product.
//   x: T [tokens, columns]
//   q: 8-bit values [tokens, padded], with zeros after the last column of x
//   scales: f32 [tokens]
//   bytes moved: x twice, q and scales once
//   grid: tokens; block: QUANTIZED_ROW_THREADS
template <typename T>
__device__ void quantize_rows(const T* x, uint8_t* q, float* scales, int columns, int padded,
                              QuantizationArgs quantization) {
    __shared__ float scratch[QUANTIZED_ROW_THREADS / 32];
    x += (size_t)blockIdx.x * columns;
    q += (size_t)blockIdx.x * padded;
    float largest = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) largest = max_magnitude(largest, to_float(x[i]));
    const float scale =
        quantization_scale(block_max_magnitude(largest, scratch), quantization.mode, quantization.static_scale);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    for (int i = threadIdx.x; i < padded; i += blockDim.x) {
        const float v = i < columns ? to_float(x[i]) / scale : 0.0f;
        q[i] = quantizes_to_int8(quantization.mode) ? (uint8_t)(int8_t)(int)quantize_scaled(v, quantization.mode)
                                                    : (uint8_t)__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
    }
}

// Quantizes each row of x to int8 or E4M3 and stores the values as T.
//   x: T [tokens, columns]
//   y: T [tokens, columns]; without `scales`, the values are multiplied by the scale of their row
//   scales: f32 [tokens] or null
//   bytes moved: x twice, y once
//   grid: tokens; block: QUANTIZED_ROW_THREADS
template <typename T>
__device__ void fake_quantize(const T* x, T* y, float* scales, int columns, QuantizationArgs quantization) {
    __shared__ float scratch[QUANTIZED_ROW_THREADS / 32];
    x += (size_t)blockIdx.x * columns;
    y += (size_t)blockIdx.x * columns;
    float largest = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) largest = max_magnitude(largest, to_float(x[i]));
    const float scale =
        quantization_scale(block_max_magnitude(largest, scratch), quantization.mode, quantization.static_scale);
    if (scales && threadIdx.x == 0) scales[blockIdx.x] = scale;
    const float factor = scales ? 1.0f : scale;
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        y[i] = from_float<T>(quantize_scaled(to_float(x[i]) / scale, quantization.mode) * factor);
}

// Applies the scales after an 8-bit matrix product: y[t, r] = sums[t, r] · x_scales[t] · w_scales[r].
//   sums: S (int or float) [tokens, rows]
//   y: f32 [tokens, stride]
//   bytes moved: sums and y once
//   grid: (tokens, ceil(rows / QUANTIZED_ROW_THREADS)); block: QUANTIZED_ROW_THREADS
template <typename S>
__device__ void rescale(const S* sums, const float* x_scales, const float* w_scales, float* y, int rows, int stride) {
    const int row = blockIdx.y * blockDim.x + threadIdx.x, token = blockIdx.x;
    if (row < rows)
        y[(size_t)token * stride + row] = (float)sums[(size_t)token * rows + row] * x_scales[token] * w_scales[row];
}
extern "C" __global__ void __launch_bounds__(QUANTIZED_ROW_THREADS)
    rescale_int(const int* sums, const float* x_scales, const float* w_scales, float* y, int rows, int stride) {
    rescale(sums, x_scales, w_scales, y, rows, stride);
}
extern "C" __global__ void __launch_bounds__(QUANTIZED_ROW_THREADS)
    rescale_float(const float* sums, const float* x_scales, const float* w_scales, float* y, int rows, int stride) {
    rescale(sums, x_scales, w_scales, y, rows, stride);
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * QUANTIZED_WARPS, 1)                                              \
        quantized_matvec_##SUFFIX(const T* x, const __grid_constant__ QuantizedStack weights, float* y, int rows,      \
                                  int columns, int stride, int quantization, float static_scale) {                     \
        matvec<T, float>(x, weights, nullptr, y, rows, columns, stride, 1, {quantization, static_scale});              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * QUANTIZED_WARPS, 1)                                              \
        quantized_experts_##SUFFIX(const T* x, const __grid_constant__ QuantizedStack weights, const uint32_t* ids,    \
                                   T* y, int rows, int columns, int pairs_per_x, int quantization,                     \
                                   float static_scale) {                                                               \
        matvec<T, T>(x, weights, ids, y, rows, columns, rows, pairs_per_x, {quantization, static_scale});              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(ELEMENT_THREADS)                                                      \
        dequantize_##SUFFIX(const __grid_constant__ QuantizedStack weights, T* out, int rows, int columns) {           \
        dequantize<T>(weights, out, rows, columns);                                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(QUANTIZED_ROW_THREADS)                                                \
        quantize_rows_##SUFFIX(const T* x, uint8_t* q, float* scales, int columns, int padded, int quantization,       \
                               float static_scale) {                                                                   \
        quantize_rows<T>(x, q, scales, columns, padded, {quantization, static_scale});                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(QUANTIZED_ROW_THREADS)                                                \
        fake_quantize_##SUFFIX(const T* x, T* y, float* scales, int columns, int quantization, float static_scale) {   \
        fake_quantize<T>(x, y, scales, columns, {quantization, static_scale});                                         \
    }
FOR_EACH_DTYPE(DEFINE)
