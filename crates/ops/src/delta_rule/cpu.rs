//! The token recurrence: the oracle, generic, and the step of decoding. The chunk form is in the other files.
#![allow(clippy::needless_range_loop)] // oracles index as the formulas do

use super::{Dims, Inputs, Saved, Upstream, Views};
use crate::lanes::dot;
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, MatMut, Real, Result, Tensor, each};

/// Added to a row's squared length, inside the root.
const EPS: f64 = 1e-6;

/// to = scale x / |x|, or scale x when the rows are not to be normalised; returns 1 / |x|. The one rounding rule of
/// every path (HAZARD 7): normalise, round, scale.
#[inline(always)]
pub(super) fn unit<T: Real>(to: &mut [T], x: &[T], l2norm: bool, scale: T) -> T {
    let r = if l2norm { (dot(x, x) + T::of(EPS)).sqrt().recip() } else { T::one() };
    to.iter_mut().zip(x).for_each(|(y, &x)| *y = x * r * scale);
    r
}

/// to (+)= the gradient of x through [`unit`], where d is that of scale x / |x|.
#[inline(always)]
pub(super) fn unit_grad<T: Real>(to: &mut [T], x: &[T], r: T, d: &[T], l2norm: bool, scale: T, add: bool) {
    let along = if l2norm { r * r * dot(x, d) } else { T::zero() };
    for ((to, &x), &d) in to.iter_mut().zip(x).zip(d) {
        let dx = scale * r * (d - x * along);
        *to = if add { *to + dx } else { dx };
    }
}

/// One token of one head: decays the state, reads the error u = β (v - k H̄), writes it, reads out.
#[inline(always)]
fn token<T: Real>(h: &mut MatMut<'_, T>, [q, k, v]: [&[T]; 3], g: T, beta: T, o: &mut [T], u: &mut [T]) {
    let alpha = g.exp();
    u.copy_from_slice(v);
    for i in 0..h.rows() {
        for (h, u) in h.row_mut(i).iter_mut().zip(u.iter_mut()) {
            *h *= alpha;
            *u -= k[i] * *h;
        }
    }
    u.iter_mut().for_each(|u| *u *= beta);
    o.fill(T::zero());
    for i in 0..h.rows() {
        for ((h, &u), o) in h.row_mut(i).iter_mut().zip(u.iter()).zip(o.iter_mut()) {
            *h += k[i] * u;
            *o += q[i] * *h;
        }
    }
}

/// The state that each row begins with, [B, H, K, V]: h0 where its first document goes on, else zero.
pub(super) fn start<T: Real>(ctx: &Ctx, inputs: Inputs<'_>, d: Dims) -> Result<Tensor> {
    let mut h = ctx.empty::<T>(&[d.batch, d.heads, d.d_k, d.d_v])?;
    let h0 = inputs.h0.map(Tensor::view::<T>).transpose()?;
    let rows = d.heads * d.d_k;
    each!(h.view_mut::<T>()?.row_blocks(rows), |b, mut h| match &h0 {
        Some(h0) if inputs.docs.continued(b) => {
            (0..rows).for_each(|i| h.row_mut(i).copy_from_slice(h0.row(b * rows + i)));
        }
        _ => h.fill(T::zero()),
    });
    Ok(h)
}

pub(super) fn oracle<T: Real>(ctx: &Ctx, inputs: Inputs<'_>, d: Dims) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let x = Views::<T>::new(inputs, d)?;
    let mut o = ctx.empty::<T>(&[x.qkv.rows(), d.heads * d.d_v])?;
    let mut state = start::<T>(ctx, inputs, d)?;
    let mut states = state.view_mut::<T>()?.row_blocks(d.d_k).into_iter();
    let (mut q, mut k, mut u) = (vec![T::zero(); d.d_k], vec![T::zero(); d.d_k], vec![T::zero(); d.d_v]);
    let mut out = o.view_mut::<T>()?;
    for b in 0..d.batch {
        for h in 0..d.heads {
            let mut state = states.next().expect("invariant: one state a row and head");
            for t in 0..d.len {
                if x.resets(b, t) {
                    state.fill(T::zero());
                }
                let i = b * d.len + t;
                unit(&mut q, x.q(i, h), d.l2norm, T::of(d.scale));
                unit(&mut k, x.k(i, h), d.l2norm, T::one());
                let o = &mut out.row_mut(i)[h * d.d_v..(h + 1) * d.d_v];
                token(&mut state, [&q, &k, x.v(i, h)], x.g.row(i)[h], x.beta.row(i)[h], o, &mut u);
            }
        }
    }
    Ok((o, state, None))
}

/// What the oracle's backward keeps of one head's tokens.
struct Trace<T> {
    /// The state before each token, after a reset, and after the last.
    states: Vec<Vec<T>>,
    q: Vec<Vec<T>>,
    k: Vec<Vec<T>>,
    rq: Vec<T>,
    rk: Vec<T>,
}

fn trace<T: Real>(x: &Views<'_, T>, d: Dims, b: usize, h: usize, mut state: Vec<T>) -> Trace<T> {
    let mut out = Trace { states: Vec::new(), q: Vec::new(), k: Vec::new(), rq: Vec::new(), rk: Vec::new() };
    let (mut o, mut u) = (vec![T::zero(); d.d_v], vec![T::zero(); d.d_v]);
    for t in 0..d.len {
        let i = b * d.len + t;
        if x.resets(b, t) {
            state.fill(T::zero());
        }
        let (mut q, mut k) = (vec![T::zero(); d.d_k], vec![T::zero(); d.d_k]);
        out.rq.push(unit(&mut q, x.q(i, h), d.l2norm, T::of(d.scale)));
        out.rk.push(unit(&mut k, x.k(i, h), d.l2norm, T::one()));
        out.states.push(state.clone());
        let mut m = MatMut::new(&mut state, d.d_k, d.d_v, d.d_v);
        token(&mut m, [&q, &k, x.v(i, h)], x.g.row(i)[h], x.beta.row(i)[h], &mut o, &mut u);
        out.q.push(q);
        out.k.push(k);
    }
    out.states.push(state);
    out
}

pub(super) fn oracle_backward<T: Real>(
    ctx: &Ctx,
    saved: &Saved,
    upstream: Upstream<'_>,
    d: Dims,
    [d_qkv, d_g, d_beta, d_h0]: &mut [GradSlot<'_>; 4],
) -> Result<()> {
    let inputs = saved.inputs();
    let x = Views::<T>::new(inputs, d)?;
    let d_o = upstream.d_o.map(Tensor::view::<T>).transpose()?;
    let begin = start::<T>(ctx, inputs, d)?;
    let mut d_state = upstream.d_state::<T>(ctx, d)?;
    let (mut dx, mut dg, mut db) = (d_qkv.target::<T>(ctx)?, d_g.target::<T>(ctx)?, d_beta.target::<T>(ctx)?);
    let write = |to: &mut T, value: T, add: bool| *to = if add { *to + value } else { value };
    let size = d.d_k * d.d_v;
    for (n, dh) in d_state.flat_mut::<T>()?.chunks_mut(size).enumerate() {
        let (b, h) = (n / d.heads, n % d.heads);
        let tr = trace(&x, d, b, h, begin.flat::<T>()?[n * size..(n + 1) * size].to_vec());
        let zeros = vec![T::zero(); d.d_v];
        for t in (0..d.len).rev() {
            let i = b * d.len + t;
            let go = d_o.as_ref().map_or(&zeros[..], |m| &m.row(i)[h * d.d_v..(h + 1) * d.d_v]);
            let s = token_backward(&tr, &x, d, (b, t, h), go, dh);
            if let Some((m, add)) = &mut dx {
                let row = m.row_mut(i);
                let (q, k, v) = (d.q_at(h), d.k_at(h), d.v_at(h));
                unit_grad(&mut row[q..q + d.d_k], x.q(i, h), tr.rq[t], &s.dq, d.l2norm, T::of(d.scale), *add);
                unit_grad(&mut row[k..k + d.d_k], x.k(i, h), tr.rk[t], &s.dk, d.l2norm, T::one(), *add);
                row[v..v + d.d_v].iter_mut().zip(&s.dv).for_each(|(to, &dv)| write(to, dv, *add));
            }
            if let Some((m, add)) = &mut dg {
                write(&mut m.row_mut(i)[h], s.dg, *add);
            }
            if let Some((m, add)) = &mut db {
                write(&mut m.row_mut(i)[h], s.db, *add);
            }
        }
        if !inputs.docs.continued(b) {
            dh.fill(T::zero());
        }
    }
    d_h0.give(ctx, d_state)
}

struct TokenGrads<T> {
    dq: Vec<T>,
    dk: Vec<T>,
    dv: Vec<T>,
    dg: T,
    db: T,
}

/// MATH 1.3; `dh` goes from the gradient of the state after the token to that of the state before it.
fn token_backward<T: Real>(
    tr: &Trace<T>,
    x: &Views<'_, T>,
    d: Dims,
    (b, t, h): (usize, usize, usize),
    go: &[T],
    dh: &mut [T],
) -> TokenGrads<T> {
    let i = b * d.len + t;
    let (alpha, beta, v) = (x.g.row(i)[h].exp(), x.beta.row(i)[h], x.v(i, h));
    let (q, k) = (&tr.q[t], &tr.k[t]);
    let decayed: Vec<T> = tr.states[t].iter().map(|&h| alpha * h).collect();
    let at = |a: usize, c: usize| a * d.d_v + c;
    let r: Vec<T> = (0..d.d_v).map(|c| v[c] - (0..d.d_k).map(|a| k[a] * decayed[at(a, c)]).sum::<T>()).collect();
    // The state after the token, made again: the next one's saved state may have been reset.
    let after = |a: usize, c: usize| decayed[at(a, c)] + k[a] * beta * r[c];
    let dq = (0..d.d_k).map(|a| (0..d.d_v).map(|c| after(a, c) * go[c]).sum::<T>()).collect();
    for a in 0..d.d_k {
        (0..d.d_v).for_each(|c| dh[at(a, c)] += q[a] * go[c]);
    }
    let du: Vec<T> = (0..d.d_v).map(|c| (0..d.d_k).map(|a| k[a] * dh[at(a, c)]).sum::<T>()).collect();
    let dv: Vec<T> = du.iter().map(|&x| beta * x).collect();
    let dk = (0..d.d_k)
        .map(|a| (0..d.d_v).map(|c| dh[at(a, c)] * beta * r[c] - decayed[at(a, c)] * dv[c]).sum::<T>())
        .collect();
    let db = (0..d.d_v).map(|c| du[c] * r[c]).sum::<T>();
    let mut dg = T::zero();
    for a in 0..d.d_k {
        for c in 0..d.d_v {
            let d_decayed = dh[at(a, c)] - k[a] * dv[c];
            dg += decayed[at(a, c)] * d_decayed;
            dh[at(a, c)] = if x.resets(b, t) { T::zero() } else { alpha * d_decayed };
        }
    }
    TokenGrads { dq, dk, dv, dg, db }
}

/// One token of every row, the states [B, H, K, V] moved on in place: decoding. Rows and heads are parallel tasks.
pub(super) fn step<T: Real>(ctx: &Ctx, inputs: Inputs<'_>, d: Dims, state: &mut Tensor) -> Result<Tensor> {
    let x = Views::<T>::new(inputs, d)?;
    let mut o = ctx.empty::<T>(&[d.batch, d.heads * d.d_v])?;
    let mut scratch = ctx.empty::<T>(&[d.batch * d.heads, 2 * d.d_k + d.d_v])?;
    let tasks: Vec<_> = (state.view_mut::<T>()?.row_blocks(d.d_k).into_iter())
        .zip(o.view_mut::<T>()?.grid(1, d.d_v))
        .zip(scratch.view_mut::<T>()?.row_blocks(1))
        .collect();
    each!(tasks, |n, ((mut state, mut o), mut scratch)| {
        let (b, h) = (n / d.heads, n % d.heads);
        let (q, rest) = scratch.row_mut(0).split_at_mut(d.d_k);
        let (k, u) = rest.split_at_mut(d.d_k);
        unit(q, x.q(b, h), d.l2norm, T::of(d.scale));
        unit(k, x.k(b, h), d.l2norm, T::one());
        token(&mut state, [q, k, x.v(b, h)], x.g.row(b)[h], x.beta.row(b)[h], o.row_mut(0), u);
    });
    Ok(o)
}
