// Greedy sampling from candidates for the largest logit of each row. If several GPUs run the model, each GPU finds
// candidates among its own logits, and the GPUs exchange only the candidates. The kernels for logits in
// matmul/dense_wgmma.cu find the candidates themselves. After such a kernel, best_logits is not launched.
#include "sampling/candidate.cuh"
#include "sampling/sampling.cuh"

// Divides each row of logits into BEST_LOGITS_BLOCKS ranges, and finds the largest logit of each range. Ignores NaN.
//   logits: f32 [rows, columns]; column i belongs to token first_token + i
//   best: Candidate [rows, BEST_LOGITS_CANDIDATES]
//   grid: (rows, BEST_LOGITS_BLOCKS); block: BEST_LOGITS_THREADS
//   bytes moved: 4 · rows · columns
extern "C" __global__ void __launch_bounds__(BEST_LOGITS_THREADS)
    best_logits(const float* logits, Candidate* best, int columns, int first_token) {
    __shared__ unsigned long long warps[BEST_LOGITS_THREADS / 32];
    const float* row = logits + (size_t)blockIdx.x * columns;
    const int ids = (columns + BEST_LOGITS_BLOCKS - 1) / BEST_LOGITS_BLOCKS;
    // The blocks that start first read the last ranges, whose logits were computed last and may still be in L2.
    const int range = BEST_LOGITS_BLOCKS - 1 - blockIdx.y, start = range * ids, end = min(start + ids, columns);
    float top = -INFINITY;
    int id = 0;
#pragma unroll 8  // so that several loads are in flight
    for (int i = start + (int)threadIdx.x; i < end; i += BEST_LOGITS_THREADS) {
        const float logit = row[i];
        if (logit > top) {
            top = logit;
            id = i;
        }
    }
    const unsigned long long largest = warp_max(candidate_key(top, first_token + id));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x > 0) return;
    unsigned long long key = 0;
    for (const unsigned long long of_warp : warps) key = max(key, of_warp);
    store_candidate(best + (size_t)blockIdx.x * BEST_LOGITS_CANDIDATES, key, range, BEST_LOGITS_BLOCKS);
}

// Chooses the token with the largest logit in each row of candidates. Chooses no token if all logits are -inf.
//   best: Candidate [rows, count]
//   tokens: u32 [rows], the chosen tokens, or NO_TOKEN
//   mailbox: u32 [rows] in host memory: the token + 1, or MAILBOX_NO_TOKEN
//   grid: rows; block: 32
//   bytes moved: 8 · rows · count
extern "C" __global__ void __launch_bounds__(32)
    choose_best(const Candidate* best, uint32_t* tokens, volatile uint32_t* mailbox, int count) {
    unsigned long long key = 0;
#pragma unroll 4  // so that several loads are in flight
    for (int i = threadIdx.x; i < count; i += 32) {
        const Candidate candidate = best[(size_t)blockIdx.x * count + i];
        if (candidate.logit > -INFINITY) key = max(key, candidate_key(candidate.logit, (uint32_t)candidate.token));
    }
    key = warp_max(key);
    if (threadIdx.x > 0) return;
    const uint32_t token = key == 0 ? NO_TOKEN : ~(uint32_t)key;
    tokens[blockIdx.x] = token;
    mailbox[blockIdx.x] = token == NO_TOKEN ? MAILBOX_NO_TOKEN : token + 1;
}
