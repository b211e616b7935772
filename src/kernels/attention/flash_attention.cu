// Causal attention on tensor cores over a KV cache (FlashAttention-2, arXiv 2307.08691).
// Supports grouped-query attention, and optionally a sliding window, sinks and a soft cap.
//   q, out: T [tokens, heads, head_dim]
//   k, v: the KV cache; see attention/paged.cuh
//   sinks: f32 [heads] or null
//   positions: u32 [tokens], the position of each query. The positions of a sequence are consecutive.
//     Positions are in device memory, so that a CUDA graph can be replayed at any position.
//   tables: u32 [sequences, table_blocks], the block table of each sequence
//   row_tiles: u32 [row tiles, 4] or null. The columns are the fields of RowTile below.
//     If row_tiles is null, every sequence has the same number of tokens. The kernel argument `tokens` is this number.
//   softcap > 0: a score s becomes softcap · tanh(s / softcap)
//   grid: (kv_heads, row tiles, partitions); block: 32 · WARPS · TEAMS
//   bytes moved: 2 · head_dim · sizeof(T) for each visible key, KV head and row tile
//     The row tiles of a sequence read mostly the same keys and values, so repeated reads mostly hit the L2 cache.
//
// Below, the tokens of a sequence are only its new tokens, which are in q, and not its cached tokens.
// A row is one query head of one token. Each KV head serves heads_per_kv = heads / kv_heads query heads.
// Row r of KV head k belongs to token r / heads_per_kv of the sequence. Its query head is
// k · heads_per_kv + r % heads_per_kv.
// A thread block loads each of its keys and values once for all rows of its row tile.
//
// The template parameter Tile is a FlashTile, which has the sizes of a kernel. In loops, m counts the 16-row slices of
// a warp's rows, h the two rows of such a slice that a thread holds (lane/4 and lane/4 + 8), and n slices of 8 or 16
// columns.
//
// The keys of a row tile are divided among one or more partitions. Each partition is one thread block.
// Each partition except the last has at least min_tiles key tiles, so sequences with few keys have fewer partitions.
// If there are several partitions, the last partition to finish combines the f32 partial results of all partitions:
//   partials: f32 [row tiles, kv_heads, partitions, ROWS · (head_dim + 2)]
//     A partial result holds the weighted sums of values [ROWS, head_dim], then (maximum, total weight) per row.
//   arrivals: u32 [row tiles, kv_heads], the number of finished partitions; all zero between launches
#include "attention/paged.cuh"
#include "constants.cuh"
#include "headers/arrive.cuh"
#include "headers/async_copy.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"
#include "headers/tensor_core.cuh"

constexpr float LOG2_E = 1.44269504f;
// Softmax weights may grow to 2^8 before the sums are rescaled, so rescaling is rare.
// Such weights do not overflow f16 or bf16, and their sums do not overflow f32.
constexpr float SLACK = 8.0f;
// The number of partial results that a thread loads at the same time.
constexpr int COMBINE_BATCH = 16;

// Pipeline stages per team in the 16-row kernels for large batches, and in the other kernels.
// Each stage has buffers for one key tile and one value tile.
constexpr int LARGE_BATCH_STAGES = 3, OTHER_STAGES = 2;
// Padding elements per query, key or value row in shared memory.
// With the padding, a row has an odd number of 16-byte segments, which avoids bank conflicts in `ldmatrix`.
constexpr int ROW_PADDING = 8;
// A warp has 16 · M query rows. If M times the head size is at most this value, the warp keeps its queries in
// registers. Otherwise, the queries are in shared memory.
constexpr int REGISTER_ELEMENTS = 160;

// A row of a table of tile sizes in constants.rs.
struct TileSizes {
    int keys, warps, shared_bytes;
};

// Returns the row for a head size. Does not compile if the kernels do not support the head size.
constexpr TileSizes tile_sizes(const int (&table)[6][3], int head_dim) {
    int row = 0;
    while (FLASH_HEAD_DIMS[row] != head_dim) ++row;
    return {table[row][0], table[row][1], table[row][2]};
}

// How the warps of a thread block divide the rows and the keys of a row tile.
//   64-row and 128-row kernels: all warps are one team, and process the same key tiles.
//     Each warp computes its own ROWS / WARPS rows.
//   16-row kernels: each warp is a team of its own. All teams compute the same 16 rows, each for its own key tiles.
//     If there are several teams, the block merges their weighted sums at the end.
template <int HEAD_DIM, int TILE_ROWS, const int (&SIZES)[6][3], int PIPELINE_STAGES> struct FlashTile {
    static constexpr TileSizes TILE = tile_sizes(SIZES, HEAD_DIM);
    static constexpr int D = HEAD_DIM, ROWS = TILE_ROWS, KEYS = TILE.keys, STAGES = PIPELINE_STAGES;
    static constexpr bool IS_DECODE = ROWS == FLASH_DECODE_ROWS, IS_LARGE_PREFILL = ROWS == FLASH_LARGE_PREFILL_ROWS;
    static constexpr int TEAMS = IS_DECODE ? TILE.warps : 1, WARPS = TILE.warps / TEAMS;  // WARPS: warps per team
    static constexpr int M = ROWS / 16 / WARPS;
    // The minimum number of resident thread blocks per multiprocessor, which limits the registers per thread.
    // Large heads need more registers: with head_dim = 256, the weighted sums of 16 rows take 128 registers per thread.
    static constexpr int MIN_BLOCKS = IS_DECODE ? 1 : IS_LARGE_PREFILL ? (D <= 128 ? 2 : 1) : D <= 64 ? 3 : 2;
    static constexpr int TEAM_THREADS = 32 * WARPS, THREADS = TEAM_THREADS * TEAMS;
    static constexpr int STRIDE = D + ROW_PADDING, KEY_ELEMENTS = KEYS * STRIDE;
    static constexpr bool QUERIES_IN_REGISTERS = M * D <= REGISTER_ELEMENTS;
    static constexpr int QUERY_BYTES = QUERIES_IN_REGISTERS ? 0 : 2 * ROWS * STRIDE;
    static constexpr int PIPELINE_BYTES = TEAMS * STAGES * 2 * KEY_ELEMENTS * 2;
    static_assert(QUERY_BYTES + PIPELINE_BYTES == TILE.shared_bytes, "constants.rs must list the bytes of this kernel");
    static constexpr int MERGE_STRIDE = D + 8;  // puts the float2 values of four rows into different banks
    static constexpr int MERGE_BYTES = TEAMS > 1 ? TEAMS * ROWS * (MERGE_STRIDE + 2) * 4 : 0;
    static_assert(MERGE_BYTES <= PIPELINE_BYTES, "the merge buffers do not fit in the shared memory of the pipeline");
    static_assert(ROWS <= THREADS && STAGES >= 2);
};

// ---- arithmetic ----

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Replaces a maximum of -infinity with zero, because -infinity - (-infinity) is NaN.
// The maximum is -infinity if no key is visible. All weights are then zero for any finite maximum.
__device__ __forceinline__ float finite(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

// Returns the factor that converts weighted sums of values to the output: 1 / (total + 2^(sink - maximum)).
// `maximum` and `sink` are base-2 exponents. The weighted sums and `total` are in units of 2^maximum.
__device__ __forceinline__ float normalizer(float maximum, float total, float sink) {
    const float base = fmaxf(maximum, sink);
    const float keep = exp2_fast(maximum - base);
    return __fdividef(keep, total * keep + exp2_fast(sink - base));
}

// Returns cap · tanh(x / cap).
__device__ __forceinline__ float soft_cap(float x, float cap) {
    return cap - __fdividef(2.0f * cap, 1.0f + exp2_fast(2.0f * LOG2_E / cap * x));
}

// ---- the work of a block ----

// The query rows that a block computes: one row tile of one KV head.
template <typename Tile> struct BlockRows {
    int kv_head, heads, heads_per_kv;  // heads_per_kv: query heads per KV head
    int first_token;                   // the index in q of the sequence's first token
    int first, count;  // the index in the sequence of the tile's first row, and the number of rows in the tile

    // Returns the offset in `q` and `out` of the first element of a row.
    __device__ __forceinline__ size_t element(int row) const {
        const int r = first + row;
        return ((size_t)(first_token + r / heads_per_kv) * heads + kv_head * heads_per_kv + r % heads_per_kv) * Tile::D;
    }
    // Returns the index of a row's token among the tokens of the sequence. Rows past the end of the tile get the token
    // of the last row.
    __device__ __forceinline__ int token(int row) const { return (first + min(row, count - 1)) / heads_per_kv; }
};

struct RowTile {
    int sequence, tile;       // the index of the sequence, and the index of the tile within it
    int first_token, tokens;  // the index in q of the sequence's first token, and the number of its tokens in q
};

// Returns the row tile of this thread block. If `row_tiles` is null, all sequences have `tokens` tokens.
// Unless a sliding window limits the keys, the last row tiles of a sequence have the most, so they should start first.
// If `row_tiles` is null, thread blocks therefore take the row tiles in reverse order.
// `row_tiles` already begins with the row tiles that have the most keys.
template <typename Tile>
__device__ __forceinline__ RowTile find_row_tile(const uint4* row_tiles, int tokens, int heads_per_kv) {
    if (row_tiles) {
        const uint4 tile = __ldg(row_tiles + blockIdx.y);
        return {(int)tile.x, (int)tile.y, (int)tile.z, (int)tile.w};
    }
    const int each = (tokens * heads_per_kv + Tile::ROWS - 1) / Tile::ROWS, index = gridDim.y - 1 - blockIdx.y;
    const int sequence = index / each;
    return {sequence, index % each, sequence * tokens, tokens};
}

// The key tiles of this team: begin, begin + TEAMS, and so on, up to but not including end.
// Key tile 0 starts at position `oldest`. `newest` is the last position that is visible to the row tile.
struct TeamTiles {
    int oldest, newest, begin, end;
};

// ---- loading keys and values ----

// Starts copying a tile of keys and values to a pipeline stage, and commits the copies as one group.
// If `tile` is past the last key tile of this team, commits an empty group of copies.
//
// Keys and values after position `newest` become zeros in shared memory, because the cache may hold NaN there, and even
// a weight of zero times NaN is NaN.
// A key tile has at most BLOCK_TOKENS keys, so it spans at most two cache blocks.
template <typename T, typename Tile>
__device__ __forceinline__ void load_keys_and_values(const T* k, const T* v, T* pipeline, const TeamTiles& team_tiles,
                                                     int tile, int stage, const uint32_t* table, int kv_heads,
                                                     int kv_head) {
    static_assert(Tile::KEYS <= BLOCK_TOKENS);
    if (tile < team_tiles.end) {
        constexpr uint32_t SEGMENTS = Tile::D / 8, COPIES = Tile::KEYS * SEGMENTS, THREADS = Tile::TEAM_THREADS;
        const uint32_t key = team_tiles.oldest + tile * Tile::KEYS, newest = team_tiles.newest,
                       first_cache_block = key / BLOCK_TOKENS;
        const uint32_t last_cache_block = min(key + Tile::KEYS - 1, newest) / BLOCK_TOKENS;
        const uint32_t first_cache_row = __ldg(table + first_cache_block) * BLOCK_TOKENS;
        const uint32_t last_cache_row = __ldg(table + last_cache_block) * BLOCK_TOKENS;
        const uint32_t thread = threadIdx.x % THREADS, left = team_tiles.newest - key;
        const uint32_t row_elements = kv_heads * Tile::D;
        const uint32_t to = shared_address(pipeline + stage * 2 * Tile::KEY_ELEMENTS);
#pragma unroll
        for (uint32_t c = 0; c < (COPIES + THREADS - 1) / THREADS; ++c) {
            const uint32_t copy = thread + c * THREADS;
            if (COPIES % THREADS != 0 && copy >= COPIES) break;
            const bool is_same_segment = THREADS % SEGMENTS == 0;  // for all copies of a thread
            const uint32_t j = is_same_segment ? thread / SEGMENTS + c * (THREADS / SEGMENTS) : copy / SEGMENTS;
            const uint32_t segment = is_same_segment ? thread % SEGMENTS : copy % SEGMENTS;
            const uint32_t position = key + j;
            const uint32_t row = (position / BLOCK_TOKENS == first_cache_block ? first_cache_row : last_cache_row) +
                                 position % BLOCK_TOKENS;
            const size_t from = (size_t)row * row_elements + kv_head * Tile::D + segment * 8;
            const uint32_t target = to + (j * Tile::STRIDE + segment * 8) * sizeof(T);
            copy_async_or_zero(target, k + from, j <= left);
            copy_async_or_zero(target + Tile::KEY_ELEMENTS * sizeof(T), v + from, j <= left);
        }
    }
    commit_copies();
}

// ---- queries ----

// Starts copying the queries of the block's rows to shared memory, and commits the copies as one group.
template <typename T, typename Tile>
__device__ __forceinline__ void load_queries_to_shared(const T* q, T* query_tile, const BlockRows<Tile>& rows) {
    for (int copy = threadIdx.x; copy < Tile::ROWS * (Tile::D / 8); copy += Tile::THREADS) {
        const int row = copy / (Tile::D / 8), segment = copy % (Tile::D / 8);
        const T* from = q + rows.element(min(row, rows.count - 1)) + segment * 8;
        copy_async_or_zero(shared_address(query_tile + row * Tile::STRIDE + segment * 8), from, true);
    }
    commit_copies();
}

// The queries of a warp as mma.sync fragments: slices of 16 columns, which one mma.sync multiplies.
// A thread holds elements of rows lane/4 and lane/4 + 8 of every 16 rows.
template <typename Tile>
using QueryFragments =
    uint32_t[Tile::QUERIES_IN_REGISTERS ? Tile::M : 1][Tile::QUERIES_IN_REGISTERS ? Tile::D / 16 : 1][4];

template <typename T, typename Tile>
__device__ __forceinline__ void load_queries_to_registers(QueryFragments<Tile>& queries, const T* q,
                                                          const BlockRows<Tile>& rows, int warp_row, int lane) {
#pragma unroll
    for (int m = 0; m < Tile::M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const T* from = q + rows.element(min(warp_row + m * 16 + lane / 4 + 8 * h, rows.count - 1)) + lane % 4 * 2;
#pragma unroll
            for (int slice = 0; slice < Tile::D / 16; ++slice) {
                queries[m][slice][h] = *reinterpret_cast<const uint32_t*>(from + slice * 16);
                queries[m][slice][h + 2] = *reinterpret_cast<const uint32_t*>(from + slice * 16 + 8);
            }
        }
    }
}

// ---- one tile of keys ----

// The scores of a warp's rows for one key tile, in the layout of mma.sync results.
// In each tile of 16 rows and 8 columns, a thread holds two adjacent columns of row lane/4 (elements 0, 1) and of row
// lane/4 + 8 (elements 2, 3).
template <typename Tile> using Scores = float[Tile::M][Tile::KEYS / 8][4];
// The weighted sums of the values, in the same layout as the scores.
template <typename Tile> using Sums = float[Tile::M][Tile::D / 8][4];
// One value per row. A thread holds the values of two rows of every 16 rows.
template <typename Tile> using RowFloats = float[Tile::M][2];
template <typename Tile> using RowInts = int[Tile::M][2];

// Computes the position of each row that this thread holds. `position` is the position of the sequence's first token.
template <typename Tile>
__device__ __forceinline__ void set_row_positions(RowInts<Tile>& row_position, const BlockRows<Tile>& rows,
                                                  int position, int warp_row, int lane) {
#pragma unroll
    for (int m = 0; m < Tile::M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) row_position[m][h] = position + rows.token(warp_row + m * 16 + lane / 4 + 8 * h);
    }
}

// Computes scores += q·k for one key tile.
template <typename T, typename Tile>
__device__ __forceinline__ void multiply_queries_and_keys(Scores<Tile>& scores, const QueryFragments<Tile>& queries,
                                                          uint32_t q_lane, uint32_t keys) {
#pragma unroll
    for (int slice = 0; slice < Tile::D / 16; ++slice) {
        uint32_t a[Tile::M][4];
#pragma unroll
        for (int m = 0; m < Tile::M; ++m) {
            if constexpr (Tile::QUERIES_IN_REGISTERS) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[m][i] = queries[m][slice][i];
            } else {
                load_matrices(a[m], q_lane + (m * 16 * Tile::STRIDE + slice * 16) * sizeof(T));
            }
        }
#pragma unroll
        for (int n = 0; n < Tile::KEYS / 16; ++n) {
            uint32_t b[4];
            load_matrices(b, keys + (n * 16 * Tile::STRIDE + slice * 16) * sizeof(T));
#pragma unroll
            for (int m = 0; m < Tile::M; ++m) {
                multiply_add<T>(scores[m][2 * n], a[m], b[0], b[1]);
                multiply_add<T>(scores[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

template <typename Tile> __device__ __forceinline__ void cap_scores(Scores<Tile>& scores, float scale, float softcap) {
#pragma unroll
    for (int m = 0; m < Tile::M; ++m) {
#pragma unroll
        for (int n = 0; n < Tile::KEYS / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[m][n][i] = soft_cap(scores[m][n][i] * scale, softcap);
        }
    }
}

// Sets the scores of keys after the query, or before the query's sliding window, to -infinity.
// `key` is the position of the first key in the key tile.
template <typename Tile>
__device__ __forceinline__ void mask_scores(Scores<Tile>& scores, const RowInts<Tile>& row_position, int key,
                                            int window, int lane) {
#pragma unroll
    for (int m = 0; m < Tile::M; ++m) {
#pragma unroll
        for (int n = 0; n < Tile::KEYS / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int distance = row_position[m][i / 2] - (key + n * 8 + lane % 4 * 2 + i % 2);
                if (distance < 0 || (window > 0 && distance >= window)) scores[m][n][i] = -INFINITY;
            }
        }
    }
}

// Raises each running maximum to the maximum of this key tile, if that is larger.
// Rescales the totals and weighted sums to the new maxima.
// Does nothing if no running maximum of the warp would grow by more than SLACK.
// The maxima are base-2 exponents, and `factor` converts scores to base-2 exponents.
template <typename Tile>
__device__ __forceinline__ void update_maxima(const Scores<Tile>& scores, float factor, RowFloats<Tile>& maxima,
                                              RowFloats<Tile>& totals, Sums<Tile>& sums) {
    RowFloats<Tile> highest;
    bool grows = false;
#pragma unroll
    for (int m = 0; m < Tile::M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float high = -INFINITY;
#pragma unroll
            for (int n = 0; n < Tile::KEYS / 8; ++n) {
                high = fmaxf(high, fmaxf(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
            }
            high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, 1));
            high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, 2));
            highest[m][h] = high * factor;
            grows |= highest[m][h] > maxima[m][h] + SLACK;
        }
    }
    if (__any_sync(ALL_LANES, grows)) {
#pragma unroll
        for (int m = 0; m < Tile::M; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float next = fmaxf(maxima[m][h], highest[m][h]), keep = exp2_fast(maxima[m][h] - finite(next));
                maxima[m][h] = next;
                totals[m][h] *= keep;
#pragma unroll
                for (int n = 0; n < Tile::D / 8; ++n) {
                    sums[m][n][2 * h] *= keep;
                    sums[m][n][2 * h + 1] *= keep;
                }
            }
        }
    }
}

// Converts scores to weights, adds the weights to the totals, and adds the weighted values to the sums.
// Each loop iteration processes a slice of 16 keys.
// The exponentials of an iteration can overlap with the matrix products of the previous iteration.
template <typename T, typename Tile>
__device__ __forceinline__ void accumulate_values(const Scores<Tile>& scores, float factor,
                                                  const RowFloats<Tile>& maxima, uint32_t values,
                                                  RowFloats<Tile>& totals, Sums<Tile>& sums) {
    RowFloats<Tile> bases;
#pragma unroll
    for (int m = 0; m < Tile::M; ++m) {
        bases[m][0] = finite(maxima[m][0]);
        bases[m][1] = finite(maxima[m][1]);
    }
#pragma unroll
    for (int slice = 0; slice < Tile::KEYS / 16; ++slice) {
        uint32_t a[Tile::M][4];
#pragma unroll
        for (int m = 0; m < Tile::M; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float (&from)[4] = scores[m][2 * slice + i / 2];
                const int h = i % 2;
                const float x = exp2_fast(from[2 * h] * factor - bases[m][h]);
                const float y = exp2_fast(from[2 * h + 1] * factor - bases[m][h]);
                totals[m][h] += x + y;
                a[m][i] = pack<T>(x, y);
            }
        }
#pragma unroll
        for (int n = 0; n < Tile::D / 16; ++n) {
            uint32_t b[4];
            load_matrices_transposed(b, values + (slice * 16 * Tile::STRIDE + n * 16) * sizeof(T));
#pragma unroll
            for (int m = 0; m < Tile::M; ++m) {
                multiply_add<T>(sums[m][2 * n], a[m], b[0], b[1]);
                multiply_add<T>(sums[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// ---- results ----

// Adds up the partial totals of each row, which are spread over four lanes.
template <typename Tile> __device__ __forceinline__ void reduce_totals(RowFloats<Tile>& totals) {
#pragma unroll
    for (int m = 0; m < Tile::M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            totals[m][h] += __shfl_xor_sync(ALL_LANES, totals[m][h], 1);
            totals[m][h] += __shfl_xor_sync(ALL_LANES, totals[m][h], 2);
        }
    }
}

template <typename T> __device__ __forceinline__ void store_pair(T* to, float x, float y) {
    *reinterpret_cast<uint32_t*>(to) = pack<T>(x, y);
}

// Stores two columns of a row's sums in a partial result. For column 0, also stores the row's maximum and total.
template <typename Tile>
__device__ __forceinline__ void store_partial(float* partial, int row, int column, float x, float y, float maximum,
                                              float total) {
    __stcg(reinterpret_cast<float2*>(partial + row * Tile::D + column), float2{x, y});
    if (column == 0)
        __stcg(reinterpret_cast<float2*>(partial + Tile::ROWS * Tile::D + 2 * row), float2{maximum, total});
}

// The online softmax of a warp's rows over all key tiles of its team.
template <typename Tile> struct Softmax {
    const RowFloats<Tile>& maxima;  // of the scores, as base-2 exponents
    const RowFloats<Tile>& totals;  // of the weights, in units of 2^maximum
    const Sums<Tile>& sums;         // of the weighted values, in units of 2^maximum
};

// Where a thread block writes the results of its rows.
template <typename T> struct Results {
    int partitions;          // with one partition, results go to `out`, otherwise to `partial`
    T* out;                  // the output of all rows
    float* partial;          // the partial result of this block
    const float* row_sinks;  // the sink of each row, as a base-2 exponent
};

// Writes the results of a block with one team.
template <typename T, typename Tile>
__device__ __forceinline__ void store_results(const Results<T>& results, const BlockRows<Tile>& rows,
                                              const Softmax<Tile>& softmax, int warp_row, int lane) {
#pragma unroll
    for (int m = 0; m < Tile::M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = warp_row + m * 16 + lane / 4 + 8 * h;
            if (row >= rows.count) continue;
            const float maximum = softmax.maxima[m][h], total = softmax.totals[m][h];
            if (results.partitions == 1) {
                const float factor = normalizer(maximum, total, results.row_sinks[row]);
                T* const to = results.out + rows.element(row) + lane % 4 * 2;
#pragma unroll
                for (int n = 0; n < Tile::D / 8; ++n) {
                    const float* sum = softmax.sums[m][n] + 2 * h;
                    store_pair(to + n * 8, sum[0] * factor, sum[1] * factor);
                }
            } else {
#pragma unroll
                for (int n = 0; n < Tile::D / 8; ++n) {
                    const float* sum = softmax.sums[m][n] + 2 * h;
                    store_partial<Tile>(results.partial, row, n * 8 + lane % 4 * 2, sum[0], sum[1], maximum, total);
                }
            }
        }
    }
}

// Merges the results of all teams in shared memory, at `merge_sums`. Writes the merged results.
template <typename T, typename Tile>
__device__ __forceinline__ void merge_teams(const Results<T>& results, const BlockRows<Tile>& rows,
                                            const Softmax<Tile>& softmax, float* merge_sums, int team, int lane) {
    float2* const merge_maxima = reinterpret_cast<float2*>(merge_sums + Tile::TEAMS * Tile::ROWS * Tile::MERGE_STRIDE);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = lane / 4 + 8 * h;
        if (row >= rows.count) continue;
#pragma unroll
        for (int n = 0; n < Tile::D / 8; ++n) {
            float* const to = merge_sums + (team * Tile::ROWS + row) * Tile::MERGE_STRIDE + n * 8 + lane % 4 * 2;
            *reinterpret_cast<float2*>(to) = {softmax.sums[0][n][2 * h], softmax.sums[0][n][2 * h + 1]};
        }
        if (lane % 4 == 0) merge_maxima[team * Tile::ROWS + row] = {softmax.maxima[0][h], softmax.totals[0][h]};
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows.count * (Tile::D / 2); i += Tile::THREADS) {
        const int row = i / (Tile::D / 2), column = i % (Tile::D / 2) * 2;
        float maximum = -INFINITY, total = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
        for (int t = 0; t < Tile::TEAMS; ++t) maximum = fmaxf(maximum, merge_maxima[t * Tile::ROWS + row].x);
        const float base = finite(maximum);
#pragma unroll
        for (int t = 0; t < Tile::TEAMS; ++t) {
            const float2 stats = merge_maxima[t * Tile::ROWS + row];
            const float* from = merge_sums + (t * Tile::ROWS + row) * Tile::MERGE_STRIDE + column;
            const float2 sum = *reinterpret_cast<const float2*>(from);
            const float weight = exp2_fast(stats.x - base);
            total += stats.y * weight;
            x += sum.x * weight;
            y += sum.y * weight;
        }
        if (results.partitions == 1) {
            const float factor = normalizer(maximum, total, results.row_sinks[row]);
            store_pair(results.out + rows.element(row) + column, x * factor, y * factor);
        } else {
            store_partial<Tile>(results.partial, row, column, x, y, maximum, total);
        }
    }
}

// Combines the partial results of all partitions, at `partials`. Writes the output.
template <typename T, typename Tile>
__device__ __forceinline__ void combine_partitions(const Results<T>& results, const BlockRows<Tile>& rows,
                                                   const float* partials) {
    for (int i = threadIdx.x; i < rows.count * (Tile::D / 2); i += Tile::THREADS) {
        const int row = i / (Tile::D / 2), column = i % (Tile::D / 2) * 2;
        float maximum = -INFINITY, total = 0.0f, x = 0.0f, y = 0.0f;
        for (int first = 0; first < results.partitions; first += COMBINE_BATCH) {
            float2 stats[COMBINE_BATCH], values[COMBINE_BATCH];
            float high = maximum;
#pragma unroll
            for (int z = 0; z < COMBINE_BATCH; ++z) {
                const float* from = partials + min(first + z, results.partitions - 1) * Tile::ROWS * (Tile::D + 2);
                stats[z] = __ldcg(reinterpret_cast<const float2*>(from + Tile::ROWS * Tile::D + 2 * row));
                values[z] = __ldcg(reinterpret_cast<const float2*>(from + row * Tile::D + column));
            }
#pragma unroll
            for (int z = 0; z < COMBINE_BATCH; ++z) high = fmaxf(high, stats[z].x);
            const float base = finite(high), keep = exp2_fast(maximum - base);
            maximum = high;
            total *= keep;
            x *= keep;
            y *= keep;
#pragma unroll
            for (int z = 0; z < COMBINE_BATCH; ++z) {
                const float weight = first + z < results.partitions ? exp2_fast(stats[z].x - base) : 0.0f;
                total += stats[z].y * weight;
                x += values[z].x * weight;
                y += values[z].y * weight;
            }
        }
        const float factor = normalizer(maximum, total, results.row_sinks[row]);
        store_pair(results.out + rows.element(row) + column, x * factor, y * factor);
    }
}

// ---- the kernel ----

// The arguments of a kernel. The top of this file describes them. `RawArguments` in flash_attention.rs mirrors them.
template <typename T> struct FlashArguments {
    const T *q, *k, *v;
    const float* sinks;
    T* out;
    const uint32_t *positions, *tables;
    const uint4* row_tiles;
    float* partials;
    uint32_t* arrivals;
    int table_blocks, tokens, heads, kv_heads, window, min_tiles;
    float scale, softcap;
};
static_assert(sizeof(FlashArguments<__half>) == 10 * 8 + 8 * 4, "FlashArguments must match RawArguments");

template <typename T, typename Tile> __device__ __forceinline__ void attention(const FlashArguments<T>& args) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float row_sinks[Tile::ROWS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / Tile::WARPS;
    const int kv_head = blockIdx.x, partition = blockIdx.z, heads_per_kv = args.heads / args.kv_heads;
    const RowTile row_tile = find_row_tile<Tile>(args.row_tiles, args.tokens, heads_per_kv);
    const uint32_t* const table = args.tables + (size_t)row_tile.sequence * args.table_blocks;
    const int first_row = row_tile.tile * Tile::ROWS;
    const int row_count = min(Tile::ROWS, row_tile.tokens * heads_per_kv - first_row);
    const BlockRows<Tile> rows = {kv_head, args.heads, heads_per_kv, row_tile.first_token, first_row, row_count};
    const int warp_row = warp % Tile::WARPS * 16 * Tile::M;
    const int first_token = rows.token(0), last_token = rows.token(rows.count - 1);
    const int warp_first_token = rows.token(warp_row), warp_last_token = rows.token(warp_row + 16 * Tile::M - 1);
    // Load the sinks early to hide the latency, although the kernel needs them only at the end.
    float sink = -INFINITY;
    if (args.sinks && threadIdx.x < rows.count)
        sink = args.sinks[kv_head * heads_per_kv + (first_row + threadIdx.x) % heads_per_kv];
    // The caller guarantees that sinks, positions, tables, row_tiles, and the keys and values of earlier steps were
    // written before the previous kernel started (see `launch` in flash_attention.rs).
    // Only loads of this step's queries, keys and values must wait until the previous kernel has ended.

    // 1. Find the keys that at least one row of the row tile can see. Select the key tiles of this partition and team,
    // and start to load them.
    const int position = (int)__ldcg(args.positions + row_tile.first_token), newest = position + last_token;
    const int oldest = args.window > 0 ? max(0, position + first_token - args.window + 1) : 0;
    const int key_tiles = (newest - oldest) / Tile::KEYS + 1;
    const int partition_tiles = max(args.min_tiles, (key_tiles + (int)gridDim.z - 1) / (int)gridDim.z);
    if (partition * partition_tiles >= key_tiles) return;
    const int partitions = (key_tiles + partition_tiles - 1) / partition_tiles;
    const TeamTiles team_tiles = {oldest, newest, partition * partition_tiles + team,
                                  min(key_tiles, partition * partition_tiles + partition_tiles)};

    T* const query_tile = reinterpret_cast<T*>(shared);
    T* const pipeline = reinterpret_cast<T*>(shared + Tile::QUERY_BYTES) + team * Tile::STAGES * 2 * Tile::KEY_ELEMENTS;
    const auto load = [&](int tile, int stage) {
        load_keys_and_values<T, Tile>(args.k, args.v, pipeline, team_tiles, tile, stage, table, args.kv_heads, kv_head);
    };
#pragma unroll
    for (int stage = 0; stage < Tile::STAGES - 1; ++stage) {
        const int tile = team_tiles.begin + stage * Tile::TEAMS;
        if (oldest + tile * Tile::KEYS + Tile::KEYS > position) pdl_wait();  // the tile includes keys of this step
        load(tile, stage);
    }
    pdl_wait();
    pdl_launch_dependents();
    if constexpr (!Tile::QUERIES_IN_REGISTERS) load_queries_to_shared<T, Tile>(args.q, query_tile, rows);
    // With several teams or more than two stages, wait for the queries in shared memory here.
    // With one team and two stages, the first wait of the main loop waits for all copies, including the queries.
    if constexpr (!Tile::QUERIES_IN_REGISTERS && (Tile::TEAMS > 1 || Tile::STAGES > 2)) {
        wait_for_copies<0>();
        __syncthreads();
    }

    // 2. Load the queries to registers if they fit, and compute the position of each row.
    QueryFragments<Tile> queries;
    if constexpr (Tile::QUERIES_IN_REGISTERS) load_queries_to_registers<T, Tile>(queries, args.q, rows, warp_row, lane);
    RowInts<Tile> row_position;
    set_row_positions<Tile>(row_position, rows, position, warp_row, lane);
    const int warp_first = position + warp_first_token, warp_last = position + warp_last_token;

    // 3. Process the key tiles: scores, running maxima, weights, and weighted sums of values.
    Sums<Tile> sums = {};
    RowFloats<Tile> maxima, totals = {};
#pragma unroll
    for (int m = 0; m < Tile::M; ++m) maxima[m][0] = maxima[m][1] = -INFINITY;
    const float factor = args.softcap > 0.0f ? LOG2_E : args.scale * LOG2_E;
    const uint32_t q_lane =
        shared_address(query_tile) + ((warp_row + lane % 16) * Tile::STRIDE + lane / 16 * 8) * sizeof(T);
    const uint32_t k_lane = ((lane % 8 + lane / 16 * 8) * Tile::STRIDE + lane / 8 % 2 * 8) * sizeof(T);
    const uint32_t v_lane = (Tile::KEY_ELEMENTS + (lane % 16) * Tile::STRIDE + lane / 16 * 8) * sizeof(T);
    int stage = 0;
    for (int tile = team_tiles.begin; tile < team_tiles.end; tile += Tile::TEAMS) {
        wait_for_copies<Tile::STAGES - 2>();
        if constexpr (Tile::WARPS > 1)
            __syncthreads();
        else
            __syncwarp();
        load(tile + (Tile::STAGES - 1) * Tile::TEAMS, stage == 0 ? Tile::STAGES - 1 : stage - 1);
        const uint32_t stage_keys = shared_address(pipeline + stage * 2 * Tile::KEY_ELEMENTS) + k_lane;
        const uint32_t stage_values = stage_keys - k_lane + v_lane;
        stage = stage == Tile::STAGES - 1 ? 0 : stage + 1;
        const int key = oldest + tile * Tile::KEYS;
        if (key > warp_last || (args.window > 0 && key + Tile::KEYS - 1 <= warp_first - args.window)) continue;

        Scores<Tile> scores = {};
        multiply_queries_and_keys<T, Tile>(scores, queries, q_lane, stage_keys);
        if (args.softcap > 0.0f) cap_scores<Tile>(scores, args.scale, args.softcap);
        if (key + Tile::KEYS - 1 > warp_first || (args.window > 0 && key <= warp_last - args.window)) {
            mask_scores<Tile>(scores, row_position, key, args.window, lane);
        }
        update_maxima<Tile>(scores, factor, maxima, totals, sums);
        accumulate_values<T, Tile>(scores, factor, maxima, stage_values, totals, sums);
    }
    reduce_totals<Tile>(totals);

    // 4. Write the output, or a partial result if several partitions share the keys of the row tile.
    if (threadIdx.x < rows.count) row_sinks[threadIdx.x] = sink * LOG2_E;
    __syncthreads();  // after this barrier, the pipeline memory can be reused
    const int tile_index = blockIdx.y * args.kv_heads + kv_head;  // among the row tiles of all KV heads
    float* const tile_partials = args.partials + (size_t)tile_index * gridDim.z * Tile::ROWS * (Tile::D + 2);
    float* const partial = tile_partials + partition * Tile::ROWS * (Tile::D + 2);
    const Softmax<Tile> softmax = {maxima, totals, sums};
    const Results<T> results = {partitions, args.out, partial, row_sinks};
    if constexpr (Tile::TEAMS == 1) {
        store_results<T, Tile>(results, rows, softmax, warp_row, lane);
    } else {
        float* const merge_sums = reinterpret_cast<float*>(shared + Tile::QUERY_BYTES);
        merge_teams<T, Tile>(results, rows, softmax, merge_sums, team, lane);
    }
    if (partitions == 1) return;

    // 5. The last partition to finish combines all partial results. is_last_block resets the counter for the next
    // launch.
    if (is_last_block(args.arrivals + tile_index, partitions))
        combine_partitions<T, Tile>(results, rows, tile_partials);
}

// TILES selects the table of tile sizes of the kernel (see constants.rs).
#define DEFINE_KERNEL(NAME, TILES, ROWS, STAGES, D, T, SUFFIX)                                                         \
    using Tile_##NAME##_##D = FlashTile<D, ROWS, FLASH_##TILES##_TILES, STAGES>;                                       \
    extern "C" __global__ void __launch_bounds__(Tile_##NAME##_##D::THREADS, Tile_##NAME##_##D::MIN_BLOCKS)            \
        flash_attention_##NAME##_##D##_##SUFFIX(const __grid_constant__ FlashArguments<T> args) {                      \
        attention<T, Tile_##NAME##_##D>(args);                                                                         \
    }
// `TileKernel` in tile_kernel.rs selects the kernel.
// The 16-row kernels are for sequences with few rows, as in decoding.
// The 64-row kernels are for prompts with too few 128-row tiles to fill the GPU. They also replace 128_rows and 16_rows
// on GPUs with too little shared memory for these kernels.
// Most kernels for large batches use less shared memory per thread block than 16_rows, so that more blocks fit on a
// multiprocessor.
#define DEFINE_DTYPE(D, T, SUFFIX)                                                                                     \
    DEFINE_KERNEL(16_rows, SMALL_BATCH, FLASH_DECODE_ROWS, OTHER_STAGES, D, T, SUFFIX)                                 \
    DEFINE_KERNEL(16_rows_batch, LARGE_BATCH, FLASH_DECODE_ROWS, LARGE_BATCH_STAGES, D, T, SUFFIX)                     \
    DEFINE_KERNEL(16_rows_batch_half, LARGE_BATCH_HALF, FLASH_DECODE_ROWS, LARGE_BATCH_STAGES, D, T, SUFFIX)           \
    DEFINE_KERNEL(16_rows_batch_quarter, LARGE_BATCH_QUARTER, FLASH_DECODE_ROWS, LARGE_BATCH_STAGES, D, T, SUFFIX)     \
    DEFINE_KERNEL(64_rows, SMALL_PREFILL, FLASH_SMALL_PREFILL_ROWS, OTHER_STAGES, D, T, SUFFIX)                        \
    DEFINE_KERNEL(128_rows, LARGE_PREFILL, FLASH_LARGE_PREFILL_ROWS, OTHER_STAGES, D, T, SUFFIX)
#define DEFINE_HEAD_DIM(D)                                                                                             \
    DEFINE_DTYPE(D, __half, f16)                                                                                       \
    DEFINE_DTYPE(D, __nv_bfloat16, bf16)
// tile_sizes does not compile for other head sizes.
static_assert(sizeof(FLASH_HEAD_DIMS) == 6 * sizeof(int), "each of FLASH_HEAD_DIMS must have its DEFINE_HEAD_DIM");
DEFINE_HEAD_DIM(16)
DEFINE_HEAD_DIM(64)
DEFINE_HEAD_DIM(80)
DEFINE_HEAD_DIM(96)
DEFINE_HEAD_DIM(128)
DEFINE_HEAD_DIM(256)
