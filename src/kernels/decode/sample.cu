// Samples the next token from the logits on the GPU, with penalties, temperature, top-k, top-p and min-p.
// Each random number depends only on the seed and the number of earlier draws.
// Never chooses a token whose logit is NaN or -inf. If every logit is NaN or -inf, the step fails.
//
// The sampler on the host (engine/sampling/sampler.rs) applies the same rules in the same order.
// This kernel and the host sampler choose the same tokens, with these exceptions:
// - If several tokens at the cutoff of top-k or top-p have equal logits, this kernel keeps all of them.
//   The host keeps only as many of the tied tokens as needed, starting with the lowest token ids.
// - The host computes probabilities in f64. This kernel computes them in f32, relative to the largest probability, and
//   truncates them to multiples of 2^-40. It therefore never chooses a token with a relative probability below 2^-40.
//   The choice can differ at the cutoffs of top-p and min-p, or if the draw is near the boundary between two tokens.
// - nvcc fuses multiplications and additions, so penalized logits can differ by rounding errors.
//
// A launch has at most one block per multiprocessor, so all blocks can run at the same time and wait for each other.
// Each block handles a range of token ids. Each thread holds up to SAMPLE_IDS_PER_THREAD logits in registers.
// Probability masses are 64-bit integers. The mass of the most likely token is 2^40.
// Integer sums do not depend on the order of the additions, so the same logits, `params`, `seen` and `state` always
// produce the same token.
//   logits: f32 [vocab]
//   seen: u32 [vocab]; 0 if no penalty applies to the token yet, otherwise 1 + the number of times it was generated
//   params: SamplingKernelParams
//   embedding, embedding_scale, x, state, mailbox: see StepOutput (step_output.cuh)
//   scratch: zeros before and after each launch, except for block_masses
//   grid: ceil(vocab / SAMPLE_THREADS), but at most one block per multiprocessor; block: SAMPLE_THREADS
//   bytes moved: 4 · vocab, or 8 · vocab with penalties
// A launch has 2 grid-wide barriers. Top-k and top-p each add 4 barriers.
#include "decode/step_output.cuh"
#include "headers/pdl.cuh"
#include "sampling/cutoff_search.cuh"

struct SampleScratch {
    uint32_t arrived, finished;  // how often blocks have arrived at barriers, and how many blocks have finished
    uint32_t top, padding;       // top: the largest key
    // The sums of the bins over all blocks, in each round of grid_cutoff: of tokens (top-k) and of masses (top-p).
    uint32_t counts[SAMPLE_ROUNDS][SAMPLE_BINS];
    unsigned long long masses[SAMPLE_ROUNDS][SAMPLE_BINS];
    unsigned long long block_masses[SAMPLE_MAX_BLOCKS];  // the mass of each block's tokens
};

static_assert(sizeof(SampleScratch) == 4 * SAMPLE_SCRATCH_WORDS, "SAMPLE_SCRATCH_WORDS must match SampleScratch");

// The token ids that this block and this thread handle.
struct OwnIds {
    int first, last;  // the block handles the ids from `first` to `last` - 1
    int count;        // the thread handles id(i) for i < count

    __device__ __forceinline__ explicit OwnIds(int vocab) {
        const int ids = (vocab + gridDim.x - 1) / gridDim.x;
        first = blockIdx.x * ids;
        last = min(first + ids, vocab);
        const int start = first + (int)threadIdx.x;
        count = start < last ? (last - start + SAMPLE_THREADS - 1) / SAMPLE_THREADS : 0;
    }
    __device__ __forceinline__ int id(int i) const { return first + threadIdx.x + i * SAMPLE_THREADS; }
};

__device__ __forceinline__ bool has_penalty(const SamplingKernelParams& params) {
    return params.repetition_penalty != 1.0f || params.frequency_penalty != 0.0f || params.presence_penalty != 0.0f;
}

// The blocks of the grid, from the view of one thread. All threads of all blocks call the methods in the same order.
struct Grid {
    SampleScratch* scratch;
    unsigned long long* warp_values;  // shared memory for one value per warp
    uint32_t expected = 0;            // the arrivals at all barriers so far

    __device__ __forceinline__ Grid(SampleScratch* scratch, unsigned long long* warp_values)
        : scratch(scratch), warp_values(warp_values) {}

    // Waits until all blocks have called this function, and makes their earlier writes visible.
    __device__ void barrier() {
        __syncthreads();
        expected += gridDim.x;
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(&scratch->arrived, 1u);
            while (*(volatile uint32_t*)&scratch->arrived < expected) {
            }
            __threadfence();
        }
        __syncthreads();
    }

    // Returns the largest key of all threads. `top` is the largest key of this thread.
    __device__ __forceinline__ uint32_t max_key(uint32_t top) {
        top = __reduce_max_sync(ALL_LANES, top);
        if (threadIdx.x % 32 == 0 && top > 0) atomicMax(&scratch->top, top);
        barrier();
        return __ldcg(&scratch->top);
    }

    // The last block to call this function sets the scratch memory to zeros, except for block_masses.
    __device__ __forceinline__ void reset_scratch() {
        __shared__ bool is_last;
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            is_last = atomicAdd(&scratch->finished, 1u) == gridDim.x - 1;
        }
        __syncthreads();
        if (!is_last) return;
        for (int i = threadIdx.x; i < SAMPLE_ROUNDS * SAMPLE_BINS; i += SAMPLE_THREADS)
            (&scratch->counts[0][0])[i] = 0, (&scratch->masses[0][0])[i] = 0;
        if (threadIdx.x == 0) scratch->arrived = scratch->finished = scratch->top = 0;
    }
};

// Returns the largest sort key k (see sort_key) for which all tokens with keys >= k together reach the target.
// Ignores tokens with keys below `floor` and tokens without probability mass.
// If the remaining tokens together do not reach the target, returns 0, which excludes no token.
// With BY_MASS, the target is `share` times the mass of the remaining tokens, and the argument `target` is ignored.
// Without BY_MASS, the target is a count of `target` tokens, and `share` is ignored.
template <bool BY_MASS>
__device__ uint32_t grid_cutoff(const uint32_t (&keys)[SAMPLE_IDS_PER_THREAD],
                                const unsigned long long (&masses)[SAMPLE_IDS_PER_THREAD], int own_ids, uint32_t floor,
                                float share, unsigned long long target, Grid& grid) {
    __shared__ unsigned long long bins[SAMPLE_BINS];
    CutoffSearch<BY_MASS> search{target};
    while (search.round < SAMPLE_ROUNDS) {
        const int round = search.round;
        if (threadIdx.x < SAMPLE_BINS) bins[threadIdx.x] = 0;
        __syncthreads();
        for (int i = 0; i < SAMPLE_IDS_PER_THREAD; ++i)
            if (i < own_ids && keys[i] >= floor && search.has_prefix(keys[i]))
                atomicAdd(&bins[search.bin_of(keys[i])], BY_MASS ? masses[i] : 1ull);
        __syncthreads();
        if (threadIdx.x < SAMPLE_BINS && bins[threadIdx.x]) {
            if (BY_MASS)
                atomicAdd(&grid.scratch->masses[round][threadIdx.x], bins[threadIdx.x]);
            else
                atomicAdd(&grid.scratch->counts[round][threadIdx.x], (uint32_t)bins[threadIdx.x]);
        }
        grid.barrier();
        const int bin = search.own_bin();
        unsigned long long value = 0;
        if (bin >= 0)
            value = BY_MASS ? __ldcg(&grid.scratch->masses[round][bin])
                            : (unsigned long long)__ldcg(&grid.scratch->counts[round][bin]);
        search.end_round(value, round == 0, share, grid.warp_values);
    }
    return search.prefix;
}

// Reads the logits of this thread's token ids and applies the penalties. Writes their keys (see logit_key) to `keys`.
// Returns this thread's largest key.
__device__ __forceinline__ uint32_t read_logits(const float* logits, const uint32_t* seen,
                                                const SamplingKernelParams& params, const OwnIds& own,
                                                uint32_t (&keys)[SAMPLE_IDS_PER_THREAD]) {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < SAMPLE_IDS_PER_THREAD; ++i) {
        keys[i] = 0;
        if (i >= own.count) continue;
        float logit = __ldcg(logits + own.id(i));
        const uint32_t times = has_penalty(params) ? seen[own.id(i)] : 0;
        if (times > 0)
            logit = penalize(logit, times - 1, params.repetition_penalty, params.frequency_penalty,
                             params.presence_penalty);
        keys[i] = logit_key(logit);
        top = max(top, keys[i]);
    }
    return top;
}

// Computes the probability masses of this thread's tokens, and sets the keys of tokens without mass to 0.
// The mass of a token that top-k, top-p or min-p excludes is 0. In greedy sampling, only tokens with the largest logit
// have mass.
// Returns the sum of this thread's masses.
__device__ __forceinline__ unsigned long long kept_masses(uint32_t (&keys)[SAMPLE_IDS_PER_THREAD],
                                                          unsigned long long (&masses)[SAMPLE_IDS_PER_THREAD],
                                                          uint32_t top, const SamplingKernelParams& params,
                                                          const OwnIds& own, int vocab, Grid& grid) {
    const float inverse_temperature = params.inverse_temperature();
    const bool is_greedy = params.temperature == 0.0f;
#pragma unroll
    for (int i = 0; i < SAMPLE_IDS_PER_THREAD; ++i) {
        masses[i] = probability_mass(keys[i], top, inverse_temperature);
        if (masses[i] == 0) keys[i] = 0;
    }
    uint32_t floor = is_greedy ? top : 1;
    if (!is_greedy && params.top_k > 0 && params.top_k < vocab)
        floor = max(floor, grid_cutoff<false>(keys, masses, own.count, floor, 0.0f, params.top_k, grid));
    if (!is_greedy && params.top_p < 1.0f)
        floor = max(floor, grid_cutoff<true>(keys, masses, own.count, floor, params.top_p, 0, grid));
    const unsigned long long min_mass = (unsigned long long)(params.min_p * TOP_MASS);
    unsigned long long total = 0;
#pragma unroll
    for (int i = 0; i < SAMPLE_IDS_PER_THREAD; ++i) {
        if (keys[i] < floor || masses[i] < min_mass) masses[i] = 0;
        total += masses[i];
    }
    return total;
}

// Adds up the masses of all blocks. `total` is the sum of this thread's masses.
__device__ __forceinline__ BlockMasses sum_blocks_of_grid(unsigned long long total, Grid& grid) {
    const unsigned long long block_mass = inclusive_scan(total, grid.warp_values);
    if (threadIdx.x == SAMPLE_THREADS - 1) grid.scratch->block_masses[blockIdx.x] = block_mass;
    grid.barrier();
    const unsigned long long value = threadIdx.x < gridDim.x ? __ldcg(&grid.scratch->block_masses[threadIdx.x]) : 0;
    const unsigned long long sum = inclusive_scan(value, grid.warp_values);
    __shared__ BlockMasses masses;
    if (threadIdx.x == blockIdx.x) masses.before = sum - value;
    if (threadIdx.x == SAMPLE_THREADS - 1) masses.all = sum;
    __syncthreads();
    return masses;
}

// Returns the first token at which the cumulative mass of all tokens, in the order of their ids, exceeds `point`.
// Returns NO_TOKEN if this token is not in this block.
// `before` is the mass of all blocks with lower token ids. Every thread gets the same result.
__device__ __forceinline__ uint32_t token_at(unsigned long long point, unsigned long long before,
                                             const unsigned long long (&masses)[SAMPLE_IDS_PER_THREAD],
                                             const OwnIds& own, unsigned long long* warp_values) {
    __shared__ uint32_t winner;
    __shared__ unsigned long long round_total;
    if (threadIdx.x == 0) winner = NO_TOKEN;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SAMPLE_IDS_PER_THREAD; ++i) {
        if (i * SAMPLE_THREADS >= own.last - own.first) break;
        const unsigned long long sum = inclusive_scan(masses[i], warp_values);
        if (masses[i] > 0 && before + sum > point && before + sum - masses[i] <= point) winner = own.id(i);
        if (threadIdx.x == SAMPLE_THREADS - 1) round_total = sum;
        __syncthreads();
        before += round_total;
        __syncthreads();
    }
    return winner;
}

template <typename T>
__device__ void sample(const float* logits, uint32_t* seen, const uint32_t* param_words, SampleScratch* scratch,
                       int vocab, const StepOutput<T>& output) {
    __shared__ unsigned long long warp_values[32];
    pdl_wait();
    const SamplingKernelParams params = *reinterpret_cast<const SamplingKernelParams*>(param_words);
    const uint32_t steps = __ldcg(output.state + STATE_STEPS);  // read before a block can finish and increment it
    const OwnIds own(vocab);
    Grid grid(scratch, warp_values);
    uint32_t keys[SAMPLE_IDS_PER_THREAD];
    unsigned long long masses[SAMPLE_IDS_PER_THREAD];
    const uint32_t top = grid.max_key(read_logits(logits, seen, params, own, keys));
    const bool has_token = top > sort_key(-INFINITY);
    const unsigned long long total = kept_masses(keys, masses, top, params, own, vocab, grid);
    const BlockMasses blocks = sum_blocks_of_grid(total, grid);

    // Draw a random point below the total mass. All blocks draw the same point.
    // Greedy sampling uses 0, which selects the token with the largest logit, or the lowest id in a tie.
    const unsigned long long point =
        params.temperature == 0.0f ? 0 : random_point(params, params.sampled_before + steps, blocks.all);
    const uint32_t winner = token_at(point, blocks.before, masses, own, warp_values);

    // After a failed step, token 0 is the input of the next step, because the embedding lookup needs a valid token.
    // The host stops at MAILBOX_NO_TOKEN and ignores all later steps.
    const bool has_winner = has_token ? winner != NO_TOKEN : blockIdx.x == 0;
    if (has_winner) {
        const uint32_t token = has_token ? winner : 0;
        output.write_embedding(token, SAMPLE_THREADS);
        if (threadIdx.x == 0) {
            if (has_penalty(params)) seen[token] = max(seen[token], 1u) + 1;
            output.send(token, has_token, steps);
        }
    }
    grid.reset_scratch();
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 1)                                                    \
        decode_sample_##SUFFIX(const float* logits, uint32_t* seen, const uint32_t* params, const T* embedding,        \
                               float* x, uint32_t* state, volatile uint32_t* mailbox, SampleScratch* scratch,          \
                               int vocab, int columns, int mailbox_slots, float embedding_scale) {                     \
        sample<T>(logits, seen, params, scratch, vocab,                                                                \
                  {embedding, embedding_scale, x, columns, state, mailbox, mailbox_slots});                            \
    }
DEFINE(__nv_bfloat16, bf16)
DEFINE(__half, f16)
