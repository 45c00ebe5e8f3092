// Causal attention within documents, in tiles under a running maximum. T: element type, in memory and in products. D, R:
// content and rotary columns of a query and a key; V: of a value; all padded with zeros to multiples of 16 in shared memory.
// KEYS: keys of a tile in the passes that own queries; QUERIES: queries of a tile in the pass that owns keys.
// A warp has 16 rows of what its block owns. Statistics and sums in float.

#define DK (D + R)
#define KP ((DK + 15) / 16 * 16)
#define VP ((V + 15) / 16 * 16)
#define LK (KP + 8)
#define LV (VP + 8)
#define OWN 64
#define PASSES 3
#define TILE (KEYS * (LK + LV))
typedef T S;

template <class E> DEVICE float exponential(float x);
template <> DEVICE float exponential<float>(float x) { return expf(x); }
template <> DEVICE float exponential<bf16>(float x) { return __expf(x); }

// Where keys lie: group g's content at k_n + row * kn_stride + g * kn_step, and so on.
struct Keys {
    const T *k_n, *k_r, *v;
    i64 kn_stride, kr_stride, v_stride, kn_step, v_step;
};

// Rows first.. of WIDTH columns into shared memory at column `at`; rows past `end` are zeros. 16 bytes at a time where the
// rows lie so; the caller waits for those.
template <int WIDTH> DEVICE void fill(S *to, int ld, int at, const T *from, i64 stride, i64 first, i64 end, int rows) {
    constexpr int per = 16 / sizeof(T), across = WIDTH / per;
    if (WIDTH == 0) return;
    if (WIDTH % per == 0 && at % per == 0 && ((i64)from | stride * (i64)sizeof(T)) % 16 == 0) {
        for (int i = threadIdx.x; i < rows * across; i += blockDim.x) {
            int r = i / (across + !across), c = i % (across + !across) * per;
            bool there = first + r < end;
            const T *p = there ? from + (first + r) * stride + c : from;
            unsigned to_at = (unsigned)__cvta_generic_to_shared(to + r * ld + at + c);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_at), "l"(p), "r"(there ? 16 : 0) : "memory");
        }
        return;
    }
    for (int i = threadIdx.x; i < rows * WIDTH; i += blockDim.x) {
        int r = i / (WIDTH + !WIDTH), c = i % (WIDTH + !WIDTH);
        to[r * ld + at + c] = first + r < end ? from[(first + r) * stride + c] : T{};
    }
}
DEVICE void arrived() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
}
DEVICE void zeros(S *to, int ld, int at, int end, int rows) {
    if (at == end) return;
    for (int i = threadIdx.x; i < rows * (end - at); i += blockDim.x) to[i / (end - at) * ld + at + i % (end - at)] = T{};
}
// Keys and values j.. of a row of the batch whose keys end at `end`.
DEVICE void fill_keys(S *k, S *v, Keys in, i64 g, i64 first, i64 end, int rows) {
    fill<D>(k, LK, 0, in.k_n + g * in.kn_step, in.kn_stride, first, end, rows);
    fill<R>(k, LK, D, in.k_r + g * R, in.kr_stride, first, end, rows);
    fill<V>(v, LV, 0, in.v + g * in.v_step, in.v_stride, first, end, rows);
}

extern "C" __global__ void __launch_bounds__(128)
    attention_fwd(const T *q, i64 q_stride, const T *k_n, i64 kn_stride, i64 kn_step, const T *k_r, i64 kr_stride,
                  const T *v, i64 v_stride, i64 v_step, const int *from, T *o, float *lse, float *most, int queries,
                  int keys, int heads, int per_group, float scale) {
    extern __shared__ __align__(16) unsigned char shared[];
    // Two tiles of keys and values: one comes while the other is worked on.
    S *qs = (S *)shared, *tiles = qs + OWN * LK;
    Keys in = {k_n, k_r, v, kn_stride, kr_stride, v_stride, kn_step, v_step};
    int i0 = (gridDim.x - 1 - blockIdx.x) * OWN, h = blockIdx.y, b = blockIdx.z, off = keys - queries; // the longest first
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    i64 rows = (i64)b * queries, key_rows = (i64)b * keys;
    fill<DK>(qs, LK, 0, q + h * DK, q_stride, rows + i0, rows + queries, OWN);
    zeros(qs, LK, DK, KP, OWN);
    for (int i = 0; i < 2; i++) {
        zeros(tiles + i * TILE, LK, DK, KP, KEYS);
        zeros(tiles + i * TILE + KEYS * LK, LV, V, VP, KEYS);
    }
    int mine[2], first[2];
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, acc[VP / 8][4] = {};
    for (int r = 0; r < 2; r++) {
        mine[r] = i0 + 16 * warp + g + 8 * r;
        first[r] = mine[r] < queries ? from[rows + mine[r]] : keys;
    }
    int end = min(i0 + OWN, queries) + off, begin = from[rows + i0], latest = from[rows + min(i0 + OWN, queries) - 1];
    auto load = [&](int j0) {
        S *to = tiles + (j0 - begin) / KEYS % 2 * TILE;
        if (j0 < end) fill_keys(to, to + KEYS * LK, in, h / per_group, key_rows + j0, key_rows + end, KEYS);
    };
    load(begin);
    for (int j0 = begin; j0 < end; j0 += KEYS) {
        const S *ks = tiles + (j0 - begin) / KEYS % 2 * TILE, *vs = ks + KEYS * LK;
        // Whether every query of the block sees every key of the tile.
        bool whole = j0 >= latest && j0 + KEYS - 1 <= i0 + off;
        arrived();
        load(j0 + KEYS);
        float s[1][KEYS / 8][4] = {};
        product<S, PASSES>(s, Rows<S>{qs, LK}, 16 * warp, Rows<S>{ks, LK}, 0, KP);
        float best[2] = {max[0], max[1]};
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                int j = j0 + 8 * n + 2 * t + c % 2, r = c / 2;
                bool seen = whole || (j >= first[r] && j <= mine[r] + off);
                s[0][n][c] = seen ? s[0][n][c] * scale : -INFINITY;
                best[r] = fmaxf(best[r], s[0][n][c]);
            }
        float shift[2], keep[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 1));
            best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 2));
            shift[r] = best[r] == -INFINITY ? 0.f : best[r];
            keep[r] = exponential<T>(max[r] - shift[r]);
            max[r] = best[r];
            sum[r] *= keep[r];
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float p = exponential<T>(s[0][n][c] - shift[c / 2]);
                s[0][n][c] = p;
                sum[c / 2] += p;
            }
#pragma unroll
        for (int n = 0; n < VP / 8; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) acc[n][c] *= keep[c / 2];
        product_of<S, PASSES>(acc, s[0], Cols<S>{vs, LV}, 0);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        if (mine[r] >= queries) continue;
        i64 row = rows + mine[r];
        if (t == 0) {
            lse[row * heads + h] = max[r] + logf(sum[r]);
            most[row * heads + h] = max[r];
        }
#pragma unroll
        for (int n = 0; n < VP / 8; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int d = 8 * n + 2 * t + c;
                if (d < V) o[(row * heads + h) * V + d] = narrow<T>(acc[n][2 * r + c] / sum[r]);
            }
    }
}

// The largest score of each head over the queries that are not padding: a block a head.
extern "C" __global__ void attention_max(const float *most, const int *padding, float *out, i64 rows, i64 heads) {
    __shared__ float part[33];
    float max = -INFINITY;
    for (i64 n = threadIdx.x; n < rows; n += blockDim.x)
        if (!padding[n]) max = fmaxf(max, most[n * heads + blockIdx.x]);
    max = block_max(max, part);
    if (threadIdx.x == 0) out[blockIdx.x] = max;
}

// <d_o, o> of every query and head: a warp each.
extern "C" __global__ void attention_delta(const T *o, const T *d_o, i64 do_stride, float *delta, i64 rows, i64 heads) {
    i64 i = blockIdx.x * (i64)(blockDim.x / 32) + threadIdx.x / 32;
    if (i >= rows * heads) return;
    float sum = 0;
    for (int d = threadIdx.x % 32; d < V; d += 32)
        sum += widen(o[i * V + d]) * widen(d_o[i / heads * do_stride + i % heads * V + d]);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) delta[i] = sum;
}

extern "C" __global__ void __launch_bounds__(128)
    attention_bwd_q(const T *q, i64 q_stride, const T *k_n, i64 kn_stride, i64 kn_step, const T *k_r, i64 kr_stride,
                    const T *v, i64 v_stride, i64 v_step, const int *from, const T *d_o, i64 do_stride,
                    const float *lse, const float *delta, T *dq, i64 dq_stride, int add, int queries, int keys,
                    int heads, int per_group, float scale) {
    extern __shared__ __align__(16) unsigned char shared[];
    S *qs = (S *)shared, *os = qs + OWN * LK, *tiles = os + OWN * LV;
    Keys in = {k_n, k_r, v, kn_stride, kr_stride, v_stride, kn_step, v_step};
    int i0 = (gridDim.x - 1 - blockIdx.x) * OWN, h = blockIdx.y, b = blockIdx.z, off = keys - queries; // the longest first
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    i64 rows = (i64)b * queries, key_rows = (i64)b * keys;
    fill<DK>(qs, LK, 0, q + h * DK, q_stride, rows + i0, rows + queries, OWN);
    fill<V>(os, LV, 0, d_o + h * V, do_stride, rows + i0, rows + queries, OWN);
    zeros(qs, LK, DK, KP, OWN);
    zeros(os, LV, V, VP, OWN);
    for (int i = 0; i < 2; i++) {
        zeros(tiles + i * TILE, LK, DK, KP, KEYS);
        zeros(tiles + i * TILE + KEYS * LK, LV, V, VP, KEYS);
    }
    int mine[2], first[2];
    float total[2], by[2], acc[KP / 8][4] = {};
    for (int r = 0; r < 2; r++) {
        mine[r] = i0 + 16 * warp + g + 8 * r;
        bool there = mine[r] < queries;
        first[r] = there ? from[rows + mine[r]] : keys;
        total[r] = there ? lse[(rows + mine[r]) * heads + h] : 0.f;
        by[r] = there ? delta[(rows + mine[r]) * heads + h] : 0.f;
    }
    int end = min(i0 + OWN, queries) + off, begin = from[rows + i0], latest = from[rows + min(i0 + OWN, queries) - 1];
    auto load = [&](int j0) {
        S *to = tiles + (j0 - begin) / KEYS % 2 * TILE;
        if (j0 < end) fill_keys(to, to + KEYS * LK, in, h / per_group, key_rows + j0, key_rows + end, KEYS);
    };
    load(begin);
    for (int j0 = begin; j0 < end; j0 += KEYS) {
        const S *ks = tiles + (j0 - begin) / KEYS % 2 * TILE, *vs = ks + KEYS * LK;
        bool whole = j0 >= latest && j0 + KEYS - 1 <= i0 + off && i0 + OWN <= queries;
        arrived();
        load(j0 + KEYS);
        float s[1][KEYS / 8][4] = {}, dp[1][KEYS / 8][4] = {};
        product<S, PASSES>(s, Rows<S>{qs, LK}, 16 * warp, Rows<S>{ks, LK}, 0, KP);
        product<S, PASSES>(dp, Rows<S>{os, LV}, 16 * warp, Rows<S>{vs, LV}, 0, VP);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                int j = j0 + 8 * n + 2 * t + c % 2, r = c / 2;
                bool seen = whole || (j >= first[r] && j <= mine[r] + off);
                float p = seen ? exponential<T>(s[0][n][c] * scale - total[r]) : 0.f;
                s[0][n][c] = scale * p * (dp[0][n][c] - by[r]);
            }
        product_of<S, PASSES>(acc, s[0], Cols<S>{ks, LK}, 0);
    }
#pragma unroll
    for (int n = 0; n < KP / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int d = 8 * n + 2 * t + c % 2;
            if (mine[c / 2] < queries && d < DK) put(dq + (rows + mine[c / 2]) * dq_stride + h * DK + d, acc[n][c], add);
        }
}

extern "C" __global__ void __launch_bounds__(128)
    attention_bwd_kv(const T *q, i64 q_stride, const T *k_n, i64 kn_stride, i64 kn_step, const T *k_r, i64 kr_stride,
                     const T *v, i64 v_stride, i64 v_step, const int *from, const T *d_o, i64 do_stride,
                     const float *lse, const float *delta, T *dk_n, i64 dkn_stride, T *dv, i64 dv_stride, int add,
                     T *dk_r, i64 dkr_stride, int add_r, int queries, int keys, int heads, int per_group,
                     float scale) {
    extern __shared__ __align__(16) unsigned char shared[];
    S *ks = (S *)shared, *vs = ks + OWN * LK, *tiles = vs + OWN * LV;
    __shared__ float totals[2][QUERIES], bys[2][QUERIES];
    __shared__ int firsts[2][QUERIES];
    Keys in = {k_n, k_r, v, kn_stride, kr_stride, v_stride, kn_step, v_step};
    int j0 = blockIdx.x * OWN, group = blockIdx.y, b = blockIdx.z, off = keys - queries;
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    i64 rows = (i64)b * queries, key_rows = (i64)b * keys;
    fill_keys(ks, vs, in, group, key_rows + j0, key_rows + keys, OWN);
    zeros(ks, LK, DK, KP, OWN);
    zeros(vs, LV, V, VP, OWN);
    for (int i = 0; i < 2; i++) {
        zeros(tiles + i * QUERIES * (LK + LV), LK, DK, KP, QUERIES);
        zeros(tiles + i * QUERIES * (LK + LV) + QUERIES * LK, LV, V, VP, QUERIES);
    }
    float of_k[KP / 8][4] = {}, of_v[VP / 8][4] = {};
    // Documents begin ever later: once one begins past these keys, so do all that follow. The tiles of queries before that,
    // for each head in turn.
    int begin = max(j0 - off, 0), low = begin, high = queries;
    while (low < high) {
        int middle = (low + high) / 2;
        if (from[rows + middle] < j0 + OWN) low = middle + 1;
        else high = middle;
    }
    int across = (low - begin + QUERIES - 1) / QUERIES, steps = across * per_group;
    auto load = [&](int step) {
        if (step >= steps) return;
        int h = group * per_group + step / across, i0 = begin + step % across * QUERIES;
        S *qs = tiles + step % 2 * QUERIES * (LK + LV), *os = qs + QUERIES * LK;
        fill<DK>(qs, LK, 0, q + h * DK, q_stride, rows + i0, rows + queries, QUERIES);
        fill<V>(os, LV, 0, d_o + h * V, do_stride, rows + i0, rows + queries, QUERIES);
        for (int i = threadIdx.x; i < QUERIES; i += blockDim.x) {
            bool there = i0 + i < queries;
            firsts[step % 2][i] = there ? from[rows + i0 + i] : keys;
            totals[step % 2][i] = there ? lse[(rows + i0 + i) * heads + h] : 0.f;
            bys[step % 2][i] = there ? delta[(rows + i0 + i) * heads + h] : 0.f;
        }
    };
    load(0);
    for (int step = 0; step < steps; step++) {
        {
            int i0 = begin + step % across * QUERIES;
            const S *qs = tiles + step % 2 * QUERIES * (LK + LV), *os = qs + QUERIES * LK;
            const float *total = totals[step % 2], *by = bys[step % 2];
            const int *first = firsts[step % 2];
            arrived();
            load(step + 1);
            float s[1][QUERIES / 8][4] = {}, dp[1][QUERIES / 8][4] = {};
            product<S, PASSES>(s, Rows<S>{ks, LK}, 16 * warp, Rows<S>{qs, LK}, 0, KP);
            product<S, PASSES>(dp, Rows<S>{vs, LV}, 16 * warp, Rows<S>{os, LV}, 0, VP);
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    int i = 8 * n + 2 * t + c % 2, j = j0 + 16 * warp + g + c / 2 * 8;
                    bool seen = j >= first[i] && j <= i0 + i + off;
                    float p = seen ? exponential<T>(s[0][n][c] * scale - total[i]) : 0.f;
                    s[0][n][c] = p;
                    dp[0][n][c] = scale * p * (dp[0][n][c] - by[i]);
                }
            product_of<S, PASSES>(of_v, s[0], Cols<S>{os, LV}, 0);
            product_of<S, PASSES>(of_k, dp[0], Cols<S>{qs, LK}, 0);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int j = j0 + 16 * warp + g + 8 * r;
        if (j >= keys) continue;
        i64 row = key_rows + j;
#pragma unroll
        for (int n = 0; n < KP / 8; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int d = 8 * n + 2 * t + c;
                if (d < D && dk_n) put(dk_n + row * dkn_stride + group * D + d, of_k[n][2 * r + c], add);
                if (d >= D && d < DK && dk_r) put(dk_r + row * dkr_stride + group * R + d - D, of_k[n][2 * r + c], add_r);
            }
#pragma unroll
        for (int n = 0; n < VP / 8; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int d = 8 * n + 2 * t + c;
                if (d < V && dv) put(dv + row * dv_stride + group * V + d, of_v[n][2 * r + c], add);
            }
    }
}
