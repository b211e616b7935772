// Projections whose outputs are added to the residual stream: o_proj, and down_proj of MLPs without experts.
//
// Computes out = partial + W·y + bias.
//   weight: T [rows, columns], or one quantized matrix
//   y: T [columns]
//   bias: f32 [rows] or null
//   partial: f32 [rows]; see StepBuffers in decode/buffers.rs
//     null if the model has a post-norm; decode_add_normed_f32 then adds norm(out) to the residual stream
//   out: f32 [rows]; may be the same buffer as `partial`
//   mailboxes: unless `ranks` is 1, the results are sent to all ranks instead of stored in `out` (see Sender)
//   grid: at most one block per multiprocessor
//   block: at most DECODE_MAX_WARPS warps, or QUANTIZED_WARPS with quantized weights
//   bytes moved: the weight
// Each warp multiplies one row of the weight at a time. One row is one strip of a DenseStream or QuantizedStream.
#include "decode/dense_matvec.cuh"
#include "decode/quantized_matvec.cuh"
#include "exchange/exchange.cuh"
#include "headers/pdl.cuh"

// Computes the elements of `out` for this warp's strips. Multiplies all dot products by `scale`.
template <typename Stream, typename Input>
__device__ __forceinline__ void store_strips(Stream& stream, const Input& input, float scale, const float* partial,
                                             const float* bias, float* out, const Sender& sender) {
    while (stream.has_strip()) {
        const int strip = stream.strip;
        const float rest = (partial ? __ldcg(partial + strip) : 0.0f) + (bias ? __ldg(bias + strip) : 0.0f);
        float sum[1];
        stream.multiply(input, sum);
        if (stream.lane == 0) sender.store(out, strip, sum[0] * scale + rest);
    }
}

template <typename T>
__device__ void decode_residual(const float* partial, float* out, const T* y, const T* weight, const float* bias,
                                int rows, int columns, const Mailboxes& mailboxes) {
    extern __shared__ float4 shared[];
    const DenseInput input{shared, columns / 8};
    const auto row = [=](int strip, int) { return as_segments(weight + (size_t)strip * columns); };
    DenseStream<T, 1, DENSE_DEPTH_1, decltype(row)> stream(input.segments, rows, row);
    const Sender sender(mailboxes);
    __syncthreads();
    pdl_wait();
    pdl_launch_dependents();
    load_vector(input, y, [](int) { return 1.0f; });
    store_strips(stream, input, 1.0f, partial, bias, out, sender);
}

template <typename T>
__device__ void quantized_residual(const float* partial, float* out, const T* y, const QuantizedStack& weight,
                                   const float* bias, int rows, int columns, QuantizationArgs quantization,
                                   const Mailboxes& mailboxes) {
    extern __shared__ float4 vector[];
    __shared__ float scratch[QUANTIZED_WARPS];
    const int groups = (columns + 31) / 32;
    const QuantizedInput input(vector, weight, groups);
    const auto row = [](int strip, int, int& matrix) {
        matrix = 0;
        return strip;
    };
    QuantizedStream<1, QUANTIZED_DEPTH_1, decltype(row)> stream(weight, groups, rows, row);
    const Sender sender(mailboxes);
    __syncthreads();
    pdl_wait();
    pdl_launch_dependents();
    const float scale = load_vector(input, y, columns, quantization, scratch);
    store_strips(stream, input, scale, partial, bias, out, sender);
}

// Computes x += norm(y).
//   x, y, norm: f32 [columns]; norm(y) is the RMSNorm of y with the weight `norm`
//   grid: 1; block: DECODE_SINGLE_BLOCK_THREADS
//   bytes moved: 16 · columns
extern "C" __global__ void __launch_bounds__(DECODE_SINGLE_BLOCK_THREADS)
    decode_add_normed_f32(float* x, const float* y, const float* norm, int columns, float eps) {
    __shared__ float scratch[32];
    pdl_wait();
    pdl_launch_dependents();
    const auto quad = [](const float* from, int i) { return __ldcg(reinterpret_cast<const float4*>(from) + i); };
    float squares = 0.0f;
    for (int i = threadIdx.x; i < columns / 4; i += blockDim.x) {
        const float4 v = quad(y, i);
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / columns + eps);
    for (int i = threadIdx.x; i < columns / 4; i += blockDim.x) {
        const float4 v = quad(y, i), w = quad(norm, i), sum = quad(x, i);
        reinterpret_cast<float4*>(x)[i] = make_float4(sum.x + v.x * scale * w.x, sum.y + v.y * scale * w.y,
                                                      sum.z + v.z * scale * w.z, sum.w + v.w * scale * w.w);
    }
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * DECODE_MAX_WARPS, 1)                                             \
        decode_residual_##SUFFIX(const float* partial, float* out, const T* y, const T* weight, const float* bias,     \
                                 int rows, int columns, const __grid_constant__ Mailboxes mailboxes) {                 \
        decode_residual<T>(partial, out, y, weight, bias, rows, columns, mailboxes);                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * QUANTIZED_WARPS, 1)                                              \
        quantized_residual_##SUFFIX(const float* partial, float* out, const T* y,                                      \
                                    const __grid_constant__ QuantizedStack weight, const float* bias, int rows,        \
                                    int columns, int quantization, float static_scale,                                 \
                                    const __grid_constant__ Mailboxes mailboxes) {                                     \
        quantized_residual<T>(partial, out, y, weight, bias, rows, columns, {quantization, static_scale}, mailboxes);  \
    }
DEFINE(__nv_bfloat16, bf16)
DEFINE(__half, f16)
