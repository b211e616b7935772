// Sums over all ranks, addition to the residual stream, and RMSNorm, in one kernel (see exchange/exchange.cuh).
#include "exchange/exchange.cuh"
#include "headers/block_sum.cuh"
#include "headers/sum_terms.cuh"
#include "moe/mxfp4_tiles/expert_outputs.cuh"

__device__ __forceinline__ void load_8(const float* from, float (&v)[8]) {
    const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
    v[0] = low.x;
    v[1] = low.y;
    v[2] = low.z;
    v[3] = low.w;
    v[4] = high.x;
    v[5] = high.y;
    v[6] = high.z;
    v[7] = high.w;
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

// The forms of partial results. Each form is a kernel argument, which a struct in exchange_add_norm.rs mirrors.
// `rounded` and `exact` return 8 columns of a row, from column i on. No returned word is EMPTY.
// `rounded` returns four words with two bf16 values each. `exact` returns f32 values.
// ROW_BLOCKS is the number of blocks per multiprocessor in the kernels for rows of one segment.

// Partial results: Y [rows, columns]. `exact` requires f32.
template <typename Y> struct PartialRows {
    static constexpr int ROW_BLOCKS = EXCHANGE_ROW_BLOCKS;
    const Y* values;
    int columns;

    __device__ __forceinline__ uint4 rounded(int row, int i) const {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(values + (size_t)row * columns + i);
        if constexpr (sizeof(Y) == 4) return load_as_bf16(from);
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        return make_uint4(sendable_pair(v.x), sendable_pair(v.y), sendable_pair(v.z), sendable_pair(v.w));
    }
    __device__ __forceinline__ void exact(int row, int i, uint4 (&words)[2]) const {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(values + (size_t)row * columns + i);
#pragma unroll
        for (int q = 0; q < 2; ++q) words[q] = Quad::sendable(Quad::load(from + 4 * q));
    }
};

// Partial results that are the sums of the terms of a product (dense_wgmma.cu).
//   product: f32 [terms, term_size / columns, columns]
struct ProductTerms {
    static constexpr int ROW_BLOCKS = 1;  // adding up the terms needs many registers
    const float* product;
    int columns, terms, term_size;

    __device__ __forceinline__ float4 sum(int row, int i) const {
        const float* from = product + (size_t)row * columns + i;
        return sum_terms<true>(terms, [&](int term) {
            return *reinterpret_cast<const float4*>(from + (size_t)term * term_size);
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
//   outputs: bf16 [rows, chosen, columns]; `columns` is a multiple of 8
//   weights: f32 [rows, chosen]
struct ExpertRows {
    static constexpr int ROW_BLOCKS = EXCHANGE_ROW_BLOCKS;
    const __nv_bfloat16* outputs;
    const float* weights;
    int columns, chosen;

    __device__ __forceinline__ uint4 rounded(int row, int i) const {
        float2 pairs[4] = {};
        add_outputs(pairs, outputs, weights, row, i / 8, columns / 8, chosen);
        const auto word = [](float2 pair) { return to_bf16_pair(__float_as_uint(pair.x), __float_as_uint(pair.y)); };
        return make_uint4(word(pairs[0]), word(pairs[1]), word(pairs[2]), word(pairs[3]));
    }
    __device__ __forceinline__ void exact(int row, int i, uint4 (&words)[2]) const {
        float2 pairs[4] = {};
        add_outputs(pairs, outputs, weights, row, i / 8, columns / 8, chosen);
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const float2 low = pairs[2 * q], high = pairs[2 * q + 1];
            words[q] = Quad::sendable(make_uint4(__float_as_uint(low.x), __float_as_uint(low.y),
                                                 __float_as_uint(high.x), __float_as_uint(high.y)));
        }
    }
};

// Each struct may end with padding.
static_assert(sizeof(PartialRows<float>) == 16, "PartialRows must match RawPartialRows");
static_assert(sizeof(ProductTerms) == 24, "ProductTerms must match RawProductTerms");
static_assert(sizeof(ExpertRows) == 24, "ExpertRows must match RawExpertRows");

// ---- rows ----

// A row has up to SEGMENTS segments of 8 · blockDim.x columns. The last segment may be shorter.
// A thread handles 8 columns of each segment, but none past the end of the row. These columns are WIDTH items.
// Calls `use(segment, i)` for each segment of a row of `size` items. i is the index of this thread's first item.
template <int SEGMENTS, int WIDTH, typename Use> __device__ __forceinline__ void for_each_segment(int size, Use use) {
#pragma unroll
    for (int segment = 0; segment < SEGMENTS; ++segment) {
        const int i = WIDTH * (threadIdx.x + segment * blockDim.x);
        if (i < size) use(segment, i);
    }
}

// Adds the sum of all ranks' partial results, `added`, and the bias to v, 8 columns of the residual stream.
// Stores the new values in `sum`, and adds their squares to `squares`.
__device__ __forceinline__ void update_8(float (&v)[8], const float (&added)[8], const float (&biases)[8], float* sum,
                                         float& squares) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        v[k] += added[k] + biases[k];
        squares += v[k] * v[k];
    }
    store_8(reinterpret_cast<uint32_t*>(sum), v);
}

// ---- kernels ----

// Adds partial results to the residual stream, and normalizes it: sum = x + bias + Σ bf16(partial) over all ranks, and
// normed = bf16(sum / sqrt(mean(sum²) + eps) · weight). A rank computes these values only for its share of the rows.
// For the same number of elements, a rank sends as many bytes as in exchange_sum_shares_bf16.
//
// A block handles row i of each rank's share, for i = blockIdx.x, blockIdx.x + gridDim.x and so on, in three phases:
//   1. It sends row i of each other rank's share of `partial` to that rank.
//   2. It receives row i of its own rank's share of `partial` from the other ranks, computes `sum` and `normed` for
//      this row, and sends `normed` to the other ranks.
//   3. It receives the rows of `normed` that the other ranks computed.
// The block starts phase 1 of a row before phase 2 of its previous row, and before phase 3 of the row before that one.
// The values are then in transit while the block works on other rows.
//
//   x, sum: f32 [rows, columns], accessed only in the rows of this rank
//   partial: the partial results, [rows, columns]
//   bias, weight: f32 [columns]; bias may be null
//   normed: T [rows, columns], the rows of all ranks
//   columns: a multiple of 8, at most 8 · SEGMENTS · EXCHANGE_ROW_THREADS
//   mailboxes.first_item: the first row of each rank's share, then the number of rows
//   SEGMENTS: 1 or EXCHANGE_ROW_SEGMENTS
//   grid: see `row_shape` in exchange_add_norm.rs; ranks may have different numbers of blocks
//   block: at most EXCHANGE_ROW_THREADS, and at least columns / (8 · SEGMENTS)
//   bytes moved: the bytes of `partial`, columns · sizeof(T) per row, columns · 8 per row of this rank, and the words
//     sent to other ranks
template <int SEGMENTS, typename Partial, typename T>
__device__ void exchange_add_norm(const float* x, const Partial& partial, const float* bias, const float* weight,
                                  float* sum, T* normed, const Mailboxes& mailboxes, float eps) {
    __shared__ float scratch[2][EXCHANGE_ROW_THREADS / 32];
    begin(mailboxes);
    const int columns = partial.columns, row_words = columns / 2;
    const auto rows_of = [&](int rank) { return mailboxes.first_item[rank + 1] - mailboxes.first_item[rank]; };
    // Returns the position at which a row of a rank's share starts in x, sum and normed, in pairs of elements.
    const auto start_of = [&](int rank, int row) { return (size_t)(mailboxes.first_item[rank] + row) * row_words; };
    // `share` (world/mod.rs) gives rank 0 the largest share.
    // In each region, the first `addend_words` words are for the addends. The normalized rows follow.
    const int addend_words = rows_of(0) * row_words;
    const Operation operation(mailboxes);
    const uint32_t* buffer = operation.own_buffer();
    Waiting waiting(mailboxes);
    // The items are words of two elements.
    const auto each_segment = [&](auto use) { for_each_segment<SEGMENTS, 4>(row_words, use); };
    // The loops below load all segments of x, of the partial result and of the first other rank's values before they
    // use the first segment, so that these loads are in flight at the same time.

    const auto send_addends = [&](int row) {
#pragma unroll 1
        for (int rank = 0; rank < mailboxes.ranks; ++rank) {
            if (rank == mailboxes.rank || row >= rows_of(rank)) continue;
            uint4 v[SEGMENTS];
            each_segment([&](int segment, int i) {
                v[segment] = partial.rounded(mailboxes.first_item[rank] + row, 2 * i);
            });
            uint32_t* to = operation.region_at(rank) + row * row_words;
            each_segment([&](int segment, int i) { Quad::store(to + i, v[segment]); });
        }
    };
    const int first_other = mailboxes.rank == 0 ? 1 : 0;
    const auto compute = [&](int row, int parity) {
        const size_t start = start_of(mailboxes.rank, row);
        const auto addends_of = [&](int rank) { return buffer + (size_t)rank * mailboxes.region + row * row_words; };
        float v[SEGMENTS][8], squares = 0.0f;
        uint4 own[SEGMENTS], other[SEGMENTS];  // `other` has the addends of rank `first_other`
        each_segment([&](int segment, int i) {
            other[segment] = Quad::load(addends_of(first_other) + i);
            own[segment] = partial.rounded(mailboxes.first_item[mailboxes.rank] + row, 2 * i);
            load_8(x + 2 * (start + i), v[segment]);
            prefetch_8(weight + 2 * i);
        });
        each_segment([&](int segment, int i) {
            float biases[8] = {}, added[8] = {};
            if (bias) load_8(bias + 2 * i, biases);
            for (int rank = 0; rank < mailboxes.ranks; ++rank) {
                uint4 received = own[segment];
                if (rank != mailboxes.rank) {
                    const uint32_t* from = addends_of(rank) + i;
                    received = rank == first_other ? other[segment] : Quad::load(from);
                    waiting.complete<Quad>(received, from, rank);
                }
                add_bf16(added, received);
            }
            update_8(v[segment], added, biases, sum + 2 * (start + i), squares);
        });
        const float scale = rsqrtf(block_sum(squares, scratch[parity]) / columns + eps);
        each_segment([&](int segment, int i) {
            float weights[8];
            load_8(weight + 2 * i, weights);
#pragma unroll
            for (int k = 0; k < 8; ++k) v[segment][k] = v[segment][k] * scale * weights[k];
            const uint4 words = round_to_bf16(v[segment]);
            for (int rank = 0; rank < mailboxes.ranks; ++rank)
                if (rank != mailboxes.rank)
                    Quad::store(operation.region_at(rank) + addend_words + row * row_words + i, words);
            store_bf16(normed + 2 * (start + i), words);
        });
    };
    const auto receive_norms = [&](int row) {
#pragma unroll 1
        for (int rank = 0; rank < mailboxes.ranks; ++rank) {
            if (rank == mailboxes.rank || row >= rows_of(rank)) continue;
            const uint32_t* from = buffer + (size_t)rank * mailboxes.region + addend_words + row * row_words;
            uint4 words[SEGMENTS];
            each_segment([&](int segment, int i) { words[segment] = Quad::load(from + i); });
            each_segment([&](int segment, int i) {
                waiting.complete<Quad>(words[segment], from + i, rank);
                store_bf16(normed + 2 * (start_of(rank, row) + i), words[segment]);
            });
        }
    };

    // A block sends its addends for a row before it waits for the other ranks' addends for the same row.
    // Otherwise, all ranks could wait for each other forever. For a row, a block waits only for blocks that handle the
    // same row, and these send their addends for it before they wait for any later row.
    for (int round = 0;; ++round) {
        const int row = blockIdx.x + round * gridDim.x, previous = row - gridDim.x;
        const int before_previous = previous - gridDim.x;
        if (before_previous >= rows_of(0)) break;
        send_addends(row);
        if (round == 0)
            operation.prepare_next(blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x, 2 * addend_words);
        if (round >= 1 && previous < rows_of(mailboxes.rank)) compute(previous, round % 2);
        if (round >= 2) receive_norms(before_previous);
    }
}

// Defines the kernels for one form of partial results: DEFINE(name, Partial, T, SEGMENTS) for each T and SEGMENTS.
#define DEFINE_FORM(DEFINE, NAME, Partial)                                                                             \
    DEFINE(NAME##_f32_1, Partial, float, 1)                                                                            \
    DEFINE(NAME##_f32_4, Partial, float, 4)                                                                            \
    DEFINE(NAME##_bf16_1, Partial, __nv_bfloat16, 1)                                                                   \
    DEFINE(NAME##_bf16_4, Partial, __nv_bfloat16, 4)
static_assert(EXCHANGE_ROW_SEGMENTS == 4, "DEFINE_FORM must define kernels for EXCHANGE_ROW_SEGMENTS segments");
#define ROW_BOUNDS(Partial, SEGMENTS) __launch_bounds__(EXCHANGE_ROW_THREADS, SEGMENTS == 1 ? Partial::ROW_BLOCKS : 1)

#define DEFINE_ADD_NORM(NAME, Partial, T, SEGMENTS)                                                                    \
    extern "C" __global__ void ROW_BOUNDS(Partial, SEGMENTS)                                                           \
        NAME(const float* x, const __grid_constant__ Partial partial, const float* bias, const float* weight,          \
             float* sum, T* normed, const __grid_constant__ Mailboxes mailboxes, float eps) {                          \
        exchange_add_norm<SEGMENTS>(x, partial, bias, weight, sum, normed, mailboxes, eps);                            \
    }
DEFINE_FORM(DEFINE_ADD_NORM, exchange_add_norm_f32, PartialRows<float>)
DEFINE_FORM(DEFINE_ADD_NORM, exchange_add_norm_bf16, PartialRows<__nv_bfloat16>)
DEFINE_FORM(DEFINE_ADD_NORM, exchange_add_norm_terms, ProductTerms)
DEFINE_FORM(DEFINE_ADD_NORM, exchange_add_norm_experts, ExpertRows)

// Like exchange_add_norm, but every rank computes all rows.
// The ranks send `partial` but no normalized rows, which takes less time for few rows.
// The kernel rounds `partial` to bf16 if ROUNDED is true, and `normed` only if T is bf16.
//
// A block handles the rows blockIdx.x, blockIdx.x + gridDim.x and so on. Before it computes `sum` and `normed` of a
// row, it sends `partial` of its next row to all other ranks. The values are then under way while the block computes.
//
//   x, sum: f32 [rows, columns]
//   partial: the partial results, [rows, columns]
//   bias, weight: f32 [columns]; bias may be null
//   normed: T [rows, columns]
//   columns: a multiple of 8, at most 8 · SEGMENTS · EXCHANGE_ROW_THREADS
//   A region must have room for 4 bytes per element of `partial`, or 2 bytes if ROUNDED is true.
//   SEGMENTS, grid, block: as for exchange_add_norm
//   bytes moved: the bytes of `partial`, columns · (8 + sizeof(T)) per row, and the words sent to other ranks
template <int SEGMENTS, bool ROUNDED, typename Partial, typename T>
__device__ void exchange_add_norm_all(const float* x, const Partial& partial, const float* bias, const float* weight,
                                      float* sum, T* normed, const Mailboxes& mailboxes, int rows, float eps) {
    __shared__ float scratch[2][EXCHANGE_ROW_THREADS / 32];
    // In a region, the 8 columns of a thread in a segment take QUADS Quads of 4 words.
    constexpr int QUADS = ROUNDED ? 1 : 2;
    const int columns = partial.columns, row_words = ROUNDED ? columns / 2 : columns;
    begin(mailboxes);
    const Operation operation(mailboxes);
    const uint32_t* buffer = operation.own_buffer();
    Waiting waiting(mailboxes);
    const auto each_segment = [&](auto use) { for_each_segment<SEGMENTS, 8>(columns, use); };
    const auto load_own = [&](uint4(&own)[QUADS], int row, int i) {
        if constexpr (ROUNDED)
            own[0] = partial.rounded(row, i);
        else
            partial.exact(row, i, own);
    };
    const auto add_received = [&](float (&added)[8], const uint4(&words)[QUADS]) {
        if constexpr (ROUNDED) {
            add_bf16(added, words[0]);
        } else {
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                const uint4 v = words[q];
                added[4 * q] += __uint_as_float(v.x);
                added[4 * q + 1] += __uint_as_float(v.y);
                added[4 * q + 2] += __uint_as_float(v.z);
                added[4 * q + 3] += __uint_as_float(v.w);
            }
        }
    };
    // Returns the position in a region of the word for column i of a row.
    const auto word_of = [&](int row, int i) { return (size_t)row * row_words + (ROUNDED ? i / 2 : i); };

    const auto send = [&](int row) {
        each_segment([&](int, int i) {
            uint4 own[QUADS];
            load_own(own, row, i);
            for (int rank = 0; rank < mailboxes.ranks; ++rank) {
                if (rank == mailboxes.rank) continue;
#pragma unroll
                for (int q = 0; q < QUADS; ++q)
                    Quad::store(operation.region_at(rank) + word_of(row, i) + 4 * q, own[q]);
            }
        });
    };
    const auto compute = [&](int row, int parity) {
        float v[SEGMENTS][8], squares = 0.0f;
        each_segment([&](int segment, int i) {
            const size_t at = (size_t)row * columns + i;
            load_8(x + at, v[segment]);
            prefetch_8(weight + i);
            uint4 own[QUADS], received[QUADS];
            load_own(own, row, i);
            float biases[8] = {}, added[8] = {};
            if (bias) load_8(bias + i, biases);
            for (int rank = 0; rank < mailboxes.ranks; ++rank) {
                if (rank == mailboxes.rank) {
                    add_received(added, own);
                    continue;
                }
                const uint32_t* from = buffer + (size_t)rank * mailboxes.region + word_of(row, i);
#pragma unroll
                for (int q = 0; q < QUADS; ++q) received[q] = Quad::load(from + 4 * q);
#pragma unroll
                for (int q = 0; q < QUADS; ++q) waiting.complete<Quad>(received[q], from + 4 * q, rank);
                add_received(added, received);
            }
            update_8(v[segment], added, biases, sum + at, squares);
        });
        const float scale = rsqrtf(block_sum(squares, scratch[parity]) / columns + eps);
        each_segment([&](int segment, int i) {
            const size_t at = (size_t)row * columns + i;
            float weights[8];
            load_8(weight + i, weights);
#pragma unroll
            for (int k = 0; k < 8; ++k) v[segment][k] = v[segment][k] * scale * weights[k];
            if constexpr (sizeof(T) == 2)
                store_bf16(normed + at, round_to_bf16(v[segment]));
            else
                store_8(reinterpret_cast<uint32_t*>(normed) + at, v[segment]);
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

#define DEFINE_ADD_NORM_ALL(NAME, Partial, T, SEGMENTS, ROUNDED)                                                       \
    extern "C" __global__ void ROW_BOUNDS(Partial, SEGMENTS)                                                           \
        NAME(const float* x, const __grid_constant__ Partial partial, const float* bias, const float* weight,          \
             float* sum, T* normed, const __grid_constant__ Mailboxes mailboxes, int rows, float eps) {                \
        exchange_add_norm_all<SEGMENTS, ROUNDED>(x, partial, bias, weight, sum, normed, mailboxes, rows, eps);         \
    }
#define DEFINE_EXACT(NAME, Partial, T, SEGMENTS) DEFINE_ADD_NORM_ALL(NAME, Partial, T, SEGMENTS, false)
#define DEFINE_ROUNDED(NAME, Partial, T, SEGMENTS) DEFINE_ADD_NORM_ALL(NAME, Partial, T, SEGMENTS, true)
DEFINE_FORM(DEFINE_EXACT, exchange_add_norm_all_exact_f32, PartialRows<float>)
DEFINE_FORM(DEFINE_EXACT, exchange_add_norm_all_exact_terms, ProductTerms)
DEFINE_FORM(DEFINE_EXACT, exchange_add_norm_all_exact_experts, ExpertRows)
DEFINE_FORM(DEFINE_ROUNDED, exchange_add_norm_all_rounded_f32, PartialRows<float>)
DEFINE_FORM(DEFINE_ROUNDED, exchange_add_norm_all_rounded_bf16, PartialRows<__nv_bfloat16>)
DEFINE_FORM(DEFINE_ROUNDED, exchange_add_norm_all_rounded_terms, ProductTerms)
DEFINE_FORM(DEFINE_ROUNDED, exchange_add_norm_all_rounded_experts, ExpertRows)
