// Norms, NorMuon's passes around its products, Cautious AdamW. Parameters, gradients and moments float; T is what a matrix
// is orthogonalised in, float or bf16. Sums in double, in a fixed order.

// Sums of squares of blocks of `per` elements.
extern "C" __global__ void sum_squares(const float *x, i64 n, i64 per, double *out) {
    __shared__ double part[33];
    i64 from = blockIdx.x * per, end = min(from + per, n);
    double sum = 0;
    for (i64 i = from + threadIdx.x; i < end; i += blockDim.x) sum += (double)x[i] * x[i];
    sum = block_sum(sum, part);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// One block: the sum of all.
extern "C" __global__ void sum_all(const double *x, i64 n, double *out) {
    __shared__ double part[33];
    double sum = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    sum = block_sum(sum, part);
    if (threadIdx.x == 0) *out = sum;
}

// The factor that brings a norm down to clip_norm (0: no clipping), NaN where nothing may move: what was summed is not
// finite, or the norm is above the limit.
extern "C" __global__ void clip_factor(const double *sum, float *factor, double clip_norm, double limit) {
    if (threadIdx.x != 0) return;
    double norm = sqrt(*sum), by = clip_norm > 0 && norm > clip_norm ? clip_norm / norm : 1.;
    *factor = norm < INFINITY && norm <= limit ? (float)by : __int_as_float(0x7fffffff);
}

// Whether a step was refused.
DEVICE bool refused(float factor) { return !(factor == factor); }

extern "C" __global__ void average(float *to, const float *x, i64 n, float keep, float take) {
    EACH(i, n) to[i] = keep * to[i] + take * x[i];
}

// A tensor that AdamW moves, as cuda.rs lays it out; `first` is the first of its blocks of work.
struct Member {
    float *w;
    const float *g;
    float *m, *v;
    i64 numel, first, blocks;
    float lr, decay;
};

DEVICE bool agree(float m, float g) { return (m > 0.f && g > 0.f) || (m < 0.f && g < 0.f); }

// m and v of a block of `per` elements, and how many of them the mask lets through.
extern "C" __global__ void adamw_moments(const Member *members, const int *owner, int *counts, i64 per,
                                         const float *factor, float beta1, float take1, float beta2, float take2) {
    __shared__ int part[33];
    float clip = *factor;
    if (refused(clip)) return;
    Member o = members[owner[blockIdx.x]];
    i64 from = (blockIdx.x - o.first) * per, end = min(from + per, o.numel);
    int count = 0;
    for (i64 i = from + threadIdx.x; i < end; i += blockDim.x) {
        float g = o.g[i] * clip, m = beta1 * o.m[i] + take1 * g;
        o.m[i] = m;
        o.v[i] = beta2 * o.v[i] + take2 * (g * g);
        count += agree(m, g);
    }
    count = block_sum(count, part);
    if (threadIdx.x == 0) counts[blockIdx.x] = count;
}

extern "C" __global__ void adamw_apply(const Member *members, const int *owner, const int *counts, i64 per,
                                       const float *factor, float correct1, float correct2, float eps, int cautious) {
    __shared__ i64 part[33];
    float clip = *factor;
    if (refused(clip)) return;
    Member o = members[owner[blockIdx.x]];
    i64 from = (blockIdx.x - o.first) * per, end = min(from + per, o.numel), count = 0;
    float rate = o.lr;
    if (cautious) {
        for (i64 i = threadIdx.x; i < o.blocks; i += blockDim.x) count += counts[o.first + i];
        count = block_sum(count, part);
        rate = (float)(o.lr / fmax((double)count / (double)o.numel, 1e-3));
    }
    for (i64 i = from + threadIdx.x; i < end; i += blockDim.x) {
        float m = o.m[i], w = o.w[i];
        float update = m * correct1 / (sqrtf(o.v[i] * correct2) + eps);
        if (cautious && !agree(m, o.g[i] * clip)) update = 0.f;
        o.w[i] = w - o.decay * w - rate * update;
    }
}

// A matrix that NorMuon moves; all of a launch have one shape.
struct Matrix {
    float *w;
    const float *g;
    float *m, *v;
    float lr, decay;
};

// M, and X into the batch's memory, a block a row; sums [batch, rows] of X's squares.
extern "C" __global__ void normuon_momentum(const Matrix *matrices, T *x, double *sums, i64 rows, i64 cols,
                                            const float *factor, float beta1, float take1, int nesterov) {
    __shared__ double part[33];
    float clip = *factor;
    if (refused(clip)) return;
    Matrix o = matrices[blockIdx.y];
    i64 row = blockIdx.x, at = row * cols;
    T *to = x + (blockIdx.y * rows + row) * cols;
    double sum = 0;
    for (i64 j = threadIdx.x; j < cols; j += blockDim.x) {
        float more = take1 * (o.g[at + j] * clip), m = beta1 * o.m[at + j] + more;
        o.m[at + j] = m;
        float own = nesterov ? more + beta1 * m : m;
        to[j] = narrow<T>(own);
        sum += (double)own * own;
    }
    sum = block_sum(sum, part);
    if (threadIdx.x == 0) sums[blockIdx.y * rows + row] = sum;
}

// by[b] = numer / (over sqrt(sum of b's rows) + eps), a block a matrix.
extern "C" __global__ void normuon_inverse(const double *sums, float *by, i64 rows, double numer, double over, double eps) {
    __shared__ double part[33];
    double sum = 0;
    for (i64 i = threadIdx.x; i < rows; i += blockDim.x) sum += sums[blockIdx.x * rows + i];
    sum = block_sum(sum, part);
    if (threadIdx.x == 0) by[blockIdx.x] = (float)(numer / (over * sqrt(sum) + eps));
}

extern "C" __global__ void normuon_scale(T *x, const float *by, i64 each) {
    T *own = x + blockIdx.y * each;
    float factor = by[blockIdx.y];
    EACH(i, each) own[i] = narrow<T>(widen(own[i]) * factor);
}

// d = three a + two I, r x r a matrix.
extern "C" __global__ void normuon_poly(const T *a, T *d, i64 r, float two, float three) {
    i64 at = blockIdx.y * r * r;
    EACH(i, r * r) {
        float x = three * widen(a[at + i]);
        d[at + i] = narrow<T>(i % (r + 1) == 0 ? x + two : x);
    }
}

// v of a row from O, a block a row; sums become those of the squares of O over its root.
extern "C" __global__ void normuon_moments(const Matrix *matrices, const T *x, double *sums, i64 rows, i64 cols,
                                           double beta2, double eps, const float *factor) {
    __shared__ double part[33];
    if (refused(*factor)) return;
    i64 row = blockIdx.x;
    const T *own = x + (blockIdx.y * rows + row) * cols;
    double sum = 0;
    for (i64 j = threadIdx.x; j < cols; j += blockDim.x) sum += (double)widen(own[j]) * widen(own[j]);
    sum = block_sum(sum, part);
    if (threadIdx.x != 0) return;
    float *v = matrices[blockIdx.y].v + row;
    float now = (float)(beta2 * *v + (1. - beta2) * sum / (double)cols);
    *v = now;
    double root = sqrt((double)now) + eps;
    sums[blockIdx.y * rows + row] = sum / (root * root);
}

extern "C" __global__ void normuon_apply(const Matrix *matrices, const T *x, const float *scales, i64 rows, i64 cols,
                                         double eps, int cautious, const float *factor) {
    if (refused(*factor)) return;
    Matrix o = matrices[blockIdx.y];
    i64 row = blockIdx.x, at = row * cols;
    const T *own = x + (blockIdx.y * rows + row) * cols;
    float scale = (float)(scales[blockIdx.y] / (sqrt((double)o.v[row]) + eps));
    for (i64 j = threadIdx.x; j < cols; j += blockDim.x) {
        float u = widen(own[j]) * scale, w = o.w[at + j];
        // Signs and not the product, which may underflow to a zero that counts as agreement.
        bool with = (u >= 0.f && w >= 0.f) || (u <= 0.f && w <= 0.f);
        o.w[at + j] = w - (with || !cautious ? o.decay : 0.f) * w - o.lr * u;
    }
}
