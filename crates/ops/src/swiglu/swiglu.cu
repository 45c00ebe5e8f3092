// h = silu(a) b of ab = [a | b], a thread an element of h.
extern "C" __global__ void swiglu_fwd(const T *ab, i64 stride, T *h, i64 rows, i64 f) {
    EACH(i, rows * f) {
        Split at(i, f);
        const T *row = ab + at.row * stride + at.col;
        h[i] = narrow<T>(silu(widen(row[0])) * widen(row[f]));
    }
}

extern "C" __global__ void swiglu_bwd(const T *ab, i64 stride, const T *dh, i64 dh_stride, T *dab, i64 dab_stride,
                                      int add, i64 rows, i64 f) {
    EACH(i, rows * f) {
        Split at(i, f);
        i64 n = at.row, j = at.col;
        float a = widen(ab[n * stride + j]), b = widen(ab[n * stride + f + j]), d = widen(dh[n * dh_stride + j]);
        T *to = dab + n * dab_stride + j;
        put(to, d * b * silu_grad(a), add);
        put(to + f, d * silu(a), add);
    }
}
