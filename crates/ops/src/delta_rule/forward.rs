//! The chunk form's forward, generic so that `f64` can show that it is the recurrence.
//!
//! Two passes over a group of chunks. First all chunks in parallel: U, W, the part of the output that needs no state
//! P U, and Q' = e^b Q̂ - P W, so that O = P U + Q' H (MATH 1.4 with V' = U - W H put in). Then each row and head in
//! order: V' = U - W H, O += Q' H, H = e^{b_C} H + K̃ᵀ V'. A group bounds the memory that the first pass leaves.

use super::chunk::{Local, Span, by_head, carve_slice, scratch, spans, tiles};
use super::cpu::start;
use super::{Dims, Inputs, Views, solve};
use crate::gemm::local;
use hymo_tensor::{Ctx, MatMut, Real, Result, Tensor, each};

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
    let chunks = d.len.div_ceil(d.chunk);
    let mut saved = keep.then(|| ctx.empty::<T>(&[d.batch * d.heads * chunks, d.d_k * d.d_v])).transpose()?;
    let rows = d.batch * d.heads * d.group().min(chunks) * d.chunk;
    let mut work = ctx.empty::<T>(&[rows, d.d_v + 3 * d.d_k])?;
    for (c, tokens) in d.groups() {
        let spans = spans(d, tokens);
        let mut outs = tiles(o.view_mut::<T>()?, d, tokens, d.d_v);
        let mut blocks: Vec<_> = work.view_mut::<T>()?.row_blocks(d.chunk).into_iter().zip(&spans).collect();
        let first = blocks.iter_mut().map(|(w, s)| (w.reborrow(), **s)).zip(outs.iter_mut().map(MatMut::reborrow));
        each!(first.collect(), |_, ((work, s), o)| within(ctx, &x, d, s, work, o));

        let n = chunks_in(tokens, d);
        let chunks = by_head(blocks.into_iter().zip(outs), n);
        let keeps = match &mut saved {
            Some(s) => group_states(s.view_mut::<T>()?, d, c, n).into_iter().map(Some).collect(),
            None => chunks.iter().map(|_| None).collect::<Vec<_>>(),
        };
        let heads = state.view_mut::<T>()?.row_blocks(d.d_k).into_iter();
        each!(heads.zip(chunks).zip(keeps).collect(), |_, ((mut h, chunks), mut keep)| {
            for (i, ((work, s), o)) in chunks.into_iter().enumerate() {
                if let Some(keep) = &mut keep {
                    store(keep.row_mut(i), &h);
                }
                across(&x, d, *s, work, o, &mut h);
            }
        });
    }
    Ok((o, state, saved))
}

/// Chunks in a group's range of tokens.
pub(super) fn chunks_in((from, to): (usize, usize), d: Dims) -> usize {
    (to - from).div_ceil(d.chunk)
}

/// Rows `c..c + n` of every row and head's chunk states.
fn group_states<T>(m: MatMut<'_, T>, d: Dims, c: usize, n: usize) -> Vec<MatMut<'_, T>> {
    let blocks = m.row_blocks(d.len.div_ceil(d.chunk)).into_iter();
    blocks.map(|m| m.split_rows(c).1.split_rows(n).0).collect()
}

/// First pass: U | W | Q' | K̃ into `work`, P U into `o`.
#[inline(always)]
fn within<T: Real>(ctx: &Ctx, x: &Views<'_, T>, d: Dims, s: Span, work: MatMut<'_, T>, o: MatMut<'_, T>) {
    let n = s.n;
    let width = d.d_v + d.d_k;
    let mut buf = scratch::<T>(ctx, Local::<T>::len(n, d) + solve::scratch(width));
    let rest = &mut buf.flat_mut::<T>().expect("invariant: fresh and contiguous");
    let l = Local::new(x, d, s, rest);
    let (mut uw, edges) = work.split_rows(n).0.split_cols(width);
    l.solve(x, d, s, uw.reborrow(), carve_slice(rest, solve::scratch(width)));
    let (mut q, mut k) = edges.split_cols(d.d_k);
    for i in 0..n {
        q.row_mut(i).iter_mut().zip(l.kq.row(n + i)).for_each(|(y, &q)| *y = l.e_in[i] * q);
        k.row_mut(i).iter_mut().zip(l.kq.row(i)).for_each(|(y, &k)| *y = l.e_out[i] * k);
    }
    let p = l.mp.as_mat().rows_at(n, n);
    local::nn(o, p, uw.as_mat().cols_at(0, d.d_v), T::one(), false);
    local::nn(q, p, uw.as_mat().cols_at(d.d_v, d.d_k), -T::one(), true);
}

/// Second pass: the chunk's output from the state, then the state after it.
#[inline(always)]
fn across<T: Real>(x: &Views<'_, T>, d: Dims, s: Span, work: MatMut<'_, T>, o: MatMut<'_, T>, h: &mut MatMut<'_, T>) {
    let (mut u, rest) = work.split_rows(s.n).0.split_cols(d.d_v);
    let rest = rest.as_mat();
    let [w, q, k] = [0, 1, 2].map(|i| rest.cols_at(i * d.d_k, d.d_k));
    local::nn(u.reborrow(), w, h.as_mat(), -T::one(), true);
    local::nn(o, q, h.as_mat(), T::one(), true);
    decay(h, s.keep(x, d));
    local::tn(h.reborrow(), k, u.as_mat(), T::one(), true);
}

/// A copy of a state in one row.
#[inline(always)]
pub(super) fn store<T: Real>(to: &mut [T], h: &MatMut<'_, T>) {
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
    let mut t = super::chunk::carve(rest, s.n, s.n);
    for i in 0..s.n {
        t.row_mut(i).fill(T::zero());
        t.row_mut(i)[i] = T::one();
    }
    solve::lower(l.a.as_mat(), t.reborrow(), carve_slice(rest, solve::scratch(s.n)), |_, _| {});
    (0..s.n).flat_map(|i| t.row(i).to_vec()).collect()
}
