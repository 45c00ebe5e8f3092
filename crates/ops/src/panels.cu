// Groups of rows with a matrix each, in bf16: tiles of 128 x 128 over steps of 32, four of them in flight. TC: C's type. MODE
// and the transposes are those of matmul.cu; here every row begins at a multiple of 16 bytes, and so do groups of eight of
// its elements that are there together.

#define BM 128
#define BN 128
#define BK 32
#define STAGES 4
// Rows of a tile in shared memory: [128][BK] where k lies side by side, else [BK][128]; eight more elements keep rows out of
// each other's banks.
#define LA (A_T ? BM + 8 : BK + 8)
#define LB (B_T ? BK + 8 : BN + 8)
#define SIZE_A (A_T ? BK * LA : BM * LA)
#define SIZE_B (B_T ? BN * LB : BK * LB)

struct __align__(2 * sizeof(TC)) Two {
    TC x[2];
};

extern __shared__ __align__(16) unsigned char memory[];

// ROWS x COLS of a matrix from (r0, c0) on; what lies past r_end or c_end is zero.
template <int ROWS, int COLS, int LD>
DEVICE void fetch(bf16 *to, const bf16 *from, i64 stride, i64 r0, i64 r_end, i64 c0, i64 c_end) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * COLS / 8; i += 256) {
        int r = i / (COLS / 8), c = i % (COLS / 8) * 8;
        bool there = r0 + r < r_end && c0 + c < c_end;
        const bf16 *p = there ? from + (r0 + r) * stride + c0 + c : from;
        unsigned at = (unsigned)__cvta_generic_to_shared(to + r * LD + c);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(p), "r"(there ? 16 : 0) : "memory");
    }
}

extern "C" __global__ void __launch_bounds__(256, 2)
    panels(const bf16 *a, i64 a_stride, const bf16 *b, i64 b_stride, TC *c, i64 c_stride, int add, i64 m, i64 n, i64 k,
           const int *offsets, i64 groups, i64 matrix) {
    bf16 *stage = (bf16 *)memory;
    i64 n0 = blockIdx.x * (i64)BN, m0 = blockIdx.y * (i64)BM, m_end = m, k0 = 0, k_end = k;
    if (MODE == 1) {
        i64 tile = blockIdx.y, e = 0;
        for (; e < groups; e++) {
            i64 tiles = (offsets[e + 1] - offsets[e] + BM - 1) / BM;
            if (tile < tiles) break;
            tile -= tiles;
        }
        if (e == groups) return;
        m0 = offsets[e] + tile * BM;
        m_end = offsets[e + 1];
        b += e * matrix;
    } else {
        i64 e = blockIdx.z;
        k0 = offsets[e];
        k_end = offsets[e + 1];
        c += e * matrix;
    }
    auto load = [&](i64 step) {
        i64 at = k0 + step * BK;
        bf16 *as = stage + step % STAGES * (SIZE_A + SIZE_B), *bs = as + SIZE_A;
        if (at < k_end) {
            if (A_T) fetch<BK, BM, LA>(as, a, a_stride, at, k_end, m0, m_end);
            else fetch<BM, BK, LA>(as, a, a_stride, m0, m_end, at, k_end);
            if (B_T) fetch<BN, BK, LB>(bs, b, b_stride, n0, n, at, k_end);
            else fetch<BK, BN, LB>(bs, b, b_stride, at, k_end, n0, n);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    int warp = threadIdx.x / 32, wm = warp / 4 * 64, wn = warp % 4 * 32;
    float acc[4][4][4] = {};
    i64 steps = (k_end - k0 + BK - 1) / BK;
    for (int s = 0; s < STAGES - 1; s++) load(s);
    for (i64 s = 0; s < steps; s++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        load(s + STAGES - 1);
        const bf16 *as = stage + s % STAGES * (SIZE_A + SIZE_B), *bs = as + SIZE_A;
        if (A_T && B_T) product<bf16, 1>(acc, Cols<bf16>{as, LA}, wm, Rows<bf16>{bs, LB}, wn, BK);
        else if (A_T) product<bf16, 1>(acc, Cols<bf16>{as, LA}, wm, Cols<bf16>{bs, LB}, wn, BK);
        else if (B_T) product<bf16, 1>(acc, Rows<bf16>{as, LA}, wm, Rows<bf16>{bs, LB}, wn, BK);
        else product<bf16, 1>(acc, Rows<bf16>{as, LA}, wm, Cols<bf16>{bs, LB}, wn, BK);
    }
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    bool even = (((i64)c | c_stride * (i64)sizeof(TC)) & (2 * sizeof(TC) - 1)) == 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int r = 0; r < 4; r += 2) {
                i64 row = m0 + wm + 16 * i + g + r / 2 * 8, col = n0 + wn + 8 * j + 2 * t;
                if (row >= m_end || col >= n) continue;
                TC *to = c + row * c_stride + col;
                if (even && col + 1 < n) {
                    Two two = {};
                    if (add) two = *(const Two *)to;
                    put(two.x, acc[i][j][r], add);
                    put(two.x + 1, acc[i][j][r + 1], add);
                    *(Two *)to = two;
                } else {
                    put(to, acc[i][j][r], add);
                    if (col + 1 < n) put(to + 1, acc[i][j][r + 1], add);
                }
            }
}
