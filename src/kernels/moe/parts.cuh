// How the pairs of a token and its expert, sorted by expert, are cut into tiles.
#pragma once
#include "headers/common.cuh"

// Where the rows of the index-th part of an expert are, counted over all experts in units of `unit` pairs.
struct Part {
    int expert, index, parts;  // it is the index-th of the expert's parts
    int first, pairs, row;     // of the expert: first in `sorted`, number, first row of tiled x and h
};

// False past the last. A whole warp calls this.
__device__ __forceinline__ bool find_part(const uint32_t* offsets, int experts, int unit, int times, int item, Part& part) {
    const int lane = threadIdx.x % 32;
    int before = 0, rows_before = 0;
    for (int base = 0; base < experts; base += 32) {
        const int expert = base + lane;
        const int first = expert < experts ? offsets[expert] : 0;
        const int pairs = expert < experts ? offsets[expert + 1] - first : 0;
        const int parts = (pairs + unit - 1) / unit * times, rows = (pairs + 7) / 8 * 8;
        int end = parts, end_row = rows;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, end, offset);
            const int other_row = __shfl_up_sync(0xffffffffu, end_row, offset);
            if (lane >= offset) end += other, end_row += other_row;
        }
        const uint32_t reached = __ballot_sync(0xffffffffu, item < before + end);
        if (reached) {
            const int owner = __ffs(reached) - 1;
            part.expert = base + owner;
            part.parts = __shfl_sync(0xffffffffu, parts, owner);
            part.index = item - before - __shfl_sync(0xffffffffu, end - parts, owner);
            part.first = __shfl_sync(0xffffffffu, first, owner);
            part.pairs = __shfl_sync(0xffffffffu, pairs, owner);
            part.row = rows_before + __shfl_sync(0xffffffffu, end_row - rows, owner);
            return true;
        }
        before += __shfl_sync(0xffffffffu, end, 31), rows_before += __shfl_sync(0xffffffffu, end_row, 31);
    }
    return false;
}
