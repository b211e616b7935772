// Quantized matrices outside of the decode graph: products with few tokens, values for products with many, rows as an
// embedding.
#include "quantized/quantized.cuh"

// y[t] = W·x[t]: grid (blocks, T), block 32·WARPS; units of two rows go round the warps.
//   x T [T, C]; y S [T, stride], of which this fills `rows` columns from its address on
//   ids u32 [T] or null: the expert, of `rows` rows, whose product y[t] is; then x has a row for each `per_x` of them
//   shared: as `vector_bytes` of quantized/cuda.rs says
constexpr int WARPS = 16;
template <typename T, typename S>
__device__ void matvec(const T* x, const Parts& parts, const uint32_t* ids, S* y, int rows, int columns, int stride,
                       int per_x, int rounding, float by) {
    extern __shared__ float4 vector[];
    __shared__ float scratch[WARPS];
    const int chunks = (columns + 31) / 32;
    const Vector v(vector, parts, chunks);
    const int first = ids ? ids[blockIdx.y] * rows : 0;
    const auto place = [=](int unit, int r, int& part) { return part = 0, first + min(2 * unit + r, rows - 1); };
    QuantizedStream<2, 2, decltype(place)> stream(parts, chunks, (rows + 1) / 2, place);
    x += (size_t)(blockIdx.y / per_x) * columns, y += (size_t)blockIdx.y * stride;
    const auto one = [=](int i) { return i < columns ? to_float(x[i]) : 0.0f; };
    const auto at = [=](int i) { return make_float4(one(4 * i), one(4 * i + 1), one(4 * i + 2), one(4 * i + 3)); };
    float scale = 1.0f;
    if (rounding == AS_IT_IS) {
        v.fill<false>(at);
        __syncthreads();
    } else {
        float most = 0.0f;
        for (int i = threadIdx.x; i < columns; i += blockDim.x) most = larger(most, one(i));
        scale = fill_rounded(v, at, most, 1.0f, {rounding, by}, scratch);
    }
    while (stream.more()) {
        const int unit = stream.unit;
        float sum[2];
        stream.finish(v, sum);
        if (stream.lane != 0) continue;
        y[2 * unit] = from_float<S>(sum[0] * scale);
        if (2 * unit + 1 < rows) y[2 * unit + 1] = from_float<S>(sum[1] * scale);
    }
}

// Eight values to columns 8i and on of a row.
template <typename T> __device__ __forceinline__ void store(T* row, int i, int columns, Eight v, float factor) {
    const float values[8] = {v.first.x,  v.first.y,  v.first.z,  v.first.w,
                             v.second.x, v.second.y, v.second.z, v.second.w};
    alignas(16) T rounded[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) rounded[c] = from_float<T>(values[c] * factor);
    if (columns % 8 == 0) {
#pragma unroll
        for (int part = 0; part < sizeof(rounded) / 16; ++part)
            reinterpret_cast<uint4*>(row + 8 * i)[part] = reinterpret_cast<const uint4*>(rounded)[part];
    } else {
        for (int c = 0; c < 8 && 8 * i + c < columns; ++c) row[8 * i + c] = rounded[c];
    }
}

// All values, a thread for 8 columns: grid ceil(rows · ceil(C / 8) / 256), block 256. out T [rows, C]
template <typename T> __device__ void dequantize(const Parts& parts, T* out, int rows, int columns) {
    const int eights = (columns + 7) / 8, chunks = (columns + 31) / 32;
    const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (long long)rows * eights) return;
    const int row = at / eights, i = at % eights;
    with_format(parts.part[0].format, [&](auto format) {
        const Eight v = eight<decltype(format)::value>(parts.part[0], row, i / 4, i % 4, chunks);
        store(out + (size_t)row * columns, i, columns, v, 1.0f);
    });
}

// Rows for ids u32 [T], times `factor`: grid T, block 256. out f32 [T, C]
extern "C" __global__ void __launch_bounds__(256)
    quantized_embed(const __grid_constant__ Parts parts, const uint32_t* ids, float* out, int columns, float factor) {
    const int eights = (columns + 7) / 8, chunks = (columns + 31) / 32;
    with_format(parts.part[0].format, [&](auto format) {
        for (int i = threadIdx.x; i < eights; i += blockDim.x) {
            const Eight v = eight<decltype(format)::value>(parts.part[0], ids[blockIdx.x], i / 4, i % 4, chunks);
            store(out + (size_t)blockIdx.x * columns, i, columns, v, factor);
        }
    });
}

// Rows rounded for a product of integers or of FP8: one block a token, 256 threads.
//   x T [T, C]; q bytes [T, padded], zero from C on; scales f32 [T]
template <typename T>
__device__ void round_rows(const T* x, uint8_t* q, float* scales, int columns, int padded, int rounding, float by) {
    __shared__ float scratch[8];
    x += (size_t)blockIdx.x * columns, q += (size_t)blockIdx.x * padded;
    float most = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) most = larger(most, to_float(x[i]));
    const float scale = rounding_scale(block_max(most, scratch), rounding, by);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    for (int i = threadIdx.x; i < padded; i += blockDim.x) {
        const float v = i < columns ? to_float(x[i]) / scale : 0.0f;
        q[i] = to_int8(rounding) ? (uint8_t)(int8_t)(int)rounded(v, rounding)
                                   : (uint8_t)__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
    }
}

// The same as floats again: what the other side of the product sees. y T [T, C]
template <typename T>
__device__ void round_floats(const T* x, T* y, int columns, int rounding, float by) {
    __shared__ float scratch[8];
    x += (size_t)blockIdx.x * columns, y += (size_t)blockIdx.x * columns;
    float most = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) most = larger(most, to_float(x[i]));
    const float scale = rounding_scale(block_max(most, scratch), rounding, by);
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        y[i] = from_float<T>(rounded(to_float(x[i]) / scale, rounding) * scale);
}

// y[t, r] = sums[t, r] · x_scales[t] · w_scales[r]: grid (T, ceil(R / 256)), block 256. sums int or float [T, R]; y f32
// [T, stride]
template <typename S>
__device__ void unround(const S* sums, const float* x_scales, const float* w_scales, float* y, int rows, int stride) {
    const int row = blockIdx.y * blockDim.x + threadIdx.x, token = blockIdx.x;
    if (row < rows)
        y[(size_t)token * stride + row] = (float)sums[(size_t)token * rows + row] * x_scales[token] * w_scales[row];
}
extern "C" __global__ void __launch_bounds__(256)
    unround_int(const int* sums, const float* x_scales, const float* w_scales, float* y, int rows, int stride) {
    unround(sums, x_scales, w_scales, y, rows, stride);
}
extern "C" __global__ void __launch_bounds__(256)
    unround_float(const float* sums, const float* x_scales, const float* w_scales, float* y, int rows, int stride) {
    unround(sums, x_scales, w_scales, y, rows, stride);
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)                                                        \
        quantized_matvec_##SUFFIX(const T* x, const __grid_constant__ Parts parts, float* y, int rows, int columns,    \
                                  int stride, int rounding, float by) {                                                \
        matvec<T, float>(x, parts, nullptr, y, rows, columns, stride, 1, rounding, by);                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)                                                        \
        quantized_experts_##SUFFIX(const T* x, const __grid_constant__ Parts parts, const uint32_t* ids, T* y,         \
                                   int rows, int columns, int per_x, int rounding, float by) {                         \
        matvec<T, T>(x, parts, ids, y, rows, columns, rows, per_x, rounding, by);                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        dequantize_##SUFFIX(const __grid_constant__ Parts parts, T* out, int rows, int columns) {                      \
        dequantize<T>(parts, out, rows, columns);                                                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        round_rows_##SUFFIX(const T* x, uint8_t* q, float* scales, int columns, int padded, int rounding, float by) {  \
        round_rows<T>(x, q, scales, columns, padded, rounding, by);                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        round_floats_##SUFFIX(const T* x, T* y, int columns, int rounding, float by) {                                 \
        round_floats<T>(x, y, columns, rounding, by);                                                                  \
    }
FOR_EACH_DTYPE(DEFINE)
