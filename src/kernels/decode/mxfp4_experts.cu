// Routed experts with MXFP4 weights for one token, computed on tensor cores.
// Each expert is an MLP with clamped SwiGLU and biases, as in gpt-oss.
// Each thread block finds the chosen experts itself, from the router logits.
#include "constants.cuh"
#include "exchange/exchange.cuh"
#include "headers/activation.cuh"
#include "headers/common.cuh"
#include "headers/pdl.cuh"
#include "headers/streaming_loads.cuh"
#include "headers/tensor_core.cuh"
#include "moe/mxfp4_tiles/e2m1.cuh"
#include "moe/routing/routing.cuh"

// MXFP4 weights in the layout that `repack_mxfp4` (moe/mxfp4_tiles/tiles.cu) produces. Tile counts are rounded up.
//   blocks: [experts][rows / 16][columns / 64][lane][16 bytes]
//   scales: [experts][rows / 16][columns / 64][g][4 bytes]
// The 16 bytes of a lane are its fragments of A for four mma.m16n8k16 instructions.
// With g = lane / 4, the fragments hold 16 of the tile's 64 columns in each of rows g and g + 8.
// The 64 columns of a row are two MXFP4 blocks.
struct Mxfp4Tiles {
    const uint8_t *blocks, *scales;
    int tiles_per_row;  // the number of tiles with the same 16 rows
};

// Multiplies 16 rows × 32 columns of weights by x. Each unpacked weight is its E2M1 value times 2^-126 (e2m1.cuh).
// In the MMA operand B, even columns hold the upper part of x, and odd columns hold the lower part (see split_x).
// The results for position g are c[0] (upper) and c[1] (lower); for position g + 8, they are c[2] and c[3].
// An MMA always computes eight columns, so computing each part of x four times costs nothing extra.
__device__ __forceinline__ void block_product(uint32_t low, uint32_t high, uint4 x, float (&c)[4]) {
    c[0] = c[1] = c[2] = c[3] = 0.0f;
    uint32_t items[4];
    e2m1_items<0>(low, high, items);
    multiply_add<__nv_bfloat16>(c, items, x.x, x.y);
    e2m1_items<1>(low, high, items);
    multiply_add<__nv_bfloat16>(c, items, x.z, x.w);
}

// Multiplies segment `index` (eight f16 values) of a row by E2M1_X_FACTOR.
// Splits each product into an upper and a lower part: two bf16 values whose sum is the product.
// The sum is exact, because an f16 has 11 significant bits and a bf16 has 8.
//   to: bf16 [columns / 32][upper, lower][32], so that lanes of even and odd g = lane / 4 read different banks
__device__ __forceinline__ void split_x(uint4 x, int index, uint4* to) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    uint32_t uppers[4], lowers[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
        const float2 scaled = make_float2(pair.x * E2M1_X_FACTOR, pair.y * E2M1_X_FACTOR);
        uppers[i] = pack<__nv_bfloat16>(scaled.x, scaled.y);
        const float2 rounded = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&uppers[i]));
        lowers[i] = pack<__nv_bfloat16>(scaled.x - rounded.x, scaled.y - rounded.y);
    }
    to += index / 4 * 8 + index % 4;
    to[0] = make_uint4(uppers[0], uppers[1], uppers[2], uppers[3]);
    to[4] = make_uint4(lowers[0], lowers[1], lowers[2], lowers[3]);
}

// Computes one warp's share of the product of x and one row of tiles.
// WARPS warps share the row. This warp processes tiles `first`, `first` + WARPS, `first` + 2 · WARPS and so on, with
// DEPTH tiles in flight.
template <int WARPS, int DEPTH> struct TileStream {
    const uint8_t *blocks, *scales;  // this lane's bytes of the oldest tile in flight
    uint4 weights[DEPTH];
    uint32_t exponents[DEPTH];
    const int first, tiles_per_row;

    // Loads the tile that is i · WARPS tiles after the oldest tile in flight into weights[d] and exponents[d].
    __device__ __forceinline__ void load(int d, int i) {
        weights[d] = load_stream_16(blocks + i * WARPS * MXFP4_TILE_BYTES);
        exponents[d] = load_stream_4(scales + i * WARPS * MXFP4_TILE_SCALE_BYTES);
    }

    __device__ __forceinline__ TileStream(const Mxfp4Tiles& tiles, size_t tile_row, int first, int lane)
        : first(first), tiles_per_row(tiles.tiles_per_row) {
        blocks = tiles.blocks + (tile_row * tiles_per_row + first) * MXFP4_TILE_BYTES + lane * 16;
        scales = tiles.scales + (tile_row * tiles_per_row + first) * MXFP4_TILE_SCALE_BYTES + lane / 4 * 4;
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            if (first + d * WARPS < tiles_per_row) load(d, d);
    }

    __device__ __forceinline__ void multiply_tile(int d, const uint4* x, float& low, float& high) const {
        const uint4 w = weights[d];
        const uint32_t s = exponents[d];
        float c[4];
        block_product(w.x, w.y, x[d * WARPS * 16], c);
        low += scale_of(s, 0) * (c[0] + c[1]);
        high += scale_of(s, 1) * (c[2] + c[3]);
        block_product(w.z, w.w, x[d * WARPS * 16 + 8], c);
        low += scale_of(s, 2) * (c[0] + c[1]);
        high += scale_of(s, 3) * (c[2] + c[3]);
    }

    // Computes this warp's sums for the rows at positions g (`low`) and g + 8 (`high`), where g = lane / 4.
    // The caller multiplies the sums by E2M1_SUM_FACTOR.
    //   x: from split_x, in shared memory, padded with zeros to a multiple of 64 columns
    __device__ __forceinline__ void multiply(const uint4* x, int lane, float& low, float& high) {
        constexpr int ROUND = DEPTH * WARPS;
        low = high = 0.0f;
        x += first * 16 + lane % 8;
        int base = first;
        // A round is DEPTH tiles. While the next round is full, its loads need no bounds checks.
        for (; base + (2 * DEPTH - 1) * WARPS < tiles_per_row; base += ROUND) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) multiply_tile(d, x, low, high), load(d, d + DEPTH);
            blocks += ROUND * MXFP4_TILE_BYTES;
            scales += ROUND * MXFP4_TILE_SCALE_BYTES;
            x += ROUND * 16;
        }
        // In the last rounds, loads and products need bounds checks.
        for (; base < tiles_per_row; base += ROUND) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                if (base + d * WARPS < tiles_per_row) multiply_tile(d, x, low, high);
                if (base + (d + DEPTH) * WARPS < tiles_per_row) load(d, d + DEPTH);
            }
            blocks += ROUND * MXFP4_TILE_BYTES;
            scales += ROUND * MXFP4_TILE_SCALE_BYTES;
            x += ROUND * 16;
        }
    }
};

// The DEPTH of a TileStream in the gate and up products, and in the down product.
constexpr int UP_DEPTH = 3, DOWN_DEPTH = 5;

// Computes h[n], the clamped SwiGLU output of the n-th chosen expert.
//   normed: f16 [columns], from the router kernel
//   normed_scale: f32 [1], from the router kernel
//   logits: f32 [experts]
//   blocks, scales: see Mxfp4Tiles; weights [experts, 2 · intermediate, columns] in paired tiles, with gate at
//     position g and up at position g + 8
//   bias: f32 [experts, 2 · intermediate], with gate and up interleaved
//   h: f16 [chosen, intermediate]
//   grid: (ceil(ceil(intermediate / 8) / DECODE_UP_TILES), chosen)
//   block: DECODE_UP_THREADS; DECODE_UP_WARPS warps share the columns of a tile
//   shared memory: bf16 [columns rounded up to a multiple of 64, 2]
//   bytes moved: 17/32 · 2 · intermediate · columns per chosen expert; an MXFP4 block of 32 values has 17 bytes
extern "C" __global__ void __launch_bounds__(DECODE_UP_THREADS, 2)
    decode_gate_up_mxfp4(const __half* normed, const float* normed_scale, const float* logits, const uint8_t* blocks,
                         const uint8_t* scales, const float* bias, __half* h, int experts, int intermediate,
                         int columns, float limit) {
    extern __shared__ uint4 x[];
    __shared__ float sums[DECODE_UP_TILES][DECODE_UP_WARPS][16];
    __shared__ Routing routing;
    const int warp = threadIdx.x / 32 % DECODE_UP_WARPS, lane = threadIdx.x % 32;
    const int block_tile = threadIdx.x / 32 / DECODE_UP_WARPS;
    const Mxfp4Tiles weights{blocks, scales, (columns + 63) / 64};
    const int segments = weights.tiles_per_row * 8, full_segments = columns / 8;
    const int tiles = (intermediate + 7) / 8, tile = blockIdx.x * DECODE_UP_TILES + block_tile;
    pdl_wait();
    pdl_launch_dependents();
    if (threadIdx.x < 32) routing.choose(logits, experts, blockIdx.y + 1, NO_WEIGHTS, lane);
    for (int i = threadIdx.x; i < segments; i += DECODE_UP_THREADS)
        split_x(i < full_segments ? __ldcg(reinterpret_cast<const uint4*>(normed) + i) : make_uint4(0, 0, 0, 0), i, x);
    const float unscale = E2M1_SUM_FACTOR * __ldcg(normed_scale);
    __syncthreads();
    const uint32_t expert = routing.expert[blockIdx.y];
    const int element = tile * 8 + lane;  // of h
    const bool writes_h = warp == 0 && lane < 8 && element < intermediate;
    float2 b = make_float2(0.0f, 0.0f);
    if (tile < tiles) {
        TileStream<DECODE_UP_WARPS, UP_DEPTH> stream(weights, (size_t)expert * tiles + tile, warp, lane);
        if (writes_h) b = __ldg(reinterpret_cast<const float2*>(bias) + (size_t)expert * intermediate + element);
        float low, high;
        stream.multiply(x, lane, low, high);
        if (lane % 4 == 0) {
            sums[block_tile][warp][lane / 4] = low;
            sums[block_tile][warp][lane / 4 + 8] = high;
        }
    }
    __syncthreads();
    if (writes_h) {
        float gate = 0.0f, up = 0.0f;
#pragma unroll
        for (int w = 0; w < DECODE_UP_WARPS; ++w) {
            gate += sums[block_tile][w][lane];
            up += sums[block_tile][w][lane + 8];
        }
        gate = gate * unscale + b.x;
        up = up * unscale + b.y;
        clamp_gate_up(gate, up, limit);
        h[(size_t)blockIdx.y * intermediate + element] = __float2half_rn(swiglu(gate, up));
    }
}

// Computes partial += Σ routing weight · (down(h) + bias) over the chosen experts.
//   partial: f32 [rows]; see StepBuffers in decode/buffers.rs
//   mailboxes: unless `ranks` is 1, the sums are sent to all ranks instead (see Sender in exchange.cuh)
//   h: f16 [chosen, columns]
//   logits: f32 [experts]
//   blocks, scales: see Mxfp4Tiles; weights [experts, rows, columns] in grouped tiles, with rows 4t to 4t + 3 at
//     positions 2t, 2t + 1, 2t + 8, 2t + 9
//   bias: f32 [experts, rows]
//   grid: ceil(rows / 16)
//   block: 32 · chosen · DECODE_DOWN_WARPS; DECODE_DOWN_WARPS warps share the columns of an expert's tile
//   shared memory: bf16 [chosen, columns rounded up to a multiple of 64, 2], then 16 floats per warp
//   bytes moved: 17/32 · rows · columns per chosen expert; an MXFP4 block of 32 values has 17 bytes
extern "C" __global__ void __launch_bounds__(32 * DECODE_DOWN_WARPS * DECODE_DOWN_MAX_CHOSEN, 2)
    decode_down_mxfp4(float* partial, const __half* h, const float* logits, const uint8_t* blocks,
                      const uint8_t* scales, const float* bias, int experts, int chosen, int rows, int columns,
                      const __grid_constant__ Mailboxes mailboxes) {
    extern __shared__ uint4 inputs[];
    __shared__ Routing routing;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x, tiles = gridDim.x;
    const Mxfp4Tiles weights{blocks, scales, (columns + 63) / 64};
    const int n = warp % chosen, tile_warp = warp / chosen, segments = weights.tiles_per_row * 8,
              full_segments = columns / 8;
    float* sums = reinterpret_cast<float*>(inputs + 2 * chosen * segments);
    // Reading the router logits before pdl_wait() is safe, because the router kernel has ended.
    // Only the previous kernel, which computes h, can still be running (see headers/pdl.cuh).
    if (warp == 0) routing.choose(logits, experts, chosen, chosen, lane);
    const Sender sender(mailboxes);
    __syncthreads();
    TileStream<DECODE_DOWN_WARPS, DOWN_DEPTH> stream(weights, (size_t)routing.expert[n] * tiles + tile, tile_warp,
                                                     lane);
    const int row = tile * 16 + threadIdx.x;
    const bool writes_partial = threadIdx.x < 16 && row < rows;
    float sum = 0.0f;
    for (int i = 0; i < chosen && writes_partial; ++i)
        sum += routing.weight[i] * __ldg(bias + (size_t)routing.expert[i] * rows + row);
    pdl_wait();
    pdl_launch_dependents();
    if (writes_partial) sum += __ldcg(partial + row);
    for (int i = threadIdx.x; i < chosen * segments; i += blockDim.x) {
        const int row = i / segments, segment = i % segments;
        const uint4 value = segment < full_segments
                                ? __ldcg(reinterpret_cast<const uint4*>(h) + row * full_segments + segment)
                                : make_uint4(0, 0, 0, 0);
        split_x(value, segment, inputs + row * 2 * segments);
    }
    __syncthreads();
    float low, high;
    stream.multiply(inputs + n * 2 * segments, lane, low, high);
    if (lane % 4 == 0) {
        const int row = grouped_row(lane / 4);
        sums[warp * 16 + row] = low;
        sums[warp * 16 + row + 2] = high;
    }
    __syncthreads();
    if (writes_partial) {
        for (int i = 0; i < chosen; ++i) {
            float y = 0.0f;
#pragma unroll
            for (int w = 0; w < DECODE_DOWN_WARPS; ++w) y += sums[(w * chosen + i) * 16 + threadIdx.x];
            sum += routing.weight[i] * E2M1_SUM_FACTOR * y;
        }
        sender.store(partial, row, sum);
    }
}
