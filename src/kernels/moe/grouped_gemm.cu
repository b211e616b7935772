// Matrix products of routed experts on floats, for many tokens, on tensor cores; and the mix of what experts say.
//   weights T [E, R, C]; bias T [E, R] or null; x T [T, C] (shared by a token's experts) or [T, N, C]; out T [T, N, R]
//   sorted, offsets: as sort_by_expert leaves them. C is a multiple of 8; rows of 16 bytes past it are taken as zeros.
// A block has a tile of up to BM pairs of one expert × BN of its rows. Chunk c of 16 bytes of row r lies at c ^ (r % 8) in
// shared memory, where ldmatrix meets no bank twice.
#include "headers/mma.cuh"
#include "moe/parts.cuh"

constexpr int BN = 128, BK = 64, STAGES = 3, THREADS = 256, ROW_BYTES = 2 * BK;

// grid (ceil(R / BN), ceil(P / BM) + E), block THREADS; a block past the last tile ends at once.
//   shared: STAGES · (BM + BN) · ROW_BYTES; bytes moved: weights once for each tile of pairs, from L2 but for the first
template <typename T, int BM>
__device__ void grouped_gemm(const T* weights, const T* bias, const T* x, const uint32_t* sorted,
                             const uint32_t* offsets, T* out, int rows, int columns, int per_x, int experts) {
    // Warps are WM × WN; each has 32 pairs × COLUMNS rows of weights.
    constexpr int WM = BM / 32, WN = 8 / WM, COLUMNS = BN / WN, TILES = COLUMNS / 8;
    constexpr int STAGE_BYTES = (BM + BN) * ROW_BYTES;
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ uint32_t pair_of[BM];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Part part;
    if (!find_part(offsets, experts, BM, 1, blockIdx.y, part)) return;
    const int first_pair = part.index * BM, pairs = min(BM, part.pairs - first_pair), first_row = blockIdx.x * BN;
    if (threadIdx.x < BM) pair_of[threadIdx.x] = sorted[part.first + first_pair + min((int)threadIdx.x, pairs - 1)];
    __syncthreads();

    // What this thread copies: chunk `chunk` of rows `row`, `row` + 32, ..; what lies past the end repeats the last.
    const int chunk = threadIdx.x % 8, row = threadIdx.x / 8;
    const T *x_rows[BM / 32], *w_rows[BN / 32];
#pragma unroll
    for (int i = 0; i < BM / 32; ++i) x_rows[i] = x + (size_t)(pair_of[row + 32 * i] / per_x) * columns + 8 * chunk;
#pragma unroll
    for (int i = 0; i < BN / 32; ++i) {
        const int of_expert = min(first_row + row + 32 * i, rows - 1);
        w_rows[i] = weights + ((size_t)part.expert * rows + of_expert) * columns + 8 * chunk;
    }
    const uint32_t base = shared_address(shared), place = row * ROW_BYTES + (chunk ^ (row & 7)) * 16;
    const int steps = (columns + BK - 1) / BK;
    const auto load = [&](int step) {
        if (step < steps) {
            const uint32_t to = base + step % STAGES * STAGE_BYTES + place;
            const bool valid = step * BK + 8 * chunk < columns;
#pragma unroll
            for (int i = 0; i < BM / 32; ++i) copy_async(to + i * 32 * ROW_BYTES, x_rows[i] + step * BK, valid);
#pragma unroll
            for (int i = 0; i < BN / 32; ++i) copy_async(to + (BM + i * 32) * ROW_BYTES, w_rows[i] + step * BK, valid);
        }
        copy_commit();
    };
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) load(step);

    float sums[2][TILES][4] = {};
    const int warp_pair = warp % WM * 32, warp_row = warp / WM * COLUMNS;
    const int x_row = warp_pair + lane % 16, x_chunk = lane / 16;                     // of A: 16 pairs × 16 columns
    const int w_row = warp_row + lane % 8 + lane / 16 * 8, w_chunk = lane / 8 % 2;    // of B: 16 rows × 16 columns
    for (int step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        load(step + STAGES - 1);
        const uint32_t from_x = base + step % STAGES * STAGE_BYTES, from_w = from_x + BM * ROW_BYTES;
#pragma unroll
        for (int k = 0; k < BK / 16; ++k) {
            uint32_t a[2][4];
#pragma unroll
            for (int m = 0; m < 2; ++m)
                load_matrices(a[m], from_x + (x_row + 16 * m) * ROW_BYTES + ((2 * k + x_chunk) ^ (x_row & 7)) * 16);
#pragma unroll
            for (int n = 0; n < TILES / 2; ++n) {
                uint32_t b[4];
                load_matrices(b, from_w + (w_row + 16 * n) * ROW_BYTES + ((2 * k + w_chunk) ^ (w_row & 7)) * 16);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    multiply_add(sums[m][2 * n], a[m], b[0], b[1], T());
                    multiply_add(sums[m][2 * n + 1], a[m], b[2], b[3], T());
                }
            }
        }
    }
    // A lane has two neighbors in a row of `out` for pairs lane / 4 and lane / 4 + 8 of each 16.
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int pair = warp_pair + 16 * m + lane / 4 + 8 * h;
            if (pair >= pairs) continue;
            T* const to = out + (size_t)pair_of[pair] * rows;
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                const int at = first_row + warp_row + 8 * n + lane % 4 * 2;
                const auto value = [&](int i) {
                    const float b = bias ? to_float(bias[(size_t)part.expert * rows + at + i]) : 0.0f;
                    return from_float<T>(sums[m][n][2 * h + i] + b);
                };
                if (rows % 2 == 0 && at < rows) {
                    const T two[2] = {value(0), value(1)};
                    *reinterpret_cast<uint32_t*>(to + at) = *reinterpret_cast<const uint32_t*>(two);
                } else {
                    if (at < rows) to[at] = value(0);
                    if (at + 1 < rows) to[at + 1] = value(1);
                }
            }
        }
    }
}

// out[t] = Σ shares[t, n] · y[t, n]: y T [T, N, C], shares f32 [T, N], out f32 [T, C]
//   grid ceil(T·C / 256), block 256; bytes moved: T·C·(N·sizeof(T) + 4)
template <typename T> __device__ void mix(const T* y, const float* shares, float* out, int n, int columns, int chosen) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int token = i / columns, column = i % columns;
    float sum = 0.0f;
    for (int c = 0; c < chosen; ++c)
        sum += shares[token * chosen + c] * to_float(y[((size_t)token * chosen + c) * columns + column]);
    out[i] = sum;
}

#define DEFINE_GEMM(T, SUFFIX, BM)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                          \
        grouped_gemm_##BM##_##SUFFIX(const T* weights, const T* bias, const T* x, const uint32_t* sorted,             \
                                     const uint32_t* offsets, T* out, int rows, int columns, int per_x, int experts) { \
        grouped_gemm<T, BM>(weights, bias, x, sorted, offsets, out, rows, columns, per_x, experts);                   \
    }
DEFINE_GEMM(__half, f16, 64)
DEFINE_GEMM(__half, f16, 128)
DEFINE_GEMM(__nv_bfloat16, bf16, 64)
DEFINE_GEMM(__nv_bfloat16, bf16, 128)

#define DEFINE_MIX(T, SUFFIX)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        mix_##SUFFIX(const T* y, const float* shares, float* out, int n, int columns, int chosen) {                   \
        mix(y, shares, out, n, columns, chosen);                                                                      \
    }
FOR_EACH_DTYPE(DEFINE_MIX)
