// Samples one token from each row of logits, with temperature, top-k, top-p and min-p.
// Ignores the penalties in `params`. To apply penalties, launch apply_penalties or edit_rows (row_edits.cu) first.
// Given the same penalized logits, parameters and number of earlier draws, chooses the same token as decode/sample.cu.
//   logits: f32 [rows, vocab]; aligned to 16 bytes if vocab is a multiple of 4
//   params: SamplingKernelParams [rows]; temperature 0 chooses the largest logit
//   tokens: u32 [rows], the chosen tokens, or NO_TOKEN if every logit of the row is NaN or -inf
//   mailbox: null, or u32 [rows] in host memory: the chosen tokens + 1, or MAILBOX_NO_TOKEN
//   grid: BLOCKS · rows, in clusters of BLOCKS; block: SAMPLE_THREADS
//   bytes moved: 4 · vocab per read of a row; with few rows, later reads hit L2
//     With temperature 0, a row is read once. Otherwise, it is read twice, and 1 / (32 · BLOCKS) of it once more.
//     Top-k and top-p each add 2 reads. Top-k adds only 1 read if fewer than top_k tokens have probability mass.
//     A block with more than MAX_KEYS_IN_BIN logits in the bin of the cutoff adds 6 reads of its part of the row
//     instead of 2.
//
// The BLOCKS blocks of a cluster divide the token ids of a row, so that few rows occupy more multiprocessors.
// They add up their counts and masses, which are integers, so the chosen token does not depend on BLOCKS.
// Code for GPUs before Hopper, which have no clusters, always uses one block per row.
#include "headers/cluster.cuh"
#include "sampling/cutoff_search.cuh"

// The number of keys from the bin of the top-k or top-p cutoff that fit in a block's shared memory (CutoffMemory).
constexpr uint32_t MAX_KEYS_IN_BIN = 4096;

// One row of logits, this block's part of the token ids, and values for the whole row.
struct Row {
    const float* logits;
    int vocab;
    int start, end;  // the first id of this block, a multiple of 4, and the id after its last one
    float inverse_temperature;
    float best_logit = 0.0f;  // the largest logit
    uint32_t best_key = 0;    // its key
    float bin_scale = 0.0f;   // the number of bins per unit of logits

    // Returns the logits of tokens id to id + 3, or NaN for tokens that are not below `end`. `id` is a multiple of 4.
    // ALIGNED requires that the row is aligned to 16 bytes and that `end` is a multiple of 4.
    template <bool ALIGNED> __device__ __forceinline__ float4 load(int id, int end) const {
        if constexpr (ALIGNED) {
            float4 v = make_float4(NAN, NAN, NAN, NAN);
            if (id < end) v = __ldcg(reinterpret_cast<const float4*>(logits + id));
            return v;
        }
        const auto value = [&](int id) { return id < end ? __ldcg(logits + id) : NAN; };
        return make_float4(value(id), value(id + 1), value(id + 2), value(id + 3));
    }
    // Returns the logits of tokens id to id + 3, or NaN for tokens of other blocks. `id` is a multiple of 4.
    __device__ __forceinline__ float4 load(int id) const {
        return vocab % 4 == 0 ? load<true>(id, end) : load<false>(id, end);
    }
    // Returns the probability mass of the token with sort key `key`.
    __device__ __forceinline__ unsigned long long mass(uint32_t key) const {
        return probability_mass(key, best_key, inverse_temperature);
    }
    // Divides the logits of tokens with mass into SAMPLE_THREADS bins of equal width. `bottom` is the smallest logit
    // above -infinity.
    __device__ __forceinline__ void set_bins(float bottom) {
        // Tokens have no mass if their probability is below 2^-40 times the largest one. e^-RANGE is slightly less.
        constexpr float RANGE = 27.8f;
        bin_scale = SAMPLE_THREADS / fminf(best_logit - bottom, RANGE / inverse_temperature);
    }
    // Returns the bin of a token with mass. Bin 0 has the largest logits. A larger key is never in a higher bin.
    __device__ __forceinline__ int bin(uint32_t key) const {
        return key == best_key ? 0 : min((int)((best_logit - from_sort_key(key)) * bin_scale), SAMPLE_THREADS - 1);
    }
};

// Waits for all threads of the row's blocks. Each of them then sees the earlier stores of all others to shared memory.
template <int BLOCKS> __device__ __forceinline__ void sync_row() {
#if __CUDA_ARCH__ >= 900
    if constexpr (BLOCKS > 1) return cluster_sync();
#endif
    __syncthreads();
}

// `own` points to a variable in this block's shared memory. Returns the address of the same variable in another block
// of the row. `block` is the index of that block among the row's blocks. The caller must call sync_row after the last
// store to this address and before the load, and again before the next store to it or the end of that block.
template <int BLOCKS, typename V> __device__ __forceinline__ const V* in_block_of_row(const V* own, int block) {
#if __CUDA_ARCH__ >= 900
    if constexpr (BLOCKS > 1) return in_block_of_cluster(own, block);
#endif
    return own;
}
// Combines the values that `own` points to in all blocks of the row: returns combine(combine(v0, v1), v2) and so on,
// where vi is the value in block i. Callers must call sync_row as for in_block_of_row.
template <int BLOCKS, typename V, typename Combine>
__device__ __forceinline__ V of_all_blocks(const V* own, Combine combine) {
    V values[BLOCKS];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) values[block] = *in_block_of_row<BLOCKS>(own, block);
    V all = values[0];
#pragma unroll
    for (int block = 1; block < BLOCKS; ++block) all = combine(all, values[block]);
    return all;
}
template <int BLOCKS> __device__ __forceinline__ unsigned long long sum_of_blocks(const unsigned long long* own) {
    return of_all_blocks<BLOCKS>(own, [](unsigned long long a, unsigned long long b) { return a + b; });
}

enum class Order { Forward, Backward };

// Calls `use(id, logits)` with the logits of tokens id to id + 3, where id is start + offset, then start + stride +
// offset, and so on. Tokens that are not below `end` have logit NaN. Threads with equal `start`, `end` and `stride`
// make the same number of calls, so the lanes of a warp can exchange values in `use`.
//   ORDER: Order::Backward reverses the order of the calls. The last tokens may still be in L2 if the previous pass
//     over the row, or the kernel that wrote the row, ended with them.
//   UNROLL: the unroll factor, so that a thread can have the loads of UNROLL calls in flight
template <int UNROLL, Order ORDER, typename Use>
__device__ __forceinline__ void each_four(const Row& row, int start, int end, int stride, int offset, Use use) {
    const int count = (end - start + stride - 1) / stride;
    const auto loop = [&](auto load) {
#pragma unroll UNROLL
        for (int i = 0; i < count; ++i) {
            const int id = start + (ORDER == Order::Forward ? i : count - 1 - i) * stride + offset;
            use(id, load(id));
        }
    };
    // Test the alignment outside of the loop: a branch in the loop would keep its loads from being in flight together.
    if (row.vocab % 4 == 0)
        loop([&](int id) { return row.load<true>(id, end); });
    else
        loop([&](int id) { return row.load<false>(id, end); });
}

// Calls each_four for the tokens of this block. Each thread gets four adjacent tokens of every 4 · SAMPLE_THREADS
// tokens.
template <int UNROLL, Order ORDER, typename Use>
__device__ __forceinline__ void each_four_of_block(const Row& row, Use use) {
    each_four<UNROLL, ORDER>(row, row.start, row.end, 4 * SAMPLE_THREADS, 4 * threadIdx.x, use);
}

// Calls `use(key)` with the sort key (see logit_key) of each token of this block. All threads make the same number of
// calls. Past the last token, the key is 0.
template <int UNROLL, Order ORDER, typename Use>
__device__ __forceinline__ void each_key_of_block(const Row& row, Use use) {
    each_four_of_block<UNROLL, ORDER>(row, [&](int, const float4& v) {
        use(logit_key(v.x)), use(logit_key(v.y)), use(logit_key(v.z)), use(logit_key(v.w));
    });
}

// Returns the largest sort key k (see sort_key) for which the tokens with keys >= k together reach the target.
// Ignores tokens with keys below `floor` and tokens without probability mass.
// If BY_MASS is true, the target is a probability mass, otherwise a number of tokens.
// `each_key(use)` calls `use(key)` for the keys that this block searches. All lanes of a warp call `use` together.
// Only the keys that the blocks of the row search count toward the target.
template <int BLOCKS, bool BY_MASS, typename EachKey>
__device__ uint32_t cutoff_in_bin(const Row& row, EachKey each_key, uint32_t floor, unsigned long long target,
                                  unsigned long long* warp_values) {
    // Other blocks can still read the bins of a round during the next round, but not during the round after it.
    __shared__ unsigned long long bins_of_rounds[2][SAMPLE_BINS];
    CutoffSearch<BY_MASS> search{target};
#pragma unroll 1  // the loop is long, and unrolling does not make it faster
    while (search.round < SAMPLE_ROUNDS) {
        unsigned long long* const bins = bins_of_rounds[search.round % 2];
        if (threadIdx.x < SAMPLE_BINS) bins[threadIdx.x] = 0;
        __syncthreads();
        each_key([&](uint32_t key) {
            const unsigned long long mass = row.mass(key);
            const bool counts = mass > 0 && key >= floor && search.has_prefix(key);
            // The keys of a warp usually fall into few bins.
            // The warp first sums its masses or counts per bin, so that each bin needs only one atomicAdd per warp.
            uint32_t left = __ballot_sync(ALL_LANES, counts);
            while (left) {
                const uint32_t bin = __shfl_sync(ALL_LANES, search.bin_of(key), __ffs(left) - 1);
                const bool is_in = counts && search.bin_of(key) == bin;
                const unsigned long long sum = warp_sum(is_in ? (BY_MASS ? mass : 1ull) : 0);
                if (threadIdx.x % 32 == 0) atomicAdd(&bins[bin], sum);
                left &= ~__ballot_sync(ALL_LANES, is_in);
            }
        });
        sync_row<BLOCKS>();
        const int bin = search.own_bin();
        search.end_round(bin >= 0 ? sum_of_blocks<BLOCKS>(&bins[bin]) : 0, false, 0.0f, warp_values);
    }
    return search.prefix;
}

// Shared memory of `row_cutoff`.
struct CutoffMemory {
    // The mass or the number of this block's tokens in each bin (see Row::bin).
    unsigned long long bins[SAMPLE_THREADS];
    // This block's keys in the chosen bin, in any order.
    uint32_t keys[MAX_KEYS_IN_BIN];
    // The number of these keys. It can exceed MAX_KEYS_IN_BIN.
    uint32_t count;
    // The chosen bin.
    int bin;
    // The sum of the bins of all blocks, and the part of the target in the chosen bin.
    unsigned long long all, rest;
};

// Returns the result of `cutoff_in_bin` for the keys of all tokens, or 0 if the tokens together do not reach the
// target. If BY_MASS is true, the target is `share` times the mass of all tokens with keys >= floor. Otherwise, the
// target is `target` tokens. A histogram finds the bin of the result, and `cutoff_in_bin` searches only the keys in
// this bin.
template <int BLOCKS, bool BY_MASS>
__device__ uint32_t row_cutoff(const Row& row, uint32_t floor, float share, unsigned long long target,
                               CutoffMemory& memory, unsigned long long* warp_values) {
    sync_row<BLOCKS>();  // slower warps may still read `memory` for an earlier cutoff
    memory.bins[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        memory.count = 0;
        memory.bin = 0;
        memory.rest = 0;
    }
    __syncthreads();
    each_key_of_block<2, Order::Forward>(row, [&](uint32_t key) {
        const unsigned long long mass = row.mass(key);
        if (mass > 0 && key >= floor) atomicAdd(&memory.bins[row.bin(key)], BY_MASS ? mass : 1ull);
    });
    sync_row<BLOCKS>();
    const unsigned long long value = sum_of_blocks<BLOCKS>(&memory.bins[threadIdx.x]);
    const unsigned long long sum = inclusive_scan(value, warp_values);
    if (threadIdx.x == SAMPLE_THREADS - 1) memory.all = sum;
    __syncthreads();
    if (BY_MASS) target = (double)share * (double)memory.all;
    if (target > memory.all) return 0;
    // If the target is 0, choose the first bin that is not empty.
    if (value > 0 && sum >= target && sum - value < max(target, 1ull)) {
        memory.bin = threadIdx.x;
        memory.rest = target - min(target, sum - value);
    }
    __syncthreads();
    const int bin = memory.bin;
    const auto is_in_bin = [&](uint32_t key) { return key >= floor && row.bin(key) == bin && row.mass(key) > 0; };
    each_key_of_block<2, Order::Backward>(row, [&](uint32_t key) {
        const bool is_in = is_in_bin(key);
        const uint32_t lanes = __ballot_sync(ALL_LANES, is_in);
        if (lanes == 0) return;
        uint32_t first = 0;
        if (threadIdx.x % 32 == 0) first = atomicAdd(&memory.count, __popc(lanes));
        const uint32_t at = __shfl_sync(ALL_LANES, first, 0) + __popc(lanes & ((1u << threadIdx.x % 32) - 1));
        if (is_in && at < MAX_KEYS_IN_BIN) memory.keys[at] = key;
    });
    __syncthreads();
    const uint32_t count = memory.count;
    const auto keys_in_bin = [&](auto use) {
        if (count > MAX_KEYS_IN_BIN)
            return each_key_of_block<1, Order::Forward>(row, [&](uint32_t key) { use(is_in_bin(key) ? key : 0); });
        for (uint32_t base = 0; base < count; base += SAMPLE_THREADS)
            use(base + threadIdx.x < count ? memory.keys[base + threadIdx.x] : 0);
    };
    return cutoff_in_bin<BLOCKS, BY_MASS>(row, keys_in_bin, floor, memory.rest, warp_values);
}

// A sort key, and the token that has it.
struct alignas(8) KeyAndToken {
    uint32_t key, token;
};

// The extreme logits of a block's tokens.
struct Extremes {
    KeyAndToken best;  // the largest logit and the lowest token id with this logit; {0, NO_TOKEN} if there is none
    uint32_t bottom;   // the key of the smallest logit above -infinity
};

// Finds the extreme logits of this block's tokens and writes them to `extremes` in shared memory.
// Ends with sync_row, so that all blocks of the row can then read `extremes`.
template <int BLOCKS> __device__ __forceinline__ void find_extremes(const Row& row, Extremes& extremes) {
    if (threadIdx.x == 0) extremes = {{0, NO_TOKEN}, NO_TOKEN};
    __syncthreads();
    float best = -INFINITY, bottom = INFINITY;  // the largest logit, and the smallest logit above -infinity
    int best_four = -1;  // the id of the first of four tokens that include one with the logit `best`
    each_four_of_block<4, Order::Backward>(row, [&](int id, const float4& v) {
        // fmaxf and fminf ignore NaN. Comparisons with NaN are false.
        const float largest = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)),
                    smallest = fminf(fminf(v.x, v.y), fminf(v.z, v.w));
        if (largest >= best) {
            best = largest;
            best_four = id;
        }
        if (smallest > -INFINITY)
            bottom = fminf(bottom, smallest);
        else
            for (float logit : {v.x, v.y, v.z, v.w})
                if (logit > -INFINITY) bottom = fminf(bottom, logit);
    });
    const uint32_t key = logit_key(best);
    const uint32_t warp_best = __reduce_max_sync(ALL_LANES, key),
                   warp_bottom = __reduce_min_sync(ALL_LANES, logit_key(bottom));
    if (threadIdx.x % 32 == 0) {
        atomicMax(&extremes.best.key, warp_best);
        atomicMin(&extremes.bottom, warp_bottom);
    }
    __syncthreads();
    if (key == extremes.best.key && best_four >= 0) {
        const float4 v = row.load(best_four);
        const int place = v.x == best ? 0 : v.y == best ? 1 : v.z == best ? 2 : 3;
        atomicMin(&extremes.best.token, best_four + place);
    }
    sync_row<BLOCKS>();
}

// The tokens that top-k, top-p and min-p keep: those whose keys and masses are at least these values.
struct KeptTokens {
    uint32_t floor;
    unsigned long long min_mass;

    // Returns the probability mass of the token with sort key `key`, or 0 if the token is not kept.
    __device__ __forceinline__ unsigned long long mass(const Row& row, uint32_t key) const {
        const unsigned long long mass = row.mass(key);
        return key < floor || mass < min_mass ? 0ull : mass;
    }
};

// Finds the tokens that top-k, top-p and min-p keep.
template <int BLOCKS>
__device__ __forceinline__ KeptTokens kept_tokens(const Row& row, const SamplingKernelParams& params,
                                                  CutoffMemory& memory, unsigned long long* warp_values) {
    uint32_t floor = 1;
    if (params.top_k > 0 && params.top_k < row.vocab)
        floor = max(floor, row_cutoff<BLOCKS, false>(row, floor, 0.0f, params.top_k, memory, warp_values));
    if (params.top_p < 1.0f)
        floor = max(floor, row_cutoff<BLOCKS, true>(row, floor, params.top_p, 0, memory, warp_values));
    // min_mass is at most TOP_MASS, so that min-p always keeps the most likely token.
    return {floor, min((unsigned long long)(params.min_p * TOP_MASS), (unsigned long long)TOP_MASS)};
}

// Probability masses of ranges of token ids. Each warp of a block has a range, in the order of the warps.
struct RangeMasses {
    unsigned long long own, before, all;  // of this warp's range, of the ranges of earlier warps, and of all warps
};

// Returns the masses of the ranges that start at `first_id`, which differs between warps, and have `size` ids.
__device__ __forceinline__ RangeMasses range_masses(const Row& row, const KeptTokens& kept, int first_id, int size,
                                                    unsigned long long* warp_values) {
    unsigned long long own = 0, before, all = 0;
    const int end = min(first_id + size, row.end);
    each_four<4, Order::Forward>(row, first_id, end, 128, 4 * (threadIdx.x % 32), [&](int, const float4& v) {
        own += kept.mass(row, logit_key(v.x)) + kept.mass(row, logit_key(v.y)) + kept.mass(row, logit_key(v.z)) +
               kept.mass(row, logit_key(v.w));
    });
    own = warp_sum(own);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = own;
    __syncthreads();
#pragma unroll 16  // completely unrolled, the loop would need more registers than a thread has
    for (int w = 0; w < SAMPLE_THREADS / 32; ++w) {
        if (w == threadIdx.x / 32) before = all;
        all += warp_values[w];
    }
    return {own, before, all};
}

// A point in a range of token ids: the first id, and the mass between it and the point.
struct PointInRange {
    int first_id;
    unsigned long long point;
};

// Returns the point in the range of the warp whose range contains it. Every thread gets the same result.
// `masses` are the masses of the warps' ranges, and `first_id` is the first id of this warp's range.
// `memory` is in shared memory.
__device__ __forceinline__ PointInRange find_range(unsigned long long point, const RangeMasses& masses, int first_id,
                                                   PointInRange& memory) {
    if (threadIdx.x % 32 == 0 && masses.before <= point && point < masses.before + masses.own)  // true in one thread
        memory = {first_id, point - masses.before};
    __syncthreads();
    return memory;
}

// Returns the first token at which the cumulative mass from `range.first_id` on exceeds `range.point`.
// The lanes of a warp call this function together. The lane that finds the token returns it, others return NO_TOKEN.
__device__ __forceinline__ uint32_t token_in_range(const Row& row, const KeptTokens& kept, const PointInRange& range) {
    unsigned long long point = range.point;
    for (int base = range.first_id;; base += 128) {
        const int id = base + 4 * (threadIdx.x % 32);
        const float4 v = row.load(id);
        const unsigned long long masses[4] = {kept.mass(row, logit_key(v.x)), kept.mass(row, logit_key(v.y)),
                                              kept.mass(row, logit_key(v.z)), kept.mass(row, logit_key(v.w))};
        const unsigned long long lane_mass = masses[0] + masses[1] + masses[2] + masses[3];
        const unsigned long long sum = warp_prefix_sum(lane_mass);
        const unsigned long long all = __shfl_sync(ALL_LANES, sum, 31);
        if (point < all) {
            uint32_t token = NO_TOKEN;
            unsigned long long reached = sum - lane_mass;
            for (int i = 0; i < 4; ++i) {
                if (reached <= point && point < reached + masses[i]) token = id + i;
                reached += masses[i];
            }
            return token;
        }
        point -= all;
    }
}

// Adds up the masses of the row's blocks. `block_mass` is the mass of this block.
// After this call, the blocks no longer need each other.
template <int BLOCKS>
__device__ __forceinline__ BlockMasses sum_blocks_of_row(unsigned long long block_mass, int block) {
    __shared__ unsigned long long own;
    if (threadIdx.x == 0) own = block_mass;
    sync_row<BLOCKS>();
    BlockMasses masses{0, 0};
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        if (i == block) masses.before = masses.all;
        masses.all += *in_block_of_row<BLOCKS>(&own, i);
    }
    sync_row<BLOCKS>();
    return masses;
}

template <int BLOCKS>
__device__ void sample_row(const float* logits, const uint32_t* param_words, uint32_t* tokens,
                           volatile uint32_t* mailbox, int vocab) {
    __shared__ alignas(16) unsigned long long warp_values[32];  // aligned, so that one instruction can load two values
    __shared__ CutoffMemory cutoff_memory;
    __shared__ Extremes extremes;
    __shared__ PointInRange point_in_range;
    const int row_index = blockIdx.x / BLOCKS, block = blockIdx.x % BLOCKS;
    const SamplingKernelParams params =
        *reinterpret_cast<const SamplingKernelParams*>(param_words + (size_t)row_index * SAMPLE_PARAM_WORDS);
    const auto choose = [&](uint32_t token) {
        tokens[row_index] = token;
        if (mailbox != nullptr) mailbox[row_index] = token == NO_TOKEN ? MAILBOX_NO_TOKEN : token + 1;
    };
    const int block_ids = (vocab + 4 * BLOCKS - 1) / (4 * BLOCKS) * 4, start = min(block * block_ids, vocab);
    const int end = min(start + block_ids, vocab);
    Row row{logits + (size_t)row_index * vocab, vocab, start, end, params.inverse_temperature()};

    // 1. Find the largest logit. If several tokens have the largest logit, greedy sampling chooses the lowest token id.
    find_extremes<BLOCKS>(row, extremes);
    // Among equal keys, the first block has the lowest token id.
    const KeyAndToken best = of_all_blocks<BLOCKS>(&extremes.best, [](const KeyAndToken& a, const KeyAndToken& b) {
        return a.key >= b.key ? a : b;
    });
    if (best.key <= sort_key(-INFINITY) || params.temperature == 0.0f) {
        if (block == 0 && threadIdx.x == 0) choose(best.key <= sort_key(-INFINITY) ? NO_TOKEN : best.token);
        sync_row<BLOCKS>();
        return;
    }
    row.best_key = best.key;
    row.best_logit = from_sort_key(best.key);
    const uint32_t bottom = of_all_blocks<BLOCKS>(&extremes.bottom, [](uint32_t a, uint32_t b) { return min(a, b); });
    row.set_bins(from_sort_key(bottom));

    // 2. Find the tokens that top-k, top-p and min-p keep.
    const KeptTokens kept = kept_tokens<BLOCKS>(row, params, cutoff_memory, warp_values);

    // 3. Draw a random point below the total mass. The first token whose cumulative mass exceeds the point is chosen.
    // Each block has a contiguous range of ids, and each of its warps has a contiguous part of this range, so that the
    // cumulative mass follows the order of the ids.
    constexpr int WARPS = SAMPLE_THREADS / 32;
    const int warp = threadIdx.x / 32;
    // The number of ids in a small range (see point 4).
    const int small_range_ids = (block_ids + 4 * WARPS * WARPS - 1) / (4 * WARPS * WARPS) * 4;
    const int first_id = row.start + warp * WARPS * small_range_ids;
    const RangeMasses masses = range_masses(row, kept, first_id, WARPS * small_range_ids, warp_values);
    const BlockMasses blocks = sum_blocks_of_row<BLOCKS>(masses.all, block);
    const unsigned long long point = random_point(params, params.sampled_before, blocks.all);

    // 4. Find the token. The block whose range contains the point divides the part that contains it into small ranges,
    // one per warp. Its first warp searches the small range that contains the point.
    if (point < blocks.before || point - blocks.before >= masses.all) return;
    const PointInRange range = find_range(point - blocks.before, masses, first_id, point_in_range);
    const int small_id = range.first_id + warp * small_range_ids;
    const RangeMasses small_masses = range_masses(row, kept, small_id, small_range_ids, warp_values);
    const PointInRange small_range = find_range(range.point, small_masses, small_id, point_in_range);
    if (warp > 0) return;
    const uint32_t token = token_in_range(row, kept, small_range);
    if (token != NO_TOKEN) choose(token);
}

extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 1)
    sample_rows_1(const float* logits, const uint32_t* params, uint32_t* tokens, volatile uint32_t* mailbox,
                  int vocab) {
    sample_row<1>(logits, params, tokens, mailbox, vocab);
}
#if __CUDA_ARCH__ >= 900
#define DEFINE(BLOCKS)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 1) __cluster_dims__(BLOCKS, 1, 1)                     \
        sample_rows_##BLOCKS(const float* logits, const uint32_t* params, uint32_t* tokens,                            \
                             volatile uint32_t* mailbox, int vocab) {                                                  \
        sample_row<BLOCKS>(logits, params, tokens, mailbox, vocab);                                                    \
    }
DEFINE(2)
DEFINE(4)
DEFINE(8)
#endif
