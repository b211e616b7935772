// Edits rows of logits before tokens are chosen: adds values and applies penalties (edit_rows), or only applies
// penalties (apply_penalties). `RowEdits::apply` in row_edits.rs is the CPU reference.
#include "sampling/sampling.cuh"

// Adds values to the logits of a row (logit biases, or -inf for forbidden tokens), then applies the row's penalties.
// The host may write `description` before it knows the last token of a row's sequence, which the previous step chooses.
// The row's counts then leave out this token, and the kernel counts it.
//   tokens: u32, the tokens that the previous step chose, or NO_TOKEN
//   description: u32, in host memory or on the device:
//     rows [gridDim.x, ROW_EDITS_WORDS]:
//       word 0: the row of logits; each row occurs at most once
//       word 1: 1 + the index of the row's last token in `tokens`, or 0 if the counts already include it
//       words 2 to 4: the indices in `description` where the row's values start, its counts start, and its counts end
//       words 5 to 7: the bits of the repetition, frequency and presence penalties
//     values [values, 2]: a token and the bits of an f32 value; each token at most once per row
//     counts [counts, 2]: a token that gets penalties, and how often it was generated; each token at most once per row
//   grid: the number of edited rows; block: ROW_EDITS_THREADS
//   bytes moved: 32 · rows + 16 · values + 16 · counts
extern "C" __global__ void __launch_bounds__(ROW_EDITS_THREADS)
    edit_rows(float* logits, const uint32_t* tokens, const volatile uint32_t* description, int vocab) {
    __shared__ bool is_counted;  // whether the row's last token is among the tokens of `counts`
    const volatile uint32_t* row = description + (size_t)blockIdx.x * ROW_EDITS_WORDS;
    const uint32_t source = row[1], values = row[2], counts = row[3], end = row[4];
    const float repetition = __uint_as_float(row[5]), frequency = __uint_as_float(row[6]),
                presence = __uint_as_float(row[7]);
    logits += (size_t)row[0] * vocab;
    const uint32_t last = source > 0 ? tokens[source - 1] : NO_TOKEN;
    if (threadIdx.x == 0) is_counted = false;
    for (uint32_t i = values + 2 * threadIdx.x; i < counts; i += 2 * ROW_EDITS_THREADS)
        logits[description[i]] += __uint_as_float(description[i + 1]);
    __syncthreads();  // wait, because a token can have both a value and a penalty
    for (uint32_t i = counts + 2 * threadIdx.x; i < end; i += 2 * ROW_EDITS_THREADS) {
        const uint32_t token = description[i];
        uint32_t generated = description[i + 1];
        if (token == last) {
            is_counted = true;
            ++generated;
        }
        logits[token] = penalize(logits[token], generated, repetition, frequency, presence);
    }
    __syncthreads();
    // If the kernel has no last token to count, `last` is NO_TOKEN, which is larger than every token id.
    if (threadIdx.x == 0 && !is_counted && last < (uint32_t)vocab)
        logits[last] = penalize(logits[last], 1, repetition, frequency, presence);
}

// Applies penalties to the logits of tokens that have appeared before.
//   logits: f32 [rows, vocab]
//   params: SamplingKernelParams [rows]
//   seen: u32 [count, 3]: row, token, how often the token was generated; each token occurs at most once per row
//   grid: ceil(count / ELEMENT_THREADS); block: ELEMENT_THREADS
//   bytes moved: 20 · count
extern "C" __global__ void __launch_bounds__(ELEMENT_THREADS)
    apply_penalties(float* logits, const uint32_t* param_words, const uint32_t* seen, int count, int vocab) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const uint32_t row = seen[3 * i], token = seen[3 * i + 1], generated = seen[3 * i + 2];
    const SamplingKernelParams params =
        *reinterpret_cast<const SamplingKernelParams*>(param_words + (size_t)row * SAMPLE_PARAM_WORDS);
    float& logit = logits[(size_t)row * vocab + token];
    logit = penalize(logit, generated, params.repetition_penalty, params.frequency_penalty, params.presence_penalty);
}
