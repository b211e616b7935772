// Samples one token from each row of logits, with temperature, top-k, top-p and min-p.
// Chooses the same tokens as decode/sample.cu, given the same logits, parameters and numbers of earlier draws.
// Ignores the penalties in `params`. To apply penalties, launch apply_penalties or edit_rows (row_edits.cu) first.
//   logits: f32 [rows, vocab]
//   params: SamplingKernelParams [rows]; temperature 0 chooses the largest logit
//   tokens: u32 [rows], the chosen tokens, or NO_TOKEN if every logit of the row is NaN or -inf
//   mailbox: null, or u32 [rows] in host memory: the chosen tokens + 1, or MAILBOX_NO_TOKEN
//   grid: rows; block: SAMPLE_THREADS
//   bytes moved: 4 · vocab per read of a row; later reads hit L2
//     With temperature 0, a row is read once.
//     Otherwise, a row is read twice, and one warp's part of it once more. Top-k and top-p each add 4 reads.
#include "sampling/sampling.cuh"

// One row of logits and its temperature.
struct Row {
    const float* logits;
    int vocab;
    float best, inverse_temperature;
    uint32_t top;  // the key of the largest logit

    // Returns the key of a token, or 0 if its logit is NaN.
    __device__ __forceinline__ uint32_t key(int id) const {
        const float logit = __ldcg(logits + id);
        return isnan(logit) ? 0 : sort_key(logit + 0.0f);  // -0 becomes +0, so that both zeros have the same key
    }
    // Returns the probability mass of the token with sort key `key`, in units of 2^-40 of the most likely token's mass.
    __device__ __forceinline__ unsigned long long mass(uint32_t key) const {
        if (key == 0) return 0;
        return key == top ? UNIT : expf((from_sort_key(key) - best) * inverse_temperature) * UNIT;
    }
};

// Returns the largest sort key k (see sort_key) for which the tokens with keys >= k together reach the target.
// Ignores tokens with keys below `floor` and tokens without probability mass.
// If BY_MASS is true, the target is a probability mass: `share` times the total mass. `target` is then ignored.
// If BY_MASS is false, the target is a number of tokens, `target`. `share` is then ignored.
template <bool BY_MASS>
__device__ uint32_t threshold(const Row& row, uint32_t floor, float share, unsigned long long target,
                              unsigned long long* warps) {
    __shared__ unsigned long long bins[SAMPLE_BINS];
    uint32_t prefix = 0;
    for (int round = 0; round < SAMPLE_ROUNDS; ++round) {
        const int shift = 24 - 8 * round;
        if (threadIdx.x < SAMPLE_BINS) bins[threadIdx.x] = 0;
        __syncthreads();
        // All lanes of a warp take part in the warp votes below, so all threads run the same number of iterations.
        for (int base = 0; base < row.vocab; base += SAMPLE_THREADS) {
            const int id = base + threadIdx.x;
            const uint32_t key = id < row.vocab ? row.key(id) : 0;
            const unsigned long long mass = row.mass(key);
            const bool counts = mass > 0 && key >= floor && (round == 0 || key >> (shift + 8) == prefix);
            // The keys of a warp usually fall into few bins.
            // The warp first sums its masses or counts per bin, so that each bin needs only one atomicAdd per warp.
            uint32_t left = __ballot_sync(0xffffffffu, counts);
            while (left) {
                const uint32_t bin = __shfl_sync(0xffffffffu, key >> shift & 255, __ffs(left) - 1);
                const bool is_in = counts && (key >> shift & 255) == bin;
                unsigned long long sum = is_in ? (BY_MASS ? mass : 1ull) : 0;
                for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
                if (threadIdx.x % 32 == 0) atomicAdd(&bins[bin], sum);
                left &= ~__ballot_sync(0xffffffffu, is_in);
            }
        }
        __syncthreads();
        const int bin = SAMPLE_BINS - 1 - threadIdx.x;  // see choose_bin
        const unsigned long long value = bin >= 0 ? bins[bin] : 0;
        choose_bin<BY_MASS>(value, round == 0, share, target, prefix, warps);
    }
    return prefix;
}

extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 1)
    sample_rows(const float* logits, const uint32_t* param_words, uint32_t* tokens, volatile uint32_t* mailbox,
                int vocab) {
    __shared__ unsigned long long warps[32];
    __shared__ uint32_t top_key, winner;
    const SamplingKernelParams params =
        *reinterpret_cast<const SamplingKernelParams*>(param_words + (size_t)blockIdx.x * SAMPLE_PARAM_WORDS);
    const auto choose = [&](uint32_t token) {
        tokens[blockIdx.x] = token;
        if (mailbox != nullptr) mailbox[blockIdx.x] = token == NO_TOKEN ? MAILBOX_NO_TOKEN : token + 1;
    };
    const bool is_greedy = params.temperature == 0.0f;
    Row row{logits + (size_t)blockIdx.x * vocab, vocab, 0.0f, 1.0f / fmaxf(params.temperature, 1e-6f), 0};
    if (threadIdx.x == 0) top_key = 0, winner = NO_TOKEN;
    __syncthreads();

    // 1. Find the largest logit. If several tokens have the largest logit, greedy sampling chooses the lowest token id.
    uint32_t top = 0, first = NO_TOKEN;
    for (int id = threadIdx.x; id < vocab; id += SAMPLE_THREADS) {
        const uint32_t key = row.key(id);
        if (key > top) top = key, first = id;
    }
    const uint32_t warp_top = __reduce_max_sync(0xffffffffu, top);
    if (threadIdx.x % 32 == 0) atomicMax(&top_key, warp_top);
    __syncthreads();
    row.top = top_key, row.best = from_sort_key(row.top);
    if (row.top <= sort_key(-INFINITY) || is_greedy) {
        if (top == row.top) atomicMin(&winner, first);
        __syncthreads();
        if (threadIdx.x == 0) choose(row.top <= sort_key(-INFINITY) ? NO_TOKEN : winner);
        return;
    }

    // 2. Find the smallest key that top-k and top-p keep.
    uint32_t floor = 1;
    if (params.top_k > 0 && params.top_k < vocab)
        floor = max(floor, threshold<false>(row, floor, 0.0f, params.top_k, warps));
    if (params.top_p < 1.0f) floor = max(floor, threshold<true>(row, floor, params.top_p, 0, warps));
    const unsigned long long min_mass = (unsigned long long)(params.min_p * UNIT);
    const auto kept_mass = [&](int id) {
        const uint32_t key = row.key(id);
        const unsigned long long mass = row.mass(key);
        return key < floor || mass < min_mass ? 0ull : mass;
    };

    // 3. Draw a random point below the total mass. The first token whose cumulative mass exceeds the point is chosen.
    // Each warp sums a contiguous range of ids, so that the cumulative mass follows the order of the ids.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int ids = (vocab + 31) / 32, begin = warp * ids, end = min(begin + ids, vocab);
    unsigned long long own = 0;
    for (int id = begin + lane; id < end; id += 32) own += kept_mass(id);
    for (int offset = 16; offset > 0; offset /= 2) own += __shfl_xor_sync(0xffffffffu, own, offset);
    __syncthreads();
    if (lane == 0) warps[warp] = own;
    __syncthreads();
    unsigned long long before = 0, all = 0;
    for (int w = 0; w < SAMPLE_THREADS / 32; ++w) {
        if (w == warp) before = all;
        all += warps[w];
    }
    const unsigned long long seed = (unsigned long long)params.seed[1] << 32 | params.seed[0];
    const unsigned long long point =
        min((unsigned long long)(uniform(seed, params.sampled_before) * (double)all), all - 1);
    if (before <= point && point < before + own) {  // true in exactly one warp, for all its lanes
        for (int base = begin; base < end; base += 32) {
            const int id = base + lane;
            const unsigned long long mass = id < end ? kept_mass(id) : 0;
            unsigned long long sum = mass;
            for (int offset = 1; offset < 32; offset *= 2) {
                const unsigned long long other = __shfl_up_sync(0xffffffffu, sum, offset);
                if (lane >= offset) sum += other;
            }
            if (mass > 0 && before + sum > point && before + sum - mass <= point) choose(id);
            before += __shfl_sync(0xffffffffu, sum, 31);
            if (before > point) break;
        }
    }
}

// Applies penalties to the logits of tokens that have appeared before.
//   logits: f32 [rows, vocab]
//   params: SamplingKernelParams [rows]
//   seen: u32 [count, 3]: row, token, 1 + the number of times that the token was generated; each token once per row
//   grid: ceil(count / 256); block: 256
//   bytes moved: 20 · count
extern "C" __global__ void __launch_bounds__(256)
    apply_penalties(float* logits, const uint32_t* param_words, const uint32_t* seen, int count, int vocab) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const uint32_t row = seen[3 * i], token = seen[3 * i + 1], times = seen[3 * i + 2];
    const SamplingKernelParams params =
        *reinterpret_cast<const SamplingKernelParams*>(param_words + (size_t)row * SAMPLE_PARAM_WORDS);
    float& logit = logits[(size_t)row * vocab + token];
    logit = penalize(logit, times - 1, params.repetition_penalty, params.frequency_penalty, params.presence_penalty);
}
