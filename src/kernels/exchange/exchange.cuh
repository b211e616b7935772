// Exchange of data between ranks on several GPUs, without copies by the host.
//
// Every rank has a mailbox to which all ranks can write. The mailbox is in the rank's GPU memory or in host memory.
// A mailbox has EXCHANGE_BUFFERS buffers, and each buffer has one region per sending rank.
// A rank writes its values to its region in the mailbox of every other rank.
// The rank then waits until the values of all other ranks have arrived in its own mailbox.
// Like the Lamport kernels of TensorRT-LLM, the exchange needs no flags that signal arrival: a word of a mailbox is
// EMPTY, the bits of a NaN, until a value arrives. Before sending, a rank replaces EMPTY with another NaN.
//
// Operation k uses buffer k mod EXCHANGE_BUFFERS.
// During operation k, a rank also empties the buffer of operation k - 1 in its own mailbox.
// The next operation to use that buffer is operation k - 1 + EXCHANGE_BUFFERS.
// Before another rank starts that operation, it has waited for this rank's values of operation k + 1 or k + 2.
// This rank sends those values only after its operation k has ended, when the buffer is already empty.
//
// In exchange_add_norm and exchange_sum_shares_bf16, two ranks with empty shares send nothing to each other.
// Both still wait for a rank with a share, which waits for all ranks, so each indirectly waits for the other.
// In exchange_columns, no rank waits for a rank without columns.
// Callers must therefore not run two exchange_columns operations in a row in which the same rank has no columns.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

#include "constants.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"

constexpr uint32_t EMPTY = 0xffffffffu;
constexpr uint32_t OTHER_NAN = 0x7fffffffu;
// The maximum number of positions in a batch. A thread loads the values of a whole batch before it uses the first one,
// so that the loads overlap.
constexpr int BATCH_POSITIONS = 4;
// After every CHECK_TURNS polls, a waiting thread checks whether to give up.
// Each check reads host memory, which is slow.
constexpr uint32_t CHECK_TURNS = 4096;

struct Mailboxes {
    // The mailbox of each rank: u32 [EXCHANGE_BUFFERS, ranks, region].
    uint32_t* of[EXCHANGE_MAX_RANKS];
    // This rank's state, three words: the number of earlier operations, the largest number of words that the previous
    // operation used in a region, and the number of this operation's thread blocks that have read the first two words.
    uint32_t* state;
    // A word in host memory that all ranks share. If it is nonzero, the exchange has ended, and threads stop waiting.
    uint32_t* control;
    // The index of the first item of each rank's share, followed by the total number of items.
    // An item is a Quad, 4 words, in exchange_sum_shares_bf16, a row in exchange_add_norm, and a column in
    // exchange_columns. The other kernels do not use this array.
    int first_item[EXCHANGE_MAX_RANKS + 1];
    int rank, ranks, region;
    // How long a thread waits for other ranks before it gives up.
    int timeout_seconds;
    // Nonzero if any two ranks use the same GPU.
    int shares_gpu;
    // Nonzero if the mailboxes are in host memory.
    int in_host_memory;
};
// The last 4 bytes are padding.
static_assert(sizeof(Mailboxes) == 8 * (EXCHANGE_MAX_RANKS + 2) + 4 * (EXCHANGE_MAX_RANKS + 8),
              "Mailboxes must match RawMailboxes");

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
    static __device__ uint32_t empty() { return EMPTY; }
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

// Adds words that hold the bits of f32 values.
__device__ __forceinline__ void add_words(uint32_t& sum, uint32_t v) {
    sum = __float_as_uint(__uint_as_float(sum) + __uint_as_float(v));
}
__device__ __forceinline__ void add_words(uint4& sum, uint4 v) {
    add_words(sum.x, v.x), add_words(sum.y, v.y), add_words(sum.z, v.z), add_words(sum.w, v.w);
}

// ---- bf16 values, two per word ----

// Returns `word`, a pair of bf16 values, or a pair of other NaNs if `word` is EMPTY, which is a pair of NaNs.
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
    // Converts the values as `unpack` does (headers/common.cuh).
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
    __device__ explicit Waiting(const Mailboxes& mailboxes)
        : control(mailboxes.control), timeout(mailboxes.timeout_seconds * 1000000000ull) {}

    // Reloads `v` from address `from` until all its words have arrived or this thread gives up.
    // After a timeout, the host reports that the rank `sender` does not answer.
    template <typename V> __device__ void complete(typename V::Word& v, const uint32_t* from, int sender) {
        for (uint32_t turn = 1; !V::has_arrived(v) && !has_ended; ++turn) {
            if (turn % CHECK_TURNS == 0) has_ended = gives_up(sender);
            v = V::load(from);
        }
    }
};

// At most BATCH_POSITIONS positions in a region: `start`, `start` + `stride`, `start` + 2 · `stride` and so on, all
// before `end`.
struct PositionBatch {
    int start, stride, end;
    // Calls `use(j, i)` for each position i of the batch. j is the index of the position in the batch.
    template <typename Use> __device__ __forceinline__ void each(Use use) const {
#pragma unroll
        for (int j = 0; j < BATCH_POSITIONS; ++j) {
            const int i = start + j * stride;
            if (i < end) use(j, i);
        }
    }
};

// Divides the positions `first`, `first` + `stride` and so on, all before `end`, into batches.
// Calls `use(batch)` for each batch.
template <typename Use> __device__ __forceinline__ void each_batch(int first, int stride, int end, Use use) {
    for (int start = first; start < end; start += BATCH_POSITIONS * stride) use(PositionBatch{start, stride, end});
}

// Waits for the values that `rank` sends for the positions of a batch, and stores these values in `received`.
// If `rank` is this rank, takes the values from `own(j, i)` instead (see PositionBatch::each).
//   buffer: the address of position 0 in the region of rank 0, in this rank's mailbox
template <typename V, typename Own>
__device__ __forceinline__ void receive(const PositionBatch& batch, const Mailboxes& mailboxes, const uint32_t* buffer,
                                        int rank, Waiting& waiting, Own own,
                                        typename V::Word (&received)[BATCH_POSITIONS]) {
    const uint32_t* region = buffer + (size_t)rank * mailboxes.region;
    if (rank == mailboxes.rank) {
        batch.each([&](int j, int i) { received[j] = own(j, i); });
        return;
    }
    batch.each([&](int j, int i) { received[j] = V::load(region + i); });
    batch.each([&](int j, int i) { waiting.complete<V>(received[j], region + i, rank); });
}

// ---- one operation ----

// One exchange operation of this rank. The constructor reads `number` and `previous` from the state of this rank.
// `number` is the number of earlier operations.
// `previous` is the largest number of words that the previous operation used in a region.
struct Operation {
    const Mailboxes& mailboxes;
    uint32_t number, previous;
    // The word offsets in a mailbox at which the buffers of this operation and of the previous operation start.
    size_t buffer, previous_buffer;

    __device__ explicit Operation(const Mailboxes& mailboxes) : mailboxes(mailboxes) {
        number = Scalar::load(mailboxes.state);
        previous = Scalar::load(mailboxes.state + 1);
        buffer = buffer_of(mailboxes, number);
        previous_buffer = buffer_of(mailboxes, number + EXCHANGE_BUFFERS - 1);
    }
    // Returns the word offset in a mailbox at which the buffer of operation `number` starts.
    static __device__ __forceinline__ size_t buffer_of(const Mailboxes& mailboxes, uint32_t number) {
        return (size_t)(number % EXCHANGE_BUFFERS) * mailboxes.ranks * mailboxes.region;
    }
    // Returns the current buffer of this rank's mailbox, which starts with the region of rank 0.
    __device__ const uint32_t* own_buffer() const { return mailboxes.of[mailboxes.rank] + buffer; }
    // Returns the region of this rank in the current buffer of `rank`'s mailbox.
    __device__ uint32_t* region_at(int rank) const {
        return mailboxes.of[rank] + buffer + (size_t)mailboxes.rank * mailboxes.region;
    }

    // Empties the other ranks' regions in the previous operation's buffer of this rank's mailbox, and updates the state
    // for the next operation.
    // All threads must call this function, because it synchronizes the block. They call it before they wait for other
    // ranks, but after they have sent their first words, so that these words arrive sooner.
    // `thread` is the index of the calling thread in the grid, and `threads` is the number of threads in the grid.
    // `largest` is the largest number of words that this operation uses in a region.
    __device__ void prepare_next(int thread, int threads, int largest) const {
        // The size of a region is a multiple of 4 words, so stores of 4 words stay within the region.
        uint32_t* own = mailboxes.of[mailboxes.rank] + previous_buffer;
        for (int i = 4 * thread; i < previous; i += 4 * threads)
            for (int rank = 0; rank < mailboxes.ranks; ++rank)
                if (rank != mailboxes.rank) Quad::store(own + (size_t)rank * mailboxes.region + i, Quad::empty());
        // The buffer must be empty before this rank sends the values of the next operation, because those values allow
        // the other ranks to use the buffer again. The stores of different GPUs reach host memory over different PCIe
        // paths, so only a fence ensures this order.
        if (mailboxes.in_host_memory) __threadfence_system();
        // The last block to read the state updates it. The next operation reads the state after this kernel has ended.
        // The update comes before the wait for the other ranks, so the wait hides the latency of the atomic operation.
        __syncthreads();
        if (threadIdx.x == 0 && atomicAdd(mailboxes.state + 2, 1u) == gridDim.x - 1) {
            Scalar::store(mailboxes.state, number + 1);
            Scalar::store(mailboxes.state + 1, largest);
            Scalar::store(mailboxes.state + 2, 0);
        }
    }
};

// Sends the results of a kernel to all ranks, each value as soon as it is computed. The next kernel must be
// exchange_sent_4 or exchange_sent_1 (exchange_sum.cu), which receives the values. Unless ranks share a GPU, the next
// kernel does not wait for the sending kernel to end.
// A rank also sends to its own mailbox, so that its values arrive like the values of the other ranks.
// If mailboxes.ranks is 1, the results are stored instead. This is the case if only one rank runs the layer, or if the
// mailboxes are in host memory (see `sender` in exchange_sum.rs).
class Sender {
    const Mailboxes& mailboxes;
    size_t offset = 0;  // the word offset of this rank's region in a mailbox

public:
    // All threads must call this constructor, which reads the state. The block must then pass a __syncthreads() before
    // any of its threads calls pdl_launch_dependents(): one call per block lets the next kernel start, and that kernel
    // updates the state.
    // At least one kernel must come between the previous operation and this kernel. The previous operation has then
    // already ended when this kernel starts (see headers/pdl.cuh).
    __device__ __forceinline__ explicit Sender(const Mailboxes& mailboxes) : mailboxes(mailboxes) {
        if (mailboxes.ranks == 1) return;
        // The shuffle needs the number, so the load has ended before the thread reaches the __syncthreads().
        const uint32_t number = __shfl_sync(ALL_LANES, Scalar::load(mailboxes.state), 0);
        offset = Operation::buffer_of(mailboxes, number) + (size_t)mailboxes.rank * mailboxes.region;
    }
    // Sends element i to all ranks. Stores it in `out` instead if mailboxes.ranks is 1.
    __device__ __forceinline__ void store(float* out, int i, float value) const {
        if (mailboxes.ranks == 1) {
            out[i] = value;
            return;
        }
        for (int rank = 0; rank < mailboxes.ranks; ++rank)
            Scalar::store(mailboxes.of[rank] + offset + i, Scalar::sendable(__float_as_uint(value)));
    }
};

// Waits for the previous kernel to end, and lets the next kernel start unless ranks share a GPU.
__device__ __forceinline__ void begin(const Mailboxes& mailboxes) {
    pdl_wait();
    // On a shared GPU, the next kernel must not start while this kernel waits for the other ranks.
    // The blocks of the next kernel could leave no room for the kernels of those ranks.
    if (!mailboxes.shares_gpu) pdl_launch_dependents();
}

// Performs one exchange operation. Sends `words` words to each other rank.
// Then calls `take(buffer, waiting, first, stride)`, which receives the words of the other ranks from `buffer`.
// `own_words(i)` returns the V::SIZE words to send from word i on, none of them EMPTY.
// A thread sends and receives V::SIZE words at `first`, V::SIZE words at `first` + `stride`, and so on.
// `largest` is the largest number of words that this operation uses in a region.
template <typename V, typename Own, typename Take>
__device__ void exchange(Own own_words, const Mailboxes& mailboxes, int words, int largest, Take take) {
    begin(mailboxes);
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    const int first = thread * V::SIZE, stride = threads * V::SIZE;
    // Small operations spend most of their time on load latency, so the first words and this rank's state are loaded at
    // the same time.
    typename V::Word v[BATCH_POSITIONS];
    const auto load = [&](const PositionBatch& batch) { batch.each([&](int j, int i) { v[j] = own_words(i); }); };
    load({first, stride, words});
    const Operation operation(mailboxes);
    each_batch(first, stride, words, [&](const PositionBatch& batch) {
        if (batch.start != first) load(batch);
        for (int rank = 0; rank < mailboxes.ranks; ++rank) {
            uint32_t* to = operation.region_at(rank);
            if (rank != mailboxes.rank) batch.each([&](int j, int i) { V::store(to + i, v[j]); });
        }
    });
    operation.prepare_next(thread, threads, largest);
    Waiting waiting(mailboxes);
    take(operation.own_buffer(), waiting, first, stride);
}
