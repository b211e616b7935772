// Sums over all ranks, addition to the residual stream, and RMSNorm, in one kernel (see exchange/exchange.cuh).
#include "exchange/exchange.cuh"
#include "headers/block_sum.cuh"
#include "headers/sum_parts.cuh"
#include "moe/expert_outputs.cuh"

__device__ __forceinline__ void load_8(const float* from, float (&v)[8]) {
    const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}
// Starts to load 8 values to the L1 cache.
__device__ __forceinline__ void prefetch_8(const float* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }
// Stores the 8 bf16 values that `words` contains, two per word. Converts them to f32 if `out` is f32.
__device__ __forceinline__ void store_bf16(__nv_bfloat16* out, uint4 words) { *reinterpret_cast<uint4*>(out) = words; }
__device__ __forceinline__ void store_bf16(float* out, uint4 words) {
    float values[8] = {};
    add_bf16(values, words);
    store_8(reinterpret_cast<uint32_t*>(out), values);
}

// ---- partial results ----

// `rounded` and `exact` return 8 columns of a row, from column i on. No returned word is EMPTY.
// `rounded` returns four words with two bf16 values each. `exact` returns f32 values.

// Partial results: Y [rows, columns]. `exact` requires f32.
template <typename Y> struct PartialRows {
    const Y* y;
    int columns;

    __device__ __forceinline__ uint4 rounded(int row, int i) const {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(y + (size_t)row * columns + i);
        if constexpr (sizeof(Y) == 4) return load_as_bf16(from);
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        return make_uint4(sendable_pair(v.x), sendable_pair(v.y), sendable_pair(v.z), sendable_pair(v.w));
    }
    __device__ __forceinline__ void exact(int row, int i, uint4 (&words)[2]) const {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(y + (size_t)row * columns + i);
#pragma unroll
        for (int q = 0; q < 2; ++q) words[q] = Quad::sendable(Quad::load(from + 4 * q));
    }
};

// Partial results that are the sums of the parts of a product (dense_wgmma.cu).
//   y: f32 [parts, part_size / columns, columns]
struct ProductParts {
    const float* y;
    int columns, parts, part_size;

    __device__ __forceinline__ float4 sum(int row, int i) const {
        const float* from = y + (size_t)row * columns + i;
        return sum_parts<true>(parts, [&](int part) {
            return *reinterpret_cast<const float4*>(from + (size_t)part * part_size);
        });
    }
    __device__ __forceinline__ uint4 rounded(int row, int i) const {
        const float4 a = sum(row, i), b = sum(row, i + 4);
        const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        return round_to_bf16(v);
    }
    __device__ __forceinline__ void exact(int row, int i, uint4 (&words)[2]) const {
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const float4 v = sum(row, i + 4 * q);
            words[q] = Quad::sendable(make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z),
                                                 __float_as_uint(v.w)));
        }
    }
};

// Partial results that are the weighted sums of each token's expert outputs.
//   y: bf16 [rows, chosen, columns]; `columns` is a multiple of 8
//   weights: f32 [rows, chosen]
struct ExpertRows {
    const __nv_bfloat16* y;
    const float* weights;
    int columns, chosen;

    __device__ __forceinline__ uint4 rounded(int row, int i) const {
        float2 pairs[4] = {};
        add_outputs(pairs, y, weights, row, i / 8, columns / 8, chosen);
        const auto word = [](float2 pair) { return to_bf16_pair(__float_as_uint(pair.x), __float_as_uint(pair.y)); };
        return make_uint4(word(pairs[0]), word(pairs[1]), word(pairs[2]), word(pairs[3]));
    }
    __device__ __forceinline__ void exact(int row, int i, uint4 (&words)[2]) const {
        float2 pairs[4] = {};
        add_outputs(pairs, y, weights, row, i / 8, columns / 8, chosen);
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const float2 low = pairs[2 * q], high = pairs[2 * q + 1];
            words[q] = Quad::sendable(make_uint4(__float_as_uint(low.x), __float_as_uint(low.y),
                                                 __float_as_uint(high.x), __float_as_uint(high.y)));
        }
    }
};

// ---- kernels ----

// Adds partial results to the residual stream, and normalizes it: sum = x + bias + Σ bf16(y) over all ranks, and
// normed = bf16(sum / sqrt(mean(sum²) + eps) · weight). A rank computes these values only for its share of the rows.
// For the same number of elements, a rank sends as many bytes as in exchange_sum_shares_bf16.
//
// A block handles row i of each rank's share, for i = blockIdx.x, blockIdx.x + gridDim.x and so on, in three steps:
//   1. It sends row i of each other rank's share of y to that rank.
//   2. It receives row i of its own rank's share of y from the other ranks, computes `sum` and `normed` for this row,
//      and sends `normed` to the other ranks.
//   3. It receives the rows of `normed` that the other ranks computed.
// The block starts step 1 of a row before step 2 of its previous row, and before step 3 of the row before that one.
// The values are then in transit while the block works on other rows.
//
//   x, sum: f32 [rows, columns], accessed only in the rows of this rank
//   y: the partial results, [rows, columns]
//   bias, weight: f32 [columns]; bias may be null
//   normed: T [rows, columns], the rows of all ranks
//   columns: a multiple of 8, at most 8 · PARTS · EXCHANGE_ROW_THREADS
//   m.first_item: the first row of each rank's share, then the number of rows
//   PARTS: 1 or EXCHANGE_ROW_PARTS
//   grid: see `row_shape` in exchange_add_norm.rs; ranks may have different numbers of blocks
//   block: at most EXCHANGE_ROW_THREADS, and at least columns / (8 · PARTS)
//   bytes moved: the bytes of y, columns · sizeof(T) per row, columns · 8 per row of this rank, and the words sent to
//     other ranks
template <int PARTS, typename Partial, typename T>
__device__ void exchange_add_norm(const float* x, const Partial& y, const float* bias, const float* weight, float* sum,
                                  T* normed, const Mailboxes& m, float eps) {
    __shared__ float scratch[2][EXCHANGE_ROW_THREADS / 32];
    begin(m);
    const int columns = y.columns, row_words = columns / 2;
    const auto rows_of = [&](int rank) { return m.first_item[rank + 1] - m.first_item[rank]; };
    // Returns the position at which a row of a rank's share starts in x, sum and normed, in pairs of elements.
    const auto start_of = [&](int rank, int row) { return (size_t)(m.first_item[rank] + row) * row_words; };
    // `share` (world/mod.rs) gives rank 0 the largest share.
    // In each region, the first `addend_words` words are for the addends. The normalized rows follow.
    const int addend_words = rows_of(0) * row_words;
    const Operation operation(m);
    const uint32_t* slot = operation.own_slot();
    Waiting waiting(m);
    // A row has up to PARTS parts of 8 · blockDim.x columns. The last part may be shorter.
    // A thread handles 8 columns of each part, but none past the end of the row.
    // Calls `use(h, i)` for each part h. In the row, i is the index of this thread's first word of the part.
    // A word is two elements.
    // The loops below load all parts of x, y and of the first other rank's values before they use the first part, so
    // that these loads are in flight at the same time.
    const auto each_part = [&](auto use) {
#pragma unroll
        for (int h = 0; h < PARTS; ++h) {
            const int i = 4 * (threadIdx.x + h * blockDim.x);
            if (i < row_words) use(h, i);
        }
    };

    const auto send_addends = [&](int row) {
#pragma unroll 1
        for (int rank = 0; rank < m.ranks; ++rank) {
            if (rank == m.rank || row >= rows_of(rank)) continue;
            uint4 v[PARTS];
            each_part([&](int h, int i) { v[h] = y.rounded(m.first_item[rank] + row, 2 * i); });
            uint32_t* to = operation.region_at(rank) + row * row_words;
            each_part([&](int h, int i) { Quad::store(to + i, v[h]); });
        }
    };
    const int first_other = m.rank == 0 ? 1 : 0;
    const auto compute = [&](int row, int parity) {
        const size_t start = start_of(m.rank, row);
        const auto addends_of = [&](int rank) { return slot + (size_t)rank * m.region + row * row_words; };
        float v[PARTS][8], squares = 0.0f;
        uint4 own[PARTS], other[PARTS];  // `other` has the addends of rank `first_other`
        each_part([&](int h, int i) {
            other[h] = Quad::load(addends_of(first_other) + i);
            own[h] = y.rounded(m.first_item[m.rank] + row, 2 * i);
            load_8(x + 2 * (start + i), v[h]);
            prefetch_8(weight + 2 * i);
        });
        each_part([&](int h, int i) {
            float biases[8] = {}, added[8] = {};
            if (bias) load_8(bias + 2 * i, biases);
            for (int rank = 0; rank < m.ranks; ++rank) {
                uint4 part = own[h];
                if (rank != m.rank) {
                    const uint32_t* from = addends_of(rank) + i;
                    part = rank == first_other ? other[h] : Quad::load(from);
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
                if (rank != m.rank) Quad::store(operation.region_at(rank) + addend_words + row * row_words + i, words);
            store_bf16(normed + 2 * (start + i), words);
        });
    };
    const auto receive_norms = [&](int row) {
#pragma unroll 1
        for (int rank = 0; rank < m.ranks; ++rank) {
            if (rank == m.rank || row >= rows_of(rank)) continue;
            const uint32_t* from = slot + (size_t)rank * m.region + addend_words + row * row_words;
            uint4 words[PARTS];
            each_part([&](int h, int i) { words[h] = Quad::load(from + i); });
            each_part([&](int h, int i) {
                waiting.complete<Quad>(words[h], from + i, rank);
                store_bf16(normed + 2 * (start_of(rank, row) + i), words[h]);
            });
        }
    };

    // A block sends its addends for a row before it waits for the other ranks' addends for the same row.
    // Otherwise, all ranks could wait for each other forever. For a row, a block waits only for blocks that handle the
    // same row, and these send their addends for it before they wait for any later row.
    for (int round = 0;; ++round) {
        const int row = blockIdx.x + round * gridDim.x, previous = row - gridDim.x, last = previous - gridDim.x;
        if (last >= rows_of(0)) break;
        send_addends(row);
        if (round == 0)
            operation.prepare_next(blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x, 2 * addend_words);
        if (round >= 1 && previous < rows_of(m.rank)) compute(previous, round % 2);
        if (round >= 2) receive_norms(last);
    }
}

// Defines kernels for rows of one part and for wider rows. The name of a kernel ends with PARTS.
#define FOR_EACH_PARTS(DEFINE, ...) DEFINE(1, __VA_ARGS__) DEFINE(4, __VA_ARGS__)
static_assert(EXCHANGE_ROW_PARTS == 4, "FOR_EACH_PARTS must define kernels for EXCHANGE_ROW_PARTS parts");
// Blocks per multiprocessor. Several small blocks have more rows in flight.
// In the kernels that add up the parts of a product, a block of the maximum size needs all registers.
#define ROW_BLOCKS(PARTS) (PARTS == 1 ? EXCHANGE_ROW_BLOCKS : 1)

#define DEFINE_ADD_NORM(PARTS, Y, Y_SUFFIX, T, SUFFIX)                                                                 \
    extern "C" __global__ void __launch_bounds__(EXCHANGE_ROW_THREADS, ROW_BLOCKS(PARTS))                              \
        exchange_add_norm_##Y_SUFFIX##_##SUFFIX##_##PARTS(const float* x, const Y* y, const float* bias,               \
                                                          const float* weight, float* sum, T* normed,                  \
                                                          const __grid_constant__ Mailboxes m, int columns,            \
                                                          float eps) {                                                 \
        exchange_add_norm<PARTS>(x, PartialRows<Y>{y, columns}, bias, weight, sum, normed, m, eps);                    \
    }
FOR_EACH_PARTS(DEFINE_ADD_NORM, float, f32, float, f32)
FOR_EACH_PARTS(DEFINE_ADD_NORM, float, f32, __nv_bfloat16, bf16)
FOR_EACH_PARTS(DEFINE_ADD_NORM, __nv_bfloat16, bf16, float, f32)
FOR_EACH_PARTS(DEFINE_ADD_NORM, __nv_bfloat16, bf16, __nv_bfloat16, bf16)
#define DEFINE_ADD_NORM_PARTS(PARTS, T, SUFFIX)                                                                        \
    extern "C" __global__ void __launch_bounds__(EXCHANGE_ROW_THREADS)                                                 \
        exchange_add_norm_parts_##SUFFIX##_##PARTS(const float* x, const float* y, const float* bias,                  \
                                                   const float* weight, float* sum, T* normed,                         \
                                                   const __grid_constant__ Mailboxes m, int columns, int parts,        \
                                                   int part_size, float eps) {                                         \
        exchange_add_norm<PARTS>(x, ProductParts{y, columns, parts, part_size}, bias, weight, sum, normed, m, eps);    \
    }
FOR_EACH_PARTS(DEFINE_ADD_NORM_PARTS, float, f32)
FOR_EACH_PARTS(DEFINE_ADD_NORM_PARTS, __nv_bfloat16, bf16)
#define DEFINE_ADD_NORM_EXPERTS(PARTS, T, SUFFIX)                                                                      \
    extern "C" __global__ void __launch_bounds__(EXCHANGE_ROW_THREADS, ROW_BLOCKS(PARTS))                              \
        exchange_add_norm_experts_##SUFFIX##_##PARTS(const float* x, const __nv_bfloat16* y,                           \
                                                     const float* expert_weights, const float* bias,                   \
                                                     const float* weight, float* sum, T* normed,                       \
                                                     const __grid_constant__ Mailboxes m, int columns, int chosen,     \
                                                     float eps) {                                                      \
        exchange_add_norm<PARTS>(x, ExpertRows{y, expert_weights, columns, chosen}, bias, weight, sum, normed, m,      \
                                 eps);                                                                                 \
    }
FOR_EACH_PARTS(DEFINE_ADD_NORM_EXPERTS, float, f32)
FOR_EACH_PARTS(DEFINE_ADD_NORM_EXPERTS, __nv_bfloat16, bf16)

// Like exchange_add_norm, but every rank computes all rows.
// The ranks send y but no normalized rows, which takes less time for few rows.
// The kernel rounds y to bf16 if ROUNDED is true, and `normed` only if T is bf16.
//
// A block handles the rows blockIdx.x, blockIdx.x + gridDim.x and so on. Before it computes `sum` and `normed` of a
// row, it sends y of its next row to all other ranks. The values are then under way while the block computes.
//
//   x, sum: f32 [rows, columns]
//   y: the partial results, [rows, columns]
//   bias, weight: f32 [columns]; bias may be null
//   normed: T [rows, columns]
//   columns: a multiple of 8, at most 8 · PARTS · EXCHANGE_ROW_THREADS
//   A region must have room for 4 bytes per element of y, or 2 bytes if ROUNDED is true.
//   PARTS, grid, block: as for exchange_add_norm
//   bytes moved: the bytes of y, columns · (8 + sizeof(T)) per row, and the words sent to other ranks
template <int PARTS, bool ROUNDED, typename Partial, typename T>
__device__ void exchange_add_norm_all(const float* x, const Partial& y, const float* bias, const float* weight,
                                      float* sum, T* normed, const Mailboxes& m, int rows, float eps) {
    __shared__ float scratch[2][EXCHANGE_ROW_THREADS / 32];
    // As in exchange_add_norm, a row has up to PARTS parts, and a thread handles 8 columns of each part.
    // In a region, these 8 columns take QUADS groups of 4 words.
    constexpr int QUADS = ROUNDED ? 1 : 2;
    const int columns = y.columns, row_words = ROUNDED ? columns / 2 : columns;
    begin(m);
    const Operation operation(m);
    const uint32_t* slot = operation.own_slot();
    Waiting waiting(m);
    const auto each_part = [&](auto use) {
#pragma unroll
        for (int h = 0; h < PARTS; ++h) {
            const int i = 8 * (threadIdx.x + h * blockDim.x);
            if (i < columns) use(h, i);
        }
    };
    const auto load_own = [&](uint4(&own)[QUADS], int row, int i) {
        if constexpr (ROUNDED)
            own[0] = y.rounded(row, i);
        else
            y.exact(row, i, own);
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
            load_own(own, row, i);
            for (int rank = 0; rank < m.ranks; ++rank) {
                if (rank == m.rank) continue;
#pragma unroll
                for (int q = 0; q < QUADS; ++q)
                    Quad::store(operation.region_at(rank) + word_of(row, i) + 4 * q, own[q]);
            }
        });
    };
    const auto compute = [&](int row, int parity) {
        float v[PARTS][8], squares = 0.0f;
        each_part([&](int h, int i) {
            const size_t at = (size_t)row * columns + i;
            load_8(x + at, v[h]);
            prefetch_8(weight + i);
            uint4 own[QUADS], part[QUADS];
            load_own(own, row, i);
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

#define DEFINE_ADD_NORM_ALL(PARTS, ROUNDED, Y, T, SUFFIX)                                                              \
    extern "C" __global__ void __launch_bounds__(EXCHANGE_ROW_THREADS, ROW_BLOCKS(PARTS))                              \
        exchange_add_norm_all_##SUFFIX##_##PARTS(const float* x, const Y* y, const float* bias, const float* weight,   \
                                                 float* sum, T* normed, const __grid_constant__ Mailboxes m, int rows, \
                                                 int columns, float eps) {                                             \
        exchange_add_norm_all<PARTS, ROUNDED>(x, PartialRows<Y>{y, columns}, bias, weight, sum, normed, m, rows, eps); \
    }
FOR_EACH_PARTS(DEFINE_ADD_NORM_ALL, false, float, float, exact_f32_f32)
FOR_EACH_PARTS(DEFINE_ADD_NORM_ALL, false, float, __nv_bfloat16, exact_f32_bf16)
FOR_EACH_PARTS(DEFINE_ADD_NORM_ALL, true, float, float, rounded_f32_f32)
FOR_EACH_PARTS(DEFINE_ADD_NORM_ALL, true, float, __nv_bfloat16, rounded_f32_bf16)
FOR_EACH_PARTS(DEFINE_ADD_NORM_ALL, true, __nv_bfloat16, float, rounded_bf16_f32)
FOR_EACH_PARTS(DEFINE_ADD_NORM_ALL, true, __nv_bfloat16, __nv_bfloat16, rounded_bf16_bf16)
#define DEFINE_ADD_NORM_ALL_PARTS(PARTS, ROUNDED, T, SUFFIX)                                                           \
    extern "C" __global__ void __launch_bounds__(EXCHANGE_ROW_THREADS)                                                 \
        exchange_add_norm_all_##SUFFIX##_##PARTS(const float* x, const float* y, const float* bias,                    \
                                                 const float* weight, float* sum, T* normed,                           \
                                                 const __grid_constant__ Mailboxes m, int rows, int columns,           \
                                                 int parts, int part_size, float eps) {                                \
        exchange_add_norm_all<PARTS, ROUNDED>(x, ProductParts{y, columns, parts, part_size}, bias, weight, sum,        \
                                              normed, m, rows, eps);                                                   \
    }
FOR_EACH_PARTS(DEFINE_ADD_NORM_ALL_PARTS, false, float, exact_parts_f32)
FOR_EACH_PARTS(DEFINE_ADD_NORM_ALL_PARTS, false, __nv_bfloat16, exact_parts_bf16)
FOR_EACH_PARTS(DEFINE_ADD_NORM_ALL_PARTS, true, float, rounded_parts_f32)
FOR_EACH_PARTS(DEFINE_ADD_NORM_ALL_PARTS, true, __nv_bfloat16, rounded_parts_bf16)
#define DEFINE_ADD_NORM_ALL_EXPERTS(PARTS, ROUNDED, T, SUFFIX)                                                         \
    extern "C" __global__ void __launch_bounds__(EXCHANGE_ROW_THREADS, ROW_BLOCKS(PARTS))                              \
        exchange_add_norm_all_##SUFFIX##_##PARTS(const float* x, const __nv_bfloat16* y, const float* expert_weights,  \
                                                 const float* bias, const float* weight, float* sum, T* normed,        \
                                                 const __grid_constant__ Mailboxes m, int rows, int columns,           \
                                                 int chosen, float eps) {                                              \
        exchange_add_norm_all<PARTS, ROUNDED>(x, ExpertRows{y, expert_weights, columns, chosen}, bias, weight, sum,    \
                                              normed, m, rows, eps);                                                   \
    }
FOR_EACH_PARTS(DEFINE_ADD_NORM_ALL_EXPERTS, false, float, exact_experts_f32)
FOR_EACH_PARTS(DEFINE_ADD_NORM_ALL_EXPERTS, false, __nv_bfloat16, exact_experts_bf16)
FOR_EACH_PARTS(DEFINE_ADD_NORM_ALL_EXPERTS, true, float, rounded_experts_f32)
FOR_EACH_PARTS(DEFINE_ADD_NORM_ALL_EXPERTS, true, __nv_bfloat16, rounded_experts_bf16)
