// The chunk form of the gated delta rule (MATH 1.4 to 1.6), C = 64 tokens a chunk. S: float (products 3xTF32) or bf16, what
// qkv, o and every operand of a product are; sums, states in registers, gates and the triangular inverse are float, sums of
// log decays double. DK: K padded to 16, 32, 64 or 128; BV, BW: columns of V that a block holds at once; STAGES: chunks that
// the sequential kernels have in shared memory.
//
// prepare (parallel over chunks):  T = (I + A)^-1,  U = T diag(b) V,  W = T diag(b e^b) K,  K~, e^b Q^, P, keep = e^{b_C}
// states (sequential):             V' = U - W H,  H <- keep H + K~^T V';  the state before every chunk is stored
// output (parallel):               O = e^b Q^ H + P V'
// bwd_states (sequential):         dV' = P^T dO + K~ dH,  dH <- keep dH + (e^b Q^)^T dO - W^T dV'
// bwd_grads (parallel):            everything else, as backward.rs has it
//
// What lies between kernels is chunk by chunk, [B H chunks][64][DK | DVP], rows past the end of a row of tokens zero, so
// that only tensors of the caller need bounds.

#define C 64
#define LK (DK + 8)
#define LC (C + 8)
#define LV (BV + 8)
#define LW (BW + 8)
#define LA (C + 4)
#define FLOOR -1000.

extern __shared__ __align__(16) unsigned char memory[];

struct __align__(16) Gates {
    double sum[C];
    float beta[C], in[C], out[C];
    int first[C];
    float keep, unused[3];
};
static_assert(sizeof(Gates) == 1552, "as cuda.rs counts it");

// Which chunk this block works on.
struct Place {
    i64 b, h, c, from, row, at;
    int n;
    DEVICE Place(i64 len, i64 heads, i64 chunks) {
        c = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
        from = c * C;
        n = (int)min((i64)C, len - from);
        row = b * len + from;
        at = (b * heads + h) * chunks + c;
    }
};

// Gates of a chunk, by one warp; the caller synchronises.
DEVICE void read_gates(Gates &s, const Place &p, const float *g, i64 g_stride, const float *beta, i64 beta_stride,
                       const int *start, const int *flags) {
    if (threadIdx.x >= 32) return;
    int lane = threadIdx.x;
    double x[2], pair = 0;
    bool carried[2];
    for (int r = 0; r < 2; r++) {
        int i = 2 * lane + r;
        bool own = i < p.n;
        float gate = own ? g[(p.row + i) * g_stride + p.h] : 0.f;
        x[r] = gate < (float)FLOOR ? FLOOR : (double)gate; // a NaN stays one
        pair += x[r];
        s.beta[i] = own ? beta[(p.row + i) * beta_stride + p.h] : 0.f;
        i64 begins = own ? start[p.row + i] : p.from + i;
        s.first[i] = (int)max(begins - p.from, (i64)0);
        carried[r] = own && (begins < p.from || (flags[p.row + i] & 1));
    }
    double total = pair;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        double before = __shfl_up_sync(~0u, total, o);
        if (lane >= o) total += before;
    }
    double before = __shfl_up_sync(~0u, total, 1);
    double sum = lane == 0 ? 0. : before;
    for (int r = 0; r < 2; r++) {
        sum += x[r];
        s.sum[2 * lane + r] = sum;
        s.in[2 * lane + r] = carried[r] ? expf((float)sum) : 0.f;
    }
    __syncwarp();
    int last = p.n - 1, ending = s.first[last];
    for (int r = 0; r < 2; r++) {
        int i = 2 * lane + r;
        s.out[i] = i >= ending && i < p.n ? expf((float)(s.sum[last] - s.sum[i])) : 0.f;
        if (i == last) s.keep = carried[r] ? expf((float)s.sum[last]) : 0.f;
    }
}

// Decay from token j to token i of one document.
DEVICE float decay(const Gates &s, int i, int j) {
    return j <= i && j >= s.first[i] ? expf((float)(s.sum[i] - s.sum[j])) : 0.f;
}

// Rows of q or k, normalised and times `scale`, zero past n and past dk. `norm` gets 1 / |x|.
DEVICE void unit_rows(S *to, float *norm, const S *from, i64 stride, int n, i64 dk, int l2norm, float scale) {
    constexpr int per = 16 / sizeof(S), lanes = DK / per, at_once = 32 / lanes;
    int lane = threadIdx.x % 32;
    if (dk == DK && at16(from, stride * sizeof(S))) {
        // A few lanes a row, and all rows of a warp asked for before the first is used.
        constexpr int most = C / 4 / at_once;
        int first = threadIdx.x / 32 * at_once + lane / lanes, step = blockDim.x / 32 * at_once;
        Pack<S> rows[most];
#pragma unroll
        for (int q = 0; q < most; q++) {
            int i = first + q * step;
            rows[q] = Pack<S>{};
            if (i < n) rows[q] = *(const Pack<S> *)(from + i * stride + lane % lanes * per);
        }
#pragma unroll
        for (int q = 0; q < most; q++) {
            int i = first + q * step;
            float sum = 0;
#pragma unroll
            for (int j = 0; j < per; j++) sum += widen(rows[q].x[j]) * widen(rows[q].x[j]);
#pragma unroll
            for (int o = lanes / 2; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
            float r = l2norm ? 1.f / sqrtf(sum + 1e-6f) : 1.f;
#pragma unroll
            for (int j = 0; j < per; j++) rows[q].x[j] = narrow<S>(widen(rows[q].x[j]) * (r * scale));
            if (i < C) {
                *(Pack<S> *)(to + i * LK + lane % lanes * per) = rows[q];
                if (norm && lane % lanes == 0) norm[i] = r;
            }
        }
        return;
    }
    for (int i = threadIdx.x / 32; i < C; i += blockDim.x / 32) {
        float x[(DK + 31) / 32], sum = 0;
#pragma unroll
        for (int q = 0; q < (DK + 31) / 32; q++) {
            int j = lane + 32 * q;
            x[q] = i < n && j < dk ? widen(from[i * stride + j]) : 0.f;
            sum += x[q] * x[q];
        }
        float r = l2norm ? 1.f / sqrtf(warp_sum(sum) + 1e-6f) : 1.f;
#pragma unroll
        for (int q = 0; q < (DK + 31) / 32; q++) {
            if (lane + 32 * q < DK) to[i * LK + lane + 32 * q] = narrow<S>(x[q] * (r * scale));
        }
        if (norm && lane == 0) norm[i] = r;
    }
}

DEVICE void copy16(void *to, const void *from) {
    unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}
DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// A tile of memory between kernels: whole, and at multiples of 16 bytes.
template <int ROWS, int COLS, int LD> DEVICE void tile_async(S *to, const S *from, i64 stride) {
    constexpr int per = 16 / sizeof(S), across = COLS / per;
    for (int i = threadIdx.x; i < ROWS * across; i += blockDim.x) {
        copy16(to + i / across * LD + i % across * per, from + i / across * stride + i % across * per);
    }
}

// A tile of a caller's tensor: n rows and `cols` columns are there, the rest is zero.
template <int COLS, int LD> DEVICE void tile(S *to, const S *from, i64 stride, int n, i64 cols) {
    constexpr int per = 16 / sizeof(S), across = COLS / per;
    if (cols >= COLS && ((i64)from | stride * (i64)sizeof(S)) % 16 == 0) {
#pragma unroll 4
        for (int i = threadIdx.x; i < C * across; i += blockDim.x) {
            int r = i / across;
            uint4 x = r < n ? *(const uint4 *)(from + r * stride + i % across * per) : uint4{0, 0, 0, 0};
            *(uint4 *)(to + r * LD + i % across * per) = x;
        }
        return;
    }
    for (int i = threadIdx.x; i < C * COLS; i += blockDim.x) {
        int r = i / COLS, c = i % COLS;
        to[r * LD + c] = r < n && c < cols ? from[r * stride + c] : S{};
    }
}

// Two neighbours of an accumulator.
DEVICE void store2(float *to, float x, float y) { *(float2 *)to = float2{x, y}; }
DEVICE void store2(bf16 *to, float x, float y) { *(unsigned *)to = pack(x, y); }

// Runs `f(row, col, a, b)` for a warp's pairs of neighbours of an accumulator of 16 rows from `m`.
template <int NT, class F> DEVICE void pairs(const float (&acc)[NT][4], int m, F f) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < NT; j++) {
        f(m + g, 8 * j + 2 * t, acc[j][0], acc[j][1]);
        f(m + g + 8, 8 * j + 2 * t, acc[j][2], acc[j][3]);
    }
}

template <int MT, int NT> DEVICE void clear(float (&acc)[MT][NT][4]) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int r = 0; r < 4; r++) acc[i][j][r] = 0;
}

// T = (I + A)^-1 from A transposed, one column a thread: no column waits for another. Blocks of 16 rows: what lies above
// first, then forward substitution inside the block.
DEVICE void invert(float *t, const float *at) {
    if (threadIdx.x >= C) return;
    int j = threadIdx.x;
    for (int i = 0; i < j / 16 * 16; i++) t[i * LC + j] = 0;
    for (int top = j / 16 * 16; top < C; top += 16) {
        float x[16];
#pragma unroll
        for (int r = 0; r < 16; r++) x[r] = top + r == j ? 1.f : 0.f;
        for (int k = j / 16 * 16; k < top; k++) {
            float by = t[k * LC + j];
            const float4 *a = (const float4 *)(at + k * LA + top);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                float4 v = a[r];
                x[4 * r] -= v.x * by, x[4 * r + 1] -= v.y * by, x[4 * r + 2] -= v.z * by, x[4 * r + 3] -= v.w * by;
            }
        }
#pragma unroll
        for (int r = 0; r < 16; r++) {
#pragma unroll
            for (int below = r + 1; below < 16; below++) x[below] -= at[(top + r) * LA + top + below] * x[r];
            t[(top + r) * LC + j] = x[r];
        }
    }
}

// 128 threads. `inverse` may be null: the forward does not need it.
extern "C" __global__ void __launch_bounds__(128)
    delta_rule_prepare(const S *qkv, i64 stride, const float *g, i64 g_stride, const float *beta, i64 beta_stride,
                       const int *start, const int *flags, S *w_out, S *u_out, S *kd_out, S *qe_out, S *p_out, S *inverse,
                       float *keep, i64 len, i64 heads, i64 dk, i64 dv, i64 dvp, i64 chunks, int l2norm, float scale) {
    Gates &s = *(Gates *)memory;
    S *kk = (S *)(memory + sizeof(Gates)), *qq = kk + C * LK, *tb = qq + C * LK, *vt = tb + C * LC;
    float *at = (float *)(vt + C * LV), *t = at + C * LA;
    Place p(len, heads, chunks);
    int m = threadIdx.x / 32 * 16;
    read_gates(s, p, g, g_stride, beta, beta_stride, start, flags);
    const S *row = qkv + p.row * stride;
    unit_rows(qq, 0, row + p.h * dk, stride, p.n, dk, l2norm, scale);
    unit_rows(kk, 0, row + (heads + p.h) * dk, stride, p.n, dk, l2norm, 1.f);
    __syncthreads();
    if (threadIdx.x == 0) keep[p.at] = s.keep;
#pragma unroll 2
    for (int i = threadIdx.x * Pack<S>::N; i < C * DK; i += blockDim.x * Pack<S>::N) {
        int r = i / DK, c = i % DK;
        Pack<S> k = *(const Pack<S> *)(kk + r * LK + c), q = *(const Pack<S> *)(qq + r * LK + c);
#pragma unroll
        for (int j = 0; j < Pack<S>::N; j++) {
            k.x[j] = narrow<S>(s.out[r] * widen(k.x[j]));
            q.x[j] = narrow<S>(s.in[r] * widen(q.x[j]));
        }
        *(Pack<S> *)(kd_out + p.at * C * DK + i) = k;
        *(Pack<S> *)(qe_out + p.at * C * DK + i) = q;
    }
    {
        float acc[1][C / 8][4];
        clear(acc);
        product<S, 3>(acc, Rows<S>{kk, LK}, m, Rows<S>{kk, LK}, 0, DK);
        pairs(acc[0], m, [&](int i, int j, float x, float y) {
            at[j * LA + i] = j < i ? s.beta[i] * decay(s, i, j) * x : 0.f;
            at[(j + 1) * LA + i] = j + 1 < i ? s.beta[i] * decay(s, i, j + 1) * y : 0.f;
        });
        clear(acc);
        product<S, 3>(acc, Rows<S>{qq, LK}, m, Rows<S>{kk, LK}, 0, DK);
        pairs(acc[0], m, [&](int i, int j, float x, float y) {
            store2(p_out + (p.at * C + i) * C + j, x * decay(s, i, j), y * decay(s, i, j + 1));
        });
    }
    __syncthreads();
    invert(t, at);
    __syncthreads();
    // The factors go into T, which is rounded anyway, and not into K and V, which would be rounded once more.
#pragma unroll 4
    for (int i = threadIdx.x * 2; i < C * C; i += blockDim.x * 2) {
        int r = i / C, c = i % C;
        float2 x = *(const float2 *)(t + r * LC + c);
        if (inverse) store2(inverse + p.at * C * C + i, x.x, x.y);
        store2(tb + r * LC + c, x.x * s.beta[c] * s.in[c], x.y * s.beta[c + 1] * s.in[c + 1]);
    }
    __syncthreads();
    {
        float acc[1][DK / 8][4];
        clear(acc);
        product<S, 3>(acc, Rows<S>{tb, LC}, m, Cols<S>{kk, LK}, 0, C);
        pairs(acc[0], m, [&](int i, int j, float x, float y) { store2(w_out + (p.at * C + i) * DK + j, x, y); });
    }
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x * 2; i < C * C; i += blockDim.x * 2) {
        int r = i / C, c = i % C;
        float2 x = *(const float2 *)(t + r * LC + c);
        store2(tb + r * LC + c, x.x * s.beta[c], x.y * s.beta[c + 1]);
    }
    for (i64 v = 0; v < dvp; v += BV) {
        tile<BV, LV>(vt, row + 2 * heads * dk + p.h * dv + v, stride, p.n, dv - v);
        __syncthreads();
        float acc[1][BV / 8][4];
        clear(acc);
        product<S, 3>(acc, Rows<S>{tb, LC}, m, Cols<S>{vt, LV}, 0, C);
        pairs(acc[0], m, [&](int i, int j, float x, float y) { store2(u_out + (p.at * C + i) * dvp + v + j, x, y); });
        __syncthreads();
    }
}

// Rows of the state that a warp holds: 16 MT from 16 MT warp, where there are any.
#define MT (DK > 64 ? DK / 64 : 1)

// A state's tile of float accumulators into shared memory and, with `to`, into memory between kernels.
DEVICE void store_state(S *shared, S *to, const float (&h)[MT][BW / 8][4], int k0, i64 dvp) {
#pragma unroll
    for (int q = 0; q < MT; q++) {
        pairs(h[q], k0 + 16 * q, [&](int k, int j, float x, float y) {
            store2(shared + k * LW + j, x, y);
            if (to) store2(to + k * dvp + j, x, y);
        });
    }
}

DEVICE void scale_state(float (&h)[MT][BW / 8][4], float by) {
#pragma unroll
    for (int q = 0; q < MT; q++)
#pragma unroll
        for (int j = 0; j < BW / 8; j++)
#pragma unroll
            for (int r = 0; r < 4; r++) h[q][j][r] *= by;
}

// The caller's states [B, H, K, V] in float.
DEVICE void load_state(float (&h)[MT][BW / 8][4], const float *from, int k0, i64 v0, i64 dk, i64 dv) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int q = 0; q < MT; q++)
#pragma unroll
        for (int j = 0; j < BW / 8; j++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                i64 k = k0 + 16 * q + g + r / 2 * 8, v = v0 + 8 * j + 2 * t + r % 2;
                h[q][j][r] = from && k < dk && v < dv ? from[k * dv + v] : 0.f;
            }
}
DEVICE void write_state(float *to, const float (&h)[MT][BW / 8][4], int k0, i64 v0, i64 dk, i64 dv, bool zero) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int q = 0; q < MT; q++)
#pragma unroll
        for (int j = 0; j < BW / 8; j++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                i64 k = k0 + 16 * q + g + r / 2 * 8, v = v0 + 8 * j + 2 * t + r % 2;
                if (k < dk && v < dv) to[k * dv + v] = zero ? 0.f : h[q][j][r];
            }
}

// 128 threads a tile of BW columns; the chunks of one row and head in order. h0 may be null, and is read only where the row
// is continued.
extern "C" __global__ void __launch_bounds__(128)
    delta_rule_states(const S *w, const S *u, const S *kd, const float *keep, const float *h0, const int *flags,
                      S *states, S *v_new, float *h_t, i64 len, i64 heads, i64 dk, i64 dv, i64 dvp, i64 chunks) {
    constexpr int part = 2 * C * LK + C * LW;
    S *stage = (S *)memory, *hs = stage + STAGES * part, *vs = hs + DK * LW;
    i64 v0 = blockIdx.x * (i64)BW, bh = blockIdx.z * heads + blockIdx.y;
    int warp = threadIdx.x / 32, m = 16 * warp, k0 = 16 * MT * warp;
    bool holds = k0 < DK, continued = h0 && (flags[blockIdx.z * len] & 1);
    float h[MT][BW / 8][4];
    load_state(h, continued ? h0 + bh * dk * dv : 0, k0, v0, dk, dv);
    auto load = [&](i64 c) {
        if (c < chunks) {
            S *to = stage + c % STAGES * part;
            i64 at = (bh * chunks + c) * C;
            tile_async<C, DK, LK>(to, w + at * DK, DK);
            tile_async<C, DK, LK>(to + C * LK, kd + at * DK, DK);
            tile_async<C, BW, LW>(to + 2 * C * LK, u + at * dvp + v0, dvp);
        }
        commit();
    };
    for (int c = 0; c < STAGES; c++) load(c);
    for (i64 c = 0; c < chunks; c++) {
        const S *ws = stage + c % STAGES * part, *ks = ws + C * LK, *us = ks + C * LK;
        i64 at = bh * chunks + c;
        if (holds) store_state(hs, states + at * DK * dvp + v0, h, k0, dvp);
        wait<STAGES - 1>();
        __syncthreads();
        float acc[1][BW / 8][4];
        clear(acc);
        product<S, 3>(acc, Rows<S>{ws, LK}, m, Cols<S>{hs, LW}, 0, DK);
        pairs(acc[0], m, [&](int i, int j, float x, float y) {
            float a = widen(us[i * LW + j]) - x, b = widen(us[i * LW + j + 1]) - y;
            store2(vs + i * LW + j, a, b);
            store2(v_new + (at * C + i) * dvp + v0 + j, a, b);
        });
        scale_state(h, keep[at]);
        __syncthreads();
        if (holds) product<S, 3>(h, Cols<S>{ks, LK}, k0, Cols<S>{vs, LW}, 0, C);
        __syncthreads();
        load(c + STAGES);
    }
    if (holds) write_state(h_t + bh * dk * dv, h, k0, v0, dk, dv, false);
}

// 128 threads a chunk.
extern "C" __global__ void __launch_bounds__(128)
    delta_rule_output(const S *qe, const S *p_in, const S *states, const S *v_new, S *o, i64 o_stride, i64 len, i64 heads,
                      i64 dv, i64 dvp, i64 chunks) {
    S *qs = (S *)memory, *ps = qs + C * LK, *hs = ps + C * LC, *vs = hs + DK * LV;
    Place p(len, heads, chunks);
    int m = threadIdx.x / 32 * 16;
    tile_async<C, DK, LK>(qs, qe + p.at * C * DK, DK);
    tile_async<C, C, LC>(ps, p_in + p.at * C * C, C);
    for (i64 v = 0; v < dvp; v += BV) {
        tile_async<DK, BV, LV>(hs, states + p.at * DK * dvp + v, dvp);
        tile_async<C, BV, LV>(vs, v_new + p.at * C * dvp + v, dvp);
        commit();
        wait<0>();
        __syncthreads();
        float acc[1][BV / 8][4];
        clear(acc);
        product<S, 3>(acc, Rows<S>{qs, LK}, m, Cols<S>{hs, LV}, 0, DK);
        product<S, 3>(acc, Rows<S>{ps, LC}, m, Cols<S>{vs, LV}, 0, C);
        pairs(acc[0], m, [&](int i, int j, float x, float y) {
            S *to = o + (p.row + i) * o_stride + p.h * dv + v + j;
            if (i < p.n && v + j < dv) *to = narrow<S>(x);
            if (i < p.n && v + j + 1 < dv) to[1] = narrow<S>(y);
        });
        __syncthreads();
    }
}

// 128 threads a tile of BW columns; the chunks of one row and head from last to first. d_ht may be null.
extern "C" __global__ void __launch_bounds__(128)
    delta_rule_bwd_states(const S *w, const S *kd, const S *qe, const S *p_in, const float *keep, const S *d_o,
                          i64 do_stride, const float *d_ht, const int *flags, S *d_states, S *d_vnew, float *d_h0, i64 len,
                          i64 heads, i64 dk, i64 dv, i64 dvp, i64 chunks) {
    constexpr int part = 3 * C * LK + C * LC + C * LW;
    S *stage = (S *)memory, *hs = stage + STAGES * part, *vs = hs + DK * LW;
    i64 v0 = blockIdx.x * (i64)BW, h = blockIdx.y, b = blockIdx.z, bh = b * heads + h;
    int warp = threadIdx.x / 32, m = 16 * warp, k0 = 16 * MT * warp;
    bool holds = k0 < DK;
    float dh[MT][BW / 8][4];
    load_state(dh, d_ht ? d_ht + bh * dk * dv : 0, k0, v0, dk, dv);
    auto load = [&](i64 c) {
        if (c >= 0) {
            S *to = stage + c % STAGES * part;
            i64 at = (bh * chunks + c) * C;
            tile_async<C, DK, LK>(to, w + at * DK, DK);
            tile_async<C, DK, LK>(to + C * LK, kd + at * DK, DK);
            tile_async<C, DK, LK>(to + 2 * C * LK, qe + at * DK, DK);
            tile_async<C, C, LC>(to + 3 * C * LK, p_in + at * C, C);
            const S *from = d_o + (b * len + c * C) * do_stride + h * dv + v0;
            tile<BW, LW>(to + 3 * C * LK + C * LC, from, do_stride, (int)min((i64)C, len - c * C), dv - v0);
        }
        commit();
    };
    for (int c = 0; c < STAGES; c++) load(chunks - 1 - c);
    for (i64 c = chunks - 1; c >= 0; c--) {
        const S *ws = stage + c % STAGES * part, *ks = ws + C * LK, *qs = ks + C * LK, *ps = qs + C * LK;
        const S *os = ps + C * LC;
        i64 at = bh * chunks + c;
        if (holds) store_state(hs, d_states + at * DK * dvp + v0, dh, k0, dvp);
        wait<STAGES - 1>();
        __syncthreads();
        float acc[1][BW / 8][4];
        clear(acc);
        product<S, 3>(acc, Cols<S>{ps, LC}, m, Cols<S>{os, LW}, 0, C);
        product<S, 3>(acc, Rows<S>{ks, LK}, m, Cols<S>{hs, LW}, 0, DK);
        pairs(acc[0], m, [&](int i, int j, float x, float y) {
            store2(vs + i * LW + j, -x, -y);
            store2(d_vnew + (at * C + i) * dvp + v0 + j, x, y);
        });
        scale_state(dh, keep[at]);
        __syncthreads();
        if (holds) {
            product<S, 3>(dh, Cols<S>{qs, LK}, k0, Cols<S>{os, LW}, 0, C);
            product<S, 3>(dh, Cols<S>{ws, LK}, k0, Cols<S>{vs, LW}, 0, C);
        }
        __syncthreads();
        load(c - STAGES);
    }
    // A row that begins anew has no gradient for its initial state.
    if (holds && d_h0) write_state(d_h0 + bh * dk * dv, dh, k0, v0, dk, dv, !(flags[b * len] & 1));
}

// The sum over the four lanes that share a row of an accumulator, in all of them.
DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// 256 threads a chunk: warps 0 to 3 have what belongs to k, 4 to 7 what belongs to q and v, 16 tokens each. Any of d_qkv,
// d_g and d_beta may be null.
extern "C" __global__ void __launch_bounds__(256)
    delta_rule_bwd_grads(const S *qkv, i64 stride, const float *g, i64 g_stride, const float *beta, i64 beta_stride,
                         const int *start, const int *flags, const S *w, const S *u, const S *inverse, const S *states,
                         const S *d_states, const S *d_vnew, const S *d_o, i64 do_stride, S *d_qkv, i64 dqkv_stride,
                         int add_qkv, float *d_g, int add_g, float *d_beta, int add_beta, i64 len, i64 heads, i64 dk,
                         i64 dv, i64 dvp, i64 chunks, int l2norm, float scale) {
    Gates &s = *(Gates *)memory;
    float *rows = (float *)(memory + sizeof(Gates));
    float *k_norm = rows, *q_norm = rows + C, *of_v = rows + 2 * C, *key = rows + 3 * C, *query = rows + 4 * C;
    float *kappa = rows + 5 * C, *inner = rows + 6 * C, *of_pairs = rows + 7 * C, *parts = rows + 8 * C; // 40 of these
    S *kk = (S *)(rows + 8 * C + 40), *qq = kk + C * LK, *ws = qq + C * LK, *ts = ws + C * LK, *hs = ts + C * LC;
    S *ds = hs + DK * LV, *os = ds + DK * LV, *vn = os + C * LV, *dvs = vn + C * LV, *vt = dvs + C * LV;
    // Over the tiles of V, once those are done with.
    float *e = (float *)os;
    S *pn = (S *)(e + C * (C + 1)), *pr = pn + C * LC;
    Place p(len, heads, chunks);
    int warp = threadIdx.x / 32, m = warp % 4 * 16, row0 = m + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    bool first = warp < 4;
    const S *row = qkv + p.row * stride;
    const S *q_at = row + p.h * dk, *k_at = row + (heads + p.h) * dk, *v_at = row + 2 * heads * dk + p.h * dv;
    tile_async<C, DK, LK>(ws, w + p.at * C * DK, DK);
    tile_async<C, C, LC>(ts, inverse + p.at * C * C, C);
    read_gates(s, p, g, g_stride, beta, beta_stride, start, flags);
    unit_rows(qq, q_norm, q_at, stride, p.n, dk, l2norm, scale);
    unit_rows(kk, k_norm, k_at, stride, p.n, dk, l2norm, 1.f);
    // Of the keys' side -dK_b and -dA, of the queries' X and dP, and Y: sums over all of V.
    float kx[1][DK / 8][4], pair[1][C / 8][4], y[1][DK / 8][4], through = 0, with_v[2] = {0, 0};
    clear(kx);
    clear(pair);
    clear(y);
    for (i64 v = 0; v < dvp; v += BV) {
        tile_async<DK, BV, LV>(hs, states + p.at * DK * dvp + v, dvp);
        tile_async<DK, BV, LV>(ds, d_states + p.at * DK * dvp + v, dvp);
        tile_async<C, BV, LV>(vn, u + p.at * C * dvp + v, dvp);
        tile_async<C, BV, LV>(dvs, d_vnew + p.at * C * dvp + v, dvp);
        commit();
        tile<BV, LV>(os, d_o + p.row * do_stride + p.h * dv + v, do_stride, p.n, dv - v);
        tile<BV, LV>(vt, v_at + v, stride, p.n, dv - v);
        wait<0>();
        __syncthreads();
        float acc[1][BV / 8][4];
        clear(acc);
        if (first) {
            // V' = U - W H, element by element in U's place.
            product<S, 3>(acc, Rows<S>{ws, LK}, m, Cols<S>{hs, LV}, 0, DK);
            pairs(acc[0], m, [&](int i, int j, float a, float b) {
                S *at = vn + i * LV + j;
                store2(at, widen(at[0]) - a, widen(at[1]) - b);
            });
        } else {
            product<S, 3>(acc, Cols<S>{ts, LC}, m, Cols<S>{dvs, LV}, 0, C);
        }
        for (int i = threadIdx.x * Pack<S>::N; i < DK * BV; i += blockDim.x * Pack<S>::N) {
            Pack<S> a = *(const Pack<S> *)(hs + i / BV * LV + i % BV), b = *(const Pack<S> *)(ds + i / BV * LV + i % BV);
#pragma unroll
            for (int j = 0; j < Pack<S>::N; j++) through += widen(a.x[j]) * widen(b.x[j]);
        }
        __syncthreads();
        if (!first) {
            pairs(acc[0], m, [&](int i, int j, float a, float b) {
                store2(dvs + i * LV + j, a, b);
                with_v[i != row0] += a * widen(vt[i * LV + j]) + b * widen(vt[i * LV + j + 1]);
                S *to = d_qkv + (p.row + i) * dqkv_stride + 2 * heads * dk + p.h * dv + v + j;
                if (d_qkv && i < p.n && v + j < dv) put(to, s.beta[i] * a, add_qkv);
                if (d_qkv && i < p.n && v + j + 1 < dv) put(to + 1, s.beta[i] * b, add_qkv);
            });
        }
        __syncthreads();
        Rows<S> left{first ? dvs : os, LV};
        product<S, 3>(kx, left, m, Rows<S>{hs, LV}, 0, BV);
        product<S, 3>(pair, left, m, Rows<S>{vn, LV}, 0, BV);
        if (first) product<S, 3>(y, Rows<S>{vn, LV}, m, Rows<S>{ds, LV}, 0, BV);
        __syncthreads();
    }
    through = block_sum(through, parts) * s.keep;

    // E = dA A + dP P; beta N below the diagonal, R with it.
    float local[1][C / 8][4], sum[2] = {0, 0};
    clear(local);
    product<S, 3>(local, Rows<S>{first ? kk : qq, LK}, m, Rows<S>{kk, LK}, 0, DK);
    for (int half = 0; half < 2; half++) {
        if (first == (half == 0)) {
#pragma unroll
            for (int j = 0; j < C / 8; j++)
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    int i = row0 + r / 2 * 8, col = 8 * j + 2 * t + r % 2;
                    float w_ij = decay(s, i, col), x = local[0][j][r] * w_ij, d = pair[0][j][r];
                    if (first) {
                        d = col < i ? d : 0.f;
                        x = col < i ? x : 0.f;
                        sum[r / 2] -= d * x;
                        e[i * (C + 1) + col] = -s.beta[i] * d * x;
                        pn[i * LC + col] = narrow<S>(-s.beta[i] * d * w_ij);
                    } else {
                        d = col <= i ? d : 0.f;
                        e[i * (C + 1) + col] += d * x;
                        pr[i * LC + col] = narrow<S>(d * w_ij);
                    }
                }
        }
        __syncthreads();
    }

    // The pairs' part of dK and dQ^, and each row's own sums.
    float own[1][DK / 8][4], dot[2] = {0, 0}, to_end[2] = {0, 0};
    clear(own);
    if (first) {
        product<S, 3>(own, Rows<S>{pn, LC}, m, Cols<S>{kk, LK}, 0, C);
        product<S, 3>(own, Cols<S>{pn, LC}, m, Cols<S>{kk, LK}, 0, C);
        product<S, 3>(own, Cols<S>{pr, LC}, m, Cols<S>{qq, LK}, 0, C);
    } else {
        product<S, 3>(own, Rows<S>{pr, LC}, m, Cols<S>{kk, LK}, 0, C);
    }
    const S *units = first ? kk : qq;
#pragma unroll
    for (int j = 0; j < DK / 8; j++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            int i = row0 + r / 2 * 8;
            float x = widen(units[i * LK + 8 * j + 2 * t + r % 2]), k = kx[0][j][r];
            dot[r / 2] += k * x;
            if (first) {
                to_end[r / 2] += y[0][j][r] * x;
                own[0][j][r] += s.out[i] * y[0][j][r] - s.beta[i] * s.in[i] * k;
            } else {
                own[0][j][r] += s.in[i] * k;
            }
        }
    for (int r = 0; r < 2; r++) {
        int i = row0 + 8 * r;
        float d = row_sum(dot[r]), x = row_sum(first ? sum[r] : with_v[r]), end = row_sum(to_end[r]);
        if (t != 0) continue;
        if (first) {
            key[i] = -d, of_pairs[i] = x, kappa[i] = s.out[i] * end;
        } else {
            query[i] = d, of_v[i] = x;
        }
    }

    // Through the norm: dx = r (dy - y <y, dy>), y of the caller's numbers and not of their rounded units.
    float by = first ? 1.f : scale, norms[2], along[2] = {0, 0};
    const S *raw = first ? k_at : q_at;
    norms[0] = (first ? k_norm : q_norm)[row0], norms[1] = (first ? k_norm : q_norm)[row0 + 8];
    float x[DK / 8][4];
#pragma unroll
    for (int j = 0; j < DK / 8; j++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            int i = row0 + r / 2 * 8, c = 8 * j + 2 * t + r % 2;
            x[j][r] = i < p.n && c < dk ? widen(raw[i * stride + c]) * norms[r / 2] : 0.f;
            along[r / 2] += x[j][r] * own[0][j][r] * by;
        }
    along[0] = l2norm ? row_sum(along[0]) : 0.f, along[1] = l2norm ? row_sum(along[1]) : 0.f;
    if (d_qkv) {
        S *to = d_qkv + p.row * dqkv_stride + (first ? heads + p.h : p.h) * dk;
#pragma unroll
        for (int j = 0; j < DK / 8; j++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                int i = row0 + r / 2 * 8, c = 8 * j + 2 * t + r % 2;
                float d = norms[r / 2] * (own[0][j][r] * by - x[j][r] * along[r / 2]);
                if (i < p.n && c < dk) put(to + i * dqkv_stride + c, d, add_qkv);
            }
    }
    __syncthreads();

    // dg_t: the gradient through every decay that token t's gate is a factor of.
    int i = threadIdx.x;
    if (i < C) {
        inner[i] = s.in[i] * (s.beta[i] * key[i] + query[i]);
        float below = 0;
        for (int r = C - 1; r > i; r--) {
            below += e[r * (C + 1) + i];
            e[r * (C + 1) + i] = below + kappa[i];
        }
        float d = of_pairs[i] + of_v[i] + s.in[i] * key[i];
        if (d_beta && i < p.n) put(d_beta + (p.row + i) * heads + p.h, d, add_beta);
    }
    __syncthreads();
    if (i < p.n && d_g) {
        float d = 0, later = 0;
        for (int j = 0; j < i; j++) d += e[i * (C + 1) + j];
        for (int r = C - 1; r >= i; r--) later += inner[r];
        put(d_g + (p.row + i) * heads + p.h, d + later + through, add_g);
    }
}
