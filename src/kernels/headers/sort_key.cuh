// Integers that sort in the same order as floats.
#pragma once

#include "headers/common.cuh"

// Maps floats to integers that sort in the same order.
// The bits of positive floats already sort in this order. Setting the sign bit moves them above all negative floats.
// The bits of negative floats sort in reverse order, so all bits are flipped.
__device__ __forceinline__ uint32_t sort_key(float value) {
    const uint32_t bits = __float_as_uint(value);
    return bits & F32_SIGN ? ~bits : bits | F32_SIGN;
}

// Returns the float whose sort_key is `key`.
__device__ __forceinline__ float from_sort_key(uint32_t key) {
    return __uint_as_float(key & F32_SIGN ? key & F32_MAGNITUDE : ~key);
}
