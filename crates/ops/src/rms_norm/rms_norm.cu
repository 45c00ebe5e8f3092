// A warp a row. x, y, d_y, d_x in T; w, r and d_w in float; all sums in float.

extern "C" __global__ void rms_norm_fwd(const T *x, i64 x_stride, const float *w, T *y, float *r, i64 rows, i64 cols,
                                        float eps, float shift) {
    i64 i = blockIdx.x * (i64)(blockDim.x / 32) + threadIdx.x / 32;
    if (i >= rows) return;
    const T *row = x + i * x_stride;
    float sum = 0;
#pragma unroll 7
    for (int j = threadIdx.x % 32; j < cols; j += 32) {
        float v = widen(row[j]);
        sum += v * v;
    }
    float own = 1.f / sqrtf(warp_sum(sum) / cols + eps);
#pragma unroll 7
    for (int j = threadIdx.x % 32; j < cols; j += 32) y[i * cols + j] = narrow<T>((shift + w[j]) * widen(row[j]) * own);
    if (threadIdx.x % 32 == 0) r[i] = own;
}

extern "C" __global__ void rms_norm_bwd_x(const T *x, i64 x_stride, const float *w, const float *r, const T *dy,
                                          i64 dy_stride, T *dx, i64 dx_stride, int add, i64 rows, i64 cols,
                                          float shift) {
    constexpr int N = Pack<T>::N;
    i64 i = blockIdx.x * (i64)(blockDim.x / 32) + threadIdx.x / 32;
    if (i >= rows) return;
    const T *row = x + i * x_stride, *g = dy + i * dy_stride;
    T *to = dx + i * dx_stride;
    float own = r[i], sum = 0;
    // 16 bytes at a time where all rows lie so; a row is read twice, the second time from the cache.
    if (cols % N == 0 && at16(x, x_stride * sizeof(T)) && at16(dy, dy_stride * sizeof(T)) && at16(dx, dx_stride * sizeof(T)) && at16(w, 0)) {
#pragma unroll 4
        for (int j = threadIdx.x % 32 * N; j < cols; j += 32 * N) {
            Pack<T> a = *(const Pack<T> *)(row + j), b = *(const Pack<T> *)(g + j);
#pragma unroll
            for (int q = 0; q < N; q++) sum += widen(b.x[q]) * (shift + w[j + q]) * widen(a.x[q]);
        }
        float mean = own * warp_sum(sum) / cols;
#pragma unroll 2
        for (int j = threadIdx.x % 32 * N; j < cols; j += 32 * N) {
            Pack<T> a = *(const Pack<T> *)(row + j), b = *(const Pack<T> *)(g + j), out = {};
            if (add) out = *(const Pack<T> *)(to + j);
#pragma unroll
            for (int q = 0; q < N; q++) {
                float d = own * (widen(b.x[q]) * (shift + w[j + q]) - widen(a.x[q]) * own * mean);
                put(out.x + q, d, add);
            }
            *(Pack<T> *)(to + j) = out;
        }
        return;
    }
    for (int j = threadIdx.x % 32; j < cols; j += 32) sum += widen(g[j]) * (shift + w[j]) * widen(row[j]);
    float mean = own * warp_sum(sum) / cols;
    for (int j = threadIdx.x % 32; j < cols; j += 32) {
        float d = own * (widen(g[j]) * (shift + w[j]) - widen(row[j]) * own * mean);
        put(to + j, d, add);
    }
}

// A block's share of d_w: `share` rows, one column a thread.
extern "C" __global__ void rms_norm_bwd_w(const T *x, i64 x_stride, const float *r, const T *dy, i64 dy_stride,
                                          float *shares, i64 rows, i64 cols, i64 share) {
    i64 j = blockIdx.y * (i64)blockDim.x + threadIdx.x;
    if (j >= cols) return;
    i64 from = blockIdx.x * share, end = min(from + share, rows);
    float sum = 0;
#pragma unroll 8
    for (i64 i = from; i < end; i++) sum += widen(dy[i * dy_stride + j]) * widen(x[i * x_stride + j]) * r[i];
    shares[blockIdx.x * cols + j] = sum;
}
