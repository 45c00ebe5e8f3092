//! The chunk form's forward, generic so that `f64` can show that it is the recurrence.
//!
//! Every row and head walks its chunks in order, with the state at hand:
//!   V' = T diag(β) (V - diag(e^b) K H),   O = diag(e^b) Q̂ H + P V',   H ← e^{b_C} H + K̃ᵀ V'.
//! That is MATH 1.4 with W H taken inside the solve: W itself, P W and the pass that would store them are never made, which
//! is a third of the multiplications. What it gives up is parallel work along one head's sequence; heads and rows are
//! plenty for a processor's threads.

use super::chunk::{Local, Span, by_head, carve, carve_slice, scratch, spans, tiles};
use super::cpu::start;
use super::{Dims, Inputs, Views, solve};
use crate::gemm::local;
use hymo_tensor::{Ctx, Mat, MatMut, Real, Result, Tensor, each};

/// o, the final state and, when wanted, the state before every chunk.
pub(super) fn forward<T: Real>(
    ctx: &Ctx,
    inputs: Inputs<'_>,
    d: Dims,
    keep: bool,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let x = Views::<T>::new(inputs, d)?;
    let mut o = ctx.empty::<T>(&[x.qkv.rows(), d.heads * d.d_v])?;
    let mut state = start::<T>(ctx, inputs, d)?;
    let chunks = d.chunks();
    let mut saved = keep.then(|| ctx.empty::<T>(&[d.batch * d.heads * chunks, d.d_k * d.d_v])).transpose()?;
    let keeps: Vec<_> = match &mut saved {
        Some(s) => s.view_mut::<T>()?.row_blocks(chunks.max(1)).into_iter().map(Some).collect(),
        None => (0..d.batch * d.heads).map(|_| None).collect(),
    };
    let walks = by_head(spans(d).into_iter().zip(tiles(o.view_mut::<T>()?, d, d.d_v)), chunks);
    let heads = state.view_mut::<T>()?.row_blocks(d.d_k).into_iter();
    each!(heads.zip(walks).zip(keeps).collect(), |_, ((mut h, walk), mut keep)| {
        let mut buf = scratch::<T>(ctx, Local::<T>::len(d.chunk, d) + inner_len(d.chunk, d));
        let buf = buf.flat_mut::<T>().expect("invariant: fresh and contiguous");
        for (i, (s, o)) in walk.into_iter().enumerate() {
            if let Some(keep) = &mut keep {
                store(keep.row_mut(i), &h);
            }
            chunk(&x, d, s, o, &mut h, buf);
        }
    });
    Ok((o, state, saved))
}

/// One chunk: its output from the state before it, then the state after it.
#[inline(always)]
fn chunk<T: Real>(x: &Views<'_, T>, d: Dims, s: Span, mut o: MatMut<'_, T>, h: &mut MatMut<'_, T>, mut rest: &mut [T]) {
    let n = s.n;
    let mut l = Local::new(x, d, s, &mut rest);
    let (v, kh) = inner(&l, x, d, s, h.as_mat(), &mut rest);
    for i in 0..n {
        o.row_mut(i).iter_mut().zip(kh.row(n + i)).for_each(|(o, &x)| *o = l.e_in[i] * x);
    }
    times_lower(o, l.mp.as_mat().rows_at(n, n), v.as_mat());
    decay(h, s.keep(x, d));
    scale_rows(&mut l.kq, 0, l.e_out);
    local::tn(h.reborrow(), l.kq.as_mat().rows_at(0, n), v.as_mat(), T::one(), true);
}

/// Elements of scratch for [`inner`].
pub(super) fn inner_len(n: usize, d: Dims) -> usize {
    3 * n * d.d_v + solve::scratch(d.d_v)
}

/// V' = T diag(β) (V - diag(e^b) K H) of a chunk [n, V], and K H over Q̂ H [2n, V].
#[inline(always)]
pub(super) fn inner<'a, T: Real>(
    l: &Local<'_, T>,
    x: &Views<'_, T>,
    d: Dims,
    s: Span,
    h: Mat<'_, T>,
    rest: &mut &'a mut [T],
) -> (MatMut<'a, T>, MatMut<'a, T>) {
    let n = s.n;
    let (mut v, mut kh) = (carve(rest, n, d.d_v), carve(rest, 2 * n, d.d_v));
    local::nn(kh.reborrow(), l.kq.as_mat(), h, T::one(), false);
    for i in 0..n {
        let (beta, edge) = (l.beta[i], l.e_in[i]);
        let terms = x.v(s.row(d, i), s.h).iter().zip(kh.row(i));
        v.row_mut(i).iter_mut().zip(terms).for_each(|(to, (&v, &kh))| *to = beta * (v - edge * kh));
    }
    solve::lower(l.a.as_mat(), v.reborrow(), carve_slice(rest, solve::scratch(d.d_v)));
    (v, kh)
}

/// Rows of a triangular matrix that are multiplied as if they were full.
const STEP: usize = 32;

/// C += P B, P lower triangular [n, n].
#[inline(always)]
fn times_lower<T: Real>(mut c: MatMut<'_, T>, p: Mat<'_, T>, b: Mat<'_, T>) {
    for from in (0..p.rows()).step_by(STEP) {
        let n = STEP.min(p.rows() - from);
        let c = c.reborrow().split_rows(from).1.split_rows(n).0;
        local::nn(c, p.rows_at(from, n).cols_at(0, from + n), b.rows_at(0, from + n), T::one(), true);
    }
}

/// C = Pᵀ B, P lower triangular [n, n].
#[inline(always)]
pub(super) fn lower_transposed_times<T: Real>(mut c: MatMut<'_, T>, p: Mat<'_, T>, b: Mat<'_, T>) {
    let rows = p.rows();
    for from in (0..rows).step_by(STEP) {
        let n = STEP.min(rows - from);
        let c = c.reborrow().split_rows(from).1.split_rows(n).0;
        local::tn(c, p.rows_at(from, rows - from).cols_at(from, n), b.rows_at(from, rows - from), T::one(), false);
    }
}

/// Row `from + i` times `by[i]`.
#[inline(always)]
pub(super) fn scale_rows<T: Real>(m: &mut MatMut<'_, T>, from: usize, by: &[T]) {
    for (i, &by) in by.iter().enumerate() {
        m.row_mut(from + i).iter_mut().for_each(|x| *x *= by);
    }
}

/// A copy of a state in one row.
#[inline(always)]
fn store<T: Real>(to: &mut [T], h: &MatMut<'_, T>) {
    to.chunks_mut(h.cols()).enumerate().for_each(|(i, to)| to.copy_from_slice(h.row(i)));
}

/// H ← e H.
#[inline(always)]
pub(super) fn decay<T: Real>(h: &mut MatMut<'_, T>, e: T) {
    for i in 0..h.rows() {
        h.row_mut(i).iter_mut().for_each(|h| *h *= e);
    }
}

/// T = (I + A)⁻¹ of one chunk, for the test of its bound.
#[cfg(test)]
pub(super) fn inverse<T: Real>(ctx: &Ctx, inputs: Inputs<'_>, d: Dims, s: Span) -> Vec<T> {
    let x = Views::<T>::new(inputs, d).unwrap();
    let mut buf = scratch::<T>(ctx, Local::<T>::len(s.n, d) + solve::scratch(s.n) + s.n * s.n);
    let rest = &mut buf.flat_mut::<T>().unwrap();
    let l = Local::new(&x, d, s, rest);
    let mut t = carve(rest, s.n, s.n);
    for i in 0..s.n {
        t.row_mut(i).fill(T::zero());
        t.row_mut(i)[i] = T::one();
    }
    solve::lower(l.a.as_mat(), t.reborrow(), carve_slice(rest, solve::scratch(s.n)));
    (0..s.n).flat_map(|i| t.row(i).to_vec()).collect()
}
