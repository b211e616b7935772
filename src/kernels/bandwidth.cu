// Measures the read bandwidth of the GPU's memory.

// Fills x with pseudo-random bits. Reading zeros would draw less power, and the measured bandwidth could be too high.
//   x: 16-byte words [n]
//   grid, block: any size
//   bytes moved: 16 · n
extern "C" __global__ void fill_random(uint4* x, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        // h is the MurmurHash3 finalizer of i · 0x9E3779B9. Each bit of i changes about half of the bits of h.
        unsigned h = i * 0x9E3779B9u;
        h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
        h = (h ^ (h >> 13)) * 0xC2B2AE35u;
        h ^= h >> 16;
        x[i] = make_uint4(h, h * 0x9E3779B9u, ~h, h ^ 0x85EBCA6Bu);
    }
}

// Reads all of x. Each thread has eight independent 16-byte loads in flight.
//   x: 16-byte words [n]; n is a multiple of 8 · blockDim
//   out: u32 [1]
//   grid: any size; block: at most 512
//   bytes moved: 16 · n
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* x, unsigned* out, int n) {
    constexpr int LOADS = 8;
    unsigned sum = 0;
    // The loop index has 64 bits, because the last increment would overflow 32 bits if n is close to 2^31.
    for (long long tile = (long long)blockIdx.x * LOADS * blockDim.x; tile < n;
         tile += (long long)gridDim.x * LOADS * blockDim.x) {
        uint4 v[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; ++j) v[j] = __ldcs(x + tile + j * blockDim.x + threadIdx.x);
#pragma unroll
        for (int j = 0; j < LOADS; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    // Without this use of `sum`, the compiler would remove the loads. The condition is almost never true.
    if (sum == 0x5EED5EED) *out = sum;
}
