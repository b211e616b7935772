// Activation functions.
#pragma once
#include "constants.cuh"

// Clamps the gate to at most `limit`, and the up value to -limit..limit, as in the clamped SwiGLU of gpt-oss.
// Comparisons keep NaN, as torch.clamp does. fminf and fmaxf would turn NaN into the limit.
__device__ __forceinline__ void clamp_gate_up(float& gate, float& up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
}

// Applies the activation function that `activation` selects: one of the ACTIVATION_ constants (see constants.rs).
__device__ __forceinline__ float activate(float x, int activation) {
    if (activation == ACTIVATION_SILU) return x / (1.0f + expf(-x));
    constexpr float SQRT_2_OVER_PI = 0.79788456f;
    return 0.5f * x * (1.0f + tanhf(SQRT_2_OVER_PI * (x + 0.044715f * x * x * x)));
}
