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
#include "sampling/sampling.cuh"

// The number of keys from the bin of the top-k or top-p cutoff that fit in a block's shared memory (CutoffMemory).
constexpr uint32_t MAX_KEYS_IN_BIN = 4096;
constexpr uint32_t ALL_LANES = 0xffffffffu;

// One row of logits, this block's part of the token ids, and values for the whole row.
struct Row {
    const float* logits;
    int vocab;
    int start, end;  // the first id of this block, a multiple of 4, and the id after its last one
    float best, inverse_temperature;
    uint32_t top;     // the key of the largest logit
    float bin_scale;  // the number of bins per unit of logits

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
    // Returns the probability mass of the token with sort key `key`, in units of 2^-40 of the most likely token's mass.
    __device__ __forceinline__ unsigned long long mass(uint32_t key) const {
        if (key <= sort_key(-INFINITY)) return 0;
        return key == top ? UNIT : expf((from_sort_key(key) - best) * inverse_temperature) * UNIT;
    }
    // Divides the logits of tokens with mass into SAMPLE_THREADS bins of equal width. `bottom` is the smallest logit
    // above -infinity.
    __device__ __forceinline__ void set_bins(float bottom) {
        // Tokens have no mass if their probability is below 2^-40 times the largest one. e^-RANGE is slightly less.
        constexpr float RANGE = 27.8f;
        bin_scale = SAMPLE_THREADS / fminf(best - bottom, RANGE / inverse_temperature);
    }
    // Returns the bin of a token with mass. Bin 0 has the largest logits. A larger key is never in a higher bin.
    __device__ __forceinline__ int bin(uint32_t key) const {
        return key == top ? 0 : min((int)((best - from_sort_key(key)) * bin_scale), SAMPLE_THREADS - 1);
    }
};

// Returns the sort key of a logit, or 0 if the logit is NaN. -0 becomes +0, so that both zeros have the same key.
__device__ __forceinline__ uint32_t key_of(float logit) { return isnan(logit) ? 0 : sort_key(logit + 0.0f); }

// Waits for all threads of the row's blocks. Each of them then sees the earlier stores of all others to shared memory.
template <int BLOCKS> __device__ __forceinline__ void sync_row() {
#if __CUDA_ARCH__ >= 900
    if constexpr (BLOCKS > 1) return cluster_sync();
#endif
    __syncthreads();
}

// `own` points to a variable in this block's shared memory. Returns the address of the same variable in block `rank` of
// the row's blocks. The caller must call sync_row after the last store to this address and before the load, and again
// before the next store to it or the end of block `rank`.
template <int BLOCKS, typename V> __device__ __forceinline__ const V* in_block_of_row(const V* own, int rank) {
#if __CUDA_ARCH__ >= 900
    if constexpr (BLOCKS > 1) return in_block_of_cluster(own, rank);
#endif
    return own;
}
// Combines the values that `own` points to in all blocks of the row: returns combine(combine(v0, v1), v2) and so on,
// where vi is the value in block i. Callers must call sync_row as for in_block_of_row.
template <int BLOCKS, typename V, typename Combine>
__device__ __forceinline__ V of_all_blocks(const V* own, Combine combine) {
    V values[BLOCKS];
#pragma unroll
    for (int rank = 0; rank < BLOCKS; ++rank) values[rank] = *in_block_of_row<BLOCKS>(own, rank);
    V all = values[0];
#pragma unroll
    for (int rank = 1; rank < BLOCKS; ++rank) all = combine(all, values[rank]);
    return all;
}
template <int BLOCKS> __device__ __forceinline__ unsigned long long sum_of_blocks(const unsigned long long* own) {
    return of_all_blocks<BLOCKS>(own, [](unsigned long long a, unsigned long long b) { return a + b; });
}

__device__ __forceinline__ unsigned long long warp_sum(unsigned long long value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

enum class Order { Forward, Backward };

// Calls `use(id, logits)` with the logits of tokens id to id + 3, where id is start + offset, then start + step +
// offset, and so on. Tokens that are not below `end` have logit NaN. Threads with equal `start`, `end` and `step` make
// the same number of calls, so the lanes of a warp can exchange values in `use`.
//   ORDER: Order::Backward reverses the order of the calls. The last tokens may still be in L2 if the previous pass
//     over the row, or the kernel that wrote the row, ended with them.
//   UNROLL: the unroll factor, so that a thread can have the loads of UNROLL calls in flight
template <int UNROLL, Order ORDER, typename Use>
__device__ __forceinline__ void each_four(const Row& row, int start, int end, int step, int offset, Use use) {
    const int count = (end - start + step - 1) / step;
    const auto loop = [&](auto load) {
#pragma unroll UNROLL
        for (int i = 0; i < count; ++i) {
            const int id = start + (ORDER == Order::Forward ? i : count - 1 - i) * step + offset;
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

// Calls `use(key)` with the sort key (see key_of) of each token of this block. All threads make the same number of
// calls. Past the last token, the key is 0.
template <int UNROLL, Order ORDER, typename Use>
__device__ __forceinline__ void each_key_of_block(const Row& row, Use use) {
    each_four_of_block<UNROLL, ORDER>(row, [&](int, const float4& v) {
        use(key_of(v.x)), use(key_of(v.y)), use(key_of(v.z)), use(key_of(v.w));
    });
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
// `each_key(use)` calls `use(key)` for the keys that this block searches. All lanes of a warp call `use` together.
// Only the keys that the blocks of the row search count toward the target.
template <int BLOCKS, bool BY_MASS, typename EachKey>
__device__ uint32_t threshold(const Row& row, EachKey each_key, uint32_t floor, unsigned long long target,
                              unsigned long long* warps) {
    // Other blocks can still read the bins of a round during the next round, but not during the round after it.
    __shared__ unsigned long long bins_of_rounds[2][SAMPLE_BINS];
    uint32_t prefix = 0;
#pragma unroll 1  // the loop is long, and unrolling does not make it faster
    for (int round = 0; round < SAMPLE_ROUNDS; ++round) {
        const int shift = 24 - 8 * round;
        unsigned long long* const bins = bins_of_rounds[round % 2];
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
        sync_row<BLOCKS>();
        const int bin = SAMPLE_BINS - 1 - threadIdx.x;  // see choose_bin
        const unsigned long long value = bin >= 0 ? sum_of_blocks<BLOCKS>(&bins[bin]) : 0;
        choose_bin<BY_MASS>(value, false, 0.0f, target, prefix, warps);
    }
    return prefix;
}

// Shared memory of `cutoff`.
struct CutoffMemory {
    unsigned long long
        bins[SAMPLE_THREADS];        // the mass or the number of this block's tokens in each bin (see Row::bin)
    uint32_t keys[MAX_KEYS_IN_BIN];  // this block's keys in the chosen bin, in any order
    uint32_t count;                  // the number of these keys; can exceed MAX_KEYS_IN_BIN
    int bin;                         // the chosen bin
    unsigned long long all, rest;    // the sum of the bins of all blocks, and the part of the target in the chosen bin
};

// Returns the result of `threshold` for the keys of all tokens, or 0 if the tokens together do not reach the target.
// If BY_MASS is true, the target is `share` times the mass of all tokens with keys >= floor. Otherwise, the target is
// `target` tokens.
// A histogram finds the bin of the result, and `threshold` searches only the keys in this bin.
template <int BLOCKS, bool BY_MASS>
__device__ uint32_t cutoff(const Row& row, uint32_t floor, float share, unsigned long long target, CutoffMemory& memory,
                           unsigned long long* warps) {
    sync_row<BLOCKS>();  // slower warps may still read `memory` for an earlier cutoff
    memory.bins[threadIdx.x] = 0;
    if (threadIdx.x == 0) memory.count = 0, memory.bin = 0, memory.rest = 0;
    __syncthreads();
    each_key_of_block<2, Order::Forward>(row, [&](uint32_t key) {
        const unsigned long long mass = row.mass(key);
        if (mass > 0 && key >= floor) atomicAdd(&memory.bins[row.bin(key)], BY_MASS ? mass : 1ull);
    });
    sync_row<BLOCKS>();
    const unsigned long long value = sum_of_blocks<BLOCKS>(&memory.bins[threadIdx.x]);
    const unsigned long long sum = inclusive_scan(value, warps);
    if (threadIdx.x == SAMPLE_THREADS - 1) memory.all = sum;
    __syncthreads();
    if (BY_MASS) target = (double)share * (double)memory.all;
    if (target > memory.all) return 0;
    // If the target is 0, choose the first bin that is not empty.
    if (value > 0 && sum >= target && sum - value < max(target, 1ull))
        memory.bin = threadIdx.x, memory.rest = target - min(target, sum - value);
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
    return threshold<BLOCKS, BY_MASS>(row, keys_in_bin, floor, memory.rest, warps);
}

// A sort key, and the token that has it.
struct alignas(8) KeyAndToken {
    uint32_t key, token;
};

template <int BLOCKS>
__device__ void sample_row(const float* logits, const uint32_t* param_words, uint32_t* tokens,
                           volatile uint32_t* mailbox, int vocab) {
    __shared__ unsigned long long warps[32], block_mass, range_point;
    __shared__ CutoffMemory cutoff_memory;
    __shared__ KeyAndToken block_top;
    __shared__ uint32_t block_bottom;
    __shared__ int range_start;
    const int row_index = blockIdx.x / BLOCKS, rank = blockIdx.x % BLOCKS;
    const SamplingKernelParams params =
        *reinterpret_cast<const SamplingKernelParams*>(param_words + (size_t)row_index * SAMPLE_PARAM_WORDS);
    const auto choose = [&](uint32_t token) {
        tokens[row_index] = token;
        if (mailbox != nullptr) mailbox[row_index] = token == NO_TOKEN ? MAILBOX_NO_TOKEN : token + 1;
    };
    const int block_ids = (vocab + 4 * BLOCKS - 1) / (4 * BLOCKS) * 4, start = min(rank * block_ids, vocab);
    Row row{logits + (size_t)row_index * vocab,      vocab, start, min(start + block_ids, vocab), 0.0f,
            1.0f / fmaxf(params.temperature, 1e-6f), 0,     0.0f};
    if (threadIdx.x == 0) block_top = {0, NO_TOKEN}, block_bottom = NO_TOKEN;
    __syncthreads();

    // 1. Find the largest logit. If several tokens have the largest logit, greedy sampling chooses the lowest token id.
    float top = -INFINITY, bottom = INFINITY;  // the largest logit, and the smallest logit above -infinity
    int top_four = -1;  // the id of the first of four tokens that include one with the logit `top`
    each_four_of_block<4, Order::Backward>(row, [&](int id, const float4& v) {
        // fmaxf and fminf ignore NaN. Comparisons with NaN are false.
        const float largest = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)),
                    smallest = fminf(fminf(v.x, v.y), fminf(v.z, v.w));
        if (largest >= top) top = largest, top_four = id;
        if (smallest > -INFINITY)
            bottom = fminf(bottom, smallest);
        else
            for (float logit : {v.x, v.y, v.z, v.w})
                if (logit > -INFINITY) bottom = fminf(bottom, logit);
    });
    const uint32_t key = key_of(top);
    const uint32_t warp_top = __reduce_max_sync(ALL_LANES, key),
                   warp_bottom = __reduce_min_sync(ALL_LANES, key_of(bottom));
    if (threadIdx.x % 32 == 0) atomicMax(&block_top.key, warp_top), atomicMin(&block_bottom, warp_bottom);
    __syncthreads();
    if (key == block_top.key && top_four >= 0) {
        const float4 v = row.vocab % 4 == 0 ? row.load<true>(top_four, row.end) : row.load<false>(top_four, row.end);
        const int place = v.x == top ? 0 : v.y == top ? 1 : v.z == top ? 2 : 3;
        atomicMin(&block_top.token, top_four + place);
    }
    sync_row<BLOCKS>();
    // Among equal keys, the first block has the lowest token id.
    const KeyAndToken row_top = of_all_blocks<BLOCKS>(&block_top, [](const KeyAndToken& a, const KeyAndToken& b) {
        return a.key >= b.key ? a : b;
    });
    if (row_top.key <= sort_key(-INFINITY) || params.temperature == 0.0f) {
        if (rank == 0 && threadIdx.x == 0) choose(row_top.key <= sort_key(-INFINITY) ? NO_TOKEN : row_top.token);
        sync_row<BLOCKS>();
        return;
    }
    row.top = row_top.key, row.best = from_sort_key(row.top);

    // 2. Find the smallest key that top-k and top-p keep.
    row.set_bins(from_sort_key(of_all_blocks<BLOCKS>(&block_bottom, [](uint32_t a, uint32_t b) { return min(a, b); })));
    uint32_t floor = 1;
    if (params.top_k > 0 && params.top_k < vocab)
        floor = max(floor, cutoff<BLOCKS, false>(row, floor, 0.0f, params.top_k, cutoff_memory, warps));
    if (params.top_p < 1.0f)
        floor = max(floor, cutoff<BLOCKS, true>(row, floor, params.top_p, 0, cutoff_memory, warps));
    // min_mass is at most UNIT, so that min-p always keeps the most likely token.
    const unsigned long long min_mass = min((unsigned long long)(params.min_p * UNIT), (unsigned long long)UNIT);
    const auto kept_mass = [&](uint32_t key) {
        const unsigned long long mass = row.mass(key);
        return key < floor || mass < min_mass ? 0ull : mass;
    };

    // 3. Draw a random point below the total mass. The first token whose cumulative mass exceeds the point is chosen.
    // Each block has a contiguous range of ids, and each of its warps has a contiguous part of this range, so that the
    // cumulative mass follows the order of the ids. The block whose range contains the point then divides the part that
    // contains it into small ranges, one per warp. Its first warp searches the small range that contains the point.
    constexpr int WARPS = SAMPLE_THREADS / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int small = (block_ids + 4 * WARPS * WARPS - 1) / (4 * WARPS * WARPS) * 4;  // the ids in a small range
    unsigned long long own, before, point;  // the mass of this warp's range, the mass before it, and the point
    const auto set_masses = [&](int first_id, int size) {
        own = 0;
        const int end = min(first_id + size, row.end);
        each_four<4, Order::Forward>(row, first_id, end, 128, 4 * lane, [&](int, const float4& v) {
            own += kept_mass(key_of(v.x)) + kept_mass(key_of(v.y)) + kept_mass(key_of(v.z)) + kept_mass(key_of(v.w));
        });
        own = warp_sum(own);
        return sum_of_warps(own, warps, before);
    };
    // Each warp passes the first id of its range. Returns the first id of the range that contains the point, and
    // subtracts the mass before this range from the point.
    const auto find_range = [&](int first_id) {
        if (lane == 0 && before <= point && point < before + own)  // true in exactly one warp
            range_start = first_id, range_point = point - before;
        __syncthreads();
        point = range_point;
        return range_start;
    };
    const int first_id = row.start + warp * WARPS * small;
    const unsigned long long mass = set_masses(first_id, WARPS * small);
    if (threadIdx.x == 0) block_mass = mass;
    sync_row<BLOCKS>();
    unsigned long long row_mass = 0, mass_before = 0;  // of all blocks, and of the blocks before this one
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        if (i == rank) mass_before = row_mass;
        row_mass += *in_block_of_row<BLOCKS>(&block_mass, i);
    }
    sync_row<BLOCKS>();  // the blocks no longer need each other
    const unsigned long long seed = (unsigned long long)params.seed[1] << 32 | params.seed[0];
    point = min((unsigned long long)(uniform(seed, params.sampled_before) * (double)row_mass), row_mass - 1);
    if (point < mass_before || point - mass_before >= mass) return;
    point -= mass_before;
    const int range = find_range(first_id);
    set_masses(range + warp * small, small);
    const int small_range = find_range(range + warp * small);
    if (warp > 0) return;
    for (int base = small_range;; base += 128) {
        const int id = base + 4 * lane;
        const float4 v = row.vocab % 4 == 0 ? row.load<true>(id, row.end) : row.load<false>(id, row.end);
        const unsigned long long masses[4] = {kept_mass(key_of(v.x)), kept_mass(key_of(v.y)), kept_mass(key_of(v.z)),
                                              kept_mass(key_of(v.w))};
        const unsigned long long lane_mass = masses[0] + masses[1] + masses[2] + masses[3];
        const unsigned long long sum = warp_prefix_sum(lane_mass);
        const unsigned long long all = __shfl_sync(ALL_LANES, sum, 31);
        if (point < all) {
            unsigned long long reached = sum - lane_mass;
            for (int i = 0; i < 4; ++i) {
                if (reached <= point && point < reached + masses[i]) choose(id + i);
                reached += masses[i];
            }
            return;
        }
        point -= all;
    }
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
