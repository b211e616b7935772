// Sums over all ranks (see exchange/exchange.cuh).
#include "exchange/exchange.cuh"

// Adds the values of `rank` to the sums of a batch. The values of rank 0 must come first, because they set the sums.
template <typename V>
__device__ __forceinline__ void add_received(const PositionBatch& batch, int rank,
                                             const typename V::Word (&received)[BATCH_POSITIONS],
                                             typename V::Word (&sum)[BATCH_POSITIONS]) {
    batch.each([&](int j, int) {
        if (rank == 0)
            sum[j] = received[j];
        else
            add_words(sum[j], received[j]);
    });
}

template <typename V>
__device__ void exchange_sum(uint32_t* x, uint32_t* out, const Mailboxes& mailboxes, int words, int clears_x) {
    const auto own_words = [&](int i) { return V::sendable(V::load(x + i)); };
    const auto take = [&](const uint32_t* buffer, Waiting& waiting, int first, int stride) {
        each_batch(first, stride, words, [&](const PositionBatch& batch) {
            typename V::Word own[BATCH_POSITIONS], sum[BATCH_POSITIONS], received[BATCH_POSITIONS];
            batch.each([&](int j, int i) { own[j] = own_words(i); });
            for (int rank = 0; rank < mailboxes.ranks; ++rank) {
                receive<V>(batch, mailboxes, buffer, rank, waiting, [&](int j, int) { return own[j]; }, received);
                add_received<V>(batch, rank, received, sum);
            }
            batch.each([&](int j, int i) {
                if (clears_x) V::store(x + i, V::zero());
                V::store(out + i, sum[j]);
            });
        });
    };
    exchange<V>(own_words, mailboxes, words, words, take);
}

// Computes out = Σ x over all ranks. The values are added in the order of the ranks.
//   x, out: f32 [words]; out may be x
//   words: at most the size of a region; exchange_sum_4 needs a multiple of 4
//   clears_x: whether to fill x with zeros; must be 0 if out is x
//   grid: at most EXCHANGE_BLOCKS, divided by the number of ranks if ranks share a GPU; block: at most EXCHANGE_THREADS
//   bytes moved: 8 · words, and 4 · words to each other rank
extern "C" __global__ void __launch_bounds__(EXCHANGE_THREADS)
    exchange_sum_4(uint32_t* x, uint32_t* out, const __grid_constant__ Mailboxes mailboxes, int words, int clears_x) {
    exchange_sum<Quad>(x, out, mailboxes, words, clears_x);
}
extern "C" __global__ void __launch_bounds__(EXCHANGE_THREADS)
    exchange_sum_1(uint32_t* x, uint32_t* out, const __grid_constant__ Mailboxes mailboxes, int words, int clears_x) {
    exchange_sum<Scalar>(x, out, mailboxes, words, clears_x);
}

// Computes the same sums as exchange_sum, of values that the previous kernel sends with a Sender.
// Unless ranks share a GPU, this kernel does not wait for the previous kernel to end: it only waits for the values.
// The next kernel can therefore start, and load weights, while both kernels run.
template <typename V> __device__ void exchange_sent(uint32_t* out, const Mailboxes& mailboxes, int words) {
    // On a shared GPU, blocks that wait for values could leave no room for the kernels that send these values.
    if (mailboxes.shares_gpu)
        pdl_wait();
    else
        pdl_launch_dependents();
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    const Operation operation(mailboxes);
    operation.prepare_next(thread, threads, words);
    Waiting waiting(mailboxes);
    uint32_t* buffer = mailboxes.of[mailboxes.rank] + operation.buffer;
    each_batch(thread * V::SIZE, threads * V::SIZE, words, [&](const PositionBatch& batch) {
        typename V::Word sum[BATCH_POSITIONS], received[BATCH_POSITIONS];
        for (int rank = 0; rank < mailboxes.ranks; ++rank) {
            const uint32_t* region = buffer + (size_t)rank * mailboxes.region;
            batch.each([&](int j, int i) { received[j] = V::load(region + i); });
            batch.each([&](int j, int i) { waiting.complete<V>(received[j], region + i, rank); });
            add_received<V>(batch, rank, received, sum);
        }
        batch.each([&](int j, int i) {
            // Empty this rank's own region here, because prepare_next empties only the regions of the other ranks.
            V::store(buffer + (size_t)mailboxes.rank * mailboxes.region + i, V::empty());
            V::store(out + i, sum[j]);
        });
    });
}

//   out: f32 [words]
//   words, grid, block: as for exchange_sum_4
//   bytes moved: 4 · words · (ranks + 2)
extern "C" __global__ void __launch_bounds__(EXCHANGE_THREADS)
    exchange_sent_4(uint32_t* out, const __grid_constant__ Mailboxes mailboxes, int words) {
    exchange_sent<Quad>(out, mailboxes, words);
}
extern "C" __global__ void __launch_bounds__(EXCHANGE_THREADS)
    exchange_sent_1(uint32_t* out, const __grid_constant__ Mailboxes mailboxes, int words) {
    exchange_sent<Scalar>(out, mailboxes, words);
}

// Computes out = Σ bf16(x) over all ranks. The sums are f32, and the values are added in the order of the ranks.
// For the same number of elements, a rank sends half as many bytes as in exchange_sum_4.
//   x, out: f32 [2 · words]; out may be x
//   words: a multiple of 4, at most the size of a region
//   grid, block: as for exchange_sum_4
//   bytes moved: 16 · words, and 4 · words to each other rank
extern "C" __global__ void __launch_bounds__(EXCHANGE_THREADS)
    exchange_sum_bf16(uint32_t* x, uint32_t* out, const __grid_constant__ Mailboxes mailboxes, int words) {
    const auto own_words = [&](int i) { return load_as_bf16(x + 2 * (size_t)i); };
    const auto take = [&](const uint32_t* buffer, Waiting& waiting, int first, int stride) {
        each_batch(first, stride, words, [&](const PositionBatch& batch) {
            uint4 own[BATCH_POSITIONS], received[BATCH_POSITIONS];
            float sum[BATCH_POSITIONS][8] = {};
            batch.each([&](int j, int i) { own[j] = own_words(i); });
            for (int rank = 0; rank < mailboxes.ranks; ++rank) {
                receive<Quad>(batch, mailboxes, buffer, rank, waiting, [&](int j, int) { return own[j]; }, received);
                batch.each([&](int j, int) { add_bf16(sum[j], received[j]); });
            }
            batch.each([&](int j, int i) { store_8(out + 2 * (size_t)i, sum[j]); });
        });
    };
    exchange<Quad>(own_words, mailboxes, words, words, take);
}

// Computes out = bf16(Σ bf16(x)) over all ranks, in two phases.
// In phase 1, each rank receives the other ranks' values for its share of the elements, and adds up the values of all
// ranks in f32 and in rank order.
// In phase 2, each rank sends the sums of its share to the other ranks.
// With R ranks, a rank sends about 8 · (R - 1) / R · words bytes. If R is more than 2, this is less than the
// 4 · (R - 1) · words bytes that a rank sends in exchange_sum_bf16.
//   x, out: f32 [2 · words]; out may be x
//   words: a multiple of 4; a region must have room for twice the words of the largest share
//   mailboxes.first_item: the first Quad (4 words) of each rank's share, then the number of Quads
//   grid, block: as for exchange_sum_4
//   bytes moved: 16 · words, and the words sent to other ranks
extern "C" __global__ void __launch_bounds__(EXCHANGE_THREADS)
    exchange_sum_shares_bf16(uint32_t* x, uint32_t* out, const __grid_constant__ Mailboxes mailboxes, int words) {
    begin(mailboxes);
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    const int first = thread * Quad::SIZE, stride = threads * Quad::SIZE;
    const auto start_of = [&](int rank) { return mailboxes.first_item[rank] * Quad::SIZE; };
    const auto words_of = [&](int rank) { return start_of(rank + 1) - start_of(rank); };
    // `share` (world/mod.rs) gives rank 0 the largest share.
    // In each region, the first `addend_words` words are for the addends. The sums follow.
    const int addend_words = words_of(0);
    const Operation operation(mailboxes);
    for (int rank = 0; rank < mailboxes.ranks; ++rank) {
        if (rank == mailboxes.rank) continue;
        uint32_t* to = operation.region_at(rank);
        const uint32_t* from = x + 2 * (size_t)start_of(rank);
        each_batch(first, stride, words_of(rank), [&](const PositionBatch& batch) {
            uint4 v[BATCH_POSITIONS];
            batch.each([&](int j, int i) { v[j] = load_as_bf16(from + 2 * (size_t)i); });
            batch.each([&](int j, int i) { Quad::store(to + i, v[j]); });
        });
    }
    operation.prepare_next(thread, threads, words ? 2 * addend_words : 0);
    Waiting waiting(mailboxes);
    const uint32_t* buffer = operation.own_buffer();
    const auto store = [&](int rank, int i, uint4 v) {
        float values[8] = {};
        add_bf16(values, v);
        store_8(out + 2 * (size_t)(start_of(rank) + i), values);
    };
    each_batch(first, stride, words_of(mailboxes.rank), [&](const PositionBatch& batch) {
        uint4 received[BATCH_POSITIONS];
        float sum[BATCH_POSITIONS][8] = {};
        const uint32_t* own = x + 2 * (size_t)start_of(mailboxes.rank);
        for (int rank = 0; rank < mailboxes.ranks; ++rank) {
            receive<Quad>(
                batch, mailboxes, buffer, rank, waiting, [&](int, int i) { return load_as_bf16(own + 2 * (size_t)i); },
                received);
            batch.each([&](int j, int) { add_bf16(sum[j], received[j]); });
        }
        batch.each([&](int j, int i) {
            received[j] = round_to_bf16(sum[j]);
            for (int rank = 0; rank < mailboxes.ranks; ++rank)
                if (rank != mailboxes.rank) Quad::store(operation.region_at(rank) + addend_words + i, received[j]);
            store(mailboxes.rank, i, received[j]);
        });
    });
    for (int rank = 0; rank < mailboxes.ranks; ++rank) {
        if (rank == mailboxes.rank) continue;
        each_batch(first, stride, words_of(rank), [&](const PositionBatch& batch) {
            uint4 received[BATCH_POSITIONS];
            receive<Quad>(
                batch, mailboxes, buffer + addend_words, rank, waiting, [&](int, int) { return Quad::zero(); },
                received);
            batch.each([&](int j, int i) { store(rank, i, received[j]); });
        });
    }
}
