// Writes the inputs of a step. The host may not know the input tokens yet, because the previous step chooses them.
#include "constants.cuh"
#include "headers/common.cuh"

// Writes the token ids and the other words of a step to its input buffer (see `StepInputs` in step_inputs.rs).
//   description: u32, in host memory or on the device:
//     ids [rows]
//     sources [rows]: 0, or 1 + the index of the row's id in `tokens`
//     words [others]: copied after the ids
//     changes [changes, 2]: the index of a word, where 0 is the first word after `words`, and the word's new value
//   tokens: u32, the tokens that the previous step chose, or NO_TOKEN
//   inputs: u32: ids [rows], words [others], then the words that `changes` sets
//   grid: ceil((rows + others + changes) / 256); block: 256
//   bytes moved: 12 · rows + 8 · others + 12 · changes
extern "C" __global__ void __launch_bounds__(256)
    set_step_inputs(const volatile uint32_t* description, const uint32_t* tokens, uint32_t* inputs, int rows,
                    int others, int changes) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows) {
        const uint32_t source = description[rows + i];
        const uint32_t id = source > 0 ? tokens[source - 1] : description[i];
        // A sequence for which no token could be chosen ends with an error. Until then, token 0 is a placeholder.
        inputs[i] = id == NO_TOKEN ? 0 : id;
    } else if (i < rows + others) {
        inputs[i] = description[rows + i];
    } else if (i < rows + others + changes) {
        const volatile uint32_t* change = description + 2 * rows + others + 2 * (i - rows - others);
        inputs[rows + others + change[0]] = change[1];
    }
}
