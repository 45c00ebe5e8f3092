// Scores, choice and gates: a warp a token. x in T, all else float; scores never in fewer bits.
// s [N, E], inverse[n] = 1 / (sum of s + tiny), gates and chosen [N, K], stats [N][2]: largest logit, largest p.

#define TINY 1e-20f

extern "C" __global__ void router_fwd(const T *x, i64 x_stride, const float *w, i64 w_stride, const float *bias,
                                      float *s, float *inverse, float *gates, int *chosen, float *stats, i64 rows,
                                      i64 d, int experts, int k, float scale) {
    extern __shared__ float shared[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float *score = shared + warp * 3 * experts, *key = score + experts, *taken = key + experts;
    i64 n = blockIdx.x * (i64)(blockDim.x / 32) + warp;
    if (n >= rows) return;
    const T *row = x + n * x_stride;
    float largest = -INFINITY, total = 0;
    for (int e = 0; e < experts; e++) {
        float sum = 0;
        for (i64 j = lane; j < d; j += 32) sum += widen(row[j]) * w[e * w_stride + j];
        sum = warp_sum(sum);
        largest = fmaxf(largest, sum);
        float own = sigmoid(sum), at = own + bias[e];
        total += own;
        if (lane == 0) score[e] = own, key[e] = isnan(at) ? -INFINITY : at, taken[e] = 0, s[n * experts + e] = own;
    }
    __syncwarp();
    float z = 0;
    for (int j = 0; j < k; j++) {
        // The best that is left; of equals the lowest index.
        int best = experts;
        float value = 0;
        for (int e = lane; e < experts; e += 32)
            if (taken[e] == 0 && (best == experts || key[e] > value)) best = e, value = key[e];
        for (int o = 16; o > 0; o /= 2) {
            int other = __shfl_xor_sync(~0u, best, o);
            float theirs = __shfl_xor_sync(~0u, value, o);
            bool better = other < experts && (best == experts || theirs > value || (theirs == value && other < best));
            if (better) best = other, value = theirs;
        }
        z += score[best];
        __syncwarp(); // all have read what is taken
        if (lane == 0) taken[best] = 1, chosen[n * k + j] = best;
        __syncwarp();
    }
    z += TINY;
    float top = 0;
    for (int j = 0; j < k; j++) top = fmaxf(top, score[chosen[n * k + j]] / z);
    __syncwarp();
    for (int j = lane; j < k; j += 32) gates[n * k + j] = scale * (score[chosen[n * k + j]] / z);
    if (lane == 0) {
        inverse[n] = 1.f / (total + TINY);
        stats[2 * n] = largest;
        stats[2 * n + 1] = top;
    }
}

// Over tokens that are not padding (flags & 2). Blocks 0..E: out[e], tokens of expert e. Block E: the largest logit, the
// sum of the largest p, the tokens.
extern "C" __global__ void router_stats(const int *chosen, const float *stats, const int *flags, double *out, i64 rows,
                                        int experts, int k) {
    __shared__ double sums[33];
    __shared__ float part[33];
    if (blockIdx.x < experts) {
        double count = 0;
        for (i64 n = threadIdx.x; n < rows; n += blockDim.x)
            for (int j = 0; j < k; j++) count += !(flags[n] & 2) && chosen[n * k + j] == (int)blockIdx.x;
        count = block_sum(count, sums);
        if (threadIdx.x == 0) out[blockIdx.x] = count;
        return;
    }
    double top = 0, tokens = 0;
    float largest = -INFINITY;
    for (i64 n = threadIdx.x; n < rows; n += blockDim.x) {
        if (flags[n] & 2) continue;
        top += stats[2 * n + 1];
        tokens += 1;
        largest = fmaxf(largest, stats[2 * n]);
    }
    top = block_sum(top, sums);
    tokens = block_sum(tokens, sums);
    largest = block_max(largest, part);
    if (threadIdx.x == 0) out[experts] = largest, out[experts + 1] = top, out[experts + 2] = tokens;
}

// One document and expert a block: c = alpha f / tokens, and its part of the loss. documents [D][2]: first token, end.
extern "C" __global__ void router_balance(const float *s, const float *inverse, const int *chosen,
                                          const int *documents, float *c, double *loss, int experts, int k,
                                          double alpha_over_tokens) {
    __shared__ double sums[33];
    i64 d = blockIdx.x, e = blockIdx.y;
    int from = documents[2 * d], end = documents[2 * d + 1];
    double share = 0, hits = 0;
    for (i64 n = from + threadIdx.x; n < end; n += blockDim.x) {
        share += s[n * experts + e] * inverse[n];
        for (int j = 0; j < k; j++) hits += chosen[n * k + j] == (int)e;
    }
    share = block_sum(share, sums);
    hits = block_sum(hits, sums);
    if (threadIdx.x == 0) {
        double own = alpha_over_tokens * experts * hits / ((double)k * (end - from));
        c[d * experts + e] = (float)own;
        loss[d * experts + e] = own * share;
    }
}

extern "C" __global__ void router_loss(const double *loss, float *balance, i64 n) {
    __shared__ double sums[33];
    double sum = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += loss[i];
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) *balance = (float)sum;
}

// d_l [N, E], a token a thread. document[n]: row of c, or -1.
extern "C" __global__ void router_bwd(const float *s, const float *inverse, const int *chosen, const float *d_gates,
                                      i64 dg_stride, const float *c, const int *document, const float *d_balance,
                                      float *dl, i64 rows, int experts, int k, float scale) {
    EACH(n, rows) {
        const float *own = s + n * experts;
        float *d = dl + n * experts;
        float balance = 0, mean = 0;
        const float *by = 0;
        if (c && document[n] >= 0) {
            by = c + document[n] * (i64)experts;
            balance = *d_balance * inverse[n];
            for (int e = 0; e < experts; e++) mean += own[e] * by[e];
            mean *= inverse[n];
        }
        for (int e = 0; e < experts; e++) d[e] = by ? balance * (by[e] - mean) : 0.f;
        if (d_gates) {
            float z = 0, average = 0;
            for (int j = 0; j < k; j++) z += own[chosen[n * k + j]];
            z += TINY;
            for (int j = 0; j < k; j++) average += d_gates[n * dg_stride + j] * (own[chosen[n * k + j]] / z);
            for (int j = 0; j < k; j++) d[chosen[n * k + j]] += scale / z * (d_gates[n * dg_stride + j] - average);
        }
        for (int e = 0; e < experts; e++) d[e] *= own[e] * (1.f - own[e]);
    }
}
