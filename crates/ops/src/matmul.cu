// C (+)= op(A) op(B) by tiles of 128 x 128: what cuBLASLt does not take (odd strides, mixed types) and groups of rows with a
// matrix each. TA, TB, TC element types; A_T: A is stored [k, m]; B_T: B is stored [n, k]; S what is multiplied. MODE 0: one
// product, blockIdx.z a share of k. 1: group e's rows offsets[e].. of A and C meet matrix e of B. 2: group e's rows of A and
// B, [k, m] and [k, n], make matrix e of C.

#define BM 128
#define BN 128
#define BK 32
#define LD (BK + 8)

DEVICE void to_shared(float *to, float x) { *to = x; }
DEVICE void to_shared(float *to, bf16 x) { *to = widen(x); }
DEVICE void to_shared(bf16 *to, bf16 x) { *to = x; }
DEVICE void to_shared(bf16 *to, float x) { *to = narrow<bf16>(x); }

// 16 elements a thread of a 128 x 32 tile, element (i, k) of the operand at p[i * row + k] or p[k * row + i].
template <bool T_, class E> struct Tile {
    E held[16];
    DEVICE void load(const E *p, i64 row, i64 i0, i64 i_end, i64 k0, i64 k_end) {
#pragma unroll
        for (int q = 0; q < 16; q++) {
            int at = threadIdx.x + 256 * q;
            i64 i = i0 + (T_ ? at % 128 : at / 32), k = k0 + (T_ ? at / 128 : at % 32);
            held[q] = i < i_end && k < k_end ? (T_ ? p[k * row + i] : p[i * row + k]) : E{};
        }
    }
    DEVICE void store(S *to) {
#pragma unroll
        for (int q = 0; q < 16; q++) {
            int at = threadIdx.x + 256 * q;
            to_shared(to + (T_ ? at % 128 : at / 32) * LD + (T_ ? at / 128 : at % 32), held[q]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(256)
    matmul(const TA *a, i64 a_stride, const TB *b, i64 b_stride, TC *c, i64 c_stride, int add, i64 m, i64 n, i64 k,
           const int *offsets, i64 groups, i64 matrix, i64 share) {
    __shared__ __align__(16) S as[BM * LD], bs[BN * LD];
    i64 n0 = blockIdx.x * (i64)BN, m0 = blockIdx.y * (i64)BM, m_end = m, k0 = 0, k_end = k;
    if (MODE == 0) {
        k0 = blockIdx.z * share;
        k_end = min(k0 + share, k);
        c += blockIdx.z * m * c_stride;
    } else if (MODE == 1) {
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
    int warp = threadIdx.x / 32, wm = warp / 4 * 64, wn = warp % 4 * 32;
    float acc[4][4][4] = {};
    Tile<A_T, TA> ta;
    Tile<!B_T, TB> tb;
    ta.load(a, a_stride, m0, m_end, k0, k_end);
    tb.load(b, b_stride, n0, n, k0, k_end);
    for (; k0 < k_end; k0 += BK) {
        __syncthreads();
        ta.store(as);
        tb.store(bs);
        __syncthreads();
        if (k0 + BK < k_end) {
            ta.load(a, a_stride, m0, m_end, k0 + BK, k_end);
            tb.load(b, b_stride, n0, n, k0 + BK, k_end);
        }
        product<S, 3>(acc, Rows<S>{as, LD}, wm, Rows<S>{bs, LD}, wn, BK);
    }
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                i64 row = m0 + wm + 16 * i + g + r / 2 * 8, col = n0 + wn + 8 * j + 2 * t + r % 2;
                if (row < m_end && col < n) put(c + row * c_stride + col, acc[i][j][r], add);
            }
}
