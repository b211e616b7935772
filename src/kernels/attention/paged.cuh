// Addresses in the paged KV cache.
//   k, v: T [rows, kv_heads, head_dim]
//   Cache block b holds BLOCK_TOKENS positions, in consecutive rows of k and v that start at row b · BLOCK_TOKENS.
//   A block table belongs to one sequence: position p of the sequence is in cache block table[p / BLOCK_TOKENS].
#pragma once
#include "constants.cuh"
#include "headers/common.cuh"

// Returns the row of k and v that holds `position` of the sequence with this block table.
__device__ __forceinline__ uint32_t cache_row(const uint32_t* table, uint32_t position) {
    return __ldg(table + position / BLOCK_TOKENS) * BLOCK_TOKENS + position % BLOCK_TOKENS;
}
