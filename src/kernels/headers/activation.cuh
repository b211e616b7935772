// What a gate or a hidden unit goes through: `Activation` of swiglu.rs.
#pragma once

// 0: silu, 1: gelu by tanh.
__device__ __forceinline__ float activate(float x, int activation) {
    if (activation == 0) return x / (1.0f + expf(-x));
    return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}
