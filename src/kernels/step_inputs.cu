// Writes the inputs of a step on the device: the host may not know the input tokens yet, because the previous step
// chooses them.
#include "constants.cuh"
#include "headers/common.cuh"

// Writes token ids and other words to the input buffer of a step (see `StepInputs` in step_inputs.rs).
//   description: u32, in host memory or on the device:
//     ids [rows]
//     sources [rows]: 0 if the row's id is in `ids`, otherwise 1 + the index of the id in `tokens`
//     words [others]: copied after the ids
//     changes [changes, 2]: the index and the new value of a word; index 0 is the first word after `words`
//   tokens: u32, the tokens that the previous step chose; NO_TOKEN where it could not choose one
//   inputs: u32: ids [rows], words [others], then words that keep their values unless `changes` sets them
//   grid: ceil((rows + others + changes) / ELEMENT_THREADS); block: ELEMENT_THREADS
//   bytes moved: 12 · rows + 8 · others + 12 · changes
extern "C" __global__ void __launch_bounds__(ELEMENT_THREADS)
    set_step_inputs(const volatile uint32_t* description, const uint32_t* tokens, uint32_t* inputs, int rows,
                    int others, int changes) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows) {
        const uint32_t source = description[rows + i];
        const uint32_t id = source > 0 ? tokens[source - 1] : description[i];
        // If no token could be chosen, the sequence will end with an error. Until then, token 0 is a placeholder.
        inputs[i] = id == NO_TOKEN ? 0 : id;
    } else if (i < rows + others) {
        inputs[i] = description[rows + i];
    } else if (i < rows + others + changes) {
        const volatile uint32_t* change = description + 2 * rows + others + 2 * (i - rows - others);
        inputs[rows + others + change[0]] = change[1];
    }
}
