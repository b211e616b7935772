// Edits and masks logits before a token is chosen, and computes log probabilities.
#include "sampling/sampling.cuh"

// Adds values such as logit biases to logits: logits[row, token] += value.
//   logits: f32 [rows, vocab]
//   edits: u32 [count, 3]: row, token, the bits of the f32 value; each token occurs at most once per row
//   grid: ceil(count / 256); block: 256
//   bytes moved: 20 · count
extern "C" __global__ void __launch_bounds__(256)
    edit_logits(float* logits, const uint32_t* edits, int count, int vocab) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    logits[(size_t)edits[3 * i] * vocab + edits[3 * i + 1]] += __uint_as_float(edits[3 * i + 2]);
}

// Sets the logits of all tokens that the row's mask does not allow to -inf.
//   logits: f32 [rows, vocab]
//   masked: u32 [count], the rows of logits to change; each row occurs at most once
//   masks: u32 [count, ceil(vocab / 32)]; bit i of word w: whether token 32 · w + i is allowed
//   grid: ceil(vocab / 256), count; block: 256
//   bytes moved: at most 4 · vocab · count
extern "C" __global__ void __launch_bounds__(256)
    mask_logits(float* logits, const uint32_t* masked, const uint32_t* masks, int vocab) {
    const int id = blockIdx.x * blockDim.x + threadIdx.x;
    if (id >= vocab) return;
    const uint32_t word = masks[(size_t)blockIdx.y * ((vocab + 31) / 32) + id / 32];
    if (word >> (id % 32) & 1) return;
    logits[(size_t)masked[blockIdx.y] * vocab + id] = -INFINITY;
}

// Returns a key that orders logits by size. NaN has the same key as -inf.
__device__ __forceinline__ uint32_t logit_key(float logit) { return sort_key(isnan(logit) ? -INFINITY : logit + 0.0f); }

// Computes the log probabilities of each row's chosen token and of the row's `count` most likely tokens.
// If tokens have equal logits, the token with the lower id comes first.
//   logits: f32 [rows, vocab]; chosen: u32 [rows]
//   ids: u32 [rows, count]; logprobs: f32 [rows, 1 + count], with the chosen token first
//   grid: rows; block: SAMPLE_THREADS
//   bytes moved: 4 · vocab for each read of a row; later reads hit L2
//     A row is read max(count, 1) + 1 times.
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 1)
    top_logprobs(const float* logits, const uint32_t* chosen, uint32_t* ids, float* logprobs, int vocab, int count) {
    __shared__ unsigned long long best;
    __shared__ float sums[SAMPLE_THREADS / 32];
    logits += (size_t)blockIdx.x * vocab, ids += (size_t)blockIdx.x * count,
        logprobs += (size_t)blockIdx.x * (1 + count);
    float largest = 0.0f, log_sum = 0.0f;
    // Each round finds the largest (logit, inverted token id) pair that is smaller than the pair of the previous round.
    // The token id is inverted so that the lowest id wins if logits are equal.
    unsigned long long last = ~0ull;
    for (int rank = 0; rank < max(count, 1); ++rank) {
        if (threadIdx.x == 0) best = 0;
        __syncthreads();
        unsigned long long own = 0;
        for (int id = threadIdx.x; id < vocab; id += SAMPLE_THREADS) {
            const unsigned long long pair = (unsigned long long)logit_key(logits[id]) << 32 | ~(uint32_t)id;
            if (pair < last && pair > own) own = pair;
        }
        atomicMax(&best, own);
        __syncthreads();
        last = best;
        const float logit = from_sort_key(last >> 32);
        if (rank == 0) {
            largest = logit;
            float sum = 0.0f;
            for (int id = threadIdx.x; id < vocab; id += SAMPLE_THREADS) {
                const float v = logits[id];
                if (!isnan(v)) sum += expf(v - largest);
            }
            for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
            if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
            __syncthreads();
            sum = 0.0f;
            for (int warp = 0; warp < SAMPLE_THREADS / 32; ++warp) sum += sums[warp];
            log_sum = logf(sum);
            if (threadIdx.x == 0) {
                const float v = logits[chosen[blockIdx.x]];
                logprobs[0] = (isnan(v) ? -INFINITY : v) - largest - log_sum;
            }
        }
        if (threadIdx.x == 0 && rank < count) {
            ids[rank] = ~(uint32_t)last;
            logprobs[1 + rank] = logit - largest - log_sum;
        }
        __syncthreads();
    }
}
