//! The chunk form's backward (MATH 1.5), generic as the forward is.
//!
//! Groups of chunks from the last to the first, three passes over each: what the reverse walk needs, all chunks in
//! parallel; the walk itself, each row and head in order; all gradients, in parallel again. Two simplifications of
//! MATH 1.5, from W H_in = U - V' and dK_β = Tᵀ dW = -dV_β H_inᵀ: dA = -strict_lower(dV_β V'ᵀ), so that neither U nor
//! the inverse is needed, and dg as the sum over the pairs that the decay stands between (see `decay_gradient`).

use super::chunk::{Local, Span, by_head, carve, carve_slice, scratch, spans, tiles};
use super::cpu::unit_grad;
use super::forward::{chunks_in, decay, store};
use super::{Dims, Saved, Upstream, Views, solve};
use crate::gemm::local;
use crate::lanes::dot;
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Mat, MatMut, Real, Result, Tensor, each};

/// What a chunk's tokens hold between the passes: V' | dV' | W | e^b Q̂ | K̃.
fn width(d: Dims) -> usize {
    2 * d.d_v + 3 * d.d_k
}

/// Where one chunk's gradients go; `None` where they are not wanted.
struct Targets<'a, T> {
    q: Option<MatMut<'a, T>>,
    k: Option<MatMut<'a, T>>,
    v: Option<MatMut<'a, T>>,
    g: Option<MatMut<'a, T>>,
    beta: Option<MatMut<'a, T>>,
    /// Whether to add to the gradient of qkv, of g, of beta.
    add: [bool; 3],
}

pub(super) fn backward<T: Real>(
    ctx: &Ctx,
    saved: &Saved,
    upstream: Upstream<'_>,
    d: Dims,
    [d_qkv, d_g, d_beta, d_h0]: &mut [GradSlot<'_>; 4],
) -> Result<()> {
    let x = Views::<T>::new(saved.inputs(), d)?;
    let zeros = upstream.d_o.is_none().then(|| ctx.zeros::<T>(&[x.qkv.rows(), d.heads * d.d_v])).transpose()?;
    let d_o = upstream.d_o.or(zeros.as_ref()).expect("invariant: one of the two").view::<T>()?;
    let mut d_state = upstream.d_state::<T>(ctx, d)?;
    let mut targets = [d_qkv.target::<T>(ctx)?, d_g.target::<T>(ctx)?, d_beta.target::<T>(ctx)?];
    let chunks = d.len.div_ceil(d.chunk);
    let states = saved.states.as_ref().expect("invariant: checked by the caller").view::<T>()?;
    let in_group = d.batch * d.heads * d.group().min(chunks);
    let mut work = ctx.empty::<T>(&[in_group * d.chunk, width(d)])?;
    let mut d_outs = ctx.empty::<T>(&[in_group, d.d_k * d.d_v])?;
    for (c, tokens) in d.groups().into_iter().rev() {
        let n = chunks_in(tokens, d);
        let spans = spans(d, tokens);
        let h_in = |i: usize| state(states.row(i / n * chunks + c + i % n), d);
        let mut blocks = work.view_mut::<T>()?.row_blocks(d.chunk);
        blocks.truncate(spans.len());
        let first = blocks.iter_mut().map(MatMut::reborrow).zip(&spans).collect();
        each!(first, |i, (work, s)| within(ctx, &x, d, *s, (d_o, h_in(i)), work));

        let walk = by_head(blocks.iter_mut().map(MatMut::reborrow).zip(&spans), n);
        let heads = d_state.view_mut::<T>()?.row_blocks(d.d_k).into_iter();
        let d_out = d_outs.view_mut::<T>()?.split_rows(spans.len()).0.row_blocks(n);
        each!(heads.zip(walk).zip(d_out).collect(), |_, ((mut dh, chunks), mut d_out)| {
            for (i, (work, s)) in chunks.into_iter().enumerate().rev() {
                store(d_out.row_mut(i), &dh);
                across(&x, d, *s, d_o, work, &mut dh);
            }
        });

        let d_out = d_outs.view::<T>()?;
        let outs = group_targets(&mut targets, d, tokens, spans.len());
        each!(outs.into_iter().zip(blocks).collect(), |i, (out, work)| {
            let ends = [h_in(i), state(d_out.row(i), d)];
            gradients(ctx, &x, d, spans[i], d_o, ends, work.as_mat(), out);
        });
    }
    clear_fresh::<T>(&mut d_state, saved, d)?;
    d_h0.give(ctx, d_state)
}

#[inline(always)]
fn state<T>(row: &[T], d: Dims) -> Mat<'_, T> {
    Mat::new(row, d.d_k, d.d_v, d.d_v)
}

/// A row that begins anew has no gradient for its initial state.
fn clear_fresh<T: Real>(d_state: &mut Tensor, saved: &Saved, d: Dims) -> Result<()> {
    for (b, row) in d_state.flat_mut::<T>()?.chunks_mut(d.heads * d.d_k * d.d_v).enumerate() {
        if !saved.docs.continued(b) {
            row.fill(T::zero());
        }
    }
    Ok(())
}

/// The tiles of the group's gradients, one set a chunk.
fn group_targets<'a, T>(
    [qkv, g, beta]: &'a mut [Option<(MatMut<'_, T>, bool)>; 3],
    d: Dims,
    tokens: (usize, usize),
    n: usize,
) -> Vec<Targets<'a, T>> {
    let add = [&*qkv, &*g, &*beta].map(|t| t.as_ref().is_some_and(|t| t.1));
    let cut = |m: Option<MatMut<'a, T>>, width| -> Vec<Option<MatMut<'a, T>>> {
        match m {
            Some(m) => tiles(m, d, tokens, width).into_iter().map(Some).collect(),
            None => (0..n).map(|_| None).collect(),
        }
    };
    let (q, k, v) = match qkv {
        Some((m, _)) => {
            let (q, rest) = m.reborrow().split_cols(d.k_at(0));
            let (k, v) = rest.split_cols(d.v_at(0) - d.k_at(0));
            (Some(q), Some(k), Some(v))
        }
        None => (None, None, None),
    };
    let mut parts = [
        cut(q, d.d_k),
        cut(k, d.d_k),
        cut(v, d.d_v),
        cut(g.as_mut().map(|t| t.0.reborrow()), 1),
        cut(beta.as_mut().map(|t| t.0.reborrow()), 1),
    ]
    .map(Vec::into_iter);
    (0..n)
        .map(|_| {
            let [q, k, v, g, beta] = parts.each_mut().map(|p| p.next().flatten());
            Targets { q, k, v, g, beta, add }
        })
        .collect()
}

/// First pass: V' = U - W H_in, Pᵀ dO in dV's place, W, e^b Q̂ and K̃.
#[inline(always)]
fn within<T: Real>(
    ctx: &Ctx,
    x: &Views<'_, T>,
    d: Dims,
    s: Span,
    (d_o, h_in): (Mat<'_, T>, Mat<'_, T>),
    work: MatMut<'_, T>,
) {
    let n = s.n;
    let (uw, edges) = (d.d_v + d.d_k, solve::scratch(d.d_v + d.d_k));
    let mut buf = scratch::<T>(ctx, Local::<T>::len(n, d) + n * uw + edges);
    let rest = &mut buf.flat_mut::<T>().expect("invariant: fresh and contiguous");
    let l = Local::new(x, d, s, rest);
    let mut solved = carve(rest, n, uw);
    l.solve(x, d, s, solved.reborrow(), carve_slice(rest, edges));
    let (mut v, more) = work.split_rows(n).0.split_cols(d.d_v);
    let (d_v, mut more) = more.split_cols(d.d_v);
    for i in 0..n {
        let (u, w) = solved.row(i).split_at(d.d_v);
        v.row_mut(i).copy_from_slice(u);
        let (to, rest) = more.row_mut(i).split_at_mut(d.d_k);
        to.copy_from_slice(w);
        let (q, k) = rest.split_at_mut(d.d_k);
        q.iter_mut().zip(l.kq.row(n + i)).for_each(|(y, &q)| *y = l.e_in[i] * q);
        k.iter_mut().zip(l.kq.row(i)).for_each(|(y, &k)| *y = l.e_out[i] * k);
    }
    local::nn(v, solved.as_mat().cols_at(d.d_v, d.d_k), h_in, -T::one(), true);
    local::tn(d_v, l.mp.as_mat().rows_at(n, n), head(d_o, d, s), T::one(), false);
}

/// The rows and columns of `m` [B T, H V] that are the chunk's.
#[inline(always)]
fn head<'a, T>(m: Mat<'a, T>, d: Dims, s: Span) -> Mat<'a, T> {
    m.rows_at(s.row(d, 0), s.n).cols_at(s.h * d.d_v, d.d_v)
}

/// Second pass, from the chunk's end to its beginning: dV' += K̃ dH, then dH = e^{b_C} dH + (e^b Q̂)ᵀ dO - Wᵀ dV'.
#[inline(always)]
fn across<T: Real>(x: &Views<'_, T>, d: Dims, s: Span, d_o: Mat<'_, T>, work: MatMut<'_, T>, dh: &mut MatMut<'_, T>) {
    let (mut d_v, more) = work.split_rows(s.n).0.split_cols(d.d_v).1.split_cols(d.d_v);
    let more = more.as_mat();
    let [w, q, k] = [0, 1, 2].map(|i| more.cols_at(i * d.d_k, d.d_k));
    local::nn(d_v.reborrow(), k, dh.as_mat(), T::one(), true);
    decay(dh, s.keep(x, d));
    local::tn(dh.reborrow(), q, head(d_o, d, s), T::one(), true);
    local::tn(dh.reborrow(), w, d_v.as_mat(), -T::one(), true);
}

/// Third pass: all gradients of one chunk.
// tidy: long, the chain of one chunk's products reads best in one piece
#[allow(clippy::too_many_arguments)] // one chunk's operands; a struct would only name them twice
#[inline(always)]
fn gradients<T: Real>(
    ctx: &Ctx,
    x: &Views<'_, T>,
    d: Dims,
    s: Span,
    d_o: Mat<'_, T>,
    [h_in, dh_out]: [Mat<'_, T>; 2],
    work: Mat<'_, T>,
    mut out: Targets<'_, T>,
) {
    let (n, one) = (s.n, T::one());
    let solving = solve::scratch(d.d_v);
    let len = 2 * n * d.d_v + 2 * n * d.d_k + 2 * n * n + 2 * n * d.d_k + 2 * n * d.d_k + 4 * n;
    let mut buf = scratch::<T>(ctx, Local::<T>::len(n, d) + solving + len);
    let rest = &mut buf.flat_mut::<T>().expect("invariant: fresh and contiguous");
    let l = Local::new(x, d, s, rest);
    let (kq, work) = (l.kq.as_mat(), work.rows_at(0, n));
    let v_new = work.cols_at(0, d.d_v);

    // dV_β = Tᵀ dV' over dO: the products that follow want both.
    let mut both = carve(rest, 2 * n, d.d_v);
    for i in 0..n {
        both.row_mut(i).copy_from_slice(work.cols_at(d.d_v, d.d_v).row(i));
        both.row_mut(n + i).copy_from_slice(head(d_o, d, s).row(i));
    }
    let d_vb = both.reborrow().split_rows(n).0;
    solve::lower_transposed(l.a.as_mat(), d_vb, carve_slice(rest, solving));

    // -dK_β over X, and -dA over dP.
    let mut kx = carve(rest, 2 * n, d.d_k);
    local::nt(kx.reborrow(), both.as_mat(), h_in, one, false);
    let mut pairs = carve(rest, 2 * n, n);
    local::nt(pairs.reborrow(), both.as_mat(), v_new, one, false);

    // E = dA ⊙ A + dP ⊙ P into Γ's place; β N over R into the pairs' place, N = dA ⊙ Γ, R = dP ⊙ Γ.
    let Local { mut gamma, mp, beta, e_in, e_out, norms, .. } = l;
    let (d_beta, inner) = (carve_slice(rest, n), carve_slice(rest, n));
    let (mut top, mut bottom) = pairs.reborrow().split_rows(n);
    for i in 0..n {
        let (na, dp, e) = (top.row_mut(i), bottom.row_mut(i), gamma.row_mut(i));
        let (m, p) = (mp.row(i), mp.row(n + i));
        let mut sum = T::zero();
        for j in 0..n {
            let (da, w) = (if j < i { -na[j] } else { T::zero() }, e[j]);
            sum += da * m[j];
            e[j] = beta[i] * da * m[j] + dp[j] * p[j];
            na[j] = beta[i] * da * w;
            dp[j] *= w;
        }
        d_beta[i] = sum;
    }

    // β N K over R K; then the other side of both pairs, and Y = V' dH_outᵀ.
    let mut right = carve(rest, 2 * n, d.d_k);
    local::nn(right.reborrow(), pairs.as_mat(), kq.rows_at(0, n), one, false);
    let mut dk = carve(rest, n, d.d_k);
    local::tn(dk.reborrow(), pairs.as_mat(), kq, one, false);
    let mut y = carve(rest, n, d.d_k);
    local::nt(y.reborrow(), v_new, dh_out, one, false);

    let kappa = carve_slice(rest, n);
    for i in 0..n {
        let row = s.row(d, i);
        let (k, q) = (kq.row(i), kq.row(n + i));
        let (key, query) = (-dot(kx.row(i), k), dot(kx.row(n + i), q));
        d_beta[i] += dot(both.row(i), x.v(row, s.h)) + e_in[i] * key;
        inner[i] = e_in[i] * (beta[i] * key + query);
        kappa[i] = e_out[i] * dot(y.row(i), k);
        let edge = beta[i] * e_in[i];
        let terms = right.row(i).iter().zip(y.row(i)).zip(kx.row(i));
        for (to, ((&a, &b), &c)) in dk.row_mut(i).iter_mut().zip(terms) {
            *to += a + e_out[i] * b - edge * c;
        }
        let dq = right.row_mut(n + i);
        dq.iter_mut().zip(kx.row(n + i)).for_each(|(to, &x)| *to += e_in[i] * x);
        if let Some(to) = &mut out.q {
            let scale = T::of(d.scale);
            unit_grad(to.row_mut(i), x.q(row, s.h), norms[n + i], dq, d.l2norm, scale, out.add[0]);
        }
        if let Some(to) = &mut out.k {
            unit_grad(to.row_mut(i), x.k(row, s.h), norms[i], dk.row(i), d.l2norm, one, out.add[0]);
        }
        if let Some(to) = &mut out.v {
            put(to.row_mut(i), both.row(i).iter().map(|&x| beta[i] * x), out.add[0]);
        }
        if let Some(to) = &mut out.beta {
            put(to.row_mut(i), [d_beta[i]], out.add[2]);
        }
    }
    if let Some(to) = &mut out.g {
        let through = (0..d.d_k).map(|a| dot(h_in.row(a), dh_out.row(a))).sum::<T>() * s.keep(x, d);
        decay_gradient(gamma.as_mat(), inner, kappa, through, carve_slice(rest, n), |t, dg| {
            put(to.row_mut(t), [dg], out.add[1]);
        });
    }
}

/// dg_t: the gradient through every decay that token t's gate is a factor of. Pairs i >= t > j of the chunk (E), from the
/// carried state to i >= t, from j < t to the chunk's end, from end to end. MATH 1.5's reverse sum of row sums less
/// column sums is the same in exact arithmetic, but there the pairs on one side of t cancel only up to rounding.
#[inline(always)]
fn decay_gradient<T: Real>(
    e: Mat<'_, T>,
    inner: &[T],
    kappa: &[T],
    through: T,
    columns: &mut [T],
    mut put: impl FnMut(usize, T),
) {
    let n = e.rows();
    columns.fill(T::zero());
    let mut from_state = T::zero();
    for t in (0..n).rev() {
        columns[..t].iter_mut().zip(e.row(t)).for_each(|(sum, &e)| *sum += e);
        from_state += inner[t];
        let pairs: T = columns[..t].iter().copied().sum();
        let to_end: T = kappa[..t].iter().copied().sum();
        put(t, pairs + from_state + to_end + through);
    }
}

#[inline(always)]
fn put<T: Real>(to: &mut [T], values: impl IntoIterator<Item = T>, add: bool) {
    for (to, value) in to.iter_mut().zip(values) {
        *to = if add { *to + value } else { value };
    }
}
