// Matrix products of a warp on tensor cores, operands read pair by pair along k through an accessor, sums in float.
//
// bf16 operands take one instruction a step of 16. float operands take m16n8k8 on TF32: PASSES 3 splits every operand into
// a high and a low part and drops only low x low, which leaves about 22 bits of each product; PASSES 1 keeps 11.
// The accumulator of a 16 x 8 tile: c[0], c[1] at row g, columns 2t and 2t + 1; c[2], c[3] at row g + 8, where
// g = lane / 4, t = lane % 4. The k of a float step is taken as pairs (2t, 2t + 1) in both operands, so that an accumulator
// can serve as the next product's A without moving between lanes.

template <class S> struct Pair;
template <> struct Pair<float> {
    float x, y;
};
template <> struct Pair<bf16> {
    unsigned bits;
};

// Rows of a matrix in shared memory whose k lies side by side: element (i, k) at p[i * ld + k].
template <class S> struct Rows;
template <> struct Rows<float> {
    const float *p;
    int ld;
    DEVICE Pair<float> pair(int i, int k) const {
        float2 v = *(const float2 *)(p + i * ld + k);
        return {v.x, v.y};
    }
};
template <> struct Rows<bf16> {
    const bf16 *p;
    int ld;
    DEVICE Pair<bf16> pair(int i, int k) const { return {*(const unsigned *)(p + i * ld + k)}; }
};

// The transpose of one: element (i, k) at p[k * ld + i].
template <class S> struct Cols;
template <> struct Cols<float> {
    const float *p;
    int ld;
    DEVICE Pair<float> pair(int i, int k) const { return {p[k * ld + i], p[(k + 1) * ld + i]}; }
};
template <> struct Cols<bf16> {
    const bf16 *p;
    int ld;
    DEVICE Pair<bf16> pair(int i, int k) const {
        return {(unsigned)p[k * ld + i].bits | (unsigned)p[(k + 1) * ld + i].bits << 16};
    }
};

template <class S> struct Step;
template <> struct Step<float> {
    static constexpr int K = 8;
};
template <> struct Step<bf16> {
    static constexpr int K = 16;
};

// An operand's part of one step: float in two parts, bf16 as it is.
template <class S, int N> struct Fragment;
template <int N> struct Fragment<float, N> {
    unsigned high[N], low[N];
};
template <int N> struct Fragment<bf16, N> {
    unsigned high[N];
};

DEVICE unsigned tf32(float x) {
    unsigned y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

template <int PASSES, int N> DEVICE void set(Fragment<float, N> &f, int i, float x) {
    f.high[i] = tf32(x);
    if (PASSES > 1) f.low[i] = tf32(x - __uint_as_float(f.high[i]));
}

template <int PASSES, class A> DEVICE void load_a(Fragment<float, 4> &f, A a, int i, int k) {
    int t = threadIdx.x % 4;
    Pair<float> upper = a.pair(i, k + 2 * t), lower = a.pair(i + 8, k + 2 * t);
    set<PASSES>(f, 0, upper.x);
    set<PASSES>(f, 1, lower.x);
    set<PASSES>(f, 2, upper.y);
    set<PASSES>(f, 3, lower.y);
}
template <int PASSES, class B> DEVICE void load_b(Fragment<float, 2> &f, B b, int i, int k) {
    Pair<float> p = b.pair(i, k + 2 * (threadIdx.x % 4));
    set<PASSES>(f, 0, p.x);
    set<PASSES>(f, 1, p.y);
}
template <int PASSES, class A> DEVICE void load_a(Fragment<bf16, 4> &f, A a, int i, int k) {
    int t = 2 * (threadIdx.x % 4);
    f.high[0] = a.pair(i, k + t).bits;
    f.high[1] = a.pair(i + 8, k + t).bits;
    f.high[2] = a.pair(i, k + t + 8).bits;
    f.high[3] = a.pair(i + 8, k + t + 8).bits;
}
template <int PASSES, class B> DEVICE void load_b(Fragment<bf16, 2> &f, B b, int i, int k) {
    int t = 2 * (threadIdx.x % 4);
    f.high[0] = b.pair(i, k + t).bits;
    f.high[1] = b.pair(i, k + t + 8).bits;
}

DEVICE void tf32_mma(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <int PASSES> DEVICE void step(float (&c)[4], const Fragment<float, 4> &a, const Fragment<float, 2> &b) {
    if (PASSES > 1) {
        // The small ones first, and apart: their sum is then not rounded to the large one's last place.
        float small[4] = {0, 0, 0, 0};
        tf32_mma(small, a.low, b.high);
        tf32_mma(small, a.high, b.low);
        float large[4] = {0, 0, 0, 0};
        tf32_mma(large, a.high, b.high);
#pragma unroll
        for (int i = 0; i < 4; i++) c[i] += large[i] + small[i];
    } else {
        tf32_mma(c, a.high, b.high);
    }
}
template <int PASSES> DEVICE void step(float (&c)[4], const Fragment<bf16, 4> &a, const Fragment<bf16, 2> &b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.high[0]), "r"(a.high[1]), "r"(a.high[2]), "r"(a.high[3]), "r"(b.high[0]), "r"(b.high[1]));
}

// Four 8 x 8 matrices of bf16 from shared memory, each lane naming a row of 16 bytes at a multiple of 16 bytes; TRANS turns
// each of them over.
template <bool TRANS> DEVICE void load_matrices(unsigned *r, const bf16 *p) {
    unsigned at = (unsigned)__cvta_generic_to_shared(p);
    if (TRANS) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at)
                     : "memory");
    }
}

// An A of 16 rows from `i`, or two B's of 8 rows each from `i`, for the step at `k`.
DEVICE void matrices_a(unsigned *r, Rows<bf16> a, int i, int k) {
    int lane = threadIdx.x % 32;
    load_matrices<false>(r, a.p + (i + lane % 16) * a.ld + k + lane / 16 * 8);
}
DEVICE void matrices_a(unsigned *r, Cols<bf16> a, int i, int k) {
    int lane = threadIdx.x % 32;
    load_matrices<true>(r, a.p + (k + lane % 8 + lane / 16 * 8) * a.ld + i + lane / 8 % 2 * 8);
}
DEVICE void matrices_b(unsigned *r, Rows<bf16> b, int i, int k) {
    int lane = threadIdx.x % 32;
    load_matrices<false>(r, b.p + (i + lane % 8 + lane / 16 * 8) * b.ld + k + lane / 8 % 2 * 8);
}
DEVICE void matrices_b(unsigned *r, Cols<bf16> b, int i, int k) {
    int lane = threadIdx.x % 32;
    load_matrices<true>(r, b.p + (k + lane % 8 + lane / 8 % 2 * 8) * b.ld + i + lane / 16 * 8);
}

// acc += A Bᵀ over k: A has 16 MT rows from row m, B has 8 NT rows from row n (NT even); k a multiple of the step.
template <class S, int PASSES, int MT, int NT, class A, class B> struct Product {
    DEVICE static void run(float (&acc)[MT][NT][4], A a, int m, B b, int n, int k) {
        int g = threadIdx.x % 32 / 4;
#pragma unroll 4
        for (int k0 = 0; k0 < k; k0 += Step<S>::K) {
            Fragment<S, 4> fa[MT];
#pragma unroll
            for (int i = 0; i < MT; i++) load_a<PASSES>(fa[i], a, m + 16 * i + g, k0);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                Fragment<S, 2> fb;
                load_b<PASSES>(fb, b, n + 8 * j + g, k0);
#pragma unroll
                for (int i = 0; i < MT; i++) step<PASSES>(acc[i][j], fa[i], fb);
            }
        }
    }
};
template <int PASSES, int MT, int NT, class A, class B> struct Product<bf16, PASSES, MT, NT, A, B> {
    static_assert(NT % 2 == 0, "B is loaded by pairs of tiles");
    DEVICE static void run(float (&acc)[MT][NT][4], A a, int m, B b, int n, int k) {
#pragma unroll 2
        for (int k0 = 0; k0 < k; k0 += 16) {
            Fragment<bf16, 4> fa[MT];
#pragma unroll
            for (int i = 0; i < MT; i++) matrices_a(fa[i].high, a, m + 16 * i, k0);
            if (MT > 1) {
                // Registers allow it, and nothing then waits for one load between two products.
                unsigned r[NT / 2][4];
#pragma unroll
                for (int j = 0; j < NT; j += 2) matrices_b(r[j / 2], b, n + 8 * j, k0);
#pragma unroll
                for (int j = 0; j < NT; j++)
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        Fragment<bf16, 2> fb = {{r[j / 2][j % 2 * 2], r[j / 2][j % 2 * 2 + 1]}};
                        step<PASSES>(acc[i][j], fa[i], fb);
                    }
                continue;
            }
#pragma unroll
            for (int j = 0; j < NT; j += 2) {
                unsigned r[4];
                matrices_b(r, b, n + 8 * j, k0);
                Fragment<bf16, 2> fb[2] = {{{r[0], r[1]}}, {{r[2], r[3]}}};
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    step<PASSES>(acc[i][j], fa[i], fb[0]);
                    step<PASSES>(acc[i][j + 1], fa[i], fb[1]);
                }
            }
        }
    }
};
template <class S, int PASSES, int MT, int NT, class A, class B>
DEVICE void product(float (&acc)[MT][NT][4], A a, int m, B b, int n, int k) {
    Product<S, PASSES, MT, NT, A, B>::run(acc, a, m, b, n, k);
}

// The accumulators of 16 rows and 8 NK columns as the A of a product over those columns, rounded to S.
template <int PASSES, int NK> DEVICE void from_acc(Fragment<float, 4> &f, const float (&p)[NK][4], int step) {
    set<PASSES>(f, 0, p[step][0]);
    set<PASSES>(f, 1, p[step][2]);
    set<PASSES>(f, 2, p[step][1]);
    set<PASSES>(f, 3, p[step][3]);
}
DEVICE unsigned pack(float x, float y) { return (unsigned)narrow<bf16>(x).bits | (unsigned)narrow<bf16>(y).bits << 16; }
template <int PASSES, int NK> DEVICE void from_acc(Fragment<bf16, 4> &f, const float (&p)[NK][4], int step) {
    f.high[0] = pack(p[2 * step][0], p[2 * step][1]);
    f.high[1] = pack(p[2 * step][2], p[2 * step][3]);
    f.high[2] = pack(p[2 * step + 1][0], p[2 * step + 1][1]);
    f.high[3] = pack(p[2 * step + 1][2], p[2 * step + 1][3]);
}

// acc += P Bᵀ with P in accumulators: 16 rows, k = 8 NK.
template <class S, int PASSES, int NT, int NK, class B> struct ProductOf {
    DEVICE static void run(float (&acc)[NT][4], const float (&p)[NK][4], B b, int n) {
        int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int s = 0; s < 8 * NK / Step<S>::K; s++) {
            Fragment<S, 4> fa;
            from_acc<PASSES>(fa, p, s);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                Fragment<S, 2> fb;
                load_b<PASSES>(fb, b, n + 8 * j + g, s * Step<S>::K);
                step<PASSES>(acc[j], fa, fb);
            }
        }
    }
};
template <int PASSES, int NT, int NK, class B> struct ProductOf<bf16, PASSES, NT, NK, B> {
    static_assert(NT % 2 == 0 && NK % 2 == 0, "B is loaded by pairs of tiles");
    DEVICE static void run(float (&acc)[NT][4], const float (&p)[NK][4], B b, int n) {
#pragma unroll
        for (int s = 0; s < NK / 2; s++) {
            Fragment<bf16, 4> fa;
            from_acc<PASSES>(fa, p, s);
#pragma unroll
            for (int j = 0; j < NT; j += 2) {
                unsigned r[4];
                matrices_b(r, b, n + 8 * j, 16 * s);
                step<PASSES>(acc[j], fa, Fragment<bf16, 2>{{r[0], r[1]}});
                step<PASSES>(acc[j + 1], fa, Fragment<bf16, 2>{{r[2], r[3]}});
            }
        }
    }
};
template <class S, int PASSES, int NT, int NK, class B>
DEVICE void product_of(float (&acc)[NT][4], const float (&p)[NK][4], B b, int n) {
    ProductOf<S, PASSES, NT, NK, B>::run(acc, p, b, n);
}
