//! The chunk form's backward (MATH 1.5), generic as the forward is.
//!
//! Every row and head walks its chunks from the last to the first, with the state before the chunk saved by the forward and
//! the gradient of the state after it at hand. Three simplifications of MATH 1.5, from W H_in = U - V' and dK_β = Tᵀ dW =
//! -dV_β H_inᵀ: dA = -strict_lower(dV_β V'ᵀ), so that neither U nor the inverse is needed; dH_in = e^{b_C} dH +
//! (e^b Q̂)ᵀ dO - (β e^b K)ᵀ dV_β, so that W is not either; and dg as the sum over the pairs that the decay stands
//! between (see `decay_gradient`).

use super::chunk::{Local, Span, by_head, carve, carve_slice, scratch, spans, tiles};
use super::cpu::unit_grad;
use super::forward::{decay, inner, inner_len, lower_transposed_times, scale_rows};
use super::{Dims, Saved, Upstream, Views, solve};
use crate::gemm::local;
use crate::lanes::{dot, sum2};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Mat, MatMut, Real, Result, Tensor, each};

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
    let states = saved.states.as_ref().expect("invariant: checked by the caller").view::<T>()?;
    let walks = by_head(spans(d).into_iter().zip(targets_by_chunk(&mut targets, d)), d.chunks());
    let heads = d_state.view_mut::<T>()?.row_blocks(d.d_k).into_iter();
    each!(heads.zip(walks).collect(), |head, (mut d_h, walk)| {
        let mut buf = scratch::<T>(ctx, scratch_len(d.chunk, d));
        let buf = buf.flat_mut::<T>().expect("invariant: fresh and contiguous");
        for (i, (s, out)) in walk.into_iter().enumerate().rev() {
            let h_in = Mat::new(states.row(head * d.chunks() + i), d.d_k, d.d_v, d.d_v);
            chunk(&x, d, s, d_o, h_in, &mut d_h, out, buf);
        }
    });
    clear_fresh::<T>(&mut d_state, saved, d)?;
    d_h0.give(ctx, d_state)
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

/// The tiles of the gradients, one set a chunk, in the order of [`tiles`].
fn targets_by_chunk<'a, T>([qkv, g, beta]: &'a mut [Option<(MatMut<'_, T>, bool)>; 3], d: Dims) -> Vec<Targets<'a, T>> {
    let n = d.batch * d.heads * d.chunks();
    let add = [&*qkv, &*g, &*beta].map(|t| t.as_ref().is_some_and(|t| t.1));
    let cut = |m: Option<MatMut<'a, T>>, width| -> Vec<Option<MatMut<'a, T>>> {
        match m {
            Some(m) => tiles(m, d, width).into_iter().map(Some).collect(),
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

/// Elements of scratch for a chunk of `n`.
fn scratch_len(n: usize, d: Dims) -> usize {
    Local::<f32>::len(n, d)
        + inner_len(n, d)
        + solve::scratch(d.d_v)
        + 2 * n * d.d_v
        + 2 * n * n
        + 6 * n * d.d_k
        + 4 * n
}

/// The rows and columns of `m` [B T, H V] that are the chunk's.
#[inline(always)]
fn head<'a, T>(m: Mat<'a, T>, d: Dims, s: Span) -> Mat<'a, T> {
    m.rows_at(s.row(d, 0), s.n).cols_at(s.h * d.d_v, d.d_v)
}

/// All gradients of one chunk; `d_h` is that of the state after it and becomes that of the state before it.
// tidy: long, the chain of one chunk's products reads best in one piece
#[inline(always)]
#[allow(clippy::too_many_arguments)] // one chunk's operands; a struct would only name them twice
fn chunk<T: Real>(
    x: &Views<'_, T>,
    d: Dims,
    s: Span,
    d_o: Mat<'_, T>,
    h_in: Mat<'_, T>,
    d_h: &mut MatMut<'_, T>,
    mut out: Targets<'_, T>,
    mut buf: &mut [T],
) {
    let (n, one, rest) = (s.n, T::one(), &mut buf);
    let l = Local::new(x, d, s, rest);
    let (v_new, mut kd) = inner(&l, x, d, s, h_in, rest);
    let v_new = v_new.as_mat();

    // dV' = Pᵀ dO + K̃ dH, then dV_β = Tᵀ dV', over dO: the products that follow want both.
    let mut both = carve(rest, 2 * n, d.d_v);
    let (mut d_vb, mut d_os) = both.reborrow().split_rows(n);
    (0..n).for_each(|i| d_os.row_mut(i).copy_from_slice(head(d_o, d, s).row(i)));
    lower_transposed_times(d_vb.reborrow(), l.mp.as_mat().rows_at(n, n), d_os.as_mat());
    let kd = &mut kd.reborrow().split_rows(n).0;
    local::nn(kd.reborrow(), l.kq.as_mat().rows_at(0, n), d_h.as_mat(), one, false);
    for i in 0..n {
        d_vb.row_mut(i).iter_mut().zip(kd.row(i)).for_each(|(to, &x)| *to += l.e_out[i] * x);
    }
    solve::lower_transposed(l.a.as_mat(), d_vb, carve_slice(rest, solve::scratch(d.d_v)));

    // -dK_β over X, and -dA over dP.
    let mut kx = carve(rest, 2 * n, d.d_k);
    local::nt(kx.reborrow(), both.as_mat(), h_in, one, false);
    let mut pairs = carve(rest, 2 * n, n);
    local::nt(pairs.reborrow(), both.as_mat(), v_new, one, false);

    // E = dA ⊙ A + dP ⊙ P into Γ's place; β N over R into the pairs' place, N = dA ⊙ Γ, R = dP ⊙ Γ.
    let Local { mut kq, mut gamma, mp, beta, e_in, e_out, norms, .. } = l;
    let (d_beta, inner) = (carve_slice(rest, n), carve_slice(rest, n));
    let (mut top, mut bottom) = pairs.reborrow().split_rows(n);
    for i in 0..n {
        let (na, dp, e) = (top.row_mut(i), bottom.row_mut(i), gamma.row_mut(i));
        let (m, p) = (mp.row(i), mp.row(n + i));
        let beta = beta[i];
        d_beta[i] = -dot(&na[..i], m);
        // On and above the diagonal dA is nothing; above it P and Γ are zero.
        na[i..].fill(T::zero());
        for ((na, (e, dp)), (&m, &p)) in na.iter_mut().zip(e.iter_mut().zip(dp)).zip(m.iter().zip(p)) {
            let (da, w) = (beta * *na, *e);
            *e = *dp * p - da * m;
            *na = -da * w;
            *dp *= w;
        }
    }

    // β N K over R K; then the other side of both pairs, and Y = V' dH_outᵀ.
    let mut right = carve(rest, 2 * n, d.d_k);
    local::nn(right.reborrow(), pairs.as_mat(), kq.as_mat().rows_at(0, n), one, false);
    let mut dk = carve(rest, n, d.d_k);
    local::tn(dk.reborrow(), pairs.as_mat(), kq.as_mat(), one, false);
    let mut y = carve(rest, n, d.d_k);
    local::nt(y.reborrow(), v_new, d_h.as_mat(), one, false);

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
        let through = (0..d.d_k).map(|a| dot(h_in.row(a), d_h.row(a))).sum::<T>() * s.keep(x, d);
        decay_gradient(gamma.as_mat(), inner, kappa, through, carve_slice(rest, n), |t, dg| {
            put(to.row_mut(t), [dg], out.add[1]);
        });
    }

    // The state before: its decay, what the outputs read of it, what the errors did.
    decay(d_h, s.keep(x, d));
    let edges = inner;
    edges.iter_mut().zip(beta.iter().zip(&*e_in)).for_each(|(to, (&beta, &e))| *to = -beta * e);
    scale_rows(&mut kq, 0, edges);
    scale_rows(&mut kq, n, e_in);
    local::tn(d_h.reborrow(), kq.as_mat(), both.as_mat(), one, true);
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
        let pairs = sum2(&columns[..t], kappa, |pair, to_end| pair + to_end);
        put(t, pairs + from_state + through);
    }
}

#[inline(always)]
fn put<T: Real>(to: &mut [T], values: impl IntoIterator<Item = T>, add: bool) {
    for (to, value) in to.iter_mut().zip(values) {
        *to = if add { *to + value } else { value };
    }
}
