// The first half of a gated MLP. Computes h = activation(gate(norm(x))) · up(norm(x)).
//
//   x, norm: f32 [columns]; norm(x) is the RMSNorm of x with the weight `norm`
//   gate, up: T [rows, columns]; with quantized weights, `weight` is a stack of the two matrices instead
//   gate_bias, up_bias: f32 [rows] or null
//   h: T [rows]
//   grid: at most one block per multiprocessor
//   block: at most DECODE_MAX_WARPS warps, or QUANTIZED_WARPS with quantized weights
//   bytes moved: the gate and up weights
// Strip s consists of row s of gate and row s of up, and produces element s of h.
#include "decode/dense_matvec.cuh"
#include "decode/quantized_matvec.cuh"
#include "headers/activation.cuh"
#include "headers/pdl.cuh"

// The output of a kernel, and how to compute it from the dot products. The top of this file describes the fields.
template <typename T> struct GatedOutput {
    T* h;
    const float *gate_bias, *up_bias;
    int rows, activation;
};

// Computes this warp's elements of h. Multiplies all dot products by `scale`.
template <typename T, typename Stream, typename Input>
__device__ __forceinline__ void store_strips(Stream& stream, const Input& input, float scale,
                                             const GatedOutput<T>& to) {
    while (stream.has_strip()) {
        const int strip = stream.strip;
        float sum[2];
        stream.multiply(input, sum);
        if (stream.lane != 0) continue;
        const float g = sum[0] * scale + (to.gate_bias ? to.gate_bias[strip] : 0.0f),
                    u = sum[1] * scale + (to.up_bias ? to.up_bias[strip] : 0.0f);
        to.h[strip] = from_float<T>(activate(g, to.activation) * u);
    }
}

template <typename T>
__device__ void decode_gate_up(const NormedVector& x, const T* gate, const T* up, const GatedOutput<T>& to) {
    extern __shared__ float4 shared[];
    __shared__ float scratch[DECODE_MAX_WARPS];
    const int columns = x.columns;
    const DenseInput input{shared, columns / 8};
    const auto row = [=](int strip, int r) { return as_segments((r == 0 ? gate : up) + (size_t)strip * columns); };
    DenseStream<T, 2, DENSE_DEPTH_2, decltype(row)> stream(input.segments, to.rows, row);
    pdl_wait();
    pdl_launch_dependents();
    const float scale = load_normed(input, x, scratch);
    store_strips(stream, input, scale, to);
}

template <typename T>
__device__ void quantized_gate_up(const NormedVector& x, const QuantizedStack& weight, const GatedOutput<T>& to,
                                  QuantizationArgs quantization) {
    extern __shared__ float4 vector[];
    __shared__ float scratch[QUANTIZED_WARPS];
    const int groups = (x.columns + 31) / 32;
    const QuantizedInput input(vector, weight, groups);
    const auto row = [](int strip, int r, int& matrix) {
        matrix = r;
        return strip;
    };
    QuantizedStream<2, QUANTIZED_DEPTH_2, decltype(row)> stream(weight, groups, to.rows, row);
    pdl_wait();
    pdl_launch_dependents();
    const float scale = load_normed(input, x, quantization, scratch);
    store_strips(stream, input, scale, to);
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * DECODE_MAX_WARPS, 1)                                             \
        decode_gate_up_##SUFFIX(const float* x, const float* norm, const T* gate, const T* up, const float* gate_bias, \
                                const float* up_bias, T* h, int rows, int columns, int activation, float eps) {        \
        decode_gate_up<T>({x, norm, columns, eps}, gate, up, {h, gate_bias, up_bias, rows, activation});               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * QUANTIZED_WARPS, 1)                                              \
        quantized_gate_up_##SUFFIX(const float* x, const float* norm, const __grid_constant__ QuantizedStack weight,   \
                                   const float* gate_bias, const float* up_bias, T* h, int rows, int columns,          \
                                   int activation, float eps, int quantization, float static_scale) {                  \
        quantized_gate_up<T>({x, norm, columns, eps}, weight, {h, gate_bias, up_bias, rows, activation},               \
                             {quantization, static_scale});                                                            \
    }
DEFINE(__nv_bfloat16, bf16)
DEFINE(__half, f16)
