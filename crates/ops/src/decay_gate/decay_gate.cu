// g = -exp(A_log) softplus(a + dt_bias), beta = scale sigmoid(b), of ab = [a | b] in T; all else in float. scale is 2 where
// negative eigenvalues are allowed, else 1.

extern "C" __global__ void decay_gate_fwd(const T *ab, i64 stride, const float *a_log, const float *dt, float *g,
                                          float *beta, i64 rows, i64 heads, float scale) {
    EACH(i, rows * heads) {
        i64 n = i / heads, h = i % heads;
        g[i] = -expf(a_log[h]) * softplus(widen(ab[n * stride + h]) + dt[h]);
        beta[i] = scale * sigmoid(widen(ab[n * stride + heads + h]));
    }
}

extern "C" __global__ void decay_gate_bwd(const T *ab, i64 stride, const float *a_log, const float *dt, const float *dg,
                                          i64 dg_stride, const float *dbeta, i64 dbeta_stride, T *dab, i64 dab_stride,
                                          int add, i64 rows, i64 heads, float scale) {
    EACH(i, rows * heads) {
        i64 n = i / heads, h = i % heads;
        float up = dg ? dg[n * dg_stride + h] : 0.f, of_beta = dbeta ? dbeta[n * dbeta_stride + h] : 0.f;
        float s = sigmoid(widen(ab[n * stride + heads + h]));
        put(dab + n * dab_stride + h, -expf(a_log[h]) * sigmoid(widen(ab[n * stride + h]) + dt[h]) * up, add);
        put(dab + n * dab_stride + heads + h, scale * s * (1.f - s) * of_beta, add);
    }
}

// A block's shares of d_A_log and d_dt_bias: `share` rows of one head, added up by a warp.
extern "C" __global__ void decay_gate_bwd_w(const T *ab, i64 stride, const float *a_log, const float *dt,
                                            const float *dg, i64 dg_stride, float *of_log, float *of_dt, i64 rows,
                                            i64 heads, i64 share) {
    i64 h = blockIdx.y, from = blockIdx.x * share, end = min(from + share, rows);
    float rate = -expf(a_log[h]);
    double log_sum = 0, dt_sum = 0;
    for (i64 n = from + threadIdx.x; n < end; n += 32) {
        float x = widen(ab[n * stride + h]) + dt[h], up = dg[n * dg_stride + h];
        log_sum += rate * softplus(x) * up;
        dt_sum += rate * sigmoid(x) * up;
    }
    log_sum = warp_sum(log_sum);
    dt_sum = warp_sum(dt_sum);
    if (threadIdx.x == 0) {
        of_log[blockIdx.x * heads + h] = (float)log_sum;
        of_dt[blockIdx.x * heads + h] = (float)dt_sum;
    }
}
