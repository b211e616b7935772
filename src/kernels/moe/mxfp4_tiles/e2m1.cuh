// Packs E2M1 values of two weight rows into two words, so that few instructions convert the values for tensor cores.
//
// With g = lane / 4 and t = lane % 4, a lane of an MMA with 16 rows holds values of rows g and g + 8.
// Together, the words `low` and `high` hold the values 8t .. 8t + 7 of one MXFP4 block (32 values) of each row.
// An *item* is two neighboring values of a row. An unpacked item is a word.
// Its low half is the value of the even column, and its high half is the value of the odd column.
// In each half, bit 15 is the sign, and bits 8..6 are the magnitude. E2M1_BITS selects these bits.
// Read as a bf16 value, each half is the E2M1 value times 2^-126.
//
// To unpack item p of a row (values 8t + 2p and 8t + 2p + 1), rotate a word to the left and mask it with E2M1_BITS.
// This table lists the word and the rotation:
//                p = 0     p = 1     p = 2      p = 3
//   row g        low, 0    low, 4    low, 10    merged, 8
//   row g + 8    high, 2   high, 6   high, 12   merged, 14
// Three items leave eight bits of a word free, but no rotation fits a fourth item into these bits.
// Item 3 of each row is therefore split between the free bits of both words.
// `merged` has the bits in E2M1_FREE_LOW from `low`, and all other bits from `high`.
// Unpacking two words takes 16 integer instructions: 8 masks, 7 shifts or rotations, and 1 merge.
#pragma once
#include "headers/common.cuh"

constexpr uint32_t E2M1_BITS = 0x81C081C0u, E2M1_FREE_LOW = 0x06030603u;

// Returns the number of bits by which the word of item `p` is rotated to the left.
// `row` is 0 for row g, and 1 for row g + 8.
__host__ __device__ constexpr int e2m1_rotation(int row, int p) {
    return row == 0 ? (p == 0 ? 0 : p == 1 ? 4 : p == 2 ? 10 : 8) : (p == 0 ? 2 : p == 1 ? 6 : p == 2 ? 12 : 14);
}

// Places an E2M1 value of item `p` of a row in the two words. The words must be zero before the first call.
//   half: 0 for the value of the even column, 1 for the value of the odd column
__host__ __device__ __forceinline__ void place_e2m1(uint32_t (&words)[2], int row, int p, int half, uint32_t value) {
    for (int i = 0; i < 4; ++i) {
        const int bit = 16 * half + (i == 3 ? 15 : 6 + i), from = (bit - e2m1_rotation(row, p)) & 31;
        const int word = p < 3 ? row : E2M1_FREE_LOW >> from & 1 ? 0 : 1;
        words[word] |= (value >> i & 1) << from;
    }
}

// Returns the matrix row at position g of a grouped tile (see tiles.cuh), where g is 0 to 7.
// Position g + 8 has the second row after it.
__host__ __device__ constexpr int grouped_row(int g) { return g / 2 * 4 + g % 2; }

// Returns items 2·PART and 2·PART + 1 of rows g and g + 8, in the order of an A fragment of m16n8k16:
// first item of row g, first item of row g + 8, second item of row g, second item of row g + 8.
template <int PART> __device__ __forceinline__ void e2m1_items(uint32_t low, uint32_t high, uint32_t (&items)[4]) {
    if constexpr (PART == 0) {
        // Shifts can replace the rotations here, because E2M1_BITS selects no bit that wraps around.
        items[0] = low & E2M1_BITS;
        items[1] = high << 2 & E2M1_BITS;
        items[2] = low << 4 & E2M1_BITS;
        items[3] = high << 6 & E2M1_BITS;
    } else {
        // Computes (low & E2M1_FREE_LOW) | (high & ~E2M1_FREE_LOW), in a form that compiles to one instruction.
        const uint32_t merged = ((low ^ high) & E2M1_FREE_LOW) ^ high;
        items[0] = __funnelshift_l(low, low, 10) & E2M1_BITS;
        items[1] = __funnelshift_l(high, high, 12) & E2M1_BITS;
        items[2] = __funnelshift_l(merged, merged, 8) & E2M1_BITS;
        items[3] = __funnelshift_l(merged, merged, 14) & E2M1_BITS;
    }
}

// A kernel that multiplies bf16 items by x, and scales only the sums, must first multiply x by E2M1_X_FACTOR.
// The items are E2M1 values times 2^-126. With E2M1_X_FACTOR, their products with x are normal f32 numbers.
// Multiplying the sums by E2M1_SUM_FACTOR cancels the factors 2^-126 and E2M1_X_FACTOR.
constexpr float E2M1_X_FACTOR = 0x1p100f, E2M1_SUM_FACTOR = 0x1p26f;

// Returns the scale 2^(s - 127), where s is byte `index` of `scales`. Moves s to the exponent field, bits 30 to 23.
// If s is 0, returns 0 instead of 2^-127, which is too small to matter in an f32 sum.
// The byte s is never 255 (NaN), because `Mxfp4Tiles::repack` rejects NaN scales.
__device__ __forceinline__ float scale_of(uint32_t scales, int index) {
    return __uint_as_float((index == 3 ? scales >> 1 : scales << (23 - 8 * index)) & F32_INFINITY);
}
