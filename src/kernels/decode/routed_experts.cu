// Routed experts with bf16, f16 or quantized weights and without biases, for one token.
// Each thread block finds the chosen experts itself, from the router logits.
#include "decode/dense_matvec.cuh"
#include "decode/quantized_matvec.cuh"
#include "exchange/exchange.cuh"
#include "headers/activation.cuh"
#include "headers/pdl.cuh"
#include "moe/routing/routing.cuh"

// The output of the router: the logits of all experts, their number, and the number of chosen experts.
struct Router {
    const float* logits;
    int experts, chosen;
};

// Computes this warp's elements of h from the dot products of its strips, multiplied by `scale`.
template <typename T, typename Stream, typename Input>
__device__ __forceinline__ void store_gated(Stream& stream, const Input& input, float scale, T* h) {
    while (stream.has_strip()) {
        const int strip = stream.strip;
        float sum[2];
        stream.multiply(input, sum);
        if (stream.lane == 0) h[strip] = from_float<T>(activate(sum[0] * scale, ACTIVATION_SILU) * (sum[1] * scale));
    }
}

// Computes h[n] = silu(gate(norm(x))) · up(norm(x)) for the n-th chosen expert.
//   x, norm: f32 [columns]; norm(x) is the RMSNorm of x with the weight `norm`
//   weight: T [experts, 2 · rows, columns], or one quantized matrix
//     For each expert, the gate rows come before the up rows.
//   logits: f32 [experts]
//   h: T [chosen, rows]
//   grid: at most one block per multiprocessor
//   block: at most DECODE_MAX_WARPS warps, or QUANTIZED_WARPS with quantized weights
//   bytes moved: the weights of the chosen experts
// A strip consists of row i of gate and row i of up of one chosen expert, and produces one element of h.
template <typename T>
__device__ void decode_routed_gate_up(const NormedVector& x, const T* weight, const Router& router, T* h, int rows) {
    extern __shared__ float4 shared[];
    __shared__ float scratch[DECODE_MAX_WARPS];
    __shared__ Routing routing;
    const int columns = x.columns;
    const DenseInput input{shared, columns / 8};
    pdl_wait();
    pdl_launch_dependents();
    if (threadIdx.x < 32) routing.choose(router.logits, router.experts, router.chosen, NO_WEIGHTS, threadIdx.x);
    __syncthreads();
    const uint32_t* expert = routing.expert;
    const auto row = [=](int strip, int r) {
        const size_t half = (size_t)expert[strip / rows] * 2 + r;
        return as_segments(weight + (half * rows + strip % rows) * columns);
    };
    DenseStream<T, 2, DENSE_DEPTH_2, decltype(row)> stream(input.segments, router.chosen * rows, row);
    const float scale = load_normed(input, x, scratch);
    store_gated(stream, input, scale, h);
}

template <typename T>
__device__ void quantized_routed_gate_up(const NormedVector& x, const QuantizedStack& weight, const Router& router,
                                         T* h, int rows, QuantizationArgs quantization) {
    extern __shared__ float4 vector[];
    __shared__ float scratch[QUANTIZED_WARPS];
    __shared__ Routing routing;
    const int groups = (x.columns + 31) / 32;
    const QuantizedInput input(vector, weight, groups);
    pdl_wait();
    pdl_launch_dependents();
    if (threadIdx.x < 32) routing.choose(router.logits, router.experts, router.chosen, NO_WEIGHTS, threadIdx.x);
    __syncthreads();
    const uint32_t* expert = routing.expert;
    const auto row = [=](int strip, int r, int& matrix) {
        matrix = 0;
        return ((int)expert[strip / rows] * 2 + r) * rows + strip % rows;
    };
    QuantizedStream<2, QUANTIZED_DEPTH_2, decltype(row)> stream(weight, groups, router.chosen * rows, row);
    const float scale = load_normed(input, x, quantization, scratch);
    store_gated(stream, input, scale, h);
}

// Finds the chosen expert to which a piece of a long row belongs.
// *Long row* i is the concatenation of row i of every chosen expert.
// A *piece* is the part of a row that a lane loads at once: a segment (dense weights) or a group (quantized weights).
struct ChosenRows {
    const uint32_t* experts;
    int pieces;            // the number of pieces in one expert's row
    size_t expert_pieces;  // the number of pieces in one expert's matrix
    uint32_t inverse;      // 2^32 / pieces, rounded up; index_of(piece) is exact if piece < 2^32 / pieces

    __device__ __forceinline__ ChosenRows() {}
    __device__ __forceinline__ ChosenRows(const uint32_t* experts, int pieces, size_t expert_pieces)
        : experts(experts), pieces(pieces), expert_pieces(expert_pieces), inverse(0xffffffffu / pieces + 1) {}
    // Returns `piece / pieces`: n if the piece belongs to the row of the n-th chosen expert.
    // If `pieces` is 1, `inverse` would be 2^32, which does not fit in 32 bits.
    __device__ __forceinline__ int index_of(int piece) const { return pieces == 1 ? piece : __umulhi(piece, inverse); }
};

// A long row of dense weights: the Address type of a DenseStream.
struct ChosenSegments {
    const uint4* row;  // the row of expert 0
    ChosenRows rows;
    __device__ __forceinline__ const uint4* operator+(int segment) const {
        const int n = rows.index_of(segment);
        return row + rows.experts[n] * rows.expert_pieces + (segment - n * rows.pieces);
    }
};

// Locates the groups and scales of long rows of quantized weights: the Layout type of a QuantizedStream.
struct ChosenGroups {
    static constexpr bool is_gathered = true;
    ChosenRows rows;
    int expert_rows;
    __device__ __forceinline__ size_t group_index(int row, int group) const {
        const int n = rows.index_of(group);
        return rows.experts[n] * rows.expert_pieces + (size_t)row * rows.pieces + (group - n * rows.pieces);
    }
    __device__ __forceinline__ int scale_row(int row, int group) const {
        return (int)rows.experts[rows.index_of(group)] * expert_rows + row;
    }
};

// Adds the dot products of this warp's strips to elements of `partial`, or sends the sums to all ranks (see Sender).
template <typename Stream, typename Input>
__device__ __forceinline__ void add_to_partial(Stream& stream, const Input& input, float* partial,
                                               const Sender& sender) {
    while (stream.has_strip()) {
        const int strip = stream.strip;
        const float rest = __ldcg(partial + strip);
        float sum[1];
        stream.multiply(input, sum);
        if (stream.lane == 0) sender.store(partial, strip, sum[0] + rest);
    }
}

// Computes partial += Σ routing weight · down(h) over the chosen experts.
// The kernel multiplies row n of h by the routing weight of the n-th chosen expert.
// partial[i] increases by the dot product of the result and long row i (see ChosenRows).
//   partial: f32 [rows]; see StepBuffers in decode/buffers.rs
//   h: T [chosen, columns]
//   logits: f32 [experts]
//   weight: T [experts, rows, columns], or one quantized matrix
//   over_all: 1 if the routing softmax covers all experts, 0 if it covers only the chosen experts
//   mailboxes: unless `ranks` is 1, the new values of `partial` are sent to all ranks instead of stored (see Sender)
//   grid: at most one block per multiprocessor
//   block: at most DECODE_MAX_WARPS warps, or QUANTIZED_WARPS with quantized weights
//   bytes moved: the weights of the chosen experts
// Each strip is one long row.
template <typename T>
__device__ void decode_routed_down(float* partial, const T* h, const T* weight, const Router& router, int over_all,
                                   int rows, int columns, const Mailboxes& mailboxes) {
    extern __shared__ float4 shared[];
    __shared__ Routing routing;
    const int segments = columns / 8;
    const DenseInput input{shared, router.chosen * segments};
    // Reading the router logits before pdl_wait() is safe: only the previous kernel, which computes h, can still be
    // running (see headers/pdl.cuh). The router kernel before it has ended.
    if (threadIdx.x < 32)
        routing.choose(router.logits, router.experts, router.chosen, router.chosen, threadIdx.x, over_all);
    const Sender sender(mailboxes);
    __syncthreads();
    const ChosenRows chosen_rows(routing.expert, segments, (size_t)rows * segments);
    const auto row = [=](int strip, int) {
        return ChosenSegments{as_segments(weight) + (size_t)strip * segments, chosen_rows};
    };
    DenseStream<T, 1, DENSE_DEPTH_1, decltype(row), ChosenSegments> stream(input.segments, rows, row);
    pdl_wait();
    pdl_launch_dependents();
    load_vector(input, h, [&](int segment) { return routing.weight[chosen_rows.index_of(segment)]; });
    add_to_partial(stream, input, partial, sender);
}

// Stores h in `input`. Multiplies each expert's row of h, or the row's scales, by the expert's routing weight.
// Quantizes each row of h to 8 bits unless `quantization.mode` is QUANTIZATION_NONE.
// `factors` is shared memory for the quantization scale of each row.
template <typename T>
__device__ __forceinline__ void load_chosen(const QuantizedInput& input, const T* h, const Routing& routing,
                                            const ChosenRows& rows, int chosen, int columns,
                                            QuantizationArgs quantization, float* factors) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto four = [=](int n, int i) {
        const uint2 two = __ldcg(reinterpret_cast<const uint2*>(h + (size_t)n * columns) + i);
        const T* values = reinterpret_cast<const T*>(&two);
        return make_float4(to_float(values[0]), to_float(values[1]), to_float(values[2]), to_float(values[3]));
    };
    // Returns quad i of `input`: four values of the n-th expert's row of h, each replaced by change(value, n).
    // Returns zeros past the last column of the row.
    const auto quad = [&](int i, auto change) {
        const int n = rows.index_of(i / 8), quad = i - n * rows.pieces * 8;
        if (4 * quad >= columns) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float4 a = four(n, quad);
        return make_float4(change(a.x, n), change(a.y, n), change(a.z, n), change(a.w, n));
    };
    if (quantization.mode == QUANTIZATION_NONE) {
        const auto weighted = [&](float value, int n) { return value * routing.weight[n]; };
        input.fill<false>([&](int i) { return quad(i, weighted); });
        __syncthreads();
        return;
    }
    for (int n = warp; n < chosen; n += blockDim.x / 32) {
        float largest = 0.0f;
        for (int i = lane; 4 * i < columns; i += 32) largest = max_magnitude(largest, max_magnitude(four(n, i)));
        for (int offset = 16; offset > 0; offset /= 2)
            largest = max_magnitude(largest, __shfl_xor_sync(ALL_LANES, largest, offset));
        if (lane == 0) factors[n] = quantization_scale(largest, quantization.mode, quantization.static_scale);
    }
    __syncthreads();
    input.fill<true>([&](int i) {
        return quad(i, [&](float value, int n) {
            const float rounded = quantize_scaled(value / factors[n], quantization.mode);
            return input.is_float ? rounded * factors[n] * routing.weight[n] : rounded;
        });
    });
    __syncthreads();
    if (input.is_float) return;
    for (int group = threadIdx.x; group < input.groups; group += blockDim.x) {
        const int n = rows.index_of(group);
        input.scales[group] = factors[n] * routing.weight[n];
    }
    __syncthreads();
}

template <typename T>
__device__ void quantized_routed_down(float* partial, const T* h, const QuantizedStack& weight, const Router& router,
                                      int over_all, int rows, int columns, QuantizationArgs quantization,
                                      const Mailboxes& mailboxes) {
    extern __shared__ float4 vector[];
    __shared__ float factors[MAX_CHOSEN_EXPERTS];
    __shared__ Routing routing;
    const int expert_groups = (columns + 31) / 32, groups = router.chosen * expert_groups;
    const QuantizedInput input(vector, weight, groups);
    // Reading the router logits before pdl_wait() is safe, as in decode_routed_down.
    if (threadIdx.x < 32)
        routing.choose(router.logits, router.experts, router.chosen, router.chosen, threadIdx.x, over_all);
    const Sender sender(mailboxes);
    __syncthreads();
    const ChosenRows chosen_rows(routing.expert, expert_groups, (size_t)rows * expert_groups);
    const auto row = [](int strip, int, int& matrix) {
        matrix = 0;
        return strip;
    };
    QuantizedStream<1, QUANTIZED_DEPTH_1, decltype(row), ChosenGroups> stream(weight, groups, rows, row,
                                                                              ChosenGroups{chosen_rows, rows});
    pdl_wait();
    pdl_launch_dependents();
    load_chosen(input, h, routing, chosen_rows, router.chosen, columns, quantization, factors);
    add_to_partial(stream, input, partial, sender);
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * DECODE_MAX_WARPS, 1)                                             \
        decode_routed_gate_up_##SUFFIX(const float* x, const float* norm, const T* weight, const float* logits, T* h,  \
                                       int experts, int chosen, int rows, int columns, float eps) {                    \
        decode_routed_gate_up<T>({x, norm, columns, eps}, weight, {logits, experts, chosen}, h, rows);                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * DECODE_MAX_WARPS, 1)                                             \
        decode_routed_down_##SUFFIX(float* partial, const T* h, const float* logits, const T* weight, int experts,     \
                                    int chosen, int rows, int columns, int over_all,                                   \
                                    const __grid_constant__ Mailboxes mailboxes) {                                     \
        decode_routed_down<T>(partial, h, weight, {logits, experts, chosen}, over_all, rows, columns, mailboxes);      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * QUANTIZED_WARPS, 1)                                              \
        quantized_routed_gate_up_##SUFFIX(const float* x, const float* norm,                                           \
                                          const __grid_constant__ QuantizedStack weight, const float* logits, T* h,    \
                                          int experts, int chosen, int rows, int columns, float eps, int quantization, \
                                          float static_scale) {                                                        \
        quantized_routed_gate_up<T>({x, norm, columns, eps}, weight, {logits, experts, chosen}, h, rows,               \
                                    {quantization, static_scale});                                                     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * QUANTIZED_WARPS, 1)                                              \
        quantized_routed_down_##SUFFIX(float* partial, const T* h, const float* logits,                                \
                                       const __grid_constant__ QuantizedStack weight, int experts, int chosen,         \
                                       int rows, int columns, int over_all, int quantization, float static_scale,      \
                                       const __grid_constant__ Mailboxes mailboxes) {                                  \
        quantized_routed_down<T>(partial, h, weight, {logits, experts, chosen}, over_all, rows, columns,               \
                                 {quantization, static_scale}, mailboxes);                                             \
    }
DEFINE(__nv_bfloat16, bf16)
DEFINE(__half, f16)
