// Tiled layouts of MXFP4 weights and 16-bit activations, for the products of routed experts on tensor cores.
//
// At load time, `repack_mxfp4` repacks the weights [experts, rows, columns] into tiles of 16 rows × 64 columns:
//   blocks: [experts][ceil(rows / 16)][ceil(columns / 64)][lane][16 bytes]
//     In column tile j, the 16 bytes of lane 4g + t are one 32-bit word of each of four MXFP4 blocks (32 values each):
//     (row g, block 2j), (row g + 8, block 2j), (row g, block 2j + 1), (row g + 8, block 2j + 1)
//     A lane's word of a block holds the values 8t .. 8t + 5 of that block.
//     The words of rows g and g + 8 together hold the values 8t + 6 and 8t + 7 of both rows (see e2m1.cuh).
//     Here, rows g and g + 8 are positions in the tile. The product determines which rows of the matrix they hold:
//     In the *paired* tiles of gate_up, positions g and g + 8 hold rows 2g and 2g + 1, a gate row and its up row.
//     In the *grouped* tiles of down, positions 2t, 2t + 1, 2t + 8 and 2t + 9 hold rows 4t to 4t + 3.
//     A lane stores the results of these four positions (see `transposed`), which are adjacent in y.
//   scales: [experts][ceil(rows / 16)][ceil(columns / 64)][g][4 bytes]
//     The four bytes are the scales of the four blocks listed above.
// A lane's 16 bytes unpack to its A fragments for four MMAs with K = 16, so weights never move between lanes.
//
// x is the input of gate_up, h is the input of down (the result of the clamped SwiGLU), and y is the output of down.
// The products read the columns of x and h in *fragment order*.
// In each group of 32 columns, column pair i is columns 2i and 2i + 1.
// Fragment order stores column pair 4t + p at position 4p + t, where t and p are 0 to 3.
// expert_mlp.cu copies x in fragment order to device memory, and expert_few_pairs.cu copies it to shared memory.
// gate_up stores h in fragment order.
// The lanes' A fragments hold the columns of a block in fragment order, so each MMA multiplies a weight by the value of
// x or h in the same column. The permutation of the fragment order is its own inverse.
//
// x (in expert_mlp.cu) and h are *tiled*: they have the shape [ceil(columns / 64)][tiled_rows][128 bytes].
// The rows of x and h are in the order of `sorted` (see sort_by_expert).
// Each expert's rows of x and h start at a multiple of 8, so pairs + 8 · experts rows are always enough.
// Segment s (16 bytes) of the 128 bytes of row r is stored at position s ^ (r % 8). Padding columns are zeros.
// In this layout, 64 columns of consecutive rows are contiguous, so one bulk copy can load them.
// ldmatrix and wgmma read the tiled rows without bank conflicts.
#pragma once
#include "constants.cuh"
#include "headers/activation.cuh"
#include "headers/common.cuh"
#include "headers/tensor_core.cuh"
#include "moe/mxfp4_tiles/e2m1.cuh"
#include "moe/work_items.cuh"

// The products process K_STEP columns at a time: the width of a weight tile, and 128 bytes of a row of x or h.
constexpr int K_STEP = MXFP4_TILE_COLUMNS;

// The type of two packed values of type T.
template <typename T> struct Pair;
template <> struct Pair<__half> {
    using type = __half2;
};
template <> struct Pair<__nv_bfloat16> {
    using type = __nv_bfloat162;
};

// ---- fragment order ----

// Returns segment `index` of a row: 8 columns in fragment order, multiplied by `factor` and rounded to T.
// `factor` is a power of two. Padding columns are zeros.
template <typename T>
__device__ __forceinline__ uint4 fragment_segment(const float2* row, int index, int columns, float factor = 1.0f) {
    if (index >= columns / 8) return make_uint4(0, 0, 0, 0);
    // Fragment order stores the column pairs p, 4 + p, 8 + p and 12 + p at positions 4p .. 4p + 3.
    const float2* pair = row + index / 4 * 16 + index % 4;
    const auto packed = [&](float2 value) { return pack<T>(value.x * factor, value.y * factor); };
    const float2 a = pair[0], b = pair[4], c = pair[8], d = pair[12];
    return make_uint4(packed(a), packed(b), packed(c), packed(d));
}

// ---- unpacking ----

// Converts four scale bytes, of two blocks in each of rows g and g + 8, to factors for unpacked values.
// Word i of `factors` holds the factors of block i: row g in the low half, row g + 8 in the high half.
// One instruction can multiply both values of an item by the same half of a word, so one word is enough for both rows.
// The factors of scale bytes above 128 would overflow. `Mxfp4Tiles::repack` rejects such scales.
template <typename T> __device__ __forceinline__ void scale_factors(uint32_t scales, uint32_t (&factors)[2]);
// bf16: unpacked values are E2M1 · 2^-126, so the factor for a scale of 2^(s - 127) is 2^(s - 1), exact even for s = 0.
// The exponent field of bf16 starts at bit 7 and has a bias of 127, so the factor has the bits (s + 126) << 7.
// The selector 0x4140 + 0x0202 · i copies bytes 2i and 2i + 1 of `scales` into the low bytes of the two halves.
// Multiplying the word by 0x80 shifts both halves by 7 bits, because no bit leaves its half.
template <> __device__ __forceinline__ void scale_factors<__nv_bfloat16>(uint32_t scales, uint32_t (&factors)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) factors[i] = __byte_perm(scales, 0, 0x4140 + 0x0202 * i) * 0x80u + 0x3F003F00u;
}
// f16: unpacked values are E2M1 · 2^-14, so the factor is 2^(s - 113), which is a normal number for s >= 99.
// The exponent field of f16 starts at bit 10 and has a bias of 15, so the factor has the bits (s - 98) << 10.
// For a scale byte s <= 98, the factor is 0, because the weights (at most 6 · 2^-29) would round to zero in f16.
template <> __device__ __forceinline__ void scale_factors<__half>(uint32_t scales, uint32_t (&factors)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        constexpr uint32_t TWICE_98 = 98u * 0x00010001u;
        factors[i] = (__vmaxs2(__byte_perm(scales, 0, 0x4140 + 0x0202 * i), TWICE_98) - TWICE_98) << 10;
    }
}

// Converts the results of e2m1_items to T: the E2M1 values times 2^-126 (bf16) or 2^-14 (f16).
template <typename T> __device__ __forceinline__ void convert_items(uint32_t (&items)[4]) {
    // The magnitude of an item is in bits 8..6, as in a bf16. In an f16, it must be in bits 11..9.
    if constexpr (__is_same(T, __half)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) items[i] = (items[i] & 0x01C001C0u) << 3 | (items[i] & 0x80008000u);
    }
}

// Unpacks items 2·PART and 2·PART + 1 of two rows (see e2m1_items), and multiplies each item by the factor of its row.
//   factors: one of the two words that scale_factors returns
template <typename T, int PART>
__device__ __forceinline__ void unpack_items(uint32_t low, uint32_t high, uint32_t factors, uint32_t (&items)[4]) {
    using T2 = typename Pair<T>::type;
    e2m1_items<PART>(low, high, items);
    convert_items<T>(items);
    const T* halves = reinterpret_cast<const T*>(&factors);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const T2 factor = {halves[i % 2], halves[i % 2]};
        const T2 product = __hmul2(*reinterpret_cast<T2*>(&items[i]), factor);
        items[i] = *reinterpret_cast<const uint32_t*>(&product);
    }
}

// ---- tiles ----

struct Weights {
    const uint8_t *blocks, *scales;
    int rows, columns;
};

// One tile of the output: the product of a token tile and a tile of weight rows.
// A token tile contains pairs of one expert. All token tiles of an expert have the same number of pairs, a multiple of
// 8, except that the last one can have fewer.
struct OutputTile {
    int expert, first_pair, pairs;
    int row;       // the tile's first row in tiled x and h
    int row_tile;  // the index of the first 16-row weight tile; 0 in expert_few_pairs.cu
};

// Finds output tile `number`. Returns false if `number` is past the last tile.
// Output tiles are ordered by expert.
// Within an expert, tiles with the same weight rows and different pairs are consecutive.
// With this order, weights are mostly read from DRAM only once, and activations stay in L2.
template <int ROW_TILES, bool GATE_UP>
__device__ __forceinline__ bool find_tile(const uint32_t* offsets, int experts, int weight_rows, int max_pairs,
                                          int number, OutputTile& tile) {
    // For gate_up, 128 weight rows give 64 columns of h. The tiles also cover the padding of h to a multiple of 64.
    const int rows = GATE_UP ? (weight_rows + 127) / 128 * 128 : weight_rows;
    const int row_blocks = (rows + ROW_TILES * 16 - 1) / (ROW_TILES * 16);
    WorkItem item;
    if (!find_work_item(offsets, experts, max_pairs, row_blocks, number, item)) return false;
    const int tiles = item.count / row_blocks, tile_pairs = ((item.pairs + tiles - 1) / tiles + 7) / 8 * 8;
    const int start = item.index % tiles * tile_pairs, pairs = min(tile_pairs, item.pairs - start);
    tile = {item.expert, item.first + start, pairs, item.row + start, item.index / tiles * ROW_TILES};
    return true;
}

// ---- results ----

// Rounds an 8 × 8 matrix to T and transposes it. Lane 4g + t passes columns 2t and 2t + 1 of row g.
// Returns rows 2t and 2t + 1 of column g to this lane.
template <typename T> __device__ __forceinline__ uint32_t transposed(float a, float b) {
    uint32_t word = pack<T>(a, b);
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(word));
    return word;
}

// Computes gate · sigmoid(alpha · gate) · (up + 1) after clamping, with an approximate exponential and reciprocal.
// The relative error is far smaller than the rounding of the result to 16 bits.
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float limit) {
    clamp_gate_up(gate, up, limit);
    constexpr float LOG2_E = 1.44269504f;
    float power, sigmoid;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(gate * (-SWIGLU_ALPHA * LOG2_E)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + power));
    return gate * sigmoid * (up + 1.0f);
}

template <typename T> struct Output {
    const T* bias;  // [experts, rows] or null
    const uint32_t* sorted;
    T* out;  // gate_up: h, tiled, with rows / 2 columns; down: y [pairs, rows]
    int tiled_rows;
    float limit;
    float h_factor = 1.0f;  // gate_up multiplies h by this power of two
};

// Returns the biases of the rows at positions g and g + 8 of a weight tile, where g = lane / 4.
// In the tile, these are rows 2g and 2g + 1 for gate_up (paired tiles), and rows r and r + 2 for down (grouped tiles),
// where r is 4 · (g / 2) + g % 2.
// Returns zeros if there is no bias or no such tile.
template <typename T, bool GATE_UP>
__device__ __forceinline__ float2 row_bias(const Output<T>& output, int rows, int expert, int row_tile) {
    const int g = threadIdx.x % 32 / 4;
    const int first = row_tile * 16 + (GATE_UP ? 2 * g : grouped_row(g)), second = first + (GATE_UP ? 1 : 2);
    const T* bias = output.bias + (size_t)expert * rows;
    if (!output.bias || row_tile * 16 >= rows) return make_float2(0.0f, 0.0f);
    return make_float2(to_float(bias[first]), to_float(bias[second]));
}

// For down, returns the index of the pair whose results this lane stores (see ResultStore). This is also the row of y.
// gate_up does not need the index.
template <bool GATE_UP, typename T>
__device__ __forceinline__ uint32_t pair_of_lane(const Output<T>& output, const OutputTile& tile, int token) {
    return GATE_UP ? 0 : output.sorted[tile.first_pair + min(token + (int)threadIdx.x % 32 / 4, tile.pairs - 1)];
}

// Stores a warp's results for TILES consecutive weight tiles of an output tile. `row_tile` is the first weight tile.
// TILES is 1 or 2. If TILES is 2, `row_tile` is even.
// The constructor computes what does not depend on the pair, so that `store` needs few instructions.
template <typename T, bool GATE_UP, int TILES> class ResultStore {
    const Output<T>& output;
    T* to;            // gate_up: this lane's place for pair 0 of the token tile; down: its place in row 0 of y
    int rows;         // the weight rows of an expert
    int pairs;        // this lane stores results of pair token + g if `token` is less than `pairs`
    bool is_padding;  // whether the weight tiles are past the last row

public:
    __device__ __forceinline__ ResultStore(const Output<T>& output, int rows, const OutputTile& tile, int row_tile)
        : output(output), rows(rows), is_padding(row_tile * 16 >= rows) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        if constexpr (GATE_UP) {
            // Word row_tile % 4 of segment `segment` holds columns 8·row_tile + 2t and 8·row_tile + 2t + 1 of h.
            const unsigned row = tile.row + g, segment = row_tile / 4 * 4 + t;
            const size_t at = ((size_t)(segment / 8) * output.tiled_rows + row) * 8 + (segment ^ row) % 8;
            to = output.out + at * 8 + row_tile % 4 * 2;
            pairs = row_tile * 16 < (rows + 127) / 128 * 128 ? tile.pairs - g : 0;
        } else {
            to = output.out + row_tile * 16 + t * 4;
            pairs = is_padding ? 0 : tile.pairs - g;
        }
    }

    // Adds the biases to the sums of 8 pairs × TILES weight tiles, and stores the results.
    // For gate_up, first applies the clamped SwiGLU and multiplies by h_factor.
    // `token` is the index of the first of the 8 pairs in the token tile. `pair` is the result of pair_of_lane.
    // For each weight tile, lane 4g + t passes four sums: position g for pairs 2t and 2t + 1, then position g + 8 for
    // the same pairs.
    __device__ __forceinline__ void store(int token, uint32_t pair, const float* const (&sums)[TILES],
                                          const float2 (&bias)[TILES]) const {
        if constexpr (GATE_UP) {
            uint32_t words[TILES];
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                const float first = clamped_swiglu(sums[i][0] + bias[i].x, sums[i][2] + bias[i].y, output.limit);
                const float second = clamped_swiglu(sums[i][1] + bias[i].x, sums[i][3] + bias[i].y, output.limit);
                words[i] = transposed<T>(first * output.h_factor, second * output.h_factor);
                if (is_padding) words[i] = 0;  // padding columns of h
            }
            // `token` is a multiple of 8, and the swizzle repeats every 8 rows, so `place` is `token` rows after `to`.
            T* place = to + token * 64;
            if (token >= pairs) return;
            if constexpr (TILES == 1)
                *reinterpret_cast<uint32_t*>(place) = words[0];
            else
                *reinterpret_cast<uint2*>(place) = make_uint2(words[0], words[1]);
        } else {
            // Computes to + pair · rows in one instruction.
            // Without asm, the compiler would add output.out last, with several instructions for each pair.
            T* row;
            asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(row) : "r"(pair), "r"(rows * (int)sizeof(T)), "l"(to));
            __builtin_assume(__isGlobal(row));  // after asm, the compiler no longer knows that y is in global memory
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                const uint2 words = make_uint2(transposed<T>(sums[i][0] + bias[i].x, sums[i][1] + bias[i].x),
                                               transposed<T>(sums[i][2] + bias[i].y, sums[i][3] + bias[i].y));
                if (token < pairs) *reinterpret_cast<uint2*>(row + i * 16) = words;
            }
        }
    }
};
