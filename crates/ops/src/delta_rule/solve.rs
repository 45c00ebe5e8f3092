//! Solves with I + A, A strictly lower triangular: what makes V' of a chunk (MATH 1.4) without forming the inverse
//! T = (I + A)⁻¹. Blocks of 16 rows: inside a block the inverse by forward substitution, between blocks products.
//!
//! Against T by substitution and two products with it, this does about half the multiplications and saves nothing.

use crate::gemm::local;
use hymo_tensor::{Mat, MatMut, Real};

/// Rows of a diagonal block.
const BLOCK: usize = 16;

/// Elements of scratch for a right side of `width` columns.
pub(super) fn scratch(width: usize) -> usize {
    BLOCK * width
}

/// X ← (I + A)⁻¹ X.
#[inline(always)]
pub(super) fn lower<T: Real>(a: Mat<'_, T>, mut x: MatMut<'_, T>, scratch: &mut [T]) {
    let n = x.rows();
    for from in (0..n).step_by(BLOCK) {
        let m = BLOCK.min(n - from);
        let (above, rest) = x.reborrow().split_rows(from);
        let mut mine = rest.split_rows(m).0;
        local::nn(mine.reborrow(), a.rows_at(from, m).cols_at(0, from), above.as_mat(), -T::one(), true);
        let inverse = invert(a, from, m);
        let rhs = copy(&mine, scratch);
        local::nn(mine, Mat::new(&inverse, m, m, BLOCK), rhs, T::one(), false);
    }
}

/// X ← (I + A)⁻ᵀ X.
#[inline(always)]
pub(super) fn lower_transposed<T: Real>(a: Mat<'_, T>, mut x: MatMut<'_, T>, scratch: &mut [T]) {
    let n = x.rows();
    for from in (0..n).step_by(BLOCK).rev() {
        let m = BLOCK.min(n - from);
        let (mut mine, below) = x.reborrow().split_rows(from).1.split_rows(m);
        let left = a.rows_at(from + m, n - from - m).cols_at(from, m);
        local::tn(mine.reborrow(), left, below.as_mat(), -T::one(), true);
        let inverse = invert(a, from, m);
        let rhs = copy(&mine, scratch);
        local::tn(mine, Mat::new(&inverse, m, m, BLOCK), rhs, T::one(), false);
    }
}

#[inline(always)]
fn copy<'a, T: Real>(x: &MatMut<'_, T>, scratch: &'a mut [T]) -> Mat<'a, T> {
    let width = x.cols();
    for i in 0..x.rows() {
        scratch[i * width..(i + 1) * width].copy_from_slice(x.row(i));
    }
    Mat::new(scratch, x.rows(), width, width)
}

/// The inverse of the diagonal block of `m` rows at `from`: T_ii = 1, T_i = -Σ_{j<i} A_ij T_j.
#[inline(always)]
fn invert<T: Real>(a: Mat<'_, T>, from: usize, m: usize) -> [T; BLOCK * BLOCK] {
    let mut t = [T::zero(); BLOCK * BLOCK];
    for i in 0..m {
        let (above, row) = t.split_at_mut(i * BLOCK);
        for (j, earlier) in above.chunks(BLOCK).enumerate() {
            let w = a.row(from + i)[from + j];
            row[..BLOCK].iter_mut().zip(earlier).for_each(|(t, &e)| *t -= w * e);
        }
        row[i] = T::one();
    }
    t
}
