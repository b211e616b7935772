#include "moe/mxfp4_tiles/tiles.cuh"

// Repacks MXFP4 weights into tiles.
// If `paired` is set, rows 2g and 2g + 1 of each tile (a gate row and its up row) are stored at positions g and g + 8.
// After an MMA with a paired tile, the products of a gate row and of its up row are therefore in the same lane.
// Otherwise, the tiles are grouped: rows 4t to 4t + 3 are stored at positions 2t, 2t + 1, 2t + 8 and 2t + 9.
// Padding values are zero and have a scale of 1.
// Sets `has_large_scale` to 1 if a scale exceeds 2 (byte 128) or is NaN (byte 255).
// scale_factors would overflow for such a scale, so the caller must then discard the tiles.
//   blocks: u8 [experts, rows, columns / 32, 16]
//   scales: u8 [experts, rows, columns / 32]
//   grid and block: one warp per tile; there are experts · ceil(rows / 16) · ceil(columns / 64) tiles
//   bytes moved: 2 · 17/32 · experts · rows · columns; an MXFP4 block of 32 values has 17 bytes
extern "C" __global__ void repack_mxfp4(const uint8_t* blocks, const uint8_t* scales, uint8_t* tile_blocks,
                                        uint8_t* tile_scales, uint32_t* has_large_scale, int experts, int rows,
                                        int columns, int paired) {
    const int row_tiles = (rows + 15) / 16, column_tiles = (columns + 63) / 64, groups = columns / 32;
    const size_t tile = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (tile >= (size_t)experts * row_tiles * column_tiles) return;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int j = tile % column_tiles, first_row = tile / column_tiles % row_tiles * 16;
    const size_t expert = tile / column_tiles / row_tiles;
    uint32_t words[2][2] = {};  // for each of the two MXFP4 blocks, the words of rows g and g + 8
    for (int i = 0; i < 4; ++i) {
        const int in_tile = paired ? 2 * g + i % 2 : grouped_row(g) + 2 * (i % 2);
        const int row = first_row + in_tile, group = 2 * j + i / 2;
        const bool valid = row < rows && group < groups;
        const size_t block = (expert * rows + row) * groups + group;
        const uint32_t nibbles = valid ? *reinterpret_cast<const uint32_t*>(blocks + block * 16 + t * 4) : 0;
        for (int k = 0; k < 8; ++k) place_e2m1(words[i / 2], i % 2, k / 2, k % 2, nibbles >> (4 * k) & 15);
        const uint8_t scale = valid ? scales[block] : 127;
        if (t == i) tile_scales[tile * 32 + g * 4 + i] = scale;
        if (scale > 128) *has_large_scale = 1;
    }
    const uint4 all_words = make_uint4(words[0][0], words[0][1], words[1][0], words[1][1]);
    reinterpret_cast<uint4*>(tile_blocks)[tile * 32 + lane] = all_words;
}
