// Samples one token from each row of logits, with temperature, top-k, top-p and min-p.
// Chooses the same tokens as decode/sample.cu, given the same logits, parameters and numbers of earlier draws.
// Ignores the penalties in `params`. To apply penalties, launch apply_penalties or edit_rows (row_edits.cu) first.
//   logits: f32 [rows, vocab]; aligned to 16 bytes if vocab is a multiple of 4
//   params: SamplingKernelParams [rows]; temperature 0 chooses the largest logit
//   tokens: u32 [rows], the chosen tokens, or NO_TOKEN if every logit of the row is NaN or -inf
//   mailbox: null, or u32 [rows] in host memory: the chosen tokens + 1, or MAILBOX_NO_TOKEN
//   grid: rows; block: SAMPLE_THREADS
//   bytes moved: 4 · vocab per read of a row; with few rows, later reads hit L2
//     With temperature 0, a row is read once. Otherwise, it is read twice, and a 32nd of it once more.
//     Top-k and top-p each add 2 reads, or 6 if more than MAX_KEYS_IN_BIN logits are in the bin of the cutoff.
//     Top-k adds only 1 read if fewer than top_k tokens have probability mass.
#include "sampling/sampling.cuh"

// The number of keys near the cutoff of top-k or top-p that fit in shared memory.
constexpr uint32_t MAX_KEYS_IN_BIN = 4096;
constexpr uint32_t ALL_LANES = 0xffffffffu;

// One row of logits and its temperature.
struct Row {
    const float* logits;
    int vocab;
    float best, inverse_temperature;
    uint32_t top;     // the key of the largest logit
    float bin_scale;  // the number of bins per unit of logits

    // Returns the keys of tokens id to id + 3. A key is 0 if the logit is NaN, or if there is no such token.
    // `id` is a multiple of 4.
    __device__ __forceinline__ uint4 keys(int id) const {
        if (vocab % 4 == 0 && id < vocab) {  // the row is aligned to 16 bytes
            const float4 v = __ldcg(reinterpret_cast<const float4*>(logits + id));
            return make_uint4(key_of(v.x), key_of(v.y), key_of(v.z), key_of(v.w));
        }
        const auto key = [&](int id) { return id < vocab ? key_of(__ldcg(logits + id)) : 0; };
        return make_uint4(key(id), key(id + 1), key(id + 2), key(id + 3));
    }
    // Returns the probability mass of the token with sort key `key`, in units of 2^-40 of the most likely token's mass.
    __device__ __forceinline__ unsigned long long mass(uint32_t key) const {
        if (key <= sort_key(-INFINITY)) return 0;
        return key == top ? UNIT : expf((from_sort_key(key) - best) * inverse_temperature) * UNIT;
    }
    // Divides the logits of tokens with mass into SAMPLE_THREADS bins of equal width. `bottom` is the smallest logit
    // above -infinity.
    __device__ __forceinline__ void set_bins(float bottom) {
        // Tokens have no mass if their probability is below e^-27.8 times the largest probability.
        constexpr float RANGE = 27.8f;
        bin_scale = SAMPLE_THREADS / fminf(best - bottom, RANGE / inverse_temperature);
    }
    // Returns the bin of a token with mass. Bin 0 has the largest logits. A larger key is never in a higher bin.
    __device__ __forceinline__ int bin(uint32_t key) const {
        return key == top ? 0 : min((int)((best - from_sort_key(key)) * bin_scale), SAMPLE_THREADS - 1);
    }

private:
    static __device__ __forceinline__ uint32_t key_of(float logit) {
        return isnan(logit) ? 0 : sort_key(logit + 0.0f);  // -0 becomes +0, so that both zeros have the same key
    }
};

__device__ __forceinline__ unsigned long long warp_sum(unsigned long long value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

enum class Order { Forward, Backward };

// Calls `use(id, key)` for four adjacent tokens per thread, then for the next 4 · SAMPLE_THREADS tokens, and so on.
// All threads of a warp call `use` together, with key 0 past the last token.
//   ORDER: with Order::Backward, the last tokens come first. They are still in L2 if the last pass over the row, or the
//     kernel that wrote the row, ended with them.
//   UNROLL: the number of loads that a thread issues before it uses the first result
template <int UNROLL, Order ORDER, typename Use> __device__ __forceinline__ void each_token(const Row& row, Use use) {
    constexpr int STEP = 4 * SAMPLE_THREADS;
    const int steps = (row.vocab + STEP - 1) / STEP;
#pragma unroll UNROLL
    for (int step = 0; step < steps; ++step) {
        const int id = (ORDER == Order::Forward ? step : steps - 1 - step) * STEP + 4 * threadIdx.x;
        const uint4 keys = row.keys(id);
        if constexpr (ORDER == Order::Forward)
            use(id, keys.x), use(id + 1, keys.y), use(id + 2, keys.z), use(id + 3, keys.w);
        else
            use(id + 3, keys.w), use(id + 2, keys.z), use(id + 1, keys.y), use(id, keys.x);
    }
}

// Returns the sum of `own` over the warps of the block, and sets `before` to the sum over the warps before this one.
// All lanes of a warp have the same value of `own`.
__device__ __forceinline__ unsigned long long sum_of_warps(unsigned long long own, unsigned long long* warps,
                                                           unsigned long long& before) {
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
    __syncthreads();
    unsigned long long all = 0;
    for (int w = 0; w < SAMPLE_THREADS / 32; ++w) {
        if (w == threadIdx.x / 32) before = all;
        all += warps[w];
    }
    return all;
}

// Returns the largest sort key k (see sort_key) for which the tokens with keys >= k together reach the target.
// Ignores tokens with keys below `floor` and tokens without probability mass.
// If BY_MASS is true, the target is a probability mass, otherwise a number of tokens.
// `each_key(use)` calls `use(key)` for the keys to search, and the target counts only these keys.
// All lanes of a warp call `use` together.
template <bool BY_MASS, typename EachKey>
__device__ uint32_t threshold(const Row& row, EachKey each_key, uint32_t floor, unsigned long long target,
                              unsigned long long* warps) {
    __shared__ unsigned long long bins[SAMPLE_BINS];
    uint32_t prefix = 0;
#pragma unroll 1  // the loop is long, and unrolling does not make it faster
    for (int round = 0; round < SAMPLE_ROUNDS; ++round) {
        const int shift = 24 - 8 * round;
        if (threadIdx.x < SAMPLE_BINS) bins[threadIdx.x] = 0;
        __syncthreads();
        each_key([&](uint32_t key) {
            const unsigned long long mass = row.mass(key);
            const bool counts = mass > 0 && key >= floor && (round == 0 || key >> (shift + 8) == prefix);
            // The keys of a warp usually fall into few bins.
            // The warp first sums its masses or counts per bin, so that each bin needs only one atomicAdd per warp.
            uint32_t left = __ballot_sync(ALL_LANES, counts);
            while (left) {
                const uint32_t bin = __shfl_sync(ALL_LANES, key >> shift & 255, __ffs(left) - 1);
                const bool is_in = counts && (key >> shift & 255) == bin;
                const unsigned long long sum = warp_sum(is_in ? (BY_MASS ? mass : 1ull) : 0);
                if (threadIdx.x % 32 == 0) atomicAdd(&bins[bin], sum);
                left &= ~__ballot_sync(ALL_LANES, is_in);
            }
        });
        __syncthreads();
        const int bin = SAMPLE_BINS - 1 - threadIdx.x;  // see choose_bin
        const unsigned long long value = bin >= 0 ? bins[bin] : 0;
        choose_bin<BY_MASS>(value, false, 0.0f, target, prefix, warps);
    }
    return prefix;
}

// Shared memory of `cutoff`.
struct CutoffMemory {
    unsigned long long bins[SAMPLE_THREADS];  // the mass or the number of the tokens in each bin (see Row::bin)
    uint32_t keys[MAX_KEYS_IN_BIN];           // the keys in the chosen bin, in any order
    uint32_t count;                           // the number of these keys; can exceed MAX_KEYS_IN_BIN
    int bin;                                  // the chosen bin
    unsigned long long all, rest;             // the sum of all bins, and the part of the target that `bin` contributes
};

// Returns the result of `threshold` for the keys of all tokens, or 0 if the tokens together do not reach the target.
// If BY_MASS is true, the target is `share` of the mass of all tokens with keys >= floor. `target` is then ignored.
// A histogram finds the bin of the result, and `threshold` searches only the keys in this bin.
template <bool BY_MASS>
__device__ uint32_t cutoff(const Row& row, uint32_t floor, float share, unsigned long long target, CutoffMemory& memory,
                           unsigned long long* warps) {
    __syncthreads();  // slower warps may still read `memory` for an earlier cutoff
    memory.bins[threadIdx.x] = 0;
    if (threadIdx.x == 0) memory.count = 0, memory.bin = 0, memory.rest = 0;
    __syncthreads();
    each_token<2, Order::Forward>(row, [&](int, uint32_t key) {
        const unsigned long long mass = row.mass(key);
        if (mass > 0 && key >= floor) atomicAdd(&memory.bins[row.bin(key)], BY_MASS ? mass : 1ull);
    });
    __syncthreads();
    const unsigned long long value = memory.bins[threadIdx.x], sum = inclusive_scan(value, warps);
    if (threadIdx.x == SAMPLE_THREADS - 1) memory.all = sum;
    __syncthreads();
    if (BY_MASS) target = (double)share * (double)memory.all;
    if (target > memory.all) return 0;
    // If the target is 0, choose the first bin that is not empty.
    if (value > 0 && sum >= target && sum - value < max(target, 1ull))
        memory.bin = threadIdx.x, memory.rest = target - min(target, sum - value);
    __syncthreads();
    const int bin = memory.bin;
    each_token<2, Order::Backward>(row, [&](int, uint32_t key) {
        const bool is_in = key >= floor && row.bin(key) == bin && row.mass(key) > 0;
        const uint32_t lanes = __ballot_sync(ALL_LANES, is_in);
        if (lanes == 0) return;
        uint32_t first = 0;
        if (threadIdx.x % 32 == 0) first = atomicAdd(&memory.count, __popc(lanes));
        const uint32_t at = __shfl_sync(ALL_LANES, first, 0) + __popc(lanes & ((1u << threadIdx.x % 32) - 1));
        if (is_in && at < MAX_KEYS_IN_BIN) memory.keys[at] = key;
    });
    __syncthreads();
    const uint32_t count = memory.count;
    if (count > MAX_KEYS_IN_BIN) {
        const auto all_keys = [&](auto use) {
            each_token<1, Order::Forward>(row, [&](int, uint32_t key) { use(key); });
        };
        return threshold<BY_MASS>(row, all_keys, floor, target, warps);
    }
    const auto keys_in_bin = [&](auto use) {
        for (uint32_t base = 0; base < count; base += SAMPLE_THREADS)
            use(base + threadIdx.x < count ? memory.keys[base + threadIdx.x] : 0);
    };
    return threshold<BY_MASS>(row, keys_in_bin, floor, memory.rest, warps);
}

extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 1)
    sample_rows(const float* logits, const uint32_t* param_words, uint32_t* tokens, volatile uint32_t* mailbox,
                int vocab) {
    __shared__ unsigned long long warps[32];
    __shared__ CutoffMemory cutoff_memory;
    __shared__ uint32_t top_key, bottom_key, winner;
    __shared__ int range_start;
    __shared__ unsigned long long range_point;
    const SamplingKernelParams params =
        *reinterpret_cast<const SamplingKernelParams*>(param_words + (size_t)blockIdx.x * SAMPLE_PARAM_WORDS);
    const auto choose = [&](uint32_t token) {
        tokens[blockIdx.x] = token;
        if (mailbox != nullptr) mailbox[blockIdx.x] = token == NO_TOKEN ? MAILBOX_NO_TOKEN : token + 1;
    };
    const bool is_greedy = params.temperature == 0.0f;
    Row row{logits + (size_t)blockIdx.x * vocab, vocab, 0.0f, 1.0f / fmaxf(params.temperature, 1e-6f), 0, 0.0f};
    if (threadIdx.x == 0) top_key = 0, bottom_key = NO_TOKEN, winner = NO_TOKEN;
    __syncthreads();

    // 1. Find the largest logit. If several tokens have the largest logit, greedy sampling chooses the lowest token id.
    uint32_t top = 0, bottom = NO_TOKEN, first = NO_TOKEN;  // `bottom` is the smallest key of a logit above -infinity
    each_token<4, Order::Backward>(row, [&](int id, uint32_t key) {
        if (key >= top) top = key, first = id;
        if (key > sort_key(-INFINITY)) bottom = min(bottom, key);
    });
    const uint32_t warp_top = __reduce_max_sync(ALL_LANES, top);
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
    const uint32_t warp_bottom = __reduce_min_sync(ALL_LANES, bottom);
    if (threadIdx.x % 32 == 0) atomicMin(&bottom_key, warp_bottom);
    __syncthreads();
    row.set_bins(from_sort_key(bottom_key));
    uint32_t floor = 1;
    if (params.top_k > 0 && params.top_k < vocab)
        floor = max(floor, cutoff<false>(row, floor, 0.0f, params.top_k, cutoff_memory, warps));
    if (params.top_p < 1.0f) floor = max(floor, cutoff<true>(row, floor, params.top_p, 0, cutoff_memory, warps));
    // The most likely token is always kept.
    const unsigned long long min_mass = min((unsigned long long)(params.min_p * UNIT), (unsigned long long)UNIT);
    const auto kept_mass = [&](uint32_t key) {
        const unsigned long long mass = row.mass(key);
        return key < floor || mass < min_mass ? 0ull : mass;
    };

    // 3. Draw a random point below the total mass. The first token whose cumulative mass exceeds the point is chosen.
    // Each warp sums a contiguous range of ids, so that the cumulative mass follows the order of the ids.
    // The block divides the range that contains the point in the same way, and then one warp searches a small range.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto mass_of_range = [&](int start, int end) {
        unsigned long long own = 0;
#pragma unroll 4
        for (int id = start + 4 * lane; id < end; id += 128) {
            const uint4 keys = row.keys(id);
            own += kept_mass(keys.x) + kept_mass(keys.y) + kept_mass(keys.z) + kept_mass(keys.w);
        }
        return warp_sum(own);
    };
    constexpr int WARPS = SAMPLE_THREADS / 32;
    const int ids = (vocab + 4 * WARPS * WARPS - 1) / (4 * WARPS * WARPS) * 4;  // the number of ids in a small range
    unsigned long long before = 0, point = 0;
    for (int size = ids * WARPS, start = 0; size >= ids; size /= WARPS) {
        const int first_id = start + warp * size;
        const unsigned long long own = mass_of_range(first_id, min(first_id + size, vocab));
        const unsigned long long all = sum_of_warps(own, warps, before);
        if (size > ids) {
            const unsigned long long seed = (unsigned long long)params.seed[1] << 32 | params.seed[0];
            point = min((unsigned long long)(uniform(seed, params.sampled_before) * (double)all), all - 1);
        }
        if (lane == 0 && before <= point && point < before + own)  // true in exactly one warp
            range_start = first_id, range_point = point - before;
        __syncthreads();
        start = range_start, point = range_point;
    }
    if (warp > 0) return;
    for (int base = range_start;; base += 128) {
        const uint4 keys = row.keys(base + 4 * lane);
        const unsigned long long masses[4] = {kept_mass(keys.x), kept_mass(keys.y), kept_mass(keys.z),
                                              kept_mass(keys.w)};
        const unsigned long long own = masses[0] + masses[1] + masses[2] + masses[3];
        unsigned long long sum = own;  // the masses of this lane and of all lanes before it
        for (int offset = 1; offset < 32; offset *= 2) {
            const unsigned long long other = __shfl_up_sync(ALL_LANES, sum, offset);
            if (lane >= offset) sum += other;
        }
        const unsigned long long all = __shfl_sync(ALL_LANES, sum, 31);
        if (point < all) {
            unsigned long long reached = sum - own;
            for (int i = 0; i < 4; ++i) {
                if (reached <= point && point < reached + masses[i]) choose(base + 4 * lane + i);
                reached += masses[i];
            }
            return;
        }
        point -= all;
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
