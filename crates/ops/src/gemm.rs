//! Matrix products: the oracle's plain loops and, for the fast path, the `gemm` crate. The only module of this crate
//! that calls it, and with it the only one with `unsafe`.
//!
//! Three forms, named by what is transposed: `nt` C = A Bᵀ (a projection), `nn` C = A B (its input's gradient), `tn`
//! C = Aᵀ B (its weight's gradient). Deterministic: an element's sum is taken in the same order whatever the number of
//! threads (tested), because the products are cut along rows and columns only.
#![allow(unsafe_code)]

use hymo_tensor::{Ctx, DType, Mat, MatMut, Path, Real};

/// Multiply-adds under which handing work to other threads costs more than it gains.
const SMALL: usize = 1 << 17;

/// C = A Bᵀ, or C += A Bᵀ when `add`. `a` [m, k], `b` [n, k], `c` [m, n].
pub fn nt<T: Real>(ctx: &Ctx, c: MatMut<'_, T>, a: Mat<'_, T>, b: Mat<'_, T>, add: bool) {
    product(fast::<T>(ctx), c, a, b, (false, true), T::one(), add, true);
}

/// C = A B, or C += A B when `add`. `a` [m, k], `b` [k, n], `c` [m, n].
pub fn nn<T: Real>(ctx: &Ctx, c: MatMut<'_, T>, a: Mat<'_, T>, b: Mat<'_, T>, add: bool) {
    product(fast::<T>(ctx), c, a, b, (false, false), T::one(), add, true);
}

/// C = Aᵀ B, or C += Aᵀ B when `add`. `a` [k, m], `b` [k, n], `c` [m, n].
pub fn tn<T: Real>(ctx: &Ctx, c: MatMut<'_, T>, a: Mat<'_, T>, b: Mat<'_, T>, add: bool) {
    product(fast::<T>(ctx), c, a, b, (true, false), T::one(), add, true);
}

/// The same products on the caller's thread and the fast path (in `f64` too), scaled by `alpha`: for work that is already
/// one of many parallel tasks.
pub mod local {
    use super::{Mat, MatMut, Real, product};

    /// C (+)= alpha A Bᵀ.
    pub fn nt<T: Real>(c: MatMut<'_, T>, a: Mat<'_, T>, b: Mat<'_, T>, alpha: T, add: bool) {
        product(true, c, a, b, (false, true), alpha, add, false);
    }

    /// C (+)= alpha A B.
    pub fn nn<T: Real>(c: MatMut<'_, T>, a: Mat<'_, T>, b: Mat<'_, T>, alpha: T, add: bool) {
        product(true, c, a, b, (false, false), alpha, add, false);
    }

    /// C (+)= alpha Aᵀ B.
    pub fn tn<T: Real>(c: MatMut<'_, T>, a: Mat<'_, T>, b: Mat<'_, T>, alpha: T, add: bool) {
        product(true, c, a, b, (true, false), alpha, add, false);
    }
}

/// The f32 kernels that the fast path's products run on here: the widest that are compiled in and that this processor
/// has. Mirrors the choice of the `gemm` crate, which does not tell.
#[must_use]
pub fn kernels() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        let avx512 = is_x86_feature_detected!("avx512f");
        if cfg!(feature = "avx512") && avx512 {
            return "AVX-512";
        }
        if is_x86_feature_detected!("fma") {
            return if avx512 {
                "AVX2 and FMA (built without AVX-512, which this processor has)"
            } else {
                "AVX2 and FMA"
            };
        }
        "plain (slow: neither AVX2 nor FMA)"
    }
    #[cfg(target_arch = "aarch64")]
    {
        "NEON"
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        "what the compiler assumes for this architecture"
    }
}

fn fast<T: Real>(ctx: &Ctx) -> bool {
    ctx.path() == Path::Fast && T::DTYPE == DType::F32
}

#[allow(clippy::too_many_arguments)] // one product's operands; a struct would only name them twice
fn product<T: Real>(
    fast: bool,
    mut c: MatMut<'_, T>,
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    (ta, tb): (bool, bool),
    alpha: T,
    add: bool,
    threads: bool,
) {
    let (m, k) = if ta { (a.cols(), a.rows()) } else { (a.rows(), a.cols()) };
    let (kb, n) = if tb { (b.cols(), b.rows()) } else { (b.rows(), b.cols()) };
    assert!(k == kb && c.rows() == m && c.cols() == n, "gemm: [{m}, {k}] x [{kb}, {n}] -> {} x {}", c.rows(), c.cols());
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if !add {
            c.fill(T::zero());
        }
        return;
    }
    if !fast {
        return plain(c, a, b, (ta, tb), alpha, add);
    }
    let strides = |m: &Mat<'_, T>, t: bool| {
        let s = m.stride() as isize;
        if t { (1, s) } else { (s, 1) }
    };
    let ((ar, ac), (br, bc), cr) = (strides(&a, ta), strides(&b, tb), c.stride() as isize);
    let beta = if add { T::one() } else { T::zero() };
    let parallelism = parallelism(threads && m.saturating_mul(n).saturating_mul(k) >= SMALL);
    // SAFETY: the shapes agree (asserted above), Mat and MatMut keep every row inside memory that they borrow, `c` is
    // the only reference to its elements, and the strides are those of the three matrices.
    unsafe {
        let (c, a, b) = (c.as_mut_ptr(), a.as_ptr(), b.as_ptr());
        gemm::gemm(m, n, k, c, 1, cr, add, a, ac, ar, b, bc, br, beta, alpha, false, false, false, parallelism);
    }
}

#[cfg(feature = "rayon")]
fn parallelism(threads: bool) -> gemm::Parallelism {
    if threads { gemm::Parallelism::Rayon(0) } else { gemm::Parallelism::None }
}

#[cfg(not(feature = "rayon"))]
fn parallelism(_: bool) -> gemm::Parallelism {
    gemm::Parallelism::None
}

fn plain<T: Real>(mut c: MatMut<'_, T>, a: Mat<'_, T>, b: Mat<'_, T>, (ta, tb): (bool, bool), alpha: T, add: bool) {
    let k = if ta { a.rows() } else { a.cols() };
    let at = |m: &Mat<'_, T>, t: bool, i: usize, j: usize| if t { m.row(j)[i] } else { m.row(i)[j] };
    for i in 0..c.rows() {
        for j in 0..c.cols() {
            let mut sum = T::zero();
            for l in 0..k {
                sum += at(&a, ta, i, l) * at(&b, tb, l, j);
            }
            let y = &mut c.row_mut(i)[j];
            *y = alpha * sum + if add { *y } else { T::zero() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Noise;

    fn matrix(seed: u64, len: usize) -> Vec<f32> {
        Noise::new(seed).normals(len).into_iter().map(|x| x as f32).collect()
    }

    /// Every form at odd sizes against the plain loops, written and added, into poisoned memory with gaps.
    #[test]
    fn products_match_the_plain_loops() {
        for (m, n, k) in [(1, 1, 1), (3, 5, 7), (64, 33, 65), (1, 100, 63), (129, 1, 40), (5, 7, 0)] {
            for (ta, tb) in [(false, true), (false, false), (true, false)] {
                for add in [false, true] {
                    let (a, b) = (matrix(1, m * k), matrix(2, n * k));
                    let (ar, ac) = if ta { (k, m) } else { (m, k) };
                    let (br, bc) = if tb { (n, k) } else { (k, n) };
                    let (a, b) = (Mat::new(&a, ar, ac, ac), Mat::new(&b, br, bc, bc));
                    let start = if add { 1.5 } else { f32::NAN };
                    let (mut got, mut want) = (vec![start; m * (n + 3)], vec![start; m * (n + 3)]);
                    product(true, MatMut::new(&mut got, m, n, n + 3), a, b, (ta, tb), 0.5, add, true);
                    plain(MatMut::new(&mut want, m, n, n + 3), a, b, (ta, tb), 0.5, add);
                    for (g, w) in got.chunks(n + 3).zip(want.chunks(n + 3)) {
                        assert!(g[n..].iter().all(|x| x.to_bits() == start.to_bits()), "wrote into the gap");
                        assert!(
                            g[..n].iter().zip(&w[..n]).all(|(x, y)| (x - y).abs() <= 1e-5 * (k as f32).sqrt().max(1.))
                        );
                    }
                }
            }
        }
    }

    /// The same bits on 1, 2, 3 and 8 threads.
    #[cfg(feature = "rayon")]
    #[test]
    fn thread_count_changes_no_bit() {
        for (m, n, k) in [(300, 200, 100), (64, 1000, 192), (7, 4096, 192), (1, 512, 512), (130, 17, 4096)] {
            let (a, b) = (matrix(3, m * k), matrix(4, n * k));
            let run = |threads| {
                let mut c = vec![0.; m * n];
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| {
                    nt(&Ctx::cpu(), MatMut::new(&mut c, m, n, n), Mat::new(&a, m, k, k), Mat::new(&b, n, k, k), false)
                });
                c
            };
            let one = run(1);
            for threads in [2, 3, 8] {
                assert!(run(threads).iter().zip(&one).all(|(x, y)| x.to_bits() == y.to_bits()), "{threads} threads");
            }
        }
    }
}
