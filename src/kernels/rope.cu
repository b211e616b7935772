// Rotary position embedding, split-half layout: pair i is (x[i], x[i + R/2]), R = rotated dims; dims from R on pass through.
//   x, out [T, H, D]; cos, sin f32 [P, R/2]; positions u32 [T]
//   grid (T, H), block 64; bytes moved: 2·T·H·D·sizeof(T)
#include "common.cuh"

template <typename T>
__device__ void rope(const T* x, const float* cos, const float* sin, const uint32_t* positions, T* out, int heads,
                     int head_dim, int rotated) {
    const int token = blockIdx.x, half = rotated / 2;
    const size_t base = ((size_t)token * heads + blockIdx.y) * head_dim;
    const float* c = cos + (size_t)positions[token] * half;
    const float* s = sin + (size_t)positions[token] * half;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        const float a = to_float(x[base + i]), b = to_float(x[base + i + half]);
        out[base + i] = from_float<T>(a * c[i] - b * s[i]);
        out[base + i + half] = from_float<T>(b * c[i] + a * s[i]);
    }
    for (int i = rotated + threadIdx.x; i < head_dim; i += blockDim.x) out[base + i] = x[base + i];
}

#define DEFINE(T, SUFFIX)                                                                                              \
    extern "C" __global__ void rope_##SUFFIX(const T* x, const float* cos, const float* sin, const uint32_t* positions, \
                                             T* out, int heads, int head_dim, int rotated) {                            \
        rope<T>(x, cos, sin, positions, out, heads, head_dim, rotated);                                                 \
    }
FOR_EACH_DTYPE(DEFINE)
