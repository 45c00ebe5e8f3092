// A warp a head of a row. o, z, y and their gradients in T; w, r and d_w in float. SILU: the gate is silu, else sigmoid.

DEVICE float gate(float z) { return SILU ? silu(z) : sigmoid(z); }
DEVICE float gate_grad(float z) {
    if (SILU) return silu_grad(z);
    float s = sigmoid(z);
    return s * (1.f - s);
}

extern "C" __global__ void gated_norm_fwd(const T *o, i64 o_stride, const T *z, i64 z_stride, const float *w, T *y,
                                          float *r, i64 rows, i64 heads, i64 v, float eps) {
    i64 i = blockIdx.x * (i64)(blockDim.x / 32) + threadIdx.x / 32;
    if (i >= rows * heads) return;
    Split which(i, heads);
    i64 n = which.row, h = which.col;
    const T *own = o + n * o_stride + h * v, *by = z + n * z_stride + h * v;
    float sum = 0;
#pragma unroll 4
    for (int j = threadIdx.x % 32; j < v; j += 32) {
        float x = widen(own[j]);
        sum += x * x;
    }
    float scale = 1.f / sqrtf(warp_sum(sum) / v + eps);
#pragma unroll 4
    for (int j = threadIdx.x % 32; j < v; j += 32) {
        y[i * v + j] = narrow<T>(w[j] * (widen(own[j]) * scale) * gate(widen(by[j])));
    }
    if (threadIdx.x % 32 == 0) r[i] = scale;
}

extern "C" __global__ void gated_norm_bwd(const T *o, i64 o_stride, const T *z, i64 z_stride, const float *w,
                                          const float *r, const T *dy, i64 dy_stride, T *d_o, i64 do_stride,
                                          int add_o, T *d_z, i64 dz_stride, int add_z, i64 rows, i64 heads, i64 v) {
    i64 i = blockIdx.x * (i64)(blockDim.x / 32) + threadIdx.x / 32;
    if (i >= rows * heads) return;
    Split which(i, heads);
    i64 n = which.row, h = which.col;
    const T *own = o + n * o_stride + h * v, *by = z + n * z_stride + h * v, *g = dy + n * dy_stride + h * v;
    float scale = r[i], sum = 0;
    constexpr int N = Pack<T>::N;
    T *to_o = d_o ? d_o + n * do_stride + h * v : 0, *to_z = d_z ? d_z + n * dz_stride + h * v : 0;
    if (v % N == 0 && v <= 32 * N && at16(own, 0) && at16(by, 0) && at16(g, 0) && at16(to_o, 0) && at16(to_z, 0)) {
        // A head in one access of each lane, read once.
        int j = threadIdx.x % 32 * N;
        Pack<T> a = {}, b = {}, c = {}, of_o = {}, of_z = {};
        float up[N], at[N];
        if (j < v) {
            a = *(const Pack<T> *)(own + j), b = *(const Pack<T> *)(by + j), c = *(const Pack<T> *)(g + j);
            if (d_o && add_o) of_o = *(const Pack<T> *)(to_o + j);
            if (d_z && add_z) of_z = *(const Pack<T> *)(to_z + j);
        }
#pragma unroll
        for (int q = 0; q < N; q++) {
            at[q] = widen(b.x[q]);
            up[q] = j < v ? widen(c.x[q]) * w[j + q] : 0.f;
            sum += widen(a.x[q]) * (up[q] * gate(at[q]));
        }
        float mean = scale * warp_sum(sum) / v;
        if (j >= v) return;
#pragma unroll
        for (int q = 0; q < N; q++) {
            float x = widen(a.x[q]);
            put(of_o.x + q, scale * (up[q] * gate(at[q]) - x * scale * mean), add_o);
            put(of_z.x + q, up[q] * (x * scale) * gate_grad(at[q]), add_z);
        }
        if (d_o) *(Pack<T> *)(to_o + j) = of_o;
        if (d_z) *(Pack<T> *)(to_z + j) = of_z;
        return;
    }
#pragma unroll 4
    for (int j = threadIdx.x % 32; j < v; j += 32) {
        sum += widen(own[j]) * (widen(g[j]) * w[j] * gate(widen(by[j])));
    }
    float mean = scale * warp_sum(sum) / v;
#pragma unroll 4
    for (int j = threadIdx.x % 32; j < v; j += 32) {
        float x = widen(own[j]), up = widen(g[j]) * w[j], at = widen(by[j]);
        if (d_o) put(d_o + n * do_stride + h * v + j, scale * (up * gate(at) - x * scale * mean), add_o);
        if (d_z) put(d_z + n * dz_stride + h * v + j, up * (x * scale) * gate_grad(at), add_z);
    }
}

// A block's share of d_w: `share` rows, all heads, one column a thread.
extern "C" __global__ void gated_norm_bwd_w(const T *o, i64 o_stride, const T *z, i64 z_stride, const float *r,
                                            const T *dy, i64 dy_stride, float *shares, i64 rows, i64 heads, i64 v,
                                            i64 share) {
    i64 j = blockIdx.y * (i64)blockDim.x + threadIdx.x;
    if (j >= v) return;
    i64 from = blockIdx.x * share, end = min(from + share, rows);
    float sum = 0;
    for (i64 n = from; n < end; n++) {
        float row = 0;
#pragma unroll 8
        for (i64 h = 0; h < heads; h++) {
            i64 c = h * v + j;
            float x = widen(o[n * o_stride + c]) * r[n * heads + h];
            row += widen(dy[n * dy_stride + c]) * x * gate(widen(z[n * z_stride + c]));
        }
        sum += row;
    }
    shares[blockIdx.x * v + j] = sum;
}
