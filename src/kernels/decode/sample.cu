// The next token from the logits, on the device: penalties, temperature, top-k, top-p, min-p and a draw that depends on the
// seed and the step alone; the same rules, in the same order, as the sampler on the host (engine/sampler.rs),
// but that tokens of equal logits are kept or cut together.
//
// One launch of at most one block a multiprocessor, so that all blocks run at once and may wait for each other. Each block
// has a run of ids, each thread a few logits in registers. Probabilities are counted in fixed point (2^-40 of the likeliest
// token's), so that sums do not depend on their order and a seed gives the same text every time.
//   logits f32 [V]; seen u32 [V]: 0, or 1 + how often the token was generated; params: see Params
//   embedding T [V, C], or null, times factor → x f32 [C]; state, ring: as in decode.cu; scratch: see Scratch, all zero between launches
//   grid ceil(V / IDS) or fewer, block 1024; bytes moved: 4·V (8·V with penalties), some 2 to 10 barriers
#include "headers/common.cuh"
#include "headers/pdl.cuh"

constexpr int THREADS = 1024, IDS_A_THREAD = 8;
constexpr float UNIT = 1099511627776.0f;  // 2^40

struct Params {
    float temperature, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty;
    uint32_t top_k, drawn;  // drawn: tokens drawn before the first step
    uint32_t seed[2];
};

struct Scratch {
    uint32_t arrived, done, top, pad;
    uint32_t counts[4][256];
    unsigned long long masses[4][256];
    unsigned long long blocks[1024];
};

// Ordered as the floats are.
__device__ __forceinline__ uint32_t order(float value) {
    const uint32_t bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// All blocks have come here; what they wrote before can be read.
__device__ void meet(Scratch* scratch, uint32_t& met) {
    __syncthreads();
    met += gridDim.x;
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&scratch->arrived, 1u);
        while (*(volatile uint32_t*)&scratch->arrived < met) {
        }
        __threadfence();
    }
    __syncthreads();
}

__device__ __forceinline__ unsigned long long mix(unsigned long long z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// In [0, 1): SplitMix64 from a seed and a counter.
__device__ double uniform(unsigned long long seed, unsigned long long counter) {
    const unsigned long long golden = 0x9E3779B97F4A7C15ull;
    return (double)(mix(mix(seed + golden) + (counter + 1) * golden) >> 11) / 9007199254740992.0;
}

// Inclusive sum over the block, in the order of threads. `warps` holds 32 words.
__device__ unsigned long long scan(unsigned long long value, unsigned long long* warps) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int offset = 1; offset < 32; offset *= 2) {
        const unsigned long long other = __shfl_up_sync(0xffffffffu, value, offset);
        if (lane >= offset) value += other;
    }
    __syncthreads();
    if (lane == 31) warps[warp] = value;
    __syncthreads();
    unsigned long long before = 0;
    for (int w = 0; w < warp; ++w) before += warps[w];
    return value + before;
}

// The smallest key so that the keys from it upwards amount to `target`, of those that are at least `floor`: counted one each,
// or by mass. Four rounds of eight bits.
template <bool BY_MASS>
__device__ uint32_t threshold(const uint32_t (&keys)[IDS_A_THREAD], const unsigned long long (&masses)[IDS_A_THREAD],
                              int mine, uint32_t floor, float share, unsigned long long target, Scratch* scratch,
                              uint32_t& met, unsigned long long* warps) {
    __shared__ unsigned long long bins[256];
    __shared__ uint32_t chosen;
    __shared__ unsigned long long rest;
    uint32_t prefix = 0;
    for (int round = 0; round < 4; ++round) {
        const int shift = 24 - 8 * round;
        if (threadIdx.x < 256) bins[threadIdx.x] = 0;
        __syncthreads();
        for (int i = 0; i < IDS_A_THREAD; ++i) {
            const bool counts = i < mine && keys[i] >= floor && (round == 0 || keys[i] >> (shift + 8) == prefix);
            if (counts) atomicAdd(&bins[keys[i] >> shift & 255], BY_MASS ? masses[i] : 1ull);
        }
        __syncthreads();
        if (threadIdx.x < 256 && bins[threadIdx.x]) {
            if (BY_MASS)
                atomicAdd(&scratch->masses[round][threadIdx.x], bins[threadIdx.x]);
            else
                atomicAdd(&scratch->counts[round][threadIdx.x], (uint32_t)bins[threadIdx.x]);
        }
        meet(scratch, met);
        // From the top downwards: thread t has bin 255 - t.
        const int bin = 255 - threadIdx.x;
        unsigned long long value = 0;
        if (bin >= 0)
            value = BY_MASS ? __ldcg(&scratch->masses[round][bin])
                            : (unsigned long long)__ldcg(&scratch->counts[round][bin]);
        const unsigned long long sum = scan(value, warps);
        if (round == 0 && BY_MASS) {
            // The target is a share of the whole.
            if (threadIdx.x == 255) rest = (unsigned long long)((double)share * (double)sum);
            __syncthreads();
            target = rest;
            __syncthreads();  // before `rest` is used again
        }
        if (threadIdx.x == 0) chosen = 0, rest = 0;
        __syncthreads();
        if (bin >= 0 && value > 0 && sum >= target && sum - value < target) chosen = bin, rest = target - (sum - value);
        // A target of nothing is reached by the first bin that has anything.
        if (bin >= 0 && value > 0 && target == 0 && sum == value) chosen = bin;
        __syncthreads();
        prefix = prefix << 8 | chosen, target = rest;
        __syncthreads();
    }
    return prefix;
}

template <typename T>
__device__ void sample(const float* logits, uint32_t* seen, const uint32_t* raw, const T* embedding, float* x,
                       uint32_t* state, volatile uint32_t* ring, Scratch* scratch, int vocab, int columns, int slots,
                       float factor) {
    __shared__ unsigned long long warps[32];
    __shared__ uint32_t winner;
    pdl_wait();
    const Params params = *reinterpret_cast<const Params*>(raw);
    const uint32_t steps = __ldcg(state + 2);  // before any block can have drawn
    const int run = (vocab + gridDim.x - 1) / gridDim.x, first = blockIdx.x * run, last = min(first + run, vocab);
    const int mine = first + (int)threadIdx.x < last ? (last - first - (int)threadIdx.x + THREADS - 1) / THREADS : 0;
    uint32_t met = 0;

    // 1. penalties; the largest logit
    float values[IDS_A_THREAD];
    uint32_t keys[IDS_A_THREAD], top = 0;
    const bool penalized =
        params.repetition_penalty != 1.0f || params.frequency_penalty != 0.0f || params.presence_penalty != 0.0f;
#pragma unroll
    for (int i = 0; i < IDS_A_THREAD; ++i) {
        keys[i] = 0, values[i] = -INFINITY;
        if (i >= mine) continue;
        const int id = first + threadIdx.x + i * THREADS;
        float logit = __ldcg(logits + id);
        const uint32_t times = penalized ? seen[id] : 0;
        if (times > 0) {
            logit = logit > 0.0f ? logit / params.repetition_penalty : logit * params.repetition_penalty;
            if (times > 1) logit -= params.frequency_penalty * (times - 1) + params.presence_penalty;
        }
        if (isnan(logit)) continue;
        values[i] = logit, keys[i] = order(logit);
        top = max(top, keys[i]);
    }
    top = __reduce_max_sync(0xffffffffu, top);
    if (threadIdx.x % 32 == 0 && top > 0) atomicMax(&scratch->top, top);
    meet(scratch, met);
    top = __ldcg(&scratch->top);
    const float best = __uint_as_float(top & 0x80000000u ? top & 0x7fffffffu : ~top);
    const bool broken = top <= order(-INFINITY);

    // 2. weights, and what is kept of them
    unsigned long long masses[IDS_A_THREAD];
    const float inverse = 1.0f / fmaxf(params.temperature, 1e-6f);
    const bool greedy = params.temperature == 0.0f;
#pragma unroll
    for (int i = 0; i < IDS_A_THREAD; ++i) {
        masses[i] = i < mine && keys[i] > 0
                        ? (unsigned long long)(keys[i] == top ? UNIT : expf((values[i] - best) * inverse) * UNIT)
                        : 0;
        if (masses[i] == 0) keys[i] = 0;
    }
    uint32_t floor = greedy ? top : 1;
    if (!greedy && params.top_k > 0 && params.top_k < vocab)
        floor = max(floor, threshold<false>(keys, masses, mine, floor, 0.0f, params.top_k, scratch, met, warps));
    if (!greedy && params.top_p < 1.0f)
        floor = max(floor, threshold<true>(keys, masses, mine, floor, params.top_p, 0, scratch, met, warps));
    const unsigned long long least = (unsigned long long)(params.min_p * UNIT);
    unsigned long long total = 0;
#pragma unroll
    for (int i = 0; i < IDS_A_THREAD; ++i) {
        if (keys[i] < floor || masses[i] < least) masses[i] = 0;
        total += masses[i];
    }
    const unsigned long long block_total = scan(total, warps);
    if (threadIdx.x == THREADS - 1) scratch->blocks[blockIdx.x] = block_total;
    meet(scratch, met);

    // 3. the draw: every block knows where among all masses it falls
    unsigned long long before = 0, all = 0;
    {
        const unsigned long long value = threadIdx.x < gridDim.x ? __ldcg(&scratch->blocks[threadIdx.x]) : 0;
        const unsigned long long sum = scan(value, warps);
        __shared__ unsigned long long sums[2];
        if (threadIdx.x == blockIdx.x) sums[0] = sum - value;
        if (threadIdx.x == THREADS - 1) sums[1] = sum;
        if (threadIdx.x == 0) winner = 0xffffffffu;
        __syncthreads();
        before = sums[0], all = sums[1];
    }
    const unsigned long long seed = (unsigned long long)params.seed[1] << 32 | params.seed[0];
    const unsigned long long at =
        greedy ? 0 : min((unsigned long long)(uniform(seed, params.drawn + steps) * (double)all), all - 1);
#pragma unroll
    for (int i = 0; i < IDS_A_THREAD; ++i) {
        if (i * THREADS >= last - first) break;
        const unsigned long long sum = scan(masses[i], warps);
        if (masses[i] > 0 && before + sum > at && before + sum - masses[i] <= at)
            winner = first + threadIdx.x + i * THREADS;
        __shared__ unsigned long long round_total;
        if (threadIdx.x == THREADS - 1) round_total = sum;
        __syncthreads();
        before += round_total;
        __syncthreads();
    }
    // Nothing but NaN: the host sees the mark and reports it; here any token will do.
    const bool ends = broken ? blockIdx.x == 0 : winner != 0xffffffffu;
    if (ends) {
        const uint32_t token = broken ? 0 : winner;
        for (int i = threadIdx.x; embedding && i < columns; i += THREADS)
            x[i] = to_float(embedding[(size_t)token * columns + i]) * factor;
        if (threadIdx.x == 0) {
            if (penalized) seen[token] = max(seen[token], 1u) + 1;
            ring[steps % slots] = broken ? 0xffffffffu : token + 1;
            __threadfence_system();
            state[0] += 1, state[1] = token, state[2] = steps + 1;
        }
    }

    // 4. the last block to leave cleans up
    __shared__ bool leaves_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        leaves_last = atomicAdd(&scratch->done, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!leaves_last) return;
    for (int i = threadIdx.x; i < 4 * 256; i += THREADS)
        (&scratch->counts[0][0])[i] = 0, (&scratch->masses[0][0])[i] = 0;
    if (threadIdx.x == 0) scratch->arrived = scratch->done = scratch->top = 0;
}

#define DEFINE(T, SUFFIX)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_sample_##SUFFIX(                                \
        const float* logits, uint32_t* seen, const uint32_t* params, const T* embedding, float* x, uint32_t* state, \
        volatile uint32_t* ring, Scratch* scratch, int vocab, int columns, int slots, float factor) {               \
        sample<T>(logits, seen, params, embedding, x, state, ring, scratch, vocab, columns, slots, factor);         \
    }
DEFINE(__nv_bfloat16, bf16)
DEFINE(__half, f16)
