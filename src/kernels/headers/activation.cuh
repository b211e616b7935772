// Applies an activation function, which is selected by its `ACTIVATION_` code (see constants.rs).
#pragma once
#include "constants.cuh"

__device__ __forceinline__ float activate(float x, int activation) {
    if (activation == ACTIVATION_SILU) return x / (1.0f + expf(-x));
    constexpr float SQRT_2_OVER_PI = 0.79788456f;
    return 0.5f * x * (1.0f + tanhf(SQRT_2_OVER_PI * (x + 0.044715f * x * x * x)));
}
