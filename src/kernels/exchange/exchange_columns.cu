// Concatenation of the columns of all ranks (see exchange/exchange.cuh).
#include "exchange/exchange.cuh"

template <typename V>
__device__ void exchange_columns(const uint32_t* x, uint32_t* out, const Mailboxes& mailboxes, int rows, int largest) {
    begin(mailboxes);
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    const int first = thread * V::SIZE, stride = threads * V::SIZE;
    const auto columns_of = [&](int rank) { return mailboxes.first_item[rank + 1] - mailboxes.first_item[rank]; };
    const auto batch_of = [&](int rank, int start) { return PositionBatch{start, stride, rows * columns_of(rank)}; };
    typename V::Word own[BATCH_POSITIONS];
    const auto load_own = [&](int start) {
        batch_of(mailboxes.rank, start).each([&](int j, int i) { own[j] = V::sendable(V::load(x + i)); });
    };
    const auto store = [&](int rank, int i, typename V::Word word) {
        const int columns = columns_of(rank);
        V::store(out + (size_t)(i / columns) * mailboxes.first_item[mailboxes.ranks] + mailboxes.first_item[rank] +
                     i % columns,
                 word);
    };
    // Small operations spend most of their time on load latency, so the first words and this rank's state are loaded at
    // the same time.
    load_own(first);
    const Operation operation(mailboxes);
    Waiting waiting(mailboxes);
    const auto send = [&](int start) {
        const PositionBatch batch = batch_of(mailboxes.rank, start);
        for (int rank = 0; rank < mailboxes.ranks; ++rank) {
            uint32_t* to = operation.region_at(rank);
            if (rank != mailboxes.rank) batch.each([&](int j, int i) { V::store(to + i, own[j]); });
        }
        batch.each([&](int j, int i) { store(mailboxes.rank, i, own[j]); });
    };
    const auto take = [&](int start) {
        const uint32_t* buffer = operation.own_buffer();
        for (int rank = 0; rank < mailboxes.ranks; ++rank) {
            if (rank == mailboxes.rank) continue;
            const PositionBatch batch = batch_of(rank, start);
            typename V::Word received[BATCH_POSITIONS];
            receive<V>(batch, mailboxes, buffer, rank, waiting, [](int, int) { return V::zero(); }, received);
            batch.each([&](int j, int i) { store(rank, i, received[j]); });
        }
    };

    // A thread sends its next batch before it waits for the previous batch of the other ranks.
    // The values of a batch are in transit while the thread receives and stores other values.
    send(first);
    operation.prepare_next(thread, threads, largest);
    for (int previous = first; previous < largest; previous += BATCH_POSITIONS * stride) {
        load_own(previous + BATCH_POSITIONS * stride);
        send(previous + BATCH_POSITIONS * stride);
        take(previous);
    }
}

// Concatenates the columns of all ranks: row r of out is row r of x from rank 0, then from rank 1, and so on.
//   x: f32 or u32 [rows, columns of this rank]
//   out: f32 or u32 [rows, columns of all ranks]
//   largest: rows · columns of the rank with the most columns; at most the size of a region
//   exchange_columns_4 requires that every rank's number of columns is a multiple of 4
//   grid, block: as for exchange_sum_4 (exchange_sum.cu)
//   bytes moved: 4 · rows · (columns of this rank + columns of all ranks), and the words sent to other ranks
extern "C" __global__ void __launch_bounds__(EXCHANGE_THREADS)
    exchange_columns_4(const uint32_t* x, uint32_t* out, const __grid_constant__ Mailboxes mailboxes, int rows,
                       int largest) {
    exchange_columns<Quad>(x, out, mailboxes, rows, largest);
}
extern "C" __global__ void __launch_bounds__(EXCHANGE_THREADS)
    exchange_columns_1(const uint32_t* x, uint32_t* out, const __grid_constant__ Mailboxes mailboxes, int rows,
                       int largest) {
    exchange_columns<Scalar>(x, out, mailboxes, rows, largest);
}
