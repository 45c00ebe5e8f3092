//! Orthogonalisation by five polynomial steps (MATH, section 6.3): singular values go to 1, singular vectors stay.
//!
//! With A = X Xᵀ a step is X <- (a I + b A + c A²) X. A tall X is taken from the right, X (a I + b XᵀX + ..), which is the
//! same matrix without transposing anything. A and A² are symmetric: blocks of their rows are computed from the diagonal on
//! and mirrored.

use hymo_model::config::Orth;
use hymo_ops::gemm;
use hymo_tensor::{Ctx, Mat, MatMut, Path, Real};

/// Coefficients a, b, c of each step.
type Steps = [[f64; 3]; 5];

const NEWTON_SCHULZ: Steps = [[3.4445, -4.7750, 2.0315]; 5];
const POLAR_EXPRESS: Steps = [
    [8.156554524902461, -22.48329292557795, 15.878769915207462],
    [4.042929935166739, -2.808917465908714, 0.5000178451051316],
    [3.8916678022926607, -2.772484153217685, 0.5060648178503393],
    [3.285753657755655, -2.3681294933425376, 0.46449024233003106],
    [2.3465413258596377, -1.7097828382687081, 0.42323551169305323],
];

/// The steps of an orthogonalisation, and by how much the norm is overestimated before them.
pub(crate) fn coefficients(orth: Orth) -> (&'static Steps, f64) {
    match orth {
        Orth::NewtonSchulz => (&NEWTON_SCHULZ, 1.0),
        Orth::PolarExpress => (&POLAR_EXPRESS, 1.02),
    }
}

/// Multiply-adds of one product from which on all threads share it: a matrix of this size has few beside it.
const SHARED: usize = 1 << 27;
/// Side from which on half of a symmetric product is mirrored in place of computed.
const MIRRORED: usize = 128;
/// Rows and columns of a tile that is mirrored at once.
const TILE: usize = 16;

/// Memory for one matrix `[m, n]`.
#[derive(Debug)]
pub struct Work<'a, T> {
    /// `[m, n]`: X, and then O.
    pub x: &'a mut [T],
    /// `[m, n]`.
    pub y: &'a mut [T],
    /// Three times the square of the smaller side.
    pub squares: &'a mut [T],
    /// `[m]`: sums of squares of rows, of X before and of what [`super::moments`] says after.
    pub sums: &'a mut [f64],
}

impl<T> Work<'_, T> {
    /// Elements of `x`, `y` and `squares` of a matrix `[m, n]`.
    #[must_use]
    pub fn elements(m: usize, n: usize) -> [usize; 3] {
        [m * n, m * n, 3 * m.min(n) * m.min(n)]
    }
}

/// O from X in `work.x`, whose sums of squares by row are `work.sums`. Every matrix is taken whole.
pub fn orthogonalise<T: Real>(ctx: &Ctx, orth: Orth, rows: usize, cols: usize, work: &mut Work<'_, T>) {
    let (steps, over) = coefficients(orth);
    let inverse = T::of(1.0 / (over * work.sums.iter().sum::<f64>().sqrt() + 1e-7));
    work.x.iter_mut().for_each(|x| *x *= inverse);
    let r = rows.min(cols);
    let (a, rest) = work.squares.split_at_mut(r * r);
    let (d, b) = rest.split_at_mut(r * r);
    let b = &mut b[..r * r];
    for &[one, two, three] in steps {
        let (one, two, three) = (T::of(one), T::of(two), T::of(three));
        let x = Mat::new(work.x, rows, cols, cols);
        // A, then D = b I + c A, then a I + A D: the polynomial with one square product and no sum of three matrices.
        let gram = if rows <= cols { Form::Rows(x, x) } else { Form::Columns(x) };
        symmetric(ctx, a, r, gram);
        d.iter_mut().zip(a.iter()).for_each(|(d, &a)| *d = three * a);
        d.iter_mut().step_by(r + 1).for_each(|d| *d += two);
        // D is its own transpose, and so a product over rows will do.
        symmetric(ctx, b, r, Form::Rows(Mat::new(a, r, r, r), Mat::new(d, r, r, r)));
        b.iter_mut().step_by(r + 1).for_each(|b| *b += one);
        let (b, y) = (Mat::new(b, r, r, r), MatMut::new(work.y, rows, cols, cols));
        match (rows <= cols, shared(ctx, rows, cols, r)) {
            (true, false) => gemm::local::nn(y, b, x, T::one(), false),
            (true, true) => gemm::nn(ctx, y, b, x, false),
            (false, false) => gemm::local::nn(y, x, b, T::one(), false),
            (false, true) => gemm::nn(ctx, y, x, b, false),
        }
        std::mem::swap(&mut work.x, &mut work.y);
    }
}

fn shared(ctx: &Ctx, m: usize, n: usize, k: usize) -> bool {
    ctx.path() == Path::Fast && m.saturating_mul(n).saturating_mul(k) >= SHARED
}

/// A product that is symmetric.
#[derive(Clone, Copy)]
enum Form<'a, T> {
    /// P Qᵀ.
    Rows(Mat<'a, T>, Mat<'a, T>),
    /// Pᵀ P.
    Columns(Mat<'a, T>),
}

/// `c [r, r]`, of which blocks of rows are computed from the diagonal on.
fn symmetric<T: Real>(ctx: &Ctx, c: &mut [T], r: usize, form: Form<'_, T>) {
    let k = match form {
        Form::Rows(p, _) => p.cols(),
        Form::Columns(p) => p.rows(),
    };
    let block = if r < MIRRORED { r } else { r.div_ceil(4).next_multiple_of(TILE) };
    let shared = shared(ctx, r, r, k);
    let mut below = MatMut::new(c, r, r, r);
    let mut at = 0;
    while at < r {
        let n = block.min(r - at);
        let (band, rest) = below.split_rows(n);
        let (_, band) = band.split_cols(at);
        match (form, shared) {
            (Form::Rows(p, q), false) => {
                gemm::local::nt(band, p.rows_at(at, n), q.rows_at(at, r - at), T::one(), false)
            }
            (Form::Rows(p, q), true) => gemm::nt(ctx, band, p.rows_at(at, n), q.rows_at(at, r - at), false),
            (Form::Columns(p), false) => {
                gemm::local::tn(band, p.cols_at(at, n), p.cols_at(at, r - at), T::one(), false)
            }
            (Form::Columns(p), true) => gemm::tn(ctx, band, p.cols_at(at, n), p.cols_at(at, r - at), false),
        }
        (below, at) = (rest, at + n);
    }
    mirror(c, r);
}

/// Copies what is above the diagonal below it.
fn mirror<T: Copy>(c: &mut [T], r: usize) {
    for i0 in (0..r).step_by(TILE) {
        for j0 in (i0..r).step_by(TILE) {
            for i in i0..r.min(i0 + TILE) {
                for j in j0.max(i + 1)..r.min(j0 + TILE) {
                    c[j * r + i] = c[i * r + j];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
