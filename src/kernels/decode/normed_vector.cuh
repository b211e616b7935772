// The input vector of the decode kernels that begin with an RMSNorm.
#pragma once

// norm(x): the RMSNorm of x with the weight `norm`.
struct NormedVector {
    const float *x, *norm;  // f32 [columns]
    int columns;
    float eps;
};
