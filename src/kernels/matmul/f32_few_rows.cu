// Products of f32 matrices with few weight rows, such as routers.
#include "headers/pdl.cuh"
#include "matmul/f32_few_rows.cuh"

// Computes y = x·wᵀ. A block computes the products of F32_FEW_ROWS_TOKENS tokens and F32_FEW_ROWS_TILE weight rows.
//   x: f32 [tokens, columns]; w: f32 [rows, columns]; y: f32 [tokens, rows]; columns is a multiple of 16
//   grid: (ceil(tokens / F32_FEW_ROWS_TOKENS), ceil(rows / F32_FEW_ROWS_TILE)); block: 32 · F32_FEW_ROWS_WARPS
//   bytes moved: x once per F32_FEW_ROWS_TILE rows and w once per F32_FEW_ROWS_TOKENS tokens, mostly from L2; y once
extern "C" __global__ void __launch_bounds__(32 * F32_FEW_ROWS_WARPS)
    f32_few_rows(const float* x, const float* w, float* y, int tokens, int rows, int columns) {
    __shared__ __align__(16) PartialSums<1> partial[F32_FEW_ROWS_WARPS];
    const int first_token = blockIdx.x * F32_FEW_ROWS_TOKENS, first_row = blockIdx.y * F32_FEW_ROWS_TILE;
    pdl_wait();
    pdl_launch_dependents();
    multiply_few_rows<1>(x, w, first_token, tokens, first_row, rows, columns, partial);
    __syncthreads();
    for (int i = threadIdx.x; i < F32_FEW_ROWS_TOKENS * F32_FEW_ROWS_TILE; i += blockDim.x) {
        const int token = i / F32_FEW_ROWS_TILE, row = i % F32_FEW_ROWS_TILE;
        if (first_token + token < tokens && first_row + row < rows)
            y[(size_t)(first_token + token) * rows + first_row + row] = sum_of_warps<1>(partial, token, row);
    }
}
