// Divides the (token, expert) pairs, sorted by expert, into work items for the thread blocks of a grid.
#pragma once
#include "headers/common.cuh"

// A work item: one tile of an expert's pairs, with all or some of the expert's weight rows.
struct WorkItem {
    int expert;
    int index, count;  // the index of this item among the expert's `count` items
    int first, pairs;  // the index in `sorted` of the expert's first pair, and the expert's number of pairs
    int row;           // the expert's first row in tiled x and h
};

// Returns the number of work items of all experts. The arguments are the same as in find_work_item.
// All lanes of the warp must call count_work_items.
__device__ __forceinline__ int count_work_items(const uint32_t* offsets, int experts, int max_pairs, int tile_items) {
    int total = 0;
    for (int base = 0; base < experts; base += 32) {
        const int expert = base + threadIdx.x % 32;
        const int pairs = expert < experts ? offsets[expert + 1] - offsets[expert] : 0;
        total += __reduce_add_sync(ALL_LANES, (pairs + max_pairs - 1) / max_pairs * tile_items);
    }
    return total;
}

// Finds work item `number`. Returns false if `number` is past the last work item.
// An expert with p pairs has ceil(p / max_pairs) tiles of up to `max_pairs` pairs, and `tile_items` work items per
// tile. All lanes of the warp must call find_work_item with the same `number`.
__device__ __forceinline__ bool find_work_item(const uint32_t* offsets, int experts, int max_pairs, int tile_items,
                                               int number, WorkItem& item) {
    const int lane = threadIdx.x % 32;
    int before = 0, rows_before = 0;
    for (int base = 0; base < experts; base += 32) {
        const int expert = base + lane;
        const int first = expert < experts ? offsets[expert] : 0;
        const int pairs = expert < experts ? offsets[expert + 1] - first : 0;
        const int count = (pairs + max_pairs - 1) / max_pairs * tile_items, rows = (pairs + 7) / 8 * 8;
        const int end = warp_prefix_sum(count), end_row = warp_prefix_sum(rows);
        const uint32_t reached = __ballot_sync(ALL_LANES, number < before + end);
        if (reached) {
            const int owner = __ffs(reached) - 1;
            item.expert = base + owner;
            item.count = __shfl_sync(ALL_LANES, count, owner);
            item.index = number - before - __shfl_sync(ALL_LANES, end - count, owner);
            item.first = __shfl_sync(ALL_LANES, first, owner);
            item.pairs = __shfl_sync(ALL_LANES, pairs, owner);
            item.row = rows_before + __shfl_sync(ALL_LANES, end_row - rows, owner);
            return true;
        }
        before += __shfl_sync(ALL_LANES, end, 31);
        rows_before += __shfl_sync(ALL_LANES, end_row, 31);
    }
    return false;
}
