// The end of a decode step: computes the logits, chooses the most likely token and loads its embedding.
// If tokens are sampled, decode_sample (sample.cu) runs instead of decode_greedy.
// decode_sample also chooses the first token after a prefill if the decode graph starts from the prefill's logits.
// If several ranks divide the vocabulary, decode_greedy chooses from the largest logits of all ranks.
#include "decode/dense_matvec.cuh"
#include "decode/quantized_matvec.cuh"
#include "decode/step_output.cuh"
#include "headers/activation.cuh"
#include "headers/pdl.cuh"

// The largest of the offered logits, and its token. If logits are equal, the lowest token id wins. NaN never wins.
// Callers initialize it with -inf and NO_TOKEN, which is larger than every token id.
struct Argmax {
    float logit;
    uint32_t token;
    __device__ __forceinline__ void offer(float other, uint32_t other_token) {
        if (other > logit || (other == logit && other_token < token)) {
            logit = other;
            token = other_token;
        }
    }
};

// Writes the argmax of the block to best[blockIdx.x].
// `own` is the argmax of the warp, in lane 0. Other lanes may pass any value.
// `warps` is shared memory with space for one Argmax per warp.
__device__ __forceinline__ void block_argmax(Argmax own, Argmax* warps, Argmax* best) {
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < blockDim.x / 32; ++w) own.offer(warps[w].logit, warps[w].token);
        best[blockIdx.x] = own;
    }
}

// The output of decode_head and quantized_head. The comment at decode_head describes the fields.
struct HeadOutput {
    float* logits;
    Argmax* best;
    int vocab, first_token;
    float softcap;
};

// Computes the logits of this warp's strips. Returns the argmax of these logits in lane 0.
// Each strip is two rows of the weight. A logit is a dot product times `scale`, limited by the soft cap.
template <typename Stream, typename Input>
__device__ __forceinline__ Argmax warp_logits(Stream& stream, const Input& input, float scale, const HeadOutput& to) {
    Argmax own{-INFINITY, NO_TOKEN};
    while (stream.has_strip()) {
        const int strip = stream.strip;
        float sum[2];
        stream.multiply(input, sum);
        if (stream.lane != 0) continue;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (2 * strip + r >= to.vocab) break;
            const float dot = sum[r] * scale, logit = to.softcap > 0.0f ? soft_capped(dot, to.softcap) : dot;
            to.logits[2 * strip + r] = logit;
            own.offer(logit, to.first_token + 2 * strip + r);
        }
    }
    return own;
}

// Computes logits = head(norm(x)), and the argmax of each block's logits.
// If softcap > 0, each logit l becomes softcap · tanh(l / softcap).
//   x, norm: f32 [columns]; norm(x) is the RMSNorm of x with the weight `norm`
//   weight: T [vocab, columns], or one quantized matrix; `vocab` is the number of tokens of this rank
//   logits: f32 [vocab]
//   best: receives one Argmax per block
//   first_token: the id of this rank's first token, to which logits[0] belongs
//   grid: at most one block per multiprocessor
//   block: at most DECODE_MAX_WARPS warps, or QUANTIZED_WARPS with quantized weights
//   bytes moved: the weight
template <typename T> __device__ void decode_head(const NormedVector& x, const T* weight, const HeadOutput& to) {
    extern __shared__ float4 shared[];
    __shared__ float scratch[DECODE_MAX_WARPS];
    __shared__ Argmax warps[DECODE_MAX_WARPS];
    const int columns = x.columns, vocab = to.vocab;
    const DenseInput input{shared, columns / 8};
    const auto row = [=](int strip, int r) {
        return as_segments(weight + (size_t)min(2 * strip + r, vocab - 1) * columns);
    };
    DenseStream<T, 2, DENSE_DEPTH_2, decltype(row)> stream(input.segments, (vocab + 1) / 2, row);
    pdl_wait();
    pdl_launch_dependents();
    const float scale = load_normed(input, x, scratch);
    block_argmax(warp_logits(stream, input, scale, to), warps, to.best);
}

__device__ void quantized_head(const NormedVector& x, const QuantizedStack& weight, const HeadOutput& to,
                               QuantizationArgs quantization) {
    extern __shared__ float4 vector[];
    __shared__ float scratch[QUANTIZED_WARPS];
    __shared__ Argmax warps[QUANTIZED_WARPS];
    const int groups = (x.columns + 31) / 32, vocab = to.vocab;
    const QuantizedInput input(vector, weight, groups);
    const auto row = [=](int strip, int r, int& matrix) {
        matrix = 0;
        return min(2 * strip + r, vocab - 1);
    };
    QuantizedStream<2, QUANTIZED_DEPTH_2, decltype(row)> stream(weight, groups, (vocab + 1) / 2, row);
    pdl_wait();
    pdl_launch_dependents();
    const float scale = load_normed(input, x, quantization, scratch);
    block_argmax(warp_logits(stream, input, scale, to), warps, to.best);
}

// Chooses the token with the largest logit and writes its embedding to x, the input of the next step.
// Sends the token to the mailbox, and updates `state`.
// Never chooses a token whose logit is NaN or -inf. If every logit is NaN or -inf, the step fails.
//   best: Argmax [blocks], of the blocks of the head kernel on all ranks; unused entries have a logit of -inf
//   other arguments: the fields of StepOutput (step_output.cuh)
//   grid: 1; block: DECODE_SINGLE_BLOCK_THREADS
//   bytes moved: 8 · blocks + one row of the embedding + 4 · columns
template <typename T> __device__ void decode_greedy(const Argmax* best, int blocks, const StepOutput<T>& output) {
    __shared__ Argmax warps[32];
    const int lane = threadIdx.x % 32;
    pdl_wait();
    Argmax own{-INFINITY, NO_TOKEN};
    for (int i = threadIdx.x; i < blocks; i += blockDim.x) own.offer(__ldcg(&best[i].logit), __ldcg(&best[i].token));
    const auto reduce = [&] {
        for (int offset = 16; offset > 0; offset /= 2)
            own.offer(__shfl_xor_sync(ALL_LANES, own.logit, offset), __shfl_xor_sync(ALL_LANES, own.token, offset));
    };
    reduce();
    if (lane == 0) warps[threadIdx.x / 32] = own;
    __syncthreads();
    own = warps[lane];
    reduce();
    // After a failed step, token 0 is the input of the next step, because the lookup below needs a valid token.
    // The host stops at MAILBOX_NO_TOKEN and ignores all later steps.
    const bool has_token = own.logit > -INFINITY;
    const uint32_t token = has_token ? own.token : 0;
    output.write_embedding(token, blockDim.x);
    if (threadIdx.x == 0) output.send(token, has_token, output.state[STATE_STEPS]);
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * DECODE_MAX_WARPS, 1)                                             \
        decode_head_##SUFFIX(const float* x, const float* norm, const T* weight, float* logits, Argmax* best,          \
                             int vocab, int first_token, int columns, float eps, float softcap) {                      \
        decode_head<T>({x, norm, columns, eps}, weight, {logits, best, vocab, first_token, softcap});                  \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(DECODE_SINGLE_BLOCK_THREADS)                                          \
        decode_greedy_##SUFFIX(const Argmax* best, int blocks, const T* embedding, float* x, uint32_t* state,          \
                               volatile uint32_t* mailbox, int mailbox_slots, int columns, float embedding_scale) {    \
        decode_greedy<T>(best, blocks, {embedding, embedding_scale, x, columns, state, mailbox, mailbox_slots});       \
    }
DEFINE(__nv_bfloat16, bf16)
DEFINE(__half, f16)

extern "C" __global__ void __launch_bounds__(32 * QUANTIZED_WARPS, 1)
    quantized_head(const float* x, const float* norm, const __grid_constant__ QuantizedStack weight, float* logits,
                   Argmax* best, int vocab, int first_token, int columns, float eps, float softcap, int quantization,
                   float static_scale) {
    quantized_head({x, norm, columns, eps}, weight, {logits, best, vocab, first_token, softcap},
                   {quantization, static_scale});
}

// Looks up the embedding of the token in `state` and writes embedding · embedding_scale to x.
// Runs after decode_greedy or decode_sample if the embedding is quantized.
//   embedding: one quantized matrix [vocab, columns]
//   state: see decode/mod.rs
//   x: f32 [columns]
//   grid: ceil(columns / 8 / ELEMENT_THREADS); block: ELEMENT_THREADS, one thread per 8 columns
//   bytes moved: one row of the embedding + 4 · columns
extern "C" __global__ void __launch_bounds__(ELEMENT_THREADS)
    quantized_next(const __grid_constant__ QuantizedStack embedding, const uint32_t* state, float* x, int columns,
                   float embedding_scale) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    pdl_wait();
    pdl_launch_dependents();
    if (8 * i >= columns) return;
    const int row = __ldcg(state + STATE_TOKEN);
    with_format(embedding.matrices[0].format, [&](auto format) {
        const EightValues v =
            dequantize8<decltype(format)::value>(embedding.matrices[0], row, i / 4, i % 4, (columns + 31) / 32);
        const auto scaled = [=](float4 a) {
            return make_float4(a.x * embedding_scale, a.y * embedding_scale, a.z * embedding_scale,
                               a.w * embedding_scale);
        };
        float4* to = reinterpret_cast<float4*>(x) + 2 * i;
        to[0] = scaled(v.first);
        to[1] = scaled(v.second);
    });
}
