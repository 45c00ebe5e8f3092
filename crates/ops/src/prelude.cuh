// What every kernel of this crate begins with: element types, the scalar functions of act.rs, sums in a fixed order.
// No header is included: bf16 is two instructions, and a user then needs NVRTC's library alone.

typedef long long i64;

struct bf16 {
    unsigned short bits;
};

#define DEVICE __device__ __forceinline__
#define INFINITY __int_as_float(0x7f800000)

DEVICE float widen(float x) { return x; }
DEVICE float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

// Rounded to nearest, ties to even.
template <class T> DEVICE T narrow(float x);
template <> DEVICE float narrow<float>(float x) { return x; }
template <> DEVICE bf16 narrow<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Writes, or adds in f32.
template <class T> DEVICE void put(T *to, float x, int add) { *to = narrow<T>(add ? widen(*to) + x : x); }

// Every index below n, one a thread, in strides of the grid.
#define EACH(i, n) \
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < (n); i += (i64)gridDim.x * blockDim.x)

// Row and column of element i of rows of `cols`: 32-bit division where that will do, which is several times faster.
struct Split {
    i64 row, col;
    DEVICE Split(i64 i, i64 cols) {
        row = (i | cols) >> 32 ? i / cols : (i64)((unsigned)i / (unsigned)cols);
        col = i - row * cols;
    }
};

// 16 bytes of elements side by side.
template <class T> struct __align__(16) Pack {
    static constexpr int N = 16 / sizeof(T);
    T x[N];
};
DEVICE bool at16(const void *p, i64 stride_bytes) { return (((i64)p | stride_bytes) & 15) == 0; }

// The sum over a warp, the same in all of its lanes; the order is a butterfly's.
template <class F> DEVICE F warp_sum(F x) {
#pragma unroll
    for (int o = 16; o > 0; o /= 2) x += __shfl_xor_sync(~0u, x, o);
    return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
    for (int o = 16; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
    return x;
}

// The sum over a block of a multiple of 32 threads, the same in all of them. `part` has 33 elements.
template <class F> DEVICE F block_sum(F x, F *part) {
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x == 0) {
        F sum = 0;
        for (int i = 0; i < blockDim.x / 32; i++) sum += part[i];
        part[32] = sum;
    }
    __syncthreads();
    return part[32];
}

// The maximum over a block; NaN is passed over, as fmaxf does.
DEVICE float block_max(float x, float *part) {
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x == 0) {
        float max = part[0];
        for (int i = 1; i < blockDim.x / 32; i++) max = fmaxf(max, part[i]);
        part[32] = max;
    }
    __syncthreads();
    return part[32];
}

DEVICE float sigmoid(float x) {
    float e = expf(-fabsf(x));
    float s = 1.f / (1.f + e);
    return x >= 0.f ? s : e * s;
}
DEVICE float silu(float x) { return x * sigmoid(x); }
DEVICE float silu_grad(float x) {
    float s = sigmoid(x);
    return s * (1.f + x * (1.f - s));
}
DEVICE float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }
