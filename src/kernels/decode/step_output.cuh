// The end of a decode step: passes the chosen token to the next step and to the host.
#pragma once
#include "constants.cuh"
#include "headers/common.cuh"

// Where the last kernel of a step writes the chosen token.
//   embedding: T [vocab, columns], or null if quantized_next (head.cu) writes x
//   embedding_scale: the factor by which the embedding is multiplied
//   x: f32 [columns], the input of the next step
//   state: see decode/mod.rs
//   mailbox: u32 [mailbox_slots] in host memory
//     Step s writes its token + 1 to slot s % mailbox_slots, or MAILBOX_NO_TOKEN if the step fails.
template <typename T> struct StepOutput {
    const T* embedding;
    float embedding_scale;
    float* x;
    int columns;
    uint32_t* state;
    volatile uint32_t* mailbox;
    int mailbox_slots;

    // Writes the embedding of the token to x. All threads of one block, which has `threads` threads, must call it.
    __device__ __forceinline__ void write_embedding(uint32_t token, int threads) const {
        for (int i = threadIdx.x; embedding && i < columns; i += threads)
            x[i] = to_float(embedding[(size_t)token * columns + i]) * embedding_scale;
    }
    // Sends the token, or MAILBOX_NO_TOKEN, to the host, and then updates `state`. Only one thread may call it.
    // `steps` is the number of earlier steps.
    __device__ __forceinline__ void send(uint32_t token, bool has_token, uint32_t steps) const {
        mailbox[steps % mailbox_slots] = has_token ? token + 1 : MAILBOX_NO_TOKEN;
        __threadfence_system();
        state[STATE_POSITION] += 1;
        state[STATE_TOKEN] = token;
        state[STATE_STEPS] = steps + 1;
    }
};
