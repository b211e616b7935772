// Exchange of data between ranks on several GPUs, without copies by the host.
//
// Every rank has a mailbox to which all ranks can write. The mailbox is in the rank's GPU memory or in host memory.
// A mailbox has EXCHANGE_SLOTS slots, and each slot has one region per sending rank.
// A rank writes its values to its region in the mailbox of every other rank.
// The rank then waits until the values of all other ranks have arrived in its own mailbox.
// The exchange needs no flags, as in the Lamport kernels of TensorRT-LLM:
// a word that has not yet arrived is EMPTY, the bits of a NaN. Before sending, a rank replaces EMPTY with another NaN.
//
// Operation k uses slot k mod EXCHANGE_SLOTS.
// During operation k, a rank also empties the slot of operation k - 1 in its own mailbox.
// Another rank writes to the emptied slot only after it has received this rank's values of operation k + 1.
// This rank sends its values of operation k + 1 only after operation k has ended, when the slot is already empty.
// In exchange_add_norm and exchange_sum_shares_bf16, two ranks without a share send nothing to each other.
// Each of them still waits for the other, because both wait for a rank with a share, which waits for all ranks.
// In exchange_columns, no rank waits for a rank without columns.
// Callers must therefore not run two exchange_columns operations in a row in which the same rank has no columns.
#include <cuda_bf16.h>
#include <stdint.h>

#include "constants.cuh"
#include "headers/block_sum.cuh"
#include "headers/pdl.cuh"

constexpr uint32_t EMPTY = 0xffffffffu;
constexpr uint32_t OTHER_NAN = 0x7fffffffu;
// The number of loads that a thread issues before it uses the first result. The loads then overlap.
constexpr int BATCH = 4;
// The number of polls after which a waiting thread checks whether to give up.
// Each check reads host memory, which is slow.
constexpr uint32_t CHECK_TURNS = 4096;

struct Mailboxes {
    // The mailbox of each rank: u32 [EXCHANGE_SLOTS, ranks, region].
    uint32_t* of[EXCHANGE_MAX_RANKS];
    // This rank's state, three words: the number of earlier operations, the largest number of words that the last
    // operation used in a region, and the number of thread blocks that have read the first two words.
    uint32_t* state;
    // A word in host memory that all ranks share. If it is nonzero, the exchange has ended, and threads stop waiting.
    uint32_t* control;
    // The index of the first item of each rank's share, followed by the total number of items.
    // An item is a group of 4 words in exchange_sum_shares_bf16, a row in exchange_add_norm, and a column in
    // exchange_columns. The other kernels do not use this array.
    int first_item[EXCHANGE_MAX_RANKS + 1];
    int rank, ranks, region;
    // The maximum time to wait for another rank.
    int timeout_seconds;
    // Nonzero if any two ranks use the same GPU.
    int shares_gpu;
    // Nonzero if the mailboxes are in host memory.
    int in_host_memory;
};

// ---- words ----

struct Scalar {
    typedef uint32_t Word;
    static constexpr int SIZE = 1;
    static __device__ void store(uint32_t* to, uint32_t v) {
        asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
    }
    static __device__ uint32_t load(const uint32_t* from) {
        uint32_t v;
        asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
        return v;
    }
    static __device__ bool has_arrived(uint32_t v) { return v != EMPTY; }
    static __device__ uint32_t sendable(uint32_t v) { return v == EMPTY ? OTHER_NAN : v; }
    static __device__ uint32_t zero() { return 0; }
};

struct Quad {
    typedef uint4 Word;
    static constexpr int SIZE = 4;
    static __device__ void store(uint32_t* to, uint4 v) {
        asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     :
                     : "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                     : "memory");
    }
    static __device__ uint4 load(const uint32_t* from) {
        uint4 v;
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(from)
                     : "memory");
        return v;
    }
    static __device__ bool has_arrived(uint4 v) { return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY; }
    static __device__ uint4 sendable(uint4 v) {
        return make_uint4(Scalar::sendable(v.x), Scalar::sendable(v.y), Scalar::sendable(v.z), Scalar::sendable(v.w));
    }
    static __device__ uint4 zero() { return make_uint4(0, 0, 0, 0); }
    static __device__ uint4 empty() { return make_uint4(EMPTY, EMPTY, EMPTY, EMPTY); }
};

__device__ __forceinline__ float add(uint32_t a, uint32_t b) { return __uint_as_float(a) + __uint_as_float(b); }
__device__ __forceinline__ void add_to(uint32_t& sum, uint32_t v) { sum = __float_as_uint(add(sum, v)); }
__device__ __forceinline__ void add_to(uint4& sum, uint4 v) {
    add_to(sum.x, v.x), add_to(sum.y, v.y), add_to(sum.z, v.z), add_to(sum.w, v.w);
}

// ---- waiting and receiving ----

// Waits for words from other ranks. A thread gives up after a timeout, or if the exchange has ended.
// After a thread gives up, the results of the operation are wrong, and the host must not use them.
class Waiting {
    uint32_t* control;
    uint64_t timeout;
    uint64_t started = 0;
    bool has_ended = false;

    static __device__ uint64_t nanoseconds() {
        uint64_t now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        return now;
    }

    __device__ bool gives_up(int sender) {
        if (*(volatile uint32_t*)control) return true;
        const uint64_t now = nanoseconds();
        if (!started) started = now;
        if (now - started < timeout) return false;
        atomicCAS_system(control, 0u, 1u + sender);
        return true;
    }

public:
    __device__ explicit Waiting(const Mailboxes& m) : control(m.control), timeout(m.timeout_seconds * 1000000000ull) {}

    // Reloads `v` from address `from` until the word has arrived or this thread gives up.
    template <typename V> __device__ void complete(typename V::Word& v, const uint32_t* from, int sender) {
        for (uint32_t turn = 1; !V::has_arrived(v) && !has_ended; ++turn) {
            if (turn % CHECK_TURNS == 0) has_ended = gives_up(sender);
            v = V::load(from);
        }
    }
};

// At most BATCH positions in a region: `start`, `start` + `step`, `start` + 2 · `step` and so on, all before `end`.
struct Batch {
    int start, step, end;
    // Calls `use(j, i)` for the j-th position i of the batch.
    template <typename Use> __device__ __forceinline__ void each(Use use) const {
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int i = start + j * step;
            if (i < end) use(j, i);
        }
    }
};

// Divides the positions `first`, `first` + `step` and so on into batches. Calls `use(batch)` for each batch.
template <typename Use> __device__ __forceinline__ void each_batch(int first, int step, int end, Use use) {
    for (int start = first; start < end; start += BATCH * step) use(Batch{start, step, end});
}

// Waits for the values that `rank` sends for the positions of a batch, and stores these values in `part`.
// A rank sends nothing to itself. If `rank` is this rank, `own(j, i)` returns the value for the j-th position i.
//   slot: the regions of all ranks in the mailbox of this rank
template <typename V, typename Own>
__device__ __forceinline__ void receive(const Batch& batch, const Mailboxes& m, const uint32_t* slot, int rank,
                                        Waiting& waiting, Own own, typename V::Word (&part)[BATCH]) {
    const uint32_t* region = slot + (size_t)rank * m.region;
    if (rank == m.rank) {
        batch.each([&](int j, int i) { part[j] = own(j, i); });
        return;
    }
    batch.each([&](int j, int i) { part[j] = V::load(region + i); });
    batch.each([&](int j, int i) { waiting.complete<V>(part[j], region + i, rank); });
}

// ---- one operation ----

// One exchange operation of this rank. The constructor reads `number` and `previous` from the state of this rank.
// `number` is the number of earlier operations.
// `previous` is the largest number of words that the previous operation used in a region.
struct Operation {
    const Mailboxes& m;
    uint32_t number, previous;
    // The word offsets in a mailbox at which the slots of this operation and of the previous operation start.
    size_t slot, last_slot;

    __device__ explicit Operation(const Mailboxes& m) : m(m) {
        number = Scalar::load(m.state), previous = Scalar::load(m.state + 1);
        slot = (size_t)(number % EXCHANGE_SLOTS) * m.ranks * m.region;
        last_slot = (size_t)((number + EXCHANGE_SLOTS - 1) % EXCHANGE_SLOTS) * m.ranks * m.region;
    }
    // Returns the current slot of this rank's mailbox, which starts with the region of rank 0.
    __device__ const uint32_t* own_slot() const { return m.of[m.rank] + slot; }
    // Returns the region of this rank in the current slot of another rank's mailbox.
    __device__ uint32_t* region_at(int rank) const { return m.of[rank] + slot + (size_t)m.rank * m.region; }

    // Empties the slot of the previous operation, and updates the state for the next operation.
    // All threads call prepare_next after they have sent their first words, and before they wait for other ranks.
    // `thread` is the index of the calling thread in the grid, and `threads` is the number of threads in the grid.
    // `largest` is the largest number of words that this operation uses in a region.
    __device__ void prepare_next(int thread, int threads, int largest) const {
        // The size of a region is a multiple of 4 words, so stores of 4 words stay within the region.
        uint32_t* own = m.of[m.rank] + last_slot;
        for (int i = 4 * thread; i < previous; i += 4 * threads)
            for (int rank = 0; rank < m.ranks; ++rank)
                if (rank != m.rank) Quad::store(own + (size_t)rank * m.region + i, Quad::empty());
        // The stores of two GPUs reach host memory over different PCIe paths, so their order needs a fence.
        // The slot must be empty before this rank sends the values of the next operation.
        // Those values allow the other ranks to use the slot again.
        if (m.in_host_memory) __threadfence_system();
        // The last block to read the state updates it. The next operation reads the state after this kernel has ended.
        // The update comes before the wait for the other ranks, so the wait hides the latency of the atomic operation.
        __syncthreads();
        if (threadIdx.x == 0 && atomicAdd(m.state + 2, 1u) == gridDim.x - 1) {
            Scalar::store(m.state, number + 1);
            Scalar::store(m.state + 1, largest);
            Scalar::store(m.state + 2, 0);
        }
    }
};

// Waits for the previous kernel to end, and lets the next kernel start unless ranks share a GPU.
__device__ __forceinline__ void begin(const Mailboxes& m) {
    pdl_wait();
    // On a shared GPU, the next kernel must not start while this kernel waits for the other ranks.
    // The blocks of the next kernel could leave no room for the kernels of those ranks.
    if (!m.shares_gpu) pdl_launch_dependents();
}

// Performs one exchange operation. Sends `words` words to each other rank.
// Then calls `take(slot, waiting, first, step)`, which receives the words of the other ranks from `slot`.
// `own_words(i)` returns the words to send from word i on: one word or four words, none of them EMPTY.
// A thread sends and receives the words that start at `first`, `first` + `step`, and so on.
// `largest` is the largest number of words that this operation uses in a region.
template <typename V, typename Own, typename Take>
__device__ void exchange(Own own_words, const Mailboxes& m, int words, int largest, Take take) {
    begin(m);
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    const int first = thread * V::SIZE, step = threads * V::SIZE;
    // Load latency dominates small operations, so the first words and the state are loaded at the same time.
    typename V::Word v[BATCH];
    const auto load = [&](const Batch& batch) { batch.each([&](int j, int i) { v[j] = own_words(i); }); };
    load({first, step, words});
    const Operation operation(m);
    each_batch(first, step, words, [&](const Batch& batch) {
        if (batch.start != first) load(batch);
        for (int rank = 0; rank < m.ranks; ++rank) {
            uint32_t* to = operation.region_at(rank);
            if (rank != m.rank) batch.each([&](int j, int i) { V::store(to + i, v[j]); });
        }
    });
    operation.prepare_next(thread, threads, largest);
    Waiting waiting(m);
    take(operation.own_slot(), waiting, first, step);
}

// ---- sums of f32 values ----

template <typename V>
__device__ void exchange_sum(uint32_t* x, uint32_t* out, const Mailboxes& m, int words, int clears_x) {
    const auto own_words = [&](int i) { return V::sendable(V::load(x + i)); };
    exchange<V>(own_words, m, words, words, [&](const uint32_t* slot, Waiting& waiting, int first, int step) {
        each_batch(first, step, words, [&](const Batch& batch) {
            typename V::Word own[BATCH], sum[BATCH], part[BATCH];
            batch.each([&](int j, int i) { own[j] = own_words(i); });
            for (int rank = 0; rank < m.ranks; ++rank) {
                receive<V>(batch, m, slot, rank, waiting, [&](int j, int) { return own[j]; }, part);
                batch.each([&](int j, int) {
                    if (rank == 0)
                        sum[j] = part[j];
                    else
                        add_to(sum[j], part[j]);
                });
            }
            batch.each([&](int j, int i) {
                if (clears_x) V::store(x + i, V::zero());
                V::store(out + i, sum[j]);
            });
        });
    });
}

// Computes out = Σ x over all ranks. The values are added in the order of the ranks.
//   x, out: f32 [words]; out may be x
//   words: at most the size of a region; exchange_sum_4 needs a multiple of 4
//   clears_x: whether to fill x with zeros; must be 0 if out is x
//   grid: at most EXCHANGE_BLOCKS, divided by the number of ranks if ranks share a GPU; block: at most 512
//   bytes moved: 8 · words, and 4 · words to each other rank
extern "C" __global__ void __launch_bounds__(512)
    exchange_sum_4(uint32_t* x, uint32_t* out, const __grid_constant__ Mailboxes m, int words, int clears_x) {
    exchange_sum<Quad>(x, out, m, words, clears_x);
}
extern "C" __global__ void __launch_bounds__(512)
    exchange_sum_1(uint32_t* x, uint32_t* out, const __grid_constant__ Mailboxes m, int words, int clears_x) {
    exchange_sum<Scalar>(x, out, m, words, clears_x);
}

// ---- sums of bf16 values ----

// Returns `word`, a pair of bf16 values. Replaces EMPTY, a pair of NaNs, with a pair of other NaNs.
__device__ __forceinline__ uint32_t sendable_pair(uint32_t word) {
    constexpr uint32_t OTHER_NAN_PAIR = 0x7fff7fffu;
    return word == EMPTY ? OTHER_NAN_PAIR : word;
}
// Rounds two f32 values to bf16 and packs both into one word, the first into the lower half. Never returns EMPTY.
__device__ __forceinline__ uint32_t to_bf16_pair(uint32_t first, uint32_t second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(__uint_as_float(first), __uint_as_float(second));
    return sendable_pair(*reinterpret_cast<const uint32_t*>(&pair));
}
__device__ __forceinline__ void add_bf16_pair(float& first, float& second, uint32_t word) {
    // The bits of a bf16 value are the high half of the bits of the equal f32 value.
    first += __uint_as_float(word << 16);
    second += __uint_as_float(word & 0xffff0000u);
}

__device__ __forceinline__ void add_bf16(float (&sum)[8], uint4 words) {
    add_bf16_pair(sum[0], sum[1], words.x), add_bf16_pair(sum[2], sum[3], words.y);
    add_bf16_pair(sum[4], sum[5], words.z), add_bf16_pair(sum[6], sum[7], words.w);
}
// Rounds 8 f32 values to bf16, and packs two per word.
__device__ __forceinline__ uint4 round_to_bf16(const float (&v)[8]) {
    const auto pair = [&](int i) { return to_bf16_pair(__float_as_uint(v[i]), __float_as_uint(v[i + 1])); };
    return make_uint4(pair(0), pair(2), pair(4), pair(6));
}
// Loads 8 f32 values and rounds them to bf16.
__device__ __forceinline__ uint4 load_as_bf16(const uint32_t* x) {
    const uint4 a = Quad::load(x), b = Quad::load(x + 4);
    return make_uint4(to_bf16_pair(a.x, a.y), to_bf16_pair(a.z, a.w), to_bf16_pair(b.x, b.y), to_bf16_pair(b.z, b.w));
}
__device__ __forceinline__ void store_8(uint32_t* out, const float (&v)[8]) {
#pragma unroll
    for (int half = 0; half < 8; half += 4)
        Quad::store(out + half, make_uint4(__float_as_uint(v[half]), __float_as_uint(v[half + 1]),
                                           __float_as_uint(v[half + 2]), __float_as_uint(v[half + 3])));
}

// Computes out = Σ bf16(x) over all ranks. The sums are f32, and the values are added in the order of the ranks.
// For the same number of elements, a rank sends half as many bytes as in exchange_sum_4.
//   x, out: f32 [2 · words]; out may be x
//   words: a multiple of 4, at most the size of a region
//   grid, block: as for exchange_sum_4
//   bytes moved: 16 · words, and 4 · words to each other rank
extern "C" __global__ void __launch_bounds__(512)
    exchange_sum_bf16(uint32_t* x, uint32_t* out, const __grid_constant__ Mailboxes m, int words) {
    const auto own_words = [&](int i) { return load_as_bf16(x + 2 * (size_t)i); };
    exchange<Quad>(own_words, m, words, words, [&](const uint32_t* slot, Waiting& waiting, int first, int step) {
        each_batch(first, step, words, [&](const Batch& batch) {
            uint4 own[BATCH], part[BATCH];
            float sum[BATCH][8] = {};
            batch.each([&](int j, int i) { own[j] = own_words(i); });
            for (int rank = 0; rank < m.ranks; ++rank) {
                receive<Quad>(batch, m, slot, rank, waiting, [&](int j, int) { return own[j]; }, part);
                batch.each([&](int j, int) { add_bf16(sum[j], part[j]); });
            }
            batch.each([&](int j, int i) { store_8(out + 2 * (size_t)i, sum[j]); });
        });
    });
}

// Computes out = bf16(Σ bf16(x)) over all ranks, in two steps.
// In step 1, each rank adds up its share of the elements, in f32 and in the order of the ranks.
// In step 2, each rank sends the sums of its share to the other ranks.
// With R ranks, a rank sends about 8 · (R - 1) / R · words bytes.
// In exchange_sum_bf16, it sends 4 · (R - 1) · words bytes.
//   x, out: f32 [2 · words]; out may be x
//   words: a multiple of 4; a region must have room for twice the words of the largest share
//   m.first_item: the first group of 4 words of each rank's share, then the number of groups
//   grid, block: as for exchange_sum_4
//   bytes moved: 16 · words, and the words sent to other ranks
extern "C" __global__ void __launch_bounds__(512)
    exchange_sum_shares_bf16(uint32_t* x, uint32_t* out, const __grid_constant__ Mailboxes m, int words) {
    begin(m);
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    const int first = thread * Quad::SIZE, step = threads * Quad::SIZE;
    const auto start_of = [&](int rank) { return m.first_item[rank] * Quad::SIZE; };
    const auto words_of = [&](int rank) { return start_of(rank + 1) - start_of(rank); };
    // `share` (world.rs) gives rank 0 the largest share.
    // In each region, the first `most` words are for the addends. The sums follow.
    const int most = words_of(0);
    const Operation operation(m);
    for (int rank = 0; rank < m.ranks; ++rank) {
        if (rank == m.rank) continue;
        uint32_t* to = operation.region_at(rank);
        const uint32_t* from = x + 2 * (size_t)start_of(rank);
        each_batch(first, step, words_of(rank), [&](const Batch& batch) {
            uint4 v[BATCH];
            batch.each([&](int j, int i) { v[j] = load_as_bf16(from + 2 * (size_t)i); });
            batch.each([&](int j, int i) { Quad::store(to + i, v[j]); });
        });
    }
    operation.prepare_next(thread, threads, words ? 2 * most : 0);
    Waiting waiting(m);
    const uint32_t* slot = operation.own_slot();
    const auto store = [&](int rank, int i, uint4 v) {
        float values[8] = {};
        add_bf16(values, v);
        store_8(out + 2 * (size_t)(start_of(rank) + i), values);
    };
    each_batch(first, step, words_of(m.rank), [&](const Batch& batch) {
        uint4 part[BATCH];
        float sum[BATCH][8] = {};
        const uint32_t* own = x + 2 * (size_t)start_of(m.rank);
        for (int rank = 0; rank < m.ranks; ++rank) {
            receive<Quad>(
                batch, m, slot, rank, waiting, [&](int, int i) { return load_as_bf16(own + 2 * (size_t)i); }, part);
            batch.each([&](int j, int) { add_bf16(sum[j], part[j]); });
        }
        batch.each([&](int j, int i) {
            part[j] = round_to_bf16(sum[j]);
            for (int rank = 0; rank < m.ranks; ++rank)
                if (rank != m.rank) Quad::store(operation.region_at(rank) + most + i, part[j]);
            store(m.rank, i, part[j]);
        });
    });
    for (int rank = 0; rank < m.ranks; ++rank) {
        if (rank == m.rank) continue;
        each_batch(first, step, words_of(rank), [&](const Batch& batch) {
            uint4 part[BATCH];
            receive<Quad>(batch, m, slot + most, rank, waiting, [&](int, int) { return Quad::zero(); }, part);
            batch.each([&](int j, int i) { store(rank, i, part[j]); });
        });
    }
}

// ---- sum, residual addition and norm ----

__device__ __forceinline__ void load_8(const float* from, float (&v)[8]) {
    const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}
// Loads 8 values of y, from value 2 · i on, as four words with two bf16 values each. f32 values are rounded.
// Returns no EMPTY word.
__device__ __forceinline__ uint4 load_pairs(const float* y, size_t i) {
    return load_as_bf16(reinterpret_cast<const uint32_t*>(y) + 2 * i);
}
__device__ __forceinline__ uint4 load_pairs(const __nv_bfloat16* y, size_t i) {
    const uint4 v = *reinterpret_cast<const uint4*>(reinterpret_cast<const uint32_t*>(y) + i);
    return make_uint4(sendable_pair(v.x), sendable_pair(v.y), sendable_pair(v.z), sendable_pair(v.w));
}
// Stores the 8 bf16 values that `words` contains, two per word. Converts them to f32 if `out` is f32.
__device__ __forceinline__ void store_bf16(__nv_bfloat16* out, uint4 words) { *reinterpret_cast<uint4*>(out) = words; }
__device__ __forceinline__ void store_bf16(float* out, uint4 words) {
    float values[8] = {};
    add_bf16(values, words);
    store_8(reinterpret_cast<uint32_t*>(out), values);
}

// Adds partial results to the residual stream, and normalizes it: sum = x + bias + Σ bf16(y) over all ranks, and
// normed = bf16(sum / sqrt(mean(sum²) + eps) · weight). A rank computes these values only for its share of the rows.
// For the same number of elements, a rank sends as many bytes as in exchange_sum_shares_bf16.
//
// A block handles row i of each rank's share, for i = blockIdx.x, blockIdx.x + gridDim.x and so on, in three steps:
//   1. It sends y of row i of each other rank's share to that rank.
//   2. It receives y of row i of its own rank's share from the other ranks, computes `sum` and `normed` for this row,
//      and sends `normed` to the other ranks.
//   3. It receives the rows of `normed` that the other ranks computed.
// The block starts step 1 of a row before step 2 of its previous row, and before step 3 of the row before that one.
// The values are then under way while the block works on other rows.
//
//   x, sum: f32 [rows, columns], accessed only in the rows of this rank
//   y: Y [rows, columns]
//   bias, weight: f32 [columns]; bias may be null
//   normed: T [rows, columns], the rows of all ranks
//   columns: a multiple of 8, at most EXCHANGE_ROW_COLUMNS
//   m.first_item: the first row of each rank's share, then the number of rows
//   grid: at most EXCHANGE_BLOCKS, divided by the number of ranks if ranks share a GPU; the same on all ranks
//   block: EXCHANGE_ROW_THREADS
//   bytes moved: columns · (sizeof(Y) + sizeof(T)) per row, and columns · 8 per row of this rank
template <typename Y, typename T>
__device__ void exchange_add_norm(const float* x, const Y* y, const float* bias, const float* weight, float* sum,
                                  T* normed, const Mailboxes& m, int columns, float eps) {
    __shared__ float scratch[2][EXCHANGE_ROW_THREADS / 32];
    begin(m);
    const int row_words = columns / 2;
    const auto rows_of = [&](int rank) { return m.first_item[rank + 1] - m.first_item[rank]; };
    // Returns the position at which a row of a rank's share starts in x, y, sum and normed, in pairs of elements.
    const auto start_of = [&](int rank, int row) { return (size_t)(m.first_item[rank] + row) * row_words; };
    // `share` (world.rs) gives rank 0 the largest share.
    // In each region, the first `most` words are for the addends. The norms follow.
    const int most = rows_of(0) * row_words;
    const Operation operation(m);
    const uint32_t* slot = operation.own_slot();
    Waiting waiting(m);
    // A row has up to HELD parts of 8 · EXCHANGE_ROW_THREADS columns. The last part may be shorter.
    // A thread handles 8 columns of each part, but none past the end of the row.
    // `use(h, i)` receives the index h of a part, and the index i of this thread's first word of the part in the row.
    // A word is two elements.
    constexpr int HELD = EXCHANGE_ROW_COLUMNS / (8 * EXCHANGE_ROW_THREADS);
    const auto each_part = [&](auto use) {
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            const int i = 4 * (threadIdx.x + h * EXCHANGE_ROW_THREADS);
            if (i < row_words) use(h, i);
        }
    };

    const auto send_addends = [&](int row) {
        each_part([&](int, int i) {
            uint4 v[EXCHANGE_MAX_RANKS];
#pragma unroll
            for (int rank = 0; rank < EXCHANGE_MAX_RANKS; ++rank)
                if (rank < m.ranks && rank != m.rank && row < rows_of(rank))
                    v[rank] = load_pairs(y, start_of(rank, row) + i);
#pragma unroll
            for (int rank = 0; rank < EXCHANGE_MAX_RANKS; ++rank)
                if (rank < m.ranks && rank != m.rank && row < rows_of(rank))
                    Quad::store(operation.region_at(rank) + row * row_words + i, v[rank]);
        });
    };
    const auto compute = [&](int row, int parity) {
        const size_t start = start_of(m.rank, row);
        float v[HELD][8], squares = 0.0f;
        each_part([&](int h, int i) {
            load_8(x + 2 * (start + i), v[h]);
            const uint4 own = load_pairs(y, start + i);
            float biases[8] = {}, added[8] = {};
            if (bias) load_8(bias + 2 * i, biases);
            for (int rank = 0; rank < m.ranks; ++rank) {
                uint4 part = own;
                if (rank != m.rank) {
                    const uint32_t* from = slot + (size_t)rank * m.region + row * row_words + i;
                    part = Quad::load(from);
                    waiting.complete<Quad>(part, from, rank);
                }
                add_bf16(added, part);
            }
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                v[h][k] += added[k] + biases[k];
                squares += v[h][k] * v[h][k];
            }
            store_8(reinterpret_cast<uint32_t*>(sum) + 2 * (start + i), v[h]);
        });
        const float scale = rsqrtf(block_sum(squares, scratch[parity]) / columns + eps);
        each_part([&](int h, int i) {
            float weights[8];
            load_8(weight + 2 * i, weights);
#pragma unroll
            for (int k = 0; k < 8; ++k) v[h][k] *= scale * weights[k];
            const uint4 words = round_to_bf16(v[h]);
            for (int rank = 0; rank < m.ranks; ++rank)
                if (rank != m.rank) Quad::store(operation.region_at(rank) + most + row * row_words + i, words);
            store_bf16(normed + 2 * (start + i), words);
        });
    };
    const auto receive_norms = [&](int row) {
        for (int rank = 0; rank < m.ranks; ++rank) {
            if (rank == m.rank || row >= rows_of(rank)) continue;
            each_part([&](int, int i) {
                const uint32_t* from = slot + (size_t)rank * m.region + most + row * row_words + i;
                uint4 words = Quad::load(from);
                waiting.complete<Quad>(words, from, rank);
                store_bf16(normed + 2 * (start_of(rank, row) + i), words);
            });
        }
    };

    // A block sends its addends for a row before it waits for the other ranks' addends for the same row.
    // Otherwise, all ranks could wait for each other forever.
    for (int round = 0;; ++round) {
        const int row = blockIdx.x + round * gridDim.x, previous = row - gridDim.x, last = previous - gridDim.x;
        if (last >= rows_of(0)) break;
        send_addends(row);
        if (round == 0) operation.prepare_next(blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x, 2 * most);
        if (round >= 1 && previous < rows_of(m.rank)) compute(previous, round % 2);
        if (round >= 2) receive_norms(last);
    }
}

#define DEFINE_ADD_NORM(Y, Y_SUFFIX, T, SUFFIX)                                                                        \
    extern "C" __global__ void __launch_bounds__(EXCHANGE_ROW_THREADS)                                                 \
        exchange_add_norm_##Y_SUFFIX##_##SUFFIX(const float* x, const Y* y, const float* bias, const float* weight,    \
                                                float* sum, T* normed, const __grid_constant__ Mailboxes m,            \
                                                int columns, float eps) {                                              \
        exchange_add_norm(x, y, bias, weight, sum, normed, m, columns, eps);                                           \
    }
DEFINE_ADD_NORM(float, f32, float, f32)
DEFINE_ADD_NORM(float, f32, __nv_bfloat16, bf16)
DEFINE_ADD_NORM(__nv_bfloat16, bf16, float, f32)
DEFINE_ADD_NORM(__nv_bfloat16, bf16, __nv_bfloat16, bf16)

// Like exchange_add_norm, but every rank computes all rows.
// The ranks send y but no norms, which takes less time for few rows.
// The kernel rounds y to bf16 if ROUNDED is true, and `normed` only if T is bf16.
//
// A block handles the rows blockIdx.x, blockIdx.x + gridDim.x and so on. It sends y of a row to all other ranks before
// it computes its previous row.
//
//   x, sum: f32 [rows, columns]
//   y: Y [rows, columns]; f32 if ROUNDED is false
//   bias, weight: f32 [columns]; bias may be null
//   normed: T [rows, columns]
//   columns: a multiple of 8, at most EXCHANGE_ROW_COLUMNS
//   A region must have room for 4 bytes per element of y, or 2 bytes if ROUNDED is true.
//   grid: at most EXCHANGE_BLOCKS, divided by the number of ranks if ranks share a GPU; the same on all ranks
//   block: EXCHANGE_ROW_THREADS
//   bytes moved: columns · (8 + sizeof(Y) + sizeof(T)) per row
template <bool ROUNDED, typename Y, typename T>
__device__ void exchange_add_norm_all(const float* x, const Y* y, const float* bias, const float* weight, float* sum,
                                      T* normed, const Mailboxes& m, int rows, int columns, float eps) {
    __shared__ float scratch[2][EXCHANGE_ROW_THREADS / 32];
    // As in exchange_add_norm, a row has up to HELD parts, and a thread handles 8 columns of each part.
    // In a region, these 8 columns take QUADS groups of 4 words.
    constexpr int HELD = EXCHANGE_ROW_COLUMNS / (8 * EXCHANGE_ROW_THREADS), QUADS = ROUNDED ? 1 : 2;
    const int row_words = ROUNDED ? columns / 2 : columns;
    begin(m);
    const Operation operation(m);
    const uint32_t* slot = operation.own_slot();
    Waiting waiting(m);
    const auto each_part = [&](auto use) {
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            const int i = 8 * (threadIdx.x + h * EXCHANGE_ROW_THREADS);
            if (i < columns) use(h, i);
        }
    };
    const auto load_own = [&](uint4(&own)[QUADS], size_t i) {
        if constexpr (ROUNDED) {
            own[0] = load_pairs(y, i / 2);
        } else {
#pragma unroll
            for (int q = 0; q < QUADS; ++q)
                own[q] = Quad::sendable(Quad::load(reinterpret_cast<const uint32_t*>(y) + i + 4 * q));
        }
    };
    const auto add_words = [&](float (&added)[8], const uint4(&words)[QUADS]) {
        if constexpr (ROUNDED) {
            add_bf16(added, words[0]);
        } else {
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                const uint4 v = words[q];
                added[4 * q] += __uint_as_float(v.x), added[4 * q + 1] += __uint_as_float(v.y);
                added[4 * q + 2] += __uint_as_float(v.z), added[4 * q + 3] += __uint_as_float(v.w);
            }
        }
    };
    // Returns the position in a region of the word for column i of a row.
    const auto word_of = [&](int row, int i) { return (size_t)row * row_words + (ROUNDED ? i / 2 : i); };

    const auto send = [&](int row) {
        each_part([&](int, int i) {
            uint4 own[QUADS];
            load_own(own, (size_t)row * columns + i);
            for (int rank = 0; rank < m.ranks; ++rank) {
                if (rank == m.rank) continue;
#pragma unroll
                for (int q = 0; q < QUADS; ++q)
                    Quad::store(operation.region_at(rank) + word_of(row, i) + 4 * q, own[q]);
            }
        });
    };
    const auto compute = [&](int row, int parity) {
        float v[HELD][8], squares = 0.0f;
        each_part([&](int h, int i) {
            const size_t at = (size_t)row * columns + i;
            load_8(x + at, v[h]);
            uint4 own[QUADS], part[QUADS];
            load_own(own, at);
            float biases[8] = {}, added[8] = {};
            if (bias) load_8(bias + i, biases);
            for (int rank = 0; rank < m.ranks; ++rank) {
                if (rank == m.rank) {
                    add_words(added, own);
                    continue;
                }
                const uint32_t* from = slot + (size_t)rank * m.region + word_of(row, i);
#pragma unroll
                for (int q = 0; q < QUADS; ++q) part[q] = Quad::load(from + 4 * q);
#pragma unroll
                for (int q = 0; q < QUADS; ++q) waiting.complete<Quad>(part[q], from + 4 * q, rank);
                add_words(added, part);
            }
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                v[h][k] += added[k] + biases[k];
                squares += v[h][k] * v[h][k];
            }
            store_8(reinterpret_cast<uint32_t*>(sum) + at, v[h]);
        });
        const float scale = rsqrtf(block_sum(squares, scratch[parity]) / columns + eps);
        each_part([&](int h, int i) {
            const size_t at = (size_t)row * columns + i;
            float weights[8];
            load_8(weight + i, weights);
#pragma unroll
            for (int k = 0; k < 8; ++k) v[h][k] = v[h][k] * scale * weights[k];
            if constexpr (sizeof(T) == 2)
                store_bf16(normed + at, round_to_bf16(v[h]));
            else
                store_8(reinterpret_cast<uint32_t*>(normed) + at, v[h]);
        });
    };

    for (int round = 0;; ++round) {
        const int row = blockIdx.x + round * gridDim.x, previous = row - gridDim.x;
        if (previous >= rows) break;
        if (row < rows) send(row);
        if (round == 0)
            operation.prepare_next(blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x, rows * row_words);
        else
            compute(previous, round % 2);
    }
}

#define DEFINE_ADD_NORM_ALL(ROUNDED, Y, T, SUFFIX)                                                                     \
    extern "C" __global__ void __launch_bounds__(EXCHANGE_ROW_THREADS)                                                 \
        exchange_add_norm_all_##SUFFIX(const float* x, const Y* y, const float* bias, const float* weight, float* sum, \
                                       T* normed, const __grid_constant__ Mailboxes m, int rows, int columns,          \
                                       float eps) {                                                                    \
        exchange_add_norm_all<ROUNDED>(x, y, bias, weight, sum, normed, m, rows, columns, eps);                        \
    }
DEFINE_ADD_NORM_ALL(false, float, float, exact_f32_f32)
DEFINE_ADD_NORM_ALL(false, float, __nv_bfloat16, exact_f32_bf16)
DEFINE_ADD_NORM_ALL(true, float, float, rounded_f32_f32)
DEFINE_ADD_NORM_ALL(true, float, __nv_bfloat16, rounded_f32_bf16)
DEFINE_ADD_NORM_ALL(true, __nv_bfloat16, float, rounded_bf16_f32)
DEFINE_ADD_NORM_ALL(true, __nv_bfloat16, __nv_bfloat16, rounded_bf16_bf16)

// ---- columns of all ranks ----

template <typename V>
__device__ void exchange_columns(const uint32_t* x, uint32_t* out, const Mailboxes& m, int rows, int largest) {
    begin(m);
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    const int first = thread * V::SIZE, step = threads * V::SIZE;
    const auto columns_of = [&](int rank) { return m.first_item[rank + 1] - m.first_item[rank]; };
    const auto batch_of = [&](int rank, int start) { return Batch{start, step, rows * columns_of(rank)}; };
    typename V::Word own[BATCH];
    const auto load_own = [&](int start) {
        batch_of(m.rank, start).each([&](int j, int i) { own[j] = V::sendable(V::load(x + i)); });
    };
    const auto store = [&](int rank, int i, typename V::Word word) {
        const int columns = columns_of(rank);
        V::store(out + (size_t)(i / columns) * m.first_item[m.ranks] + m.first_item[rank] + i % columns, word);
    };
    // Load latency dominates small operations, so the first words and the state are loaded at the same time.
    load_own(first);
    const Operation operation(m);
    Waiting waiting(m);
    const auto send = [&](int start) {
        const Batch batch = batch_of(m.rank, start);
        for (int rank = 0; rank < m.ranks; ++rank) {
            uint32_t* to = operation.region_at(rank);
            if (rank != m.rank) batch.each([&](int j, int i) { V::store(to + i, own[j]); });
        }
        batch.each([&](int j, int i) { store(m.rank, i, own[j]); });
    };
    const auto take = [&](int start) {
        const uint32_t* slot = operation.own_slot();
        for (int rank = 0; rank < m.ranks; ++rank) {
            if (rank == m.rank) continue;
            const Batch batch = batch_of(rank, start);
            typename V::Word part[BATCH];
            receive<V>(batch, m, slot, rank, waiting, [](int, int) { return V::zero(); }, part);
            batch.each([&](int j, int i) { store(rank, i, part[j]); });
        }
    };

    // A thread sends its next batch before it waits for the previous batch of the other ranks.
    // The values of a batch are under way while the thread receives and stores other values.
    send(first);
    operation.prepare_next(thread, threads, largest);
    for (int previous = first; previous < largest; previous += BATCH * step) {
        load_own(previous + BATCH * step);
        send(previous + BATCH * step);
        take(previous);
    }
}

// Concatenates the columns of all ranks: row r of out is row r of x from rank 0, then from rank 1, and so on.
//   x: f32 [rows, columns of this rank]
//   out: f32 [rows, columns of all ranks]
//   largest: rows · columns of the rank with the most columns
//   exchange_columns_4 requires that every rank's number of columns is a multiple of 4
//   grid, block: as for exchange_sum_4
//   bytes moved: 4 · rows · (columns of this rank + columns of all ranks), and the words sent to other ranks
extern "C" __global__ void __launch_bounds__(512)
    exchange_columns_4(const uint32_t* x, uint32_t* out, const __grid_constant__ Mailboxes m, int rows, int largest) {
    exchange_columns<Quad>(x, out, m, rows, largest);
}
extern "C" __global__ void __launch_bounds__(512)
    exchange_columns_1(const uint32_t* x, uint32_t* out, const __grid_constant__ Mailboxes m, int rows, int largest) {
    exchange_columns<Scalar>(x, out, m, rows, largest);
}
