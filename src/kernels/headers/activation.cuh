// Activation functions and the soft cap.
#pragma once
#include "constants.cuh"

// Return the smaller or larger of two values, or NaN if one of them is NaN. fminf and fmaxf would return the other one.
__device__ __forceinline__ float min_or_nan(float a, float b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

// Returns cap · tanh(x / cap), the soft cap of attention scores and logits. Without a soft cap, `cap` is 0, and callers
// must not call this function.
__device__ __forceinline__ float soft_capped(float x, float cap) { return cap * tanhf(x / cap); }

// Clamps the gate to at most `limit`, and the up value to -limit..limit, as in the clamped SwiGLU of gpt-oss.
// NaN stays NaN, as in torch.clamp.
__device__ __forceinline__ void clamp_gate_up(float& gate, float& up, float limit) {
    gate = min_or_nan(gate, limit);
    up = max_or_nan(min_or_nan(up, limit), -limit);
}

// Returns gate · sigmoid(SWIGLU_ALPHA · gate) · (up + 1), the SwiGLU of gpt-oss. clamp_gate_up must have clamped the
// gate and up values.
__device__ __forceinline__ float swiglu(float gate, float up) {
    return gate / (1.0f + expf(-SWIGLU_ALPHA * gate)) * (up + 1.0f);
}

// Applies the activation function that `activation` selects: one of the ACTIVATION_ constants (see constants.rs).
__device__ __forceinline__ float activate(float x, int activation) {
    if (activation == ACTIVATION_SILU) return x / (1.0f + expf(-x));
    constexpr float SQRT_2_OVER_PI = 0.79788456f;
    return 0.5f * x * (1.0f + tanhf(SQRT_2_OVER_PI * (x + 0.044715f * x * x * x)));
}
