// Elements from one place to another: rows of `cols`, `stride` elements apart. TO and FROM are float, bf16 or an integer.

struct bf16 {
    unsigned short bits;
};

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float widen(unsigned x) { return __uint_as_float(x); }
__device__ inline float widen(short x) { return (float)x; }
__device__ inline void put(float *to, float x) { *to = x; }
__device__ inline void put(bf16 *to, float x) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(x));
}
__device__ inline void put(unsigned *to, float x) { *to = __float_as_uint(x); }

// Division by 32 bits where that will do.
__device__ inline long long row_of(long long i, long long cols) {
    return (i | cols) >> 32 ? i / cols : (long long)((unsigned)i / (unsigned)cols);
}

#define EACH(i, n) \
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < (n); i += (long long)gridDim.x * blockDim.x)

extern "C" __global__ void add_rows(TO *to, long long to_stride, const FROM *from, long long from_stride,
                                    long long rows, long long cols) {
    EACH(i, rows * cols) {
        long long row = row_of(i, cols), col = i - row * cols;
        TO *y = to + row * to_stride + col;
        put(y, widen(*y) + widen(from[row * from_stride + col]));
    }
}

extern "C" __global__ void set_rows(TO *to, long long to_stride, const FROM *from, long long from_stride,
                                    long long rows, long long cols) {
    EACH(i, rows * cols) {
        long long row = row_of(i, cols), col = i - row * cols;
        put(to + row * to_stride + col, widen(from[row * from_stride + col]));
    }
}

extern "C" __global__ void clear_rows(FROM *to, long long stride, long long rows, long long cols) {
    EACH(i, rows * cols) {
        long long row = row_of(i, cols);
        to[row * stride + i - row * cols] = FROM{};
    }
}
