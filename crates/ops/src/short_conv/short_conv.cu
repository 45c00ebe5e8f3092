// p_t = sum over j of w_j x_{t-(K-1)+j}, y = silu(p). KC taps. start[n]: first token of n's document, in its row; flags[n]:
// 1 where the document goes on from an earlier piece, whose last KC-1 rows are the tail [B, KC-1, C].

struct Place {
    i64 row, t, len;
    int start, carried;
};

// x at `back` tokens before token t, channel c; 0 where that lies before the document.
DEVICE float input(const T *x, i64 stride, const T *tail, Place at, int back, i64 c, i64 channels) {
    if (at.t - at.start >= back) return widen(x[(at.row * at.len + at.t - back) * stride + c]);
    if (at.carried) return widen(tail[(at.row * (KC - 1) + (KC - 1) + at.t - back) * channels + c]);
    return 0.f;
}

DEVICE Place place(i64 n, i64 len, const int *start, const int *flags) {
    return {n / len, n % len, len, start[n], flags[n] & 1};
}

extern "C" __global__ void short_conv_fwd(const T *x, i64 stride, const float *w, const T *tail, const int *start,
                                          const int *flags, T *y, i64 rows, i64 len, i64 channels) {
    EACH(i, rows * channels) {
        Split which(i, channels);
        i64 n = which.row, c = which.col;
        Place at = place(n, len, start, flags);
        float sum = 0;
#pragma unroll
        for (int j = 0; j < KC; j++) sum += w[c * KC + j] * input(x, stride, tail, at, KC - 1 - j, c, channels);
        y[i] = narrow<T>(silu(sum));
    }
}

// d_p [N, C] and a block's share of d_w [C, KC]: `share` rows, one channel a thread.
extern "C" __global__ void short_conv_bwd_p(const T *x, i64 stride, const float *w, const T *tail, const int *start,
                                            const int *flags, const T *dy, i64 dy_stride, float *dp, float *shares,
                                            i64 rows, i64 len, i64 channels, i64 share) {
    i64 c = blockIdx.y * (i64)blockDim.x + threadIdx.x;
    if (c >= channels) return;
    i64 from = blockIdx.x * share, end = min(from + share, rows);
    float tap[KC], sum[KC];
#pragma unroll
    for (int j = 0; j < KC; j++) tap[j] = w[c * KC + j], sum[j] = 0;
    for (i64 n = from; n < end; n++) {
        Place at = place(n, len, start, flags);
        float in[KC], p = 0;
#pragma unroll
        for (int j = 0; j < KC; j++) {
            in[j] = input(x, stride, tail, at, KC - 1 - j, c, channels);
            p += tap[j] * in[j];
        }
        float d = widen(dy[n * dy_stride + c]) * silu_grad(p);
        dp[n * channels + c] = d;
#pragma unroll
        for (int j = 0; j < KC; j++) sum[j] += d * in[j];
    }
#pragma unroll
    for (int j = 0; j < KC; j++) shares[(blockIdx.x * channels + c) * KC + j] = sum[j];
}

// d_x_s = sum over j of w_j d_p at s + (K-1) - j, where that is of the same document.
extern "C" __global__ void short_conv_bwd_x(const float *dp, const float *w, const int *start, T *dx, i64 dx_stride,
                                            int add, i64 rows, i64 len, i64 channels) {
    EACH(i, rows * channels) {
        Split which(i, channels);
        i64 n = which.row, c = which.col, t = n % len;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < KC; j++) {
            int ahead = KC - 1 - j;
            if (t + ahead < len && start[n + ahead] == start[n]) sum += w[c * KC + j] * dp[(n + ahead) * channels + c];
        }
        put(dx + n * dx_stride + c, sum, add);
    }
}

// The next piece's tail [B, KC-1, C]: the last rows of each row's last document.
extern "C" __global__ void short_conv_tail(const T *x, i64 stride, const T *tail, const int *start, const int *flags,
                                           T *next, i64 batch, i64 len, i64 channels) {
    EACH(i, batch * (KC - 1) * channels) {
        i64 c = i % channels, j = i / channels % (KC - 1), b = i / channels / (KC - 1);
        Place at = place(b * len + len - 1, len, start, flags);
        next[i] = narrow<T>(input(x, stride, tail, at, (int)(KC - 2 - j), c, channels));
    }
}

// The same for rows at multiples of 16 bytes: a thread has N neighbouring channels of a run of tokens, and the last rows at
// hand.
constexpr int N = Pack<T>::N;

// The KC rows that token n's filter covers, but for its own: what came before, or what its document begins with.
struct Window {
    float x[KC][N];

    DEVICE void begin(const T *from, i64 stride, const T *tail, i64 n, i64 len, const int *start, const int *flags, i64 c,
                      i64 channels) {
        Place at = place(n, len, start, flags);
#pragma unroll
        for (int j = 0; j < KC - 1; j++)
#pragma unroll
            for (int q = 0; q < N; q++) x[j][q] = input(from, stride, tail, at, KC - 1 - j, c + q, channels);
    }

    // A document begins at this token: its row's tail, or nothing.
    DEVICE void renew(const T *tail, i64 row, bool carried, i64 c, i64 channels) {
#pragma unroll
        for (int j = 0; j < KC - 1; j++)
#pragma unroll
            for (int q = 0; q < N; q++) x[j][q] = carried ? widen(tail[(row * (KC - 1) + j) * channels + c + q]) : 0.f;
    }

    DEVICE void take(const Pack<T> &own) {
#pragma unroll
        for (int q = 0; q < N; q++) x[KC - 1][q] = widen(own.x[q]);
    }

    DEVICE void move() {
#pragma unroll
        for (int j = 0; j < KC - 1; j++)
#pragma unroll
            for (int q = 0; q < N; q++) x[j][q] = x[j + 1][q];
    }
};

extern "C" __global__ void __launch_bounds__(128)
    short_conv_fwd_runs(const T *x, i64 stride, const float *w, const T *tail, const int *start, const int *flags, T *y,
                        i64 rows, i64 len, i64 channels, i64 run) {
    i64 c = (blockIdx.x * (i64)blockDim.x + threadIdx.x) * N, from = blockIdx.y * run, end = min(from + run, rows);
    if (c >= channels) return;
    float taps[KC][N];
#pragma unroll
    for (int j = 0; j < KC; j++)
#pragma unroll
        for (int q = 0; q < N; q++) taps[j][q] = w[(c + q) * KC + j];
    Window in;
    in.begin(x, stride, tail, from, len, start, flags, c, channels);
    i64 row = from / len, t = from % len;
#pragma unroll 4
    for (i64 n = from; n < end; n++) {
        Pack<T> own = *(const Pack<T> *)(x + n * stride + c);
        if (t == start[n]) in.renew(tail, row, flags[n] & 1, c, channels);
        in.take(own);
#pragma unroll
        for (int q = 0; q < N; q++) {
            float sum = 0;
#pragma unroll
            for (int j = 0; j < KC; j++) sum += taps[j][q] * in.x[j][q];
            own.x[q] = narrow<T>(silu(sum));
        }
        *(Pack<T> *)(y + n * channels + c) = own;
        in.move();
        if (++t == len) t = 0, row++;
    }
}

// d_x, and a run's share of d_w [C, KC]. Each row of d_x is a sum over the KC tokens from it on, which the run's last rows
// have beyond its end. dx may be null.
extern "C" __global__ void __launch_bounds__(128)
    short_conv_bwd_runs(const T *x, i64 stride, const float *w, const T *tail, const int *start, const int *flags,
                        const T *dy, i64 dy_stride, T *dx, i64 dx_stride, int add, float *shares, i64 rows, i64 len,
                        i64 channels, i64 run) {
    i64 c = (blockIdx.x * (i64)blockDim.x + threadIdx.x) * N, from = blockIdx.y * run, end = min(from + run, rows);
    if (c >= channels) return;
    float taps[KC][N], dw[KC][N], open[KC][N];
#pragma unroll
    for (int j = 0; j < KC; j++)
#pragma unroll
        for (int q = 0; q < N; q++) taps[j][q] = w[(c + q) * KC + j], dw[j][q] = 0, open[j][q] = 0;
    auto write = [&](i64 n, const float (&d)[N]) {
        if (n < from || n >= end || !dx) return;
        T *to = dx + n * dx_stride + c;
        Pack<T> out = {};
        if (add) out = *(const Pack<T> *)to;
#pragma unroll
        for (int q = 0; q < N; q++) put(out.x + q, d[q], add);
        *(Pack<T> *)to = out;
    };
    Window in;
    in.begin(x, stride, tail, from, len, start, flags, c, channels);
    i64 row = from / len, t = from % len, stop = min(end + KC - 1, rows);
#pragma unroll 2
    for (i64 n = from; n < stop; n++) {
        Pack<T> own = *(const Pack<T> *)(x + n * stride + c), up = *(const Pack<T> *)(dy + n * dy_stride + c);
        int first = start[n];
        if (t == first) in.renew(tail, row, flags[n] & 1, c, channels);
        in.take(own);
#pragma unroll
        for (int q = 0; q < N; q++) {
            float p = 0;
#pragma unroll
            for (int j = 0; j < KC; j++) p += taps[j][q] * in.x[j][q];
            float d = widen(up.x[q]) * silu_grad(p);
#pragma unroll
            for (int j = 0; j < KC; j++) {
                if (t - first >= KC - 1 - j) open[j][q] += taps[j][q] * d;
                if (n < end) dw[j][q] += d * in.x[j][q];
            }
        }
        write(n - (KC - 1), open[0]);
#pragma unroll
        for (int j = 0; j < KC; j++)
#pragma unroll
            for (int q = 0; q < N; q++) open[j][q] = j + 1 < KC ? open[j + 1][q] : 0.f;
        in.move();
        if (++t == len) t = 0, row++;
    }
#pragma unroll
    for (int j = 0; j < KC - 1; j++) write(stop - (KC - 1) + j, open[j]);
#pragma unroll
    for (int q = 0; q < N; q++)
#pragma unroll
        for (int j = 0; j < KC; j++) shares[(blockIdx.y * channels + c + q) * KC + j] = dw[j][q];
}
