// Causal attention on tensor cores over a key/value cache (FlashAttention-2): grouped queries, optional window, sinks.
//   q, out [T, H, D]; k, v [S, K, D] (position p lies in row p mod S); sinks f32 [H] or null; G = H/K
//   positions u32: query t stands at positions[0] + t (in device memory, so that a CUDA graph can be replayed)
//   grid (K, row tiles, splits), block 32·WARPS·TEAMS; a row is a pair (token, head of the group): row r of a kv head
//   is token r / G, head kv·G + r % G, so a tile reads each key and value once for all heads of the group
//   with softcap > 0 scores s become softcap · tanh(s / softcap)
//   splits share a tile's keys; the last of them to finish combines their partial results, f32, through L2:
//   partials [row tiles, K, splits, ROWS·(D + 2)], arrivals u32 [row tiles, K], which is all zero between launches
//   bytes moved: 2·D·sizeof(T) per key in sight, kv head and row tile; from L2 but for the first of the row tiles
#include "headers/common.cuh"
#include "headers/mma.cuh"
#include "headers/pdl.cuh"

constexpr float LOG2_E = 1.44269504f;
// Weights may grow to 2^8 before sums are rescaled: harmless in f32 and f16, and it spares nearly all rescaling.
constexpr float SLACK = 8.0f;
// Partial results combined at once: this many loads are under way.
constexpr int COMBINE_BATCH = 16;

// How a kernel cuts the work.
//   TEAMS = 1 (prompts): WARPS warps of 16·M rows share tiles of KEYS keys, in STAGES buffers
//   TEAMS > 1 (decoding): teams of one warp have the same 16 rows and other tiles; their sums are added at the end
template <int HEAD_DIM, int M_, int WARPS_, int TEAMS_, int KEYS_, int STAGES_, int MIN_TILES_>
struct Shape {
    static constexpr int D = HEAD_DIM, M = M_, WARPS = WARPS_, TEAMS = TEAMS_, KEYS = KEYS_, STAGES = STAGES_;
    static constexpr int MIN_TILES = MIN_TILES_;  // a split with fewer tiles of keys is not worth combining
    static constexpr int ROWS = 16 * M * WARPS, TEAM_THREADS = 32 * WARPS, THREADS = TEAM_THREADS * TEAMS;
    // A row of 16-byte chunks is padded to an odd number of them: ldmatrix then meets no bank twice.
    static constexpr int STRIDE = D + 8, TILE = KEYS * STRIDE;
    static constexpr bool QUERIES_IN_REGISTERS = M * D <= 160;
    static constexpr int QUERY_BYTES = QUERIES_IN_REGISTERS ? 0 : 2 * ROWS * STRIDE;
    static constexpr int PIPELINE_BYTES = TEAMS * STAGES * 2 * TILE * 2;
    static constexpr int MERGE_STRIDE = D + 8;  // four rows of float2 in different banks
    static constexpr int MERGE_BYTES = TEAMS > 1 ? TEAMS * ROWS * (MERGE_STRIDE + 2) * 4 : 0;
    static constexpr int SHARED = QUERY_BYTES + (PIPELINE_BYTES > MERGE_BYTES ? PIPELINE_BYTES : MERGE_BYTES);
    static_assert(WARPS == 1 || TEAMS == 1, "a team of several warps would need a barrier of its own");
    static_assert(ROWS <= THREADS && STAGES >= 2);
};

__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Subtracting an infinite maximum would give NaN. Where nothing is in sight, any finite number does.
__device__ __forceinline__ float finite(float top) { return top == -INFINITY ? 0.0f : top; }

// The factor that turns a sum of weights·values relative to 2^top into the output. The sink takes its share here.
__device__ __forceinline__ float normalizer(float top, float total, float sink) {
    const float base = fmaxf(top, sink);
    const float keep = exp2_fast(top - base);
    return __fdividef(keep, total * keep + exp2_fast(sink - base));
}

// cap · tanh(x / cap)
__device__ __forceinline__ float soft_cap(float x, float cap) {
    return cap - __fdividef(2.0f * cap, 1.0f + exp2_fast(2.0f * LOG2_E / cap * x));
}

// Counts to `last` and then starts over at 0. What the block wrote before is visible to whoever counts after.
__device__ __forceinline__ uint32_t arrive(uint32_t* counter, uint32_t last) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}

template <typename T, typename C>
__device__ __forceinline__ void attention(const T* q, const T* k, const T* v, const float* sinks, T* out,
                                          const uint32_t* positions, float* partials, uint32_t* arrivals, int tokens,
                                          int heads, int kv_heads, int cache_rows, int window, float scale,
                                          float softcap, int early) {
    constexpr int D = C::D, M = C::M, KEYS = C::KEYS, STAGES = C::STAGES, STRIDE = C::STRIDE;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float row_sinks[C::ROWS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / C::WARPS;
    // The last rows of a causal matrix have the most keys: they start first.
    const int kv_head = blockIdx.x, row_tile = gridDim.y - 1 - blockIdx.y, split = blockIdx.z;
    const int per_kv = heads / kv_heads;
    const int first_row = row_tile * C::ROWS, rows = min(C::ROWS, tokens * per_kv - first_row);
    const int warp_row = warp % C::WARPS * 16 * M;
    const auto element = [&](int row) {  // first element of a row of this tile in q and out
        const int r = first_row + row;
        return ((size_t)(r / per_kv) * heads + kv_head * per_kv + r % per_kv) * D;
    };
    const auto token = [&](int row) { return (first_row + min(row, rows - 1)) / per_kv; };
    const int first_token = token(0), last_token = token(rows - 1);
    const int warp_first_token = token(warp_row), warp_last_token = token(warp_row + 16 * M - 1);
    // Needed last, asked for first.
    float sink = -INFINITY;
    if (sinks && threadIdx.x < rows) sink = sinks[kv_head * per_kv + (first_row + threadIdx.x) % per_kv];
    // With `early`, the caller promises that positions[0] and the keys before it were complete when the kernel before
    // this one started: then only the queries and this step's own keys have to wait for that kernel.
    if (!early) pdl_wait();

    // 1. The keys that some row of the tile sees, and this team's part of this split's share of them.
    const int position = (int)__ldcg(positions), newest = position + last_token;
    const int oldest = window > 0 ? max(0, position + first_token - window + 1) : 0;
    const int tiles = (newest - oldest) / KEYS + 1;
    const int share = max(C::MIN_TILES, (tiles + (int)gridDim.z - 1) / (int)gridDim.z);
    if (split * share >= tiles) return;
    const int splits = (tiles + share - 1) / share;
    const int begin = split * share + team, end = min(tiles, split * share + share);

    T* const query_tile = reinterpret_cast<T*>(shared);
    T* const pipeline = reinterpret_cast<T*>(shared + C::QUERY_BYTES) + team * STAGES * 2 * C::TILE;
    const uint32_t row_elements = kv_heads * D;
    // Rows out of sight become zeros: what lies there may be NaN, and zero times NaN is NaN. At most S positions are in
    // sight, so those of a tile wrap around once.
    const auto load = [&](int tile, int stage) {
        if (tile < end) {
            constexpr uint32_t CHUNKS = D / 8, COPIES = KEYS * CHUNKS, THREADS = C::TEAM_THREADS;
            const uint32_t key = oldest + tile * KEYS, size = cache_rows, base = key < size ? key : key % size;
            const uint32_t thread = threadIdx.x % THREADS, left = newest - key;
            const uint32_t to = shared_address(pipeline + stage * 2 * C::TILE);
#pragma unroll
            for (uint32_t c = 0; c < (COPIES + THREADS - 1) / THREADS; ++c) {
                const uint32_t copy = thread + c * THREADS;
                if (COPIES % THREADS != 0 && copy >= COPIES) break;
                const bool even = THREADS % CHUNKS == 0;  // then a thread keeps to one column
                const uint32_t j = even ? thread / CHUNKS + c * (THREADS / CHUNKS) : copy / CHUNKS;
                const uint32_t chunk = even ? thread % CHUNKS : copy % CHUNKS;
                const uint32_t row = min(base + j, base + j - size);  // unsigned: the smaller is the one in range
                const size_t from = (size_t)row * row_elements + kv_head * D + chunk * 8;
                const uint32_t place = to + (j * STRIDE + chunk * 8) * sizeof(T);
                copy_async(place, k + from, j <= left);
                copy_async(place + C::TILE * sizeof(T), v + from, j <= left);
            }
        }
        copy_commit();
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        const int tile = begin + stage * C::TEAMS;
        if (oldest + tile * KEYS + KEYS > position) pdl_wait();  // this step's own keys
        load(tile, stage);
    }
    pdl_wait();
    pdl_launch_dependents();
    if constexpr (!C::QUERIES_IN_REGISTERS) {
        static_assert(STAGES == 2, "the first wait below is to cover this group too");
        for (int copy = threadIdx.x; copy < C::ROWS * (D / 8); copy += C::THREADS) {
            const int row = copy / (D / 8), chunk = copy % (D / 8);
            const T* from = q + element(min(row, rows - 1)) + chunk * 8;
            copy_async(shared_address(query_tile + row * STRIDE + chunk * 8), from, true);
        }
        copy_commit();
    }
    // Teams do not wait for each other below, but queries were copied by all of them.
    if constexpr (!C::QUERIES_IN_REGISTERS && C::TEAMS > 1) {
        copy_wait<0>();
        __syncthreads();
    }

    // 2. Queries. A thread holds rows lane/4 and lane/4 + 8 of each 16. Rows past the end repeat the last, unwritten.
    uint32_t queries[C::QUERIES_IN_REGISTERS ? M : 1][C::QUERIES_IN_REGISTERS ? D / 16 : 1][4];
    if constexpr (C::QUERIES_IN_REGISTERS) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const T* from = q + element(min(warp_row + m * 16 + lane / 4 + 8 * h, rows - 1)) + lane % 4 * 2;
#pragma unroll
                for (int step = 0; step < D / 16; ++step) {
                    queries[m][step][h] = *reinterpret_cast<const uint32_t*>(from + step * 16);
                    queries[m][step][h + 2] = *reinterpret_cast<const uint32_t*>(from + step * 16 + 8);
                }
            }
        }
    }
    int row_position[M][2];
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) row_position[m][h] = position + token(warp_row + m * 16 + lane / 4 + 8 * h);
    }
    const int warp_first = position + warp_first_token, warp_last = position + warp_last_token;

    // 3. Tiles of keys: scores, running maximum, weights, sums of values.
    float sums[M][D / 8][4] = {}, tops[M][2], totals[M][2] = {};
#pragma unroll
    for (int m = 0; m < M; ++m) tops[m][0] = tops[m][1] = -INFINITY;
    const float factor = softcap > 0.0f ? LOG2_E : scale * LOG2_E;
    const uint32_t q_lane = shared_address(query_tile) + ((warp_row + lane % 16) * STRIDE + lane / 16 * 8) * sizeof(T);
    const uint32_t k_lane = ((lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8) * sizeof(T);
    const uint32_t v_lane = (C::TILE + (lane % 16) * STRIDE + lane / 16 * 8) * sizeof(T);
    int stage = 0;
    for (int tile = begin; tile < end; tile += C::TEAMS) {
        copy_wait<STAGES - 2>();
        if constexpr (C::WARPS > 1) __syncthreads(); else __syncwarp();
        load(tile + (STAGES - 1) * C::TEAMS, stage == 0 ? STAGES - 1 : stage - 1);
        const uint32_t keys = shared_address(pipeline + stage * 2 * C::TILE) + k_lane, values = keys - k_lane + v_lane;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        const int key = oldest + tile * KEYS;
        if (key > warp_last || (window > 0 && key + KEYS - 1 <= warp_first - window)) continue;

        float scores[M][KEYS / 8][4] = {};
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            uint32_t a[M][4];
#pragma unroll
            for (int m = 0; m < M; ++m) {
                if constexpr (C::QUERIES_IN_REGISTERS) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) a[m][i] = queries[m][step][i];
                } else {
                    load_matrices(a[m], q_lane + (m * 16 * STRIDE + step * 16) * sizeof(T));
                }
            }
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                uint32_t b[4];
                load_matrices(b, keys + (n * 16 * STRIDE + step * 16) * sizeof(T));
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    multiply_add(scores[m][2 * n], a[m], b[0], b[1], T());
                    multiply_add(scores[m][2 * n + 1], a[m], b[2], b[3], T());
                }
            }
        }
        if (softcap > 0.0f) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) scores[m][n][i] = soft_cap(scores[m][n][i] * scale, softcap);
                }
            }
        }
        if (key + KEYS - 1 > warp_first || (window > 0 && key <= warp_last - window)) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int back = row_position[m][i / 2] - (key + n * 8 + lane % 4 * 2 + i % 2);
                        if (back < 0 || (window > 0 && back >= window)) scores[m][n][i] = -INFINITY;
                    }
                }
            }
        }
        float highest[M][2];
        bool grows = false;
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float high = -INFINITY;
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n) {
                    high = fmaxf(high, fmaxf(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
                }
                high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
                high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
                highest[m][h] = high * factor;
                grows |= highest[m][h] > tops[m][h] + SLACK;
            }
        }
        if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float next = fmaxf(tops[m][h], highest[m][h]), keep = exp2_fast(tops[m][h] - finite(next));
                    tops[m][h] = next;
                    totals[m][h] *= keep;
#pragma unroll
                    for (int n = 0; n < D / 8; ++n) sums[m][n][2 * h] *= keep, sums[m][n][2 * h + 1] *= keep;
                }
            }
        }
        float bases[M][2];
#pragma unroll
        for (int m = 0; m < M; ++m) bases[m][0] = finite(tops[m][0]), bases[m][1] = finite(tops[m][1]);
        // The exponentials of a step run beside the products of the step before.
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
            uint32_t a[M][4];
#pragma unroll
            for (int m = 0; m < M; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float(&from)[4] = scores[m][2 * step + i / 2];
                    const int h = i % 2;
                    const float x = exp2_fast(from[2 * h] * factor - bases[m][h]);
                    const float y = exp2_fast(from[2 * h + 1] * factor - bases[m][h]);
                    totals[m][h] += x + y;
                    a[m][i] = pack(x, y, T());
                }
            }
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                uint32_t b[4];
                load_matrices_transposed(b, values + (step * 16 * STRIDE + n * 16) * sizeof(T));
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    multiply_add(sums[m][2 * n], a[m], b[0], b[1], T());
                    multiply_add(sums[m][2 * n + 1], a[m], b[2], b[3], T());
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            totals[m][h] += __shfl_xor_sync(0xffffffffu, totals[m][h], 1);
            totals[m][h] += __shfl_xor_sync(0xffffffffu, totals[m][h], 2);
        }
    }

    // 4. The output if this block saw all keys, else partial sums [rows, D], then [rows] of (maximum, total).
    if (threadIdx.x < rows) row_sinks[threadIdx.x] = sink * LOG2_E;
    __syncthreads();  // and the pipeline's memory is free
    const int slot = row_tile * kv_heads + kv_head;
    float* const slot_partials = partials + (size_t)slot * gridDim.z * C::ROWS * (D + 2);
    float* const partial = slot_partials + split * C::ROWS * (D + 2);
    const auto store = [&](T* at, float x, float y) { *reinterpret_cast<uint32_t*>(at) = pack(x, y, T()); };
    const auto store_partial = [&](int row, int column, float x, float y, float top, float total) {
        __stcg(reinterpret_cast<float2*>(partial + row * D + column), float2{x, y});
        if (column == 0) __stcg(reinterpret_cast<float2*>(partial + C::ROWS * D + 2 * row), float2{top, total});
    };
    if constexpr (C::TEAMS == 1) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = warp_row + m * 16 + lane / 4 + 8 * h;
                if (row >= rows) continue;
                if (splits == 1) {
                    const float share = normalizer(tops[m][h], totals[m][h], row_sinks[row]);
                    T* const at = out + element(row) + lane % 4 * 2;
#pragma unroll
                    for (int n = 0; n < D / 8; ++n) {
                        store(at + n * 8, sums[m][n][2 * h] * share, sums[m][n][2 * h + 1] * share);
                    }
                } else {
#pragma unroll
                    for (int n = 0; n < D / 8; ++n) {
                        const int column = n * 8 + lane % 4 * 2;
                        store_partial(row, column, sums[m][n][2 * h], sums[m][n][2 * h + 1], tops[m][h], totals[m][h]);
                    }
                }
            }
        }
    } else {
        float* const merge_sums = reinterpret_cast<float*>(shared + C::QUERY_BYTES);
        float2* const merge_tops = reinterpret_cast<float2*>(merge_sums + C::TEAMS * C::ROWS * C::MERGE_STRIDE);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = lane / 4 + 8 * h;
            if (row >= rows) continue;
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
                float* const at = merge_sums + (team * C::ROWS + row) * C::MERGE_STRIDE + n * 8 + lane % 4 * 2;
                *reinterpret_cast<float2*>(at) = {sums[0][n][2 * h], sums[0][n][2 * h + 1]};
            }
            if (lane % 4 == 0) merge_tops[team * C::ROWS + row] = {tops[0][h], totals[0][h]};
        }
        __syncthreads();
        for (int i = threadIdx.x; i < rows * (D / 2); i += C::THREADS) {
            const int row = i / (D / 2), column = i % (D / 2) * 2;
            float top = -INFINITY, total = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
            for (int t = 0; t < C::TEAMS; ++t) top = fmaxf(top, merge_tops[t * C::ROWS + row].x);
            const float base = finite(top);
#pragma unroll
            for (int t = 0; t < C::TEAMS; ++t) {
                const float2 part = merge_tops[t * C::ROWS + row];
                const float* at = merge_sums + (t * C::ROWS + row) * C::MERGE_STRIDE + column;
                const float2 sum = *reinterpret_cast<const float2*>(at);
                const float share = exp2_fast(part.x - base);
                total += part.y * share, x += sum.x * share, y += sum.y * share;
            }
            if (splits == 1) {
                const float share = normalizer(top, total, row_sinks[row]);
                store(out + element(row) + column, x * share, y * share);
            } else {
                store_partial(row, column, x, y, top, total);
            }
        }
    }
    if (splits == 1) return;

    // 5. The last split to arrive combines them all; its arrival turns the counter back to 0 for the next launch.
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) is_last = arrive(arrivals + slot, splits - 1) == (uint32_t)splits - 1;
    __syncthreads();
    if (!is_last) return;
    for (int i = threadIdx.x; i < rows * (D / 2); i += C::THREADS) {
        const int row = i / (D / 2), column = i % (D / 2) * 2;
        float top = -INFINITY, total = 0.0f, x = 0.0f, y = 0.0f;
        for (int first = 0; first < splits; first += COMBINE_BATCH) {
            float2 parts[COMBINE_BATCH], values[COMBINE_BATCH];
            float high = top;
#pragma unroll
            for (int z = 0; z < COMBINE_BATCH; ++z) {
                const float* from = slot_partials + min(first + z, splits - 1) * C::ROWS * (D + 2);
                parts[z] = __ldcg(reinterpret_cast<const float2*>(from + C::ROWS * D + 2 * row));
                values[z] = __ldcg(reinterpret_cast<const float2*>(from + row * D + column));
            }
#pragma unroll
            for (int z = 0; z < COMBINE_BATCH; ++z) high = fmaxf(high, parts[z].x);
            const float base = finite(high), keep = exp2_fast(top - base);
            top = high, total *= keep, x *= keep, y *= keep;
#pragma unroll
            for (int z = 0; z < COMBINE_BATCH; ++z) {
                const float share = first + z < splits ? exp2_fast(parts[z].x - base) : 0.0f;
                total += parts[z].y * share, x += values[z].x * share, y += values[z].y * share;
            }
        }
        const float share = normalizer(top, total, row_sinks[row]);
        store(out + element(row) + column, x * share, y * share);
    }
}

#define KERNEL(NAME, T, BLOCKS, ...)                                                                               \
    extern "C" __global__ void __launch_bounds__(Shape<__VA_ARGS__>::THREADS, BLOCKS)                              \
        NAME(const T* q, const T* k, const T* v, const float* sinks, T* out, const uint32_t* positions,            \
             float* partials, uint32_t* arrivals, int tokens, int heads, int kv_heads, int cache_rows, int window, \
             float scale, float softcap, int early) {                                                              \
        attention<T, Shape<__VA_ARGS__>>(q, k, v, sinks, out, positions, partials, arrivals, tokens, heads,        \
                                         kv_heads, cache_rows, window, scale, softcap, early);                     \
    }
// 128 rows for long prompts, 64 where 128 would leave multiprocessors idle, 16 for decoding.
// Head dim, keys in a tile of 128 rows, blocks of 64 rows a multiprocessor, keys in a tile of 16 rows: as measured.
#define FOR_EACH_HEAD_DIM(DEFINE) \
    DEFINE(16, 64, 3, 32)         \
    DEFINE(64, 48, 3, 32)         \
    DEFINE(80, 48, 2, 16)         \
    DEFINE(96, 48, 2, 16)         \
    DEFINE(128, 48, 2, 16)
#define DEFINE_TYPE(T, SUFFIX, D, KEYS, BLOCKS, DECODE_KEYS)                        \
    KERNEL(flash_attention_128_rows_##D##_##SUFFIX, T, 2, D, 2, 4, 1, KEYS, 2, 4)   \
    KERNEL(flash_attention_64_rows_##D##_##SUFFIX, T, BLOCKS, D, 1, 4, 1, 64, 2, 4) \
    KERNEL(flash_attention_16_rows_##D##_##SUFFIX, T, 1, D, 1, 1, 8, DECODE_KEYS, 2, 128 / DECODE_KEYS)
#define DEFINE(D, ...)                       \
    DEFINE_TYPE(__half, f16, D, __VA_ARGS__) \
    DEFINE_TYPE(__nv_bfloat16, bf16, D, __VA_ARGS__)
FOR_EACH_HEAD_DIM(DEFINE)
// The sums of 16 rows of 256 fill half of a warp's registers, and tiles of keys take twice the memory.
#define DEFINE_256(T, SUFFIX)                                             \
    KERNEL(flash_attention_128_rows_256_##SUFFIX, T, 1, 256, 1, 8, 1, 32, 2, 4) \
    KERNEL(flash_attention_64_rows_256_##SUFFIX, T, 2, 256, 1, 4, 1, 16, 2, 4)  \
    KERNEL(flash_attention_16_rows_256_##SUFFIX, T, 1, 256, 1, 1, 4, 16, 2, 8)
DEFINE_256(__half, f16)
DEFINE_256(__nv_bfloat16, bf16)
