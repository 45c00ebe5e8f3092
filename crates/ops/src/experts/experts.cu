// Pairs (token n, choice j), numbered n K + j, sorted by expert; equal experts keep the order of the numbers.

extern "C" __global__ void experts_count(const int *chosen, int *counts, i64 pairs) {
    __shared__ int sums[33];
    int count = 0;
    for (i64 p = threadIdx.x; p < pairs; p += blockDim.x) count += chosen[p] == (int)blockIdx.x;
    count = block_sum(count, sums);
    if (threadIdx.x == 0) counts[blockIdx.x] = count;
}

// A block an expert: its pairs in order get its rows in order.
extern "C" __global__ void experts_place(const int *chosen, const int *counts, int *offsets, int *order, int *slot,
                                         i64 pairs, int experts) {
    __shared__ int within[32];
    int e = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, from = 0;
    for (int i = 0; i < e; i++) from += counts[i];
    if (threadIdx.x == 0) {
        offsets[e] = from;
        if (e == experts - 1) offsets[experts] = from + counts[e];
    }
    for (i64 base = 0; base < pairs; base += blockDim.x) {
        i64 p = base + threadIdx.x;
        bool mine = p < pairs && chosen[p] == e;
        unsigned votes = __ballot_sync(~0u, mine);
        __syncthreads();
        if (lane == 0) within[warp] = __popc(votes);
        __syncthreads();
        int before = 0, all = 0;
        for (int i = 0; i < blockDim.x / 32; i++) {
            if (i < warp) before += within[i];
            all += within[i];
        }
        if (mine) {
            int row = from + before + __popc(votes & ((1u << lane) - 1));
            order[row] = (int)p;
            slot[p] = row;
        }
        from += all;
    }
}

extern "C" __global__ void experts_gather(const T *x, i64 stride, const int *order, T *out, i64 rows, i64 cols, int k) {
    constexpr int N = Pack<T>::N;
    if (cols % N == 0 && at16(x, stride * sizeof(T)) && at16(out, 0)) {
        EACH(i, rows * (cols / N)) {
            Split at(i, cols / N);
            *(Pack<T> *)(out + i * N) = *(const Pack<T> *)(x + (i64)(order[at.row] / k) * stride + at.col * N);
        }
        return;
    }
    EACH(i, rows * cols) {
        Split at(i, cols);
        out[i] = x[(i64)(order[at.row] / k) * stride + at.col];
    }
}

// h = gate silu(a) b.
extern "C" __global__ void experts_gated(const T *ab, const float *gates, const int *order, T *h, i64 rows, i64 f) {
    EACH(i, rows * f) {
        Split at(i, f);
        i64 r = at.row, j = at.col;
        h[i] = narrow<T>(gates[order[r]] * silu(widen(ab[r * 2 * f + j])) * widen(ab[r * 2 * f + f + j]));
    }
}

// y_n (+)= sum over j of z at the row of (n, j).
extern "C" __global__ void experts_combine(const Z *z, const int *slot, T *y, i64 y_stride, int add, i64 tokens,
                                           i64 cols, int k) {
    EACH(i, tokens * cols) {
        Split at(i, cols);
        i64 n = at.row, c = at.col;
        float sum = 0;
        for (int j = 0; j < k; j++) sum += widen(z[slot[n * k + j] * cols + c]);
        put(y + n * y_stride + c, sum, add);
    }
}

// A warp a row: d_ab, the gate's gradient, and gate h in place of d_h.
extern "C" __global__ void experts_bwd(const T *ab, const float *gates, const int *order, T *dh, T *dab, float *dgate,
                                       i64 rows, i64 f) {
    i64 r = blockIdx.x * (i64)(blockDim.x / 32) + threadIdx.x / 32;
    if (r >= rows) return;
    float gate = gates[order[r]], sum = 0;
#pragma unroll 4
    for (i64 j = threadIdx.x % 32; j < f; j += 32) {
        float a = widen(ab[r * 2 * f + j]), b = widen(ab[r * 2 * f + f + j]), d = widen(dh[r * f + j]);
        float s = silu(a);
        sum += d * s * b;
        dab[r * 2 * f + j] = narrow<T>(gate * d * b * silu_grad(a));
        dab[r * 2 * f + f + j] = narrow<T>(gate * d * s);
        dh[r * f + j] = narrow<T>(gate * s * b);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) dgate[r] = sum;
}

extern "C" __global__ void experts_bwd_gates(const float *dgate, const int *slot, float *to, i64 stride, int add,
                                             i64 pairs, i64 k) {
    EACH(p, pairs) { put(to + p / k * stride + p % k, dgate[slot[p]], add); }
}
