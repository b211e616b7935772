// Edits and masks logits before a token is chosen, and computes log probabilities.
#include "sampling/sampling.cuh"

// Adds values such as logit biases to logits: logits[row, token] += value.
//   logits: f32 [rows, vocab]
//   edits: u32 [count, 3]: row, token, the bits of the f32 value; each token occurs at most once per row
//   grid: ceil(count / ELEMENT_THREADS); block: ELEMENT_THREADS
//   bytes moved: 20 · count
extern "C" __global__ void __launch_bounds__(ELEMENT_THREADS)
    edit_logits(float* logits, const uint32_t* edits, int count, int vocab) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    logits[(size_t)edits[3 * i] * vocab + edits[3 * i + 1]] += __uint_as_float(edits[3 * i + 2]);
}

// Sets a token's logit to -inf if the row's mask does not allow the token.
//   logits: f32 [rows, vocab]
//   masked: u32 [count], the rows of logits to change; each row occurs at most once
//   masks: u32 [count, ceil(vocab / 32)]; bit i of word w: whether token 32 · w + i is allowed
//   grid: (ceil(vocab / ELEMENT_THREADS), count); block: ELEMENT_THREADS
//   bytes moved: at most (4 + 1/8) · vocab · count
extern "C" __global__ void __launch_bounds__(ELEMENT_THREADS)
    mask_logits(float* logits, const uint32_t* masked, const uint32_t* masks, int vocab) {
    const int id = blockIdx.x * blockDim.x + threadIdx.x;
    if (id >= vocab) return;
    const uint32_t word = masks[(size_t)blockIdx.y * ((vocab + 31) / 32) + id / 32];
    if (word >> (id % 32) & 1) return;
    logits[(size_t)masked[blockIdx.y] * vocab + id] = -INFINITY;
}

// Returns a key that is larger for a larger logit, and among equal logits, for a lower token id. NaN counts as -inf.
__device__ __forceinline__ unsigned long long token_key(const float* logits, int id) {
    const float logit = logits[id];
    // The addition turns -0 into +0, so that both zeros have the same key.
    return (unsigned long long)sort_key(isnan(logit) ? -INFINITY : logit + 0.0f) << 32 | ~(uint32_t)id;
}

// Computes the log probabilities of a row's chosen token and of the row's `count` most likely tokens.
// `logits` is f32 [vocab]. `count` is at most `vocab`.
// `chosen` is NO_TOKEN if no token was chosen. The argument of set_chosen is then -inf or NaN.
// Thread 0 calls set_chosen(logprob) once, and set_top(place, id, logprob) for each of the most likely tokens.
// All SAMPLE_THREADS threads of the block must call this function.
template <typename SetChosen, typename SetTop>
__device__ void row_logprobs(const float* logits, int vocab, uint32_t chosen, int count, SetChosen set_chosen,
                             SetTop set_top) {
    __shared__ unsigned long long best;
    __shared__ float sums[SAMPLE_THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Each thread owns the tokens threadIdx.x, threadIdx.x + SAMPLE_THREADS, and so on.
    // `own` is the largest of their keys that no earlier round of the loop below has found.
    unsigned long long own = 0;
    for (int id = threadIdx.x; id < vocab; id += SAMPLE_THREADS) own = max(own, token_key(logits, id));
    float largest = 0.0f, log_sum = 0.0f;
    for (int place = 0; place < max(count, 1); ++place) {
        if (threadIdx.x == 0) best = 0;
        __syncthreads();
        const unsigned long long warp_best = warp_max(own);
        if (lane == 0) atomicMax(&best, warp_best);
        __syncthreads();
        const unsigned long long found = best;
        const uint32_t token = ~(uint32_t)found;
        const float logit = from_sort_key(found >> 32);
        if (place == 0) {
            largest = logit;
            float sum = 0.0f;
            for (int id = threadIdx.x; id < vocab; id += SAMPLE_THREADS) {
                const float v = logits[id];
                if (!isnan(v)) sum += expf(v - largest);
            }
            sum = warp_sum(sum);
            if (lane == 0) sums[warp] = sum;
            __syncthreads();
            sum = 0.0f;
            for (int w = 0; w < SAMPLE_THREADS / 32; ++w) sum += sums[w];
            log_sum = logf(sum);
            if (threadIdx.x == 0) {
                const float v = chosen < (uint32_t)vocab ? logits[chosen] : -INFINITY;
                set_chosen((isnan(v) ? -INFINITY : v) - largest - log_sum);
            }
        }
        if (threadIdx.x == 0 && place < count) set_top(place, token, logit - largest - log_sum);
        // The warp of the thread that owns `token` finds this thread's next largest key.
        const int owner = token % SAMPLE_THREADS;
        if (warp == owner / 32) {
            unsigned long long next = 0;
            for (int id = owner + lane * SAMPLE_THREADS; id < vocab; id += 32 * SAMPLE_THREADS) {
                const unsigned long long key = token_key(logits, id);
                if (key < found) next = max(next, key);
            }
            next = warp_max(next);
            if (threadIdx.x == owner) own = next;
        }
        __syncthreads();  // wait, because the next round sets `best` to 0
    }
}

// Computes the log probabilities of each row's chosen token and of the row's `count` most likely tokens.
// If tokens have equal logits, the token with the lower id comes first.
//   logits: f32 [rows, vocab]; chosen: u32 [rows]
//   ids: u32 [rows, count]; logprobs: f32 [rows, 1 + count], with the chosen token first
//   grid: rows; block: SAMPLE_THREADS
//   bytes moved: 8 · vocab for each row; with few rows, the second read hits L2
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 1)
    top_logprobs(const float* logits, const uint32_t* chosen, uint32_t* ids, float* logprobs, int vocab, int count) {
    ids += (size_t)blockIdx.x * count;
    logprobs += (size_t)blockIdx.x * (1 + count);
    row_logprobs(
        logits + (size_t)blockIdx.x * vocab, vocab, chosen[blockIdx.x], count,
        [&](float logprob) { logprobs[0] = logprob; },
        [&](int place, uint32_t id, float logprob) { ids[place] = id, logprobs[1 + place] = logprob; });
}

// Computes the same log probabilities as top_logprobs, for the tokens of a queued step, and sends them to the host.
//   logits: f32 [n, vocab]; the kernel uses only the rows that `rows` names
//   rows: u32 [gridDim.x, LOGPROBS_ROW_WORDS] in host memory:
//     the row of logits, the index of the chosen token in `tokens`, and the number of most likely tokens
//   tokens: u32; each is a chosen token, or NO_TOKEN
//   mailbox: u32 [gridDim.x, LOGPROBS_SLOTS] in host memory
//     A log probability arrives as its inverted bits, and a token id as id + 1.
//   grid: one block per entry of `rows`; block: SAMPLE_THREADS
//   bytes moved: 8 · vocab for each row; with few rows, the second read hits L2
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 1)
    send_logprobs(const float* logits, const uint32_t* rows, const uint32_t* tokens, volatile uint32_t* mailbox,
                  int vocab) {
    rows += (size_t)blockIdx.x * LOGPROBS_ROW_WORDS;
    mailbox += (size_t)blockIdx.x * LOGPROBS_SLOTS;
    // An empty mailbox slot holds 0, so a word must not be 0. The bits of a log probability of 0 are 0, so they are
    // inverted. Inverted bits are 0 only for one of the NaN values, which is replaced by another.
    const auto word = [](float logprob) { return max(~__float_as_uint(logprob), 1u); };
    row_logprobs(
        logits + (size_t)rows[0] * vocab, vocab, tokens[rows[1]], rows[2],
        [&](float logprob) { mailbox[0] = word(logprob); },
        [&](int place, uint32_t id, float logprob) {
            mailbox[1 + 2 * place] = id + 1;
            mailbox[2 + 2 * place] = word(logprob);
        });
}
